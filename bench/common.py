"""What all measurements share: the form of a result, where it was measured, and running a whole process.

A measurement is a command that prints one JSON object a line on standard output and its progress on standard error:

    name                what was measured
    ours, peer, ratio   Keel, the other library, ours / peer; null where there is none
    unit                of ours and peer
    at_least, goal      bounds: the one that must be met, and the one that is aimed at; null where there is none
    judged              which number they bound and how: "ratio >=", "ratio <=", "ours >=" or "ours <="
    detail              every single round, and whatever else belongs to it
    machine, versions   where and with what it was measured
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rich.console

from keel.runs.console import Console

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("keel-rl", "torch", "transformers", "peft", "numpy")
Judged = Literal["ratio >=", "ratio <=", "ours >=", "ours <="]


class Bounds(NamedTuple):
    """What a figure should be: see `at_least`, `goal` and `judged` above."""

    judged: Judged
    at_least: float
    goal: float | None = None


def line(
    name: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    bounds: Bounds | None = None,
    detail: Mapping[str, Any] | None = None,
    packages: Sequence[str] = PACKAGES,
) -> dict[str, Any]:
    """One result. The ratio is null where a quotient says nothing: no peer, or one that is not above 0."""
    return {
        "name": name,
        "ours": ours,
        "peer": peer,
        "ratio": ours / peer if peer and peer > 0 else None,
        "unit": unit,
        "at_least": bounds.at_least if bounds else None,
        "goal": bounds.goal if bounds else None,
        "judged": bounds.judged if bounds else None,
        "detail": dict(detail or {}),
        "machine": machine(),
        "versions": versions(packages),
    }


def met(result: Mapping[str, Any], bound: Literal["at_least", "goal"]) -> bool | None:
    """Whether a result meets a bound; None where it has none, or nothing to compare with it."""
    if result[bound] is None or result["judged"] is None:
        return None
    which, sign = result["judged"].split()
    value = result[which]
    if value is None:
        return None
    return value >= result[bound] if sign == ">=" else value <= result[bound]


def write(result: Mapping[str, Any]) -> None:
    """Prints a result as one line."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def progress() -> Console:
    """The screen of a measurement: standard error."""
    return Console(rich.console.Console(stderr=True, highlight=False))


def machine() -> str:
    """The processor's name, its cores and the system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = named[0] if named else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python and the packages, as they are installed where this runs."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass(frozen=True)
class Finished:
    """A process that has ended: its wall time, its largest resident memory (children apart) and standard output."""

    seconds: float
    peak_bytes: int
    output: str


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    shown: bool = False,
    enough: Callable[[], bool] | None = None,
) -> Finished:
    """Runs a command to its end with `folder` as its working directory. Raises SystemExit with the end of its output
    where it fails. The caller must be small: a process inherits the peak of the one that started it (getrusage(2)).

    shown: the output goes to standard error at once, instead of into the result.
    enough: asked now and then; once it is so, Keel is asked to stop (SIGTERM), and that it did is no failure."""
    log = folder / "output.txt"
    log.touch()
    with nullcontext(sys.stderr) if shown else log.open("w") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        try:
            while enough and not enough() and _runs(process.pid):
                time.sleep(0.1)
            if enough:
                os.kill(process.pid, signal.SIGTERM)  # send_signal would wait for one that has ended
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(errors="replace")
    if process.returncode not in ((0, 128 + signal.SIGTERM) if enough else (0,)):
        raise SystemExit(f"{' '.join(command)}\nfailed with {process.returncode}:\n{output[-3000:]}")
    peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
    return Finished(seconds, peak, output)


def _runs(process: int) -> bool:
    """Whether a child has not ended yet; it is left to be waited for."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def keel(*arguments: str) -> list[str]:
    """The command line of Keel with this Python."""
    return [sys.executable, "-m", "keel.cli", *arguments]


HERE = {"PYTHONPATH": os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p)}
"""Environment in which a process finds this checkout, wherever it works."""
