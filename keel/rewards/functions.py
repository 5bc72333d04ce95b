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
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from keel.errors import KeelError, RewardError
from keel.rewards.base import checked
from keel.types import Rollouts


class FunctionReward:
    """Calls one function per response."""

    def __init__(self, function: Callable[..., object], name: str):
        """name: what errors call it."""
        self.function, self.name = function, name
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            raise RewardError(
                "the reward function does not say which arguments it takes",
                where=name,
                remedy="wrap it: def score(response): return ...",
            ) from None
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters}

    @classmethod
    def named(cls, name: str) -> "FunctionReward":
        """Imports `file.py:name` or `package.module:name`. Raises RewardError where that fails, with the reason."""
        place, _, attribute = name.rpartition(":")
        try:
            module = _module(place)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's own code runs here, and may fail in any way, or leave by sys.exit
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
        return cls(function, name)

    def score(self, rollouts: Rollouts) -> Tensor:
        """See `base.Reward`. Raises RewardError where the function raises or returns something that is no number."""
        return checked(torch.tensor([self._one(rollouts, b) for b in range(len(rollouts))]), rollouts, self.name)

    def _one(self, rollouts: Rollouts, b: int) -> float:
        prompt = rollouts.prompts[b]
        given: dict[str, Any] = {
            **prompt.columns,
            "prompt": prompt.text,
            "response": rollouts.texts[b],
            "finish_reason": rollouts.finish[b],
            "messages": list(prompt.messages),
        }
        if not self.takes_all:
            given = {name: value for name, value in given.items() if name in self.takes}
        try:
            # Copies, and the mode of gradients put back: whatever the function does to them stays with it.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                value = self.function(**copy.deepcopy(given))
        except (KeelError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RewardError(
                f"the reward function raised {_told(error)}",
                where=f"{self.name}, prompt {prompt.source or b}, response {rollouts.texts[b][:200]!r}",
                remedy=f"it was called with {', '.join(sorted(given))}",
                rows=[b],
            ) from error
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise RewardError(
                f"the reward function returned {type(value).__name__}, not a number",
                where=f"{self.name}, prompt {prompt.source or b}",
                remedy="return one float per response",
                rows=[b],
            )
        try:
            return float(value)
        except OverflowError:
            return math.inf  # refused with the others that are not finite


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception of the user's whose text fails in turn
        return type(error).__name__


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
