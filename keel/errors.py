"""What Keel raises when the user can mend it: what is wrong, where, and the remedy.

The command line prints these without a traceback and leaves with `exit_code`. Anything else that escapes is a defect of
Keel and keeps its traceback.
"""

import signal
from collections.abc import Sequence


class KeelError(Exception):
    """A mistake that the user can mend.

    Args:
        what: one sentence, what is wrong.
        where: file:line, row, key or folder; empty where there is no place.
        remedy: one sentence, what to do.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


class ConfigError(KeelError):
    """A recipe or a flag that cannot be used."""


class DataError(KeelError):
    """A file or a row that cannot be read or encoded."""


class ModelError(KeelError):
    """A model folder, tokenizer or architecture that cannot be used."""


class StepError(KeelError):
    """A step of training that cannot be taken; no weight has changed, unless `final`.

    Args:
        rows: which rows of the batch are at fault, where that is known.
        final: leaving the step out would not help, and the run must stop.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", rows: Sequence[int] = (), final: bool = False):
        super().__init__(what, where=where, remedy=remedy)
        self.rows, self.final = list(rows), final


class RewardError(StepError):
    """A reward function, scorer or reward model that fails or returns something that is no number."""


class RunError(KeelError):
    """A run folder that cannot be used: another recipe's, in use, or without a stage that is needed."""


class NumberError(StepError):
    """A loss, gradient, log-probability, reward or weight that is not finite."""

    exit_code = 3


class Interrupted(KeelError):
    """The user or the system asked the run to stop; the last step is saved. exit_code: 128 + the signal's number, as
    shells have it: 130 for Ctrl-C, 143 for SIGTERM."""

    exit_code = 130


class StopAtOnce(KeyboardInterrupt):
    """A second signal: what is on disk is whole, and nothing more is to be written. number: of that signal."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def is_stop(error: BaseException) -> bool:
    """Whether this is the user's wish to stop at once. While an `Interrupt` listens, a plain KeyboardInterrupt is not:
    some code has raised it by itself."""
    if isinstance(error, StopAtOnce):
        return True
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
