"""What a source of rewards may cost: seconds a call, and the share of a batch that may fail."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 1.0
"""A function that swallowed the first strike gets another after so long, and again."""


class TookTooLong(BaseException):
    """Strikes inside a call that is out of time; no Exception, so that `except Exception` does not swallow it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises TookTooLong inside the block once it has run for so long; None: never.

    By SIGALRM, which breaks into Python code and into waiting for the network alike. A function in C that never returns
    to Python cannot be broken into, and outside the main thread there is no limit, as Python takes no signals there.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def strike(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:  # twice: a strike may fall between the end of the block and the line that disarms
        try:
            yield
        finally:
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
