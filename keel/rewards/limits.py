"""What a source of rewards may cost: seconds a call, and the share of a batch that may fail."""

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 1.0
"""A function that swallowed the first strike gets another after so long, and again."""
STRIKES = 5
"""One that has swallowed so many, as a retry loop with a bare `except:` does, ends the process; nothing else would."""


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
    armed, strikes = True, 0

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal strikes
        strikes += 1
        if armed and strikes > STRIKES:
            told = f"keel: a reward function goes on after {STRIKES} interruptions at its limit of {seconds:g} seconds"
            remedy = "let it raise what is no Exception, as `except Exception` does; the same command goes on"
            where = traceback.format_stack(frame)[-1].strip()
            os.write(2, f"\n{told}\n  where:  {where}\n  remedy: {remedy}\n".encode())
            os._exit(2)  # what is saved stays as it is, as after a kill
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
