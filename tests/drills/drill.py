"""Strikes at a short PPO run: kill -9, a full disk, damaged checkpoints, a fuzzed run folder. `make drills`.

    python -m tests.drills.drill MODE FOLDER STRIKES

One process imports torch once and forks a child for each `keel run`. After every strike the run must go on, and come to
the bytes of the run that nobody struck, with no file left over.
"""

import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import keel.train.pipeline  # noqa: F401  # all that a run needs, before the first fork
from keel import cli
from keel.metrics import TIMED
from tests.drills.mutations import mutate, reseal
from tests.drills.trainers import ONLINE, SEPARATE, STEERED, TRAINERS, write_data
from tests.tiny import write_model

RECIPE: dict[str, Any] = {"model": SEPARATE, "ppo": {**ONLINE, **STEERED, "critic": {"warmup_cap": 1}}}
POINTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}
"""Audit events of the file system at which a run may be struck."""
LONGEST = 600.0
"""Seconds after which a run counts as hanging."""
STAGE = Path("runs/x/ppo")
RUN = ["run", "recipe.yaml"]


class Child:
    """A forked `keel` with its output."""

    def __init__(self, arguments: Sequence[str], first: Callable[[], object] = lambda: None):
        reader, writer = os.pipe()
        self.reader, self.output = reader, b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(writer), "w", buffering=1) for _ in range(2))
            code: Any = 99
            try:
                first()
                cli.main(list(arguments))
            except SystemExit as left:
                code = left.code or 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(code)
        os.close(writer)

    def wait(self, seconds: float = LONGEST) -> int | None:
        """The exit code, -9 where it was killed; None where it still runs after so long."""
        left = seconds
        while left > 0:
            # In slices: where this process is suspended with the one it waits for, the time between is no hang.
            piece, began = min(left, 1.0), time.monotonic()
            if select.select([self.reader], [], [], piece)[0]:
                block = os.read(self.reader, 1 << 16)
                if not block:
                    os.close(self.reader)
                    return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                self.output += block
            left -= min(piece, time.monotonic() - began)
        return None

    def kill(self) -> int | None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


