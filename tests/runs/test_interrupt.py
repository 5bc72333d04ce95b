"""Signals: the first asks, the second stops, and the handlers from before come back."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import keel
from keel.errors import StopAtOnce, is_stop
from keel.runs.interrupt import Interrupt

HERE = {**os.environ, "PYTHONPATH": str(Path(keel.__file__).parents[1])}
LOOP = """
import signal, sys
from keel.runs.interrupt import Interrupt

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

with Interrupt(lambda: say("asked")) as interrupt:
    try:
        say("ready")
        while not (interrupt.requested and sys.argv[1] == "polite"):
            signal.pause()
        say("saved")
    except KeyboardInterrupt:
        say("stopped")
say(str(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_to_a_process(number: int):
    for manner, signals, last in (("polite", 1, "saved"), ("rude", 2, "stopped")):
        child = subprocess.Popen([sys.executable, "-c", LOOP, manner], env=HERE, stdout=subprocess.PIPE, text=True)
        with child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(number)
            assert child.stdout.readline() == "asked\n"
            if signals == 2:
                child.send_signal(number)
            assert child.stdout.read() == f"{last}\nTrue\n"
        assert child.returncode == 0


def test_first_then_second_then_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    told: list[str] = []
    with Interrupt(lambda: told.append("asked")) as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested and told == ["asked"]
        for number in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(StopAtOnce) as stopped:
                os.kill(os.getpid(), number)
            assert stopped.value.number == number
        assert told == ["asked"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_stream_that_is_busy_does_not_end_the_run():
    def busy() -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with Interrupt(busy) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested


def test_nothing_happens_in_another_thread():
    seen: list[object] = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.extend([interrupt.requested, signal.getsignal(signal.SIGTERM)])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, before]


LATE = """
import os, signal, sys
from keel import cli
from keel.errors import Interrupted

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without

class Late:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGINT):
        kill(me, number)

late = Late()  # goes when Python takes itself down

def stopped(arguments, console):
    raise Interrupted("stopped at step 3")

def tell():
    cli._stderr = stderr
    if sys.argv[1] == "telling":
        signal.raise_signal(signal.SIGINT)  # handled before it returns
    return stderr()

cli._dispatch, stderr, cli._stderr = stopped, cli._stderr, tell
cli.main([])
"""


@pytest.mark.parametrize(("moment", "told"), [("after", "stopped at step 3"), ("telling", "stopped at once")])
def test_one_more_signal_in_the_last_moments_leaves_the_exit_code(moment, told):
    done = subprocess.run([sys.executable, "-c", LATE, moment], env=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 130 and told in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_code_that_raises_a_keyboard_interrupt_by_itself_is_not_the_user():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born deaf to it
    try:
        _tell_apart()
    finally:
        signal.signal(signal.SIGINT, before)


def _tell_apart() -> None:
    assert is_stop(KeyboardInterrupt()) and is_stop(StopAtOnce(15)) and not is_stop(SystemExit())
    with Interrupt():
        assert not is_stop(KeyboardInterrupt()) and is_stop(StopAtOnce(15))
