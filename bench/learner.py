"""How much of the machine the learner uses, and whether a token costs the same in a large batch as in a small one.

    python -m bench.learner utilisation        SmolLM2 in bfloat16 with adapters: model FLOP utilisation of the update
    python -m bench.learner scaling            the tiny model: seconds per token from 64 to 2048 rollouts a step

Both are whole processes, `keel ppo`; the median update counts, the first one left out. Utilisation is against a plain
bfloat16 matrix product on the same machine, as every run measures it (docs/runs.md).
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import Bounds, line, progress, write
from bench.workload import measure, median_update, model_folder, prepare, recipe
from keel.runs.console import Console

ROLLOUTS = (64, 256, 1024, 2048)


def utilisation(root: Path, rounds: int, updates: int, console: Console) -> Iterator[dict[str, Any]]:
    """The update of PPO with a policy and a critic, 1536 tokens each."""
    model = {"dtype": "bfloat16", "backbone": "shared", "lora_rank": 16}
    ppo = {"rollouts": 32, "minibatches": 1, "updates": updates}
    weights = model_folder("smollm2-bfloat16", root)
    file = recipe("utilisation", weights, root, os.cpu_count() or 1, model=model, ppo=ppo)
    prepare(file, root)
    parts = ("generate", "score", "policy", "reference", "values", "update")
    found: list[dict[str, float]] = []
    for number in range(rounds):
        _, seen = measure(file, root)
        found.append({name: median_update(seen, f"utilisation_{name}") for name in parts})
        found[-1]["product_rate"] = seen[-1]["product_rate"]
        console.line(f"utilisation, round {number + 1} of {rounds}: {found[-1]['update']:.1%} of the product's rate")
    ours = statistics.median(one["update"] for one in found)
    yield line("learner/utilisation/smollm2-lora", "share", ours, None, Bounds("ours >=", 0.45, 0.6), {"rounds": found})


def scaling(root: Path, rounds: int, updates: int, console: Console) -> Iterator[dict[str, Any]]:
    """Seconds per token of a whole update; the sizes take turns."""
    weights, threads = model_folder("tiny", root), os.cpu_count() or 1
    files: dict[int, Path] = {}
    for rollouts in ROLLOUTS:
        ppo = {"rollouts": rollouts, "updates": updates}
        files[rollouts] = recipe(f"scaling-{rollouts}", weights, root, threads, model={"backbone": "separate"}, ppo=ppo)
        prepare(files[rollouts], root)
    found: dict[int, list[float]] = {rollouts: [] for rollouts in ROLLOUTS}
    for number in range(rounds):
        for rollouts, file in files.items():
            _, seen = measure(file, root)
            costs = [update["seconds"] / (rollouts * update["length"]) for update in seen]
            found[rollouts].append(statistics.median(costs[1:] or costs))
            console.line(
                f"scaling, round {number + 1} of {rounds}: {rollouts} rollouts, "
                f"{found[rollouts][-1] * 1e6:.0f} µs per response token"
            )
    cost = {rollouts: statistics.median(seconds) for rollouts, seconds in found.items()}
    detail = {"seconds_per_token": {str(n): seconds for n, seconds in found.items()}}
    ratio = cost[ROLLOUTS[-1]] / cost[ROLLOUTS[0]]
    yield line("learner/cost-2048-by-64/tiny", "1", ratio, None, Bounds("ours <=", 1.1, 1.0), detail)


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("utilisation", "scaling"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--root", type=Path, default=Path("runs/bench"), help="where models and runs are kept")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    measurement = {"utilisation": utilisation, "scaling": scaling}[arguments.what]
    for result in measurement(root, arguments.rounds, arguments.updates, progress()):
        write(result)


if __name__ == "__main__":
    main()
