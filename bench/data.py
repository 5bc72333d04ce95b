"""What a large file takes: seconds, and the peak memory of the process that inspects it or trains on it.

    python -m bench.data                       1 GB of pairs, made beside the model and removed
    python -m bench.data sft                   the same by a stage that trains: sft, reward or dpo
    python -m bench.data sft --megabytes 200

The pairs are the sandbox's, written again and again with an order number in front, so that no prompt and no pair comes
twice: the worst case for what is remembered of rows. `keel inspect --model` reads, counts and encodes every row with
the sandbox's tokenizer. A stage reads, counts, splits and encodes all rows, and is stopped after its first step; then
it is started again, on the rows that it has encoded, and stopped after another. What leads to the steps is measured, so
the model is a tiny one. dpo is simpo, which needs no pass of the reference over all rows. Progress is shown; standard
output gets one JSON object, as bench/common.py describes it: `ours` is the largest peak in GiB.
"""

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.common import HERE, Bounds, Finished, keel, line, progress, run, write
from bench.workload import model_folder
from keel import sandbox
from keel.runs.console import Console

FEW = {"batch": 8, "held_out": 64, "checkpoint_every": 1_000_000}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {**FEW, "data": {"columns": {"completion": "chosen"}}}),
    "reward": ("reward", {**FEW, "data": {}}),
    "dpo": ("preference", {**FEW, "loss": "simpo", "data": {}}),
}
"""What is measured: the section of a recipe, and what stands in it."""

DISTINCT = 20_000
"""Pairs that are drawn; more only takes longer to make."""


def write_pairs(path: Path, size: int, console: Console) -> int:
    """Writes about `size` bytes of pairs and returns how many there are."""
    rng = random.Random(0)
    texts = [
        (r.text, sandbox.ideal_reply(r, rng), sandbox.demonstration(r, rng))
        for r in sandbox.requests(0, DISTINCT, "train")
    ]
    rows, written = 0, 0
    with path.open("w", encoding="utf-8") as file, console.task("writing", size // 1_000_000, unit="MB") as task:
        while written < size:
            asked, chosen, rejected = texts[rows % DISTINCT]
            pair = {"prompt": f"Order {rows}. {asked}", "chosen": chosen, "rejected": rejected}
            written += file.write(json.dumps(pair) + "\n")
            rows += 1
            if rows % 10_000 == 0:
                task.update(min(written // 1_000_000, task.total))
    return rows


def measure(what: str, megabytes: int, root: Path, console: Console) -> dict[str, Any]:
    """Makes the file, inspects it or trains on it in processes of their own, and removes it."""
    model = model_folder("tiny", root)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = Path(folder) / "pairs.jsonl"
        rows = write_pairs(path, megabytes * 1_000_000, console)
        size = path.stat().st_size
        peak, detail = inspect(path, model) if what == "inspect" else train(what, path, model)
    detail |= {"rows": rows, "bytes": size}
    return line(f"data/{what}/{megabytes}MB", "GiB", peak / 2**30, None, Bounds("ours <=", 1.5), detail)


def inspect(path: Path, model: Path) -> tuple[int, dict[str, Any]]:
    """The peak in bytes, and how long it took."""
    flags = ["--model", str(model), "--html", str(path.with_suffix(".html"))]
    found = run(keel("inspect", str(path), *flags), path.parent, HERE, shown=True)
    rate = path.stat().st_size / 1e6 / found.seconds
    return found.peak_bytes, {"seconds": found.seconds, "megabytes_per_second": rate}


def train(what: str, path: Path, model: Path) -> tuple[int, dict[str, Any]]:
    """The larger peak of both starts in bytes; the seconds of each, and what lies on disk between them."""
    name, section = STAGES[what]
    tree = {
        "name": "large",
        "threads": 1,
        "model": {"path": str(model), "backbone": "separate", "max_prompt_tokens": 96, "max_response_tokens": 64},
        name: section | {"data": section["data"] | {"path": [str(path)]}},
    }
    recipe = path.with_name("large.yaml")
    recipe.write_text(yaml.safe_dump(tree))
    log = path.parent / "runs" / "large" / name / "metrics.jsonl"
    starts: list[Finished] = []
    for _ in range(2):
        last = _lines(log)
        more = partial(_more, log, last)
        starts.append(run(keel("run", str(recipe)), path.parent, HERE, shown=True, enough=more))
        if not more():
            raise SystemExit("no step was taken")
    kept = sum(file.stat().st_size for file in log.parents[1].glob("encoded/*"))
    detail = {
        "seconds": [start.seconds for start in starts],
        "peaks_gib": [start.peak_bytes / 2**30 for start in starts],
        "encoded_bytes": kept,
    }
    return max(start.peak_bytes for start in starts), detail


def _more(file: Path, lines: int) -> bool:
    return _lines(file) > lines


def _lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def main() -> None:
    """Parses the command line and prints the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="inspect", choices=["inspect", *STAGES])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the file")
    parser.add_argument("--root", type=Path, default=Path("runs/bench"), help="where the model is kept")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    write(measure(arguments.what, arguments.megabytes, root, progress()))


if __name__ == "__main__":
    main()
