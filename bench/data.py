"""What `keel inspect` takes for a large file: rows and bytes a second, and the peak memory of the process.

    python -m bench.data                       1 GB of pairs, made in a temporary folder and removed
    python -m bench.data --megabytes 200

The pairs are the sandbox's, written again and again with an order number in front, so that no prompt and no pair comes
twice: the worst case for what is remembered of rows. `keel inspect --model` reads, counts and encodes every row with
the sandbox's tokenizer. It shows its own progress; standard output gets one JSON object, as bench/common.py describes
it: `ours` is the peak in GiB, and the rates stand in `detail`.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.common import HERE, Bounds, keel, line, progress, run, write
from bench.workload import model_folder
from keel import sandbox
from keel.runs.console import Console

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


def measure(megabytes: int, root: Path, console: Console) -> dict[str, Any]:
    """Makes the file, inspects it in a process of its own, and removes it."""
    model = model_folder("tiny", root)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = Path(folder) / "pairs.jsonl"
        rows = write_pairs(path, megabytes * 1_000_000, console)
        size = path.stat().st_size
        flags = ["--model", str(model), "--html", str(Path(folder) / "pairs.html")]
        found = run(keel("inspect", str(path), *flags), Path(folder), HERE, shown=True)
    detail = {
        "rows": rows,
        "bytes": size,
        "seconds": found.seconds,
        "rows_per_second": rows / found.seconds,
        "megabytes_per_second": size / 1e6 / found.seconds,
    }
    return line(f"data/inspect/{megabytes}MB", "GiB", found.peak_bytes / 2**30, None, Bounds("ours <=", 1.5), detail)


def main() -> None:
    """Parses the command line and prints the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the file")
    parser.add_argument("--root", type=Path, default=Path("runs/bench"), help="where the model is kept")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    write(measure(arguments.megabytes, root, progress()))


if __name__ == "__main__":
    main()
