"""Python functions as a source of rewards.

A function is named `file.py:name` or `package.module:name` and is called once per response with the keywords that it
names among: prompt (text of the last message), response (text), finish_reason ("stop" or "length"), messages (the whole
prompt), and the row's other columns. It returns one number, higher is better.
"""

import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from keel.errors import KeelError, RewardError, is_stop
from keel.rewards.base import score_rows
from keel.rewards.limits import TookTooLong, time_limit
from keel.types import Prompt, Rollouts

GIVEN = ("prompt", "response", "finish_reason", "messages")
"""What every function may name beside the row's columns."""


class FunctionReward:
    """Calls one function per response. See `base.Reward`."""

    def __init__(
        self, function: Callable[..., object], name: str, timeout: float | None = None, max_failed: float = 0.0
    ):
        """name: what errors call it. timeout: of each call, seconds. max_failed: share of a batch."""
        self.function, self.name, self.timeout, self.max_failed = function, name, timeout, max_failed
        self.failed: dict[int, RewardError] = {}
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            raise RewardError(
                "the reward function does not say which arguments it takes",
                where=name,
                remedy="wrap it: def score(response): return ...",
            ) from None
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self.needs = {p.name for p in parameters if p.default is p.empty and p.name in self.takes}
        if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters) or not (
            self.takes or self.takes_all
        ):
            raise RewardError(
                "the reward function takes no argument by name, and is called by name alone",
                where=name,
                remedy=f"name what it reads: def score(response): return ...; there are {', '.join(GIVEN)} and columns",
            )

    def check_columns(self, prompts: Iterable[Prompt]) -> None:
        """Raises RewardError where the function needs an argument that is neither always given nor a column of every
        prompt."""
        for prompt in prompts:
            if missing := sorted(self.needs - {*GIVEN, *prompt.columns}):
                raise RewardError(
                    f"the reward function needs {', '.join(missing)}, which the row does not have",
                    where=f"{self.name}, prompt {prompt.source}",
                    remedy=f"name some of {', '.join((*GIVEN, *sorted(prompt.columns)))}, or give it a default",
                )

    @classmethod
    def named(cls, name: str, timeout: float | None = None, max_failed: float = 0.0) -> "FunctionReward":
        """Imports `file.py:name` or `package.module:name`. Raises RewardError where that fails, with the reason."""
        place, _, attribute = name.rpartition(":")
        try:
            module = _module(place)
        except BaseException as error:  # the user's own code runs here, and may fail in any way, or leave by sys.exit
            if is_stop(error):
                raise
            raise RewardError(
                f"the reward function's module cannot be imported: {_told(error)}",
                where=name,
                remedy="name it as file.py:function or package.module:function, and install what it imports",
            ) from None
        function = getattr(module, attribute, None)
        if not callable(function):
            raise RewardError(
                f"there is no function {attribute!r} in {place}",
                where=name,
                remedy=f"functions there: {', '.join(_functions(module)) or 'none'}",
            )
        return cls(function, name, timeout, max_failed)

    def score(self, rollouts: Rollouts) -> Tensor:
        """See `base.Reward`. A row fails where the function raises, takes too long or returns no finite number."""
        return score_rows(rollouts, lambda b: self._one(rollouts, b), self.max_failed, self.failed)

    def _one(self, rollouts: Rollouts, b: int) -> float:
        prompt, given = rollouts.prompts[b], row_view(rollouts, b)
        if not self.takes_all:
            given = {name: value for name, value in given.items() if name in self.takes}
        try:
            # Copies, and the mode of gradients put back: whatever the function does to them stays with it.
            with time_limit(self.timeout), torch.set_grad_enabled(torch.is_grad_enabled()):
                value = self.function(**copy.deepcopy(given))
        except KeelError:
            raise
        except TookTooLong:
            raise RewardError(
                f"the reward function took longer than {self.timeout:g} seconds",
                where=f"{self.name}, prompt {prompt.source or b}, response {rollouts.texts[b][:200]!r}",
                remedy="give it a time limit of its own, or raise ppo.scoring.timeout",
                rows=[b],
            ) from None
        except BaseException as error:
            if is_stop(error):
                raise
            raise RewardError(
                f"the reward function raised {_told(error)}{_raised_at(error)}",
                where=f"{self.name}, prompt {prompt.source or b}, response {rollouts.texts[b][:200]!r}",
                remedy=f"it was called with {', '.join(sorted(given))}",
                rows=[b],
            ) from error
        return as_score(value, f"{self.name}, prompt {prompt.source or b}", b)


def row_view(rollouts: Rollouts, b: int) -> dict[str, Any]:
    """What a source of rewards is told of a row: its columns, and the names that the module's docstring lists."""
    prompt = rollouts.prompts[b]
    return {
        **prompt.columns,
        "prompt": prompt.text,
        "response": rollouts.texts[b],
        "finish_reason": rollouts.finish[b],
        "messages": list(prompt.messages),
    }


def as_score(value: object, where: str, row: int) -> float:
    """What a function or a server gave for a row, as a finite float. Raises RewardError where it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        found, remedy = f"{type(value).__name__}, not a number", "return one float per response"
    else:
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        # Scores are float32, in which a larger number is infinite.
        if abs(score) <= torch.finfo(torch.float32).max:
            return score
        found, remedy = f"{score}, which is not a finite number", "return a finite number for every response"
    raise RewardError(f"the reward of a response is {found}", where=where, remedy=remedy, rows=[row])


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception of the user's whose text fails in turn
        return type(error).__name__


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call itself
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def source_hash(name: str) -> str:
    """SHA-256 of the file that defines the function, so that a changed function is a changed input."""
    place = name.rpartition(":")[0]
    spec = None if place.endswith(".py") else importlib.import_module(place).__spec__
    file = Path(place) if place.endswith(".py") else Path(spec.origin) if spec and spec.origin else None
    content = file.read_bytes() if file and file.is_file() else place.encode()
    return hashlib.sha256(content).hexdigest()


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise ImportError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(f"keel_reward_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions(module: ModuleType) -> list[str]:
    return sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
