"""Python functions as a source of rewards.

A function is named `file.py:name` or `package.module:name` and is called once per response with the keywords that it
names among: prompt (text of the last message), response (text), finish_reason ("stop" or "length"), messages (the whole
prompt), and the row's other columns. It returns one number, higher is better.
"""

import copy
import difflib
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
AWAITED = "nothing awaits what it returns"
NOT_ASYNC = "write it with def, and call asyncio.run(...) inside where it needs what is async"


class FunctionReward:
    """Calls one function per response. See `base.Reward`."""

    def __init__(
        self, function: Callable[..., object], name: str, timeout: float | None = None, max_failed: float = 0.0
    ):
        """name: what errors call it. timeout: of each call, seconds. max_failed: share of a batch."""
        self.function, self.name, self.timeout, self.max_failed = function, name, timeout, max_failed
        self.failed: dict[int, RewardError] = {}
        if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
            raise RewardError(f"the reward function is async, and {AWAITED}", where=name, remedy=NOT_ASYNC)
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
            raise _not_imported(error, name, place, attribute) from None
        function = getattr(module, attribute, None)
        if callable(function):
            return cls(function, name, timeout, max_failed)
        there = _functions(module)
        near = difflib.get_close_matches(attribute, there, n=1)
        remedy = f"did you mean {place}:{near[0]}?" if near else f"functions there: {', '.join(there) or 'none'}"
        if hasattr(module, attribute):
            raise RewardError(f"{attribute} in {place} is no function: {function!r:.80}", where=name, remedy=remedy)
        raise RewardError(f"there is no function {attribute!r} in {place}", where=name, remedy=remedy)

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
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # Python else warns of it
        raise RewardError(
            f"a {type(value).__name__} was returned: {AWAITED}", where=where, remedy=NOT_ASYNC, rows=[row]
        )
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


def _not_imported(error: BaseException, name: str, place: str, attribute: str) -> RewardError:
    """Why the import of a module failed, and what to do about it."""
    file = Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py")
    if isinstance(error, SyntaxError):
        at = f"{error.filename}:{error.lineno}, for {name}"
        return RewardError(f"the reward function's file is no Python: {error.msg}", where=at, remedy="mend that line")
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        told = f"the import of the reward function's module raised {_told(error)}{_raised_at(error, file.name)}"
        alone = place if place.endswith(".py") else f"-m {place}"
        return RewardError(told, where=name, remedy=f"mend it; python {alone} shows the whole of it")
    if place == error.name or place.startswith(f"{error.name}."):
        remedy = (
            f"did you mean {file}:{attribute}?" if file.is_file() else "install it, or name a file as file.py:function"
        )
        return RewardError(f"there is no module {error.name}", where=name, remedy=remedy)
    beside = file.with_name(f"{error.name.partition('.')[0]}.py")
    mend = f"put its folder on the path: PYTHONPATH={beside.parent}" if beside.is_file() else "install it"
    told = f"the reward function's module imports {error.name}, which is not there{_raised_at(error, file.name)}"
    return RewardError(told, where=name, remedy=mend)


def _raised_at(error: BaseException, file: str = "") -> str:
    """The innermost line of the file, by default of any."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call itself
    frames = [frame for frame in frames if frame.filename.endswith(file)] or frames
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
