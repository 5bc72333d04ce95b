"""PPO with four roles beside TRL 1.12.0, its last release with PPO: samples/s and peak memory of whole processes.

    python -m bench.ppo tiny smollm2-lora smollm2-full --trl-script trl_ppo.py --trl-python PYTHON --trl-path TRL_DIR

Both train the same model: 16 prompt tokens, up to 32 response tokens, one epoch of four optimizer steps. They run in
turns, each a process of its own. Of each process the median update counts, the first one left out, and of the processes
the median. Peak memory is the process's largest resident set. The peer is a script that takes the flags below and
prints a JSON object last; without it Keel is measured alone.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import REPOSITORY, Bounds, line, progress, run, write
from bench.workload import PROMPT, RESPONSE, measure, median_update, model_folder, prepare, recipe
from keel.runs.console import Console

SCRIPT = REPOSITORY.parent / "shared" / "peers" / "trl_ppo.py"
GIB = 2**30


class Case(NamedTuple):
    """One setting, and what the figures should be: the ratio of samples/s at least, of memory at most."""

    model: str
    batch: int
    dtype: str
    lora_rank: int
    speed: Bounds
    memory: Bounds | None = None


CASES = {
    "tiny": Case("tiny", 64, "float32", 0, Bounds("ratio >=", 4.0, 6.0)),
    "smollm2-lora": Case(
        "smollm2-bfloat16", 16, "bfloat16", 16, Bounds("ratio >=", 2.5, 4.0), Bounds("ratio <=", 0.4, 0.25)
    ),
    "smollm2-full": Case("smollm2-float32", 16, "float32", 0, Bounds("ratio >=", 1.5, 2.5)),
}


def compare(
    name: str, root: Path, peer: "Peer | None", rounds: int, updates: int, console: Console
) -> Iterator[dict[str, Any]]:
    """Speed and memory of one case."""
    case, threads = CASES[name], os.cpu_count() or 1
    console.line(f"{name}: making the model and Keel's stages before PPO")
    folder = model_folder(case.model, root)
    model: dict[str, Any] = {"dtype": case.dtype, "backbone": "shared" if case.lora_rank else "separate"}
    if case.lora_rank:
        model["lora_rank"] = case.lora_rank
    file = recipe(name, folder, root, threads, model=model, ppo={"rollouts": case.batch, "updates": updates})
    prepare(file, root)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        finished, updates_seen = measure(file, root)
        ours.append(
            {
                "samples_per_second": case.batch / median_update(updates_seen, "seconds"),
                "peak_bytes": finished.peak_bytes,
                **{
                    key: median_update(updates_seen, key)
                    for key in updates_seen[-1]
                    if key.startswith(("seconds", "utilisation", "padding")) or key == "length"
                },
            }
        )
        if peer:
            theirs.append(peer.run(case, folder, root, updates, threads))
        console.line(f"{name}, round {number + 1} of {rounds}: {_shown(ours[-1])}; peer {_shown(theirs[-1:])}")
    detail = {"ours": ours, "peer": theirs, "batch": case.batch, "prompt": PROMPT, "response": RESPONSE}
    for what, unit, scale, bounds in (
        ("samples_per_second", "samples/s", 1, case.speed),
        ("peak_bytes", "GiB", GIB, case.memory),
    ):
        kind = "memory" if what == "peak_bytes" else "speed"
        mine = statistics.median(r[what] for r in ours) / scale
        other = statistics.median(r[what] for r in theirs) / scale if theirs else None
        result = line(f"ppo/{name}/{kind}", unit, mine, other, bounds, detail)
        yield {**result, "versions": {**result["versions"], **({"trl": peer.version()} if peer else {})}}
    padded = max(r[key] for r in ours for key in ("padding_update", "padding_experience"))
    yield line(f"ppo/{name}/padding", "share", padded, None, Bounds("ours <=", 0.05), detail)


class Peer(NamedTuple):
    """How the other library is run: its script, its Python and a folder for its PYTHONPATH."""

    script: Path
    python: str
    path: str

    def version(self) -> str:
        """Of trl where the peer finds it, which is not where Keel is installed."""
        found = metadata.distributions(name="trl", path=[self.path])
        return next((distribution.version for distribution in found), "unknown")

    def run(self, case: Case, model: Path, root: Path, updates: int, threads: int) -> dict[str, float]:
        """One whole process; what it says of itself, with the peak that the system counted."""
        flags = {
            "model": model,
            "batch": case.batch,
            "updates": updates,
            "prompt-length": PROMPT,
            "response-length": RESPONSE,
            "dtype": case.dtype,
            "lora-rank": case.lora_rank,
            "threads": threads,
        }
        command = [
            self.python,
            str(self.script),
            *(text for n, value in flags.items() for text in (f"--{n}", f"{value}")),
        ]
        finished = run(command, root, {"PYTHONPATH": self.path})
        told = json.loads(finished.output.strip().splitlines()[-1])
        return {"samples_per_second": told["samples_per_second"], "peak_bytes": finished.peak_bytes}


def _shown(results: Any) -> str:
    if not results:
        return "none"
    one = results[-1] if isinstance(results, list) else results
    return f"{one['samples_per_second']:.1f} samples/s, {one['peak_bytes'] / GIB:.2f} GiB"


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--trl-script", type=Path, default=Path(os.environ.get("TRL_SCRIPT", SCRIPT)))
    parser.add_argument("--trl-python", default=os.environ.get("TRL_PYTHON", sys.executable))
    parser.add_argument("--trl-path", default=os.environ.get("TRL_DIR", ""), help="where trl itself is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--root", type=Path, default=Path("runs/bench"), help="where models and runs are kept")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    console, root = progress(), arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    peer = Peer(arguments.trl_script.resolve(), arguments.trl_python, arguments.trl_path)
    if not peer.script.is_file():
        console.line(
            f"no peer: {peer.script} is not there (--trl-script, TRL_SCRIPT); Keel alone is measured", "yellow"
        )
        peer = None
    for name in arguments.cases or CASES:
        for result in compare(name, root, peer, arguments.rounds, arguments.updates, console):
            write(result)


if __name__ == "__main__":
    main()
