"""Ctrl-C and SIGTERM: the first asks, the second stops. No torch here."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from keel.errors import StopAtOnce

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Catches SIGINT and SIGTERM within a `with` block, for a loop that asks `requested` after each step.

    The first signal sets `requested` and calls `tell`; a second one raises StopAtOnce wherever the program is.
    The handlers from before come back at the end. Outside the main thread Python takes no handlers: nothing happens.

    number: of the first signal.

    Args:
        tell: says to the user "finishing this step, saving; again to stop at once".
    """

    def __init__(self, tell: Callable[[], None] | None = None):
        self.requested = False
        self.number: int = signal.SIGINT
        self._tell = tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise StopAtOnce(number)
        self.requested, self.number = True, number
        if self._tell is not None:
            # A signal can strike inside a write to the same stream, which Python refuses to enter twice.
            with contextlib.suppress(RuntimeError):
                self._tell()