def keel_(*arguments: str, first: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Runs to the end; a run that hangs fails the drill."""
    child = Child(arguments, first)
    code = child.wait()
    if code is None:
        child.kill()
    assert code is not None, f"it hangs: {child.output.decode()[-2000:]}"
    return code, child.output.decode()


def strike_after(points: int) -> Callable[[], None]:
    """Kills the process itself at a file-system operation."""

    def first() -> None:
        left = points

        def hook(event: str, args: object) -> None:
            nonlocal left
            if event in POINTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return first


def strike_once(path: Path) -> Callable[[], None]:
    """Kills the process at the first file-system operation after `path` is there."""

    def first() -> None:
        def hook(event: str, args: object) -> None:
            if event in POINTS and os.access(path, os.F_OK):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return first


def result(root: Path = STAGE.parent) -> dict[str, Any]:
    """All that must be the same however often a run was struck: every file's name, weights, samples, metrics."""
    paths = sorted(root.rglob("*"))
    metrics = {}
    for path in paths:
        if path.name == "metrics.jsonl":
            lines = map(json.loads, path.read_text().splitlines())
            metrics[path.parent.name] = [{n: v for n, v in line.items() if n not in TIMED} for line in lines]
    return {
        "names": [str(path.relative_to(root)) for path in paths if path.name != "bad"],
        "weights": {str(p.relative_to(root)): p.read_bytes() for p in paths if p.suffix == ".safetensors"},
        "metrics": metrics,
        "samples": {str(p.relative_to(root)): p.read_bytes() for p in paths if p.name == "samples.jsonl"},
    }


def same(whole: dict[str, Any], but: str = "nothing") -> None:
    """Asserts that the run in this folder has come to what the unbroken one came to; but: a part of the names of files
    that may be others, if no left-over."""
    mine = result()
    assert not [name for name in mine["names"] if Path(name).name.startswith((".tmp-", ".old-"))], mine["names"]
    for name, wanted in whole.items():
        found, wanted = (
            [x for x in side if but not in x] if name == "names" else {n: x for n, x in side.items() if but not in n}
            for side in (mine[name], wanted)
        )
        assert found == wanted, f"{name} differ: {set(found) ^ set(wanted)}"


def prepare(folder: Path, recipe: dict[str, Any] = RECIPE) -> dict[str, Any]:
    """Writes model, data and recipe, and makes the unbroken run, whose result comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    pid = os.fork()  # torch must have done nothing in the process that forks
    if pid == 0:
        write_model(Path("model"), layers=1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    Path("fn.py").write_text("def score(response):\n    return -len(response) / 10\n")
    write_data()
    return whole_run(recipe)


def whole_run(recipe: dict[str, Any]) -> dict[str, Any]:
    """The result of the unbroken run of a recipe, which is left in `runs`."""
    Path("recipe.yaml").write_text(yaml.safe_dump({"name": "x", "threads": 1, **recipe}))
    code, output = keel_(*RUN)
    assert code == 0, output
    return result()


def trainers(folder: Path) -> None:
    """Every trainer in turn: two steps of four, kill -9, the rest. Prints a line of JSON for each."""
    for number, (name, recipe) in enumerate(TRAINERS.items()):
        whole = whole_run(recipe) if number else prepare(folder, recipe)
        (stage,) = whole["metrics"]
        shutil.rmtree("runs")
        code, _ = keel_(*RUN, first=strike_once(STAGE.parent / stage / "checkpoints/step-2"))
        resumed, output = keel_(*RUN)
        mine = result()
        found = {
            "trainer": name,
            "killed": code,
            "resumed": resumed,
            "from": [line.split()[-1] for line in output.splitlines() if "going on from step" in line],
            "steps": len(whole["metrics"][stage]),
            "differ": [part for part in whole if mine[part] != whole[part]],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        shutil.rmtree("runs")


def kills(whole: dict[str, Any], strikes: int, chance: random.Random) -> None:
    """kill -9 at a random time, or at a random file-system operation, of which most are inside saving."""
    shutil.rmtree("runs")
    began, finished = time.monotonic(), 0
    assert keel_(*RUN)[0] == 0
    longest = time.monotonic() - began
    struck, points = 0, 400.0
    while struck < strikes:
        by_time = struck % 2 == 0
        child = Child(RUN, (lambda: None) if by_time else strike_after(chance.randrange(int(points))))
        code = child.wait(chance.uniform(0, longest) if by_time else LONGEST)
        code = child.kill() if code is None else code
        assert code in (0, -9), child.output.decode()
        struck += code == -9
        if code == 0:
            same(whole)
            finished += 1
            shutil.rmtree("runs")
            points, longest = (points, 0.9 * longest) if by_time else (max(50.0, 0.8 * points), longest)
    code, output = keel_(*RUN)
    assert code == 0, output
    same(whole)
    sys.stdout.write(f"{struck} strikes, {finished + 1} runs finished\n")


def damage(whole: dict[str, Any], strikes: int, chance: random.Random) -> None:
    """A byte flipped in each file of the newest checkpoint, each file missing, a clock set back."""
    shutil.rmtree("runs")
    keel_(*RUN, first=strike_once(STAGE / "checkpoints/step-3"))
    shutil.move("runs", "struck")
    newest = STAGE / "checkpoints/step-3"
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
        for how in ("flipped", "missing"):
            shutil.copytree("struck", "runs")
            file = newest / name
            if how == "flipped":
                content = bytearray(file.read_bytes())
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                file.write_bytes(content)
            else:
                file.unlink()
            code, output = keel_(*RUN)
            assert code == 0 and "passed over a damaged checkpoint: step-3 passed over" in output, output
            assert "going on from step 2" in output, output
            same(whole)
            shutil.rmtree("runs")
    shutil.copytree("struck", "runs")
    for path in newest.parent.rglob("*"):
        os.utime(path, (1, 1) if "step-3" in str(path) else None)
    code, output = keel_(*RUN)
    assert code == 0 and "going on from step 3" in output, output
    same(whole)


def disk(whole: dict[str, Any], strikes: int, chance: random.Random) -> None:
    """A disk of 50 MB that another fills at a random moment, where this process may mount one; else a random limit on
    the size of files. The run goes on without a checkpoint, or stops cleanly, and then comes to the same bytes."""
    shutil.rmtree("runs")
    Path("runs").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={50 << 20}", "keel-drill", "runs"]
    mounted = bool(shutil.which("mount")) and subprocess.run(command, capture_output=True, check=False).returncode == 0
    ends, failed = {0: 0, 2: 0}, 0
    try:
        began = time.monotonic()
        assert keel_(*RUN)[0] == 0
        longest = time.monotonic() - began
        for _ in range(max(2, strikes // 2)):
            shutil.rmtree("runs/x")
            most = chance.randrange(1, 600_000)
            child = Child(RUN, (lambda: None) if mounted else limited(most))
            code = child.wait(chance.uniform(0, longest)) if mounted else None
            if mounted and code is None:
                fill(Path("runs/filler"), chance.choice([0, most]))
            code = child.wait() if code is None else code
            output = child.output.decode()
            assert code in ends and "Traceback" not in output, f"{code}: {output}"
            ends[code] += 1
            missed = output.count("training goes on; the next checkpoint is the next attempt")
            failed += missed
            Path("runs/filler").unlink(missing_ok=True)
            code, output = keel_(*RUN)
            assert code == 0, output
            same(whole, "/checkpoints" if missed else "nothing")
        kind = "a tmpfs of 50 MB" if mounted else "a size limit"
        sys.stdout.write(f"{kind}: exit codes {ends}, {failed} checkpoints failed and training went on\n")
    finally:
        if mounted:
            subprocess.run(["umount", "runs"], check=True)


def limited(most: int) -> Callable[[], None]:
    """Lets no file of the process grow beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def fill(filler: Path, free: int) -> None:
    """Takes all of the disk but so many bytes."""
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while (left := shutil.disk_usage(filler.parent).free - free) > 0:
            file.write(bytes(min(left, 1 << 20)))
            file.flush()


def fuzz(whole: dict[str, Any], strikes: int, chance: random.Random) -> None:
    """Any file of a finished and of a broken-off run is changed at random: no traceback, no code run, no hang."""
    shutil.copytree("runs", "finished")
    shutil.rmtree("runs")
    keel_(*RUN, first=strike_once(STAGE / "checkpoints/step-3"))
    shutil.move("runs", "broken")
    codes: dict[int, int] = {}
    for number in range(strikes):
        source = ("finished", "broken")[number % 2]
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(source, "runs")
        files = sorted(path for path in Path("runs").rglob("*") if path.is_file() and path.name != ".lock")
        victim = chance.choice(files)
        how = mutate(victim, chance)
        if victim.is_file() and "checkpoints" in victim.parts and chance.random() < 0.7:
            reseal(victim)
        command = chance.choice([RUN, RUN, ["resume", "runs/x", "--ppo.reward", "fn.py:score"], ["chat", "runs/x"]])
        code, output = keel_(*command)
        assert code in (0, 2, 3) and "Traceback" not in output, f"{source} {victim} {how}: {code}\n{output}"
        assert not Path("struck-by-a-pickle").exists(), f"{victim} was unpickled"
        codes[code] = codes.get(code, 0) + 1
    sys.stdout.write(f"exit codes {codes}\n")


def main() -> None:
    """MODE FOLDER STRIKES, or `trainers FOLDER`."""
    torch.set_num_threads(1)
    mode, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    if mode == "trainers":
        trainers(folder)
        return
    strikes = int(sys.argv[3])
    modes = {"kills": kills, "damage": damage, "disk": disk, "fuzz": fuzz}
    modes[mode](prepare(folder), strikes, random.Random(int(os.environ.get("KEEL_DRILL_SEED", "0"))))


if __name__ == "__main__":
    main()
