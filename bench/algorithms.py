"""Every algorithm in the sandbox on equal budgets: gold reward, KL, seconds and peak memory.

    python bench/algorithms.py run --seeds 0 1 2 --root runs/bench          # one JSON object a run, on standard output
    python bench/algorithms.py table runs/bench                             # the table and the picture of what was run

World, SFT model, preferences and reward model are those of recipes/quickstart.yaml, made once a seed. Online algorithms
sample as many responses as the quickstart's PPO; preference losses read all of the reward model's rankings once.
`seconds` and `peak_bytes` are of the process that trains and evaluates, not of what all share. A run that is finished
is not run again.
"""

import argparse
import copy
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
SHARED_STAGES = ("base", "sft", "reward")
GROUP = {"responses_per_prompt": 8, "critic": {}}
ONLINE: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {**GROUP, "advantage": "grpo", "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.05}},
    "dr_grpo": {**GROUP, "advantage": "dr_grpo", "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.05}},
    "rloo": {**GROUP, "advantage": "rloo"},
    "reinforce_plus_plus": {"critic": {}, "advantage": "reinforce_plus_plus"},
    "remax": {"critic": {}, "advantage": "remax"},
}
"""What each changes in the quickstart's ppo section."""
PREFERENCE = {"batch": 32, "learning_rate": 1e-4, "micro_tokens": 8192}
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo"},
    "ipo": {"loss": "ipo"},
    "simpo": {"loss": "simpo"},
    "kto": {"loss": "kto", "batch": 128},
}
BEST_OF = 16
ALGORITHMS = [*ONLINE, *PREFERENCES, f"best_of_{BEST_OF}"]


def recipe_of(algorithm: str, seed: int, root: Path) -> dict[str, Any]:
    """The quickstart's recipe with its last training stage changed."""
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    tree |= {"name": f"{algorithm}-{seed}", "root": str(root), "seed": seed}
    ppo = tree.pop("ppo")
    if algorithm in ONLINE:
        tree["ppo"] = {**copy.deepcopy(ppo), **ONLINE[algorithm]}
    elif algorithm in PREFERENCES:
        tree["preference"] = {**PREFERENCE, **PREFERENCES[algorithm]}
    else:
        tree["eval"]["best_of"] = BEST_OF
    return tree


def run(algorithm: str, seed: int, root: Path, threads: int) -> dict[str, Any]:
    """Trains and evaluates in a process of its own; what all share is copied from the first run of the seed."""
    tree, folder = recipe_of(algorithm, seed, root), root / f"{algorithm}-{seed}"
    first = root / f"shared-{seed}"
    if not (first / "reward" / "done.json").exists():
        for stage in ("sft", "reward"):
            _keel(stage, {**recipe_of("ppo", seed, root), "name": first.name}, threads)
    for stage in SHARED_STAGES:
        if not (folder / stage).exists():
            shutil.copytree(first / stage, folder / stage)
    if not (folder / "summary.json").exists():
        _keel("run", tree, threads)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    line = line_of(algorithm, seed, summary)
    (folder / "algorithm.json").write_text(json.dumps(line), encoding="utf-8")
    return line


def line_of(algorithm: str, seed: int, summary: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of a run; of best-of-N the best responses are judged."""
    own = [name for name in summary["seconds_by_stage"] if name not in SHARED_STAGES]
    best = summary.get("best_of")
    return {
        "algorithm": algorithm,
        "seed": seed,
        "gold_sft": summary["gold_sft"],
        "gold_best": summary["gold_best"],
        "gold": best["gold"]["after"] if best else summary["gold_final"],
        "win_rate": best["gold"]["win_rate"] if best else summary["win_rate"],
        "kl": best["kl_per_response"] if best else summary["kl_per_response"],
        "length": best["length"] if best else summary["length_final"],
        "seconds": sum(summary["seconds_by_stage"][name] for name in own),
        "peak_bytes": summary["peak_rss_bytes"],
        **({"kl_bound": best["kl_bound"]} if best else {}),
    }


def _keel(command: str, tree: dict[str, Any], threads: int) -> None:
    file = Path(tree["root"]) / f"{tree['name']}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command_line = [sys.executable, "-m", "keel.cli", command, str(file), "--threads", str(threads)]
    subprocess.run(command_line, check=True, stdout=sys.stderr)


def table(root: Path) -> str:
    """A Markdown table of all runs under the root: means over the seeds, and the least and the largest."""
    lines = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(root.glob("*/algorithm.json"))]
    rows = ["| algorithm | gold | of the way | win rate | KL | length | seconds | peak GiB |", "| --- " * 8 + "|"]
    for name in ALGORITHMS:
        own = [line for line in lines if line["algorithm"] == name]
        if not own:
            continue
        way = [(x["gold"] - x["gold_sft"]) / (x["gold_best"] - x["gold_sft"]) for x in own]
        golds = [x["gold"] for x in own]
        means = {k: statistics.mean(x[k] for x in own) for k in ("win_rate", "kl", "length", "seconds", "peak_bytes")}
        rows.append(
            f"| `{name}` | {statistics.mean(golds):.2f} ({min(golds):.2f} to {max(golds):.2f}) | "
            f"{statistics.mean(way):.0%} | {means['win_rate']:.1%} | {means['kl']:.2f} | {means['length']:.1f} | "
            f"{means['seconds']:.0f} | {means['peak_bytes'] / 2**30:.2f} |"
        )
    draw(lines, root / "frontier.png")
    return "\n".join(rows)


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Gold over KL, one colour an algorithm, one point a seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for k, name in enumerate(ALGORITHMS):
        own = [line for line in lines if line["algorithm"] == name]
        if not own:
            continue
        marker = "osD^v<>Pp*X"[k % 11]
        axes.plot([x["kl"] for x in own], [x["gold"] for x in own], marker, label=name, color=f"C{k % 10}", alpha=0.8)
    start = statistics.mean(line["gold_sft"] for line in lines)
    axes.plot([0], [start], "k*", markersize=11, label="SFT")
    axes.axhline(
        statistics.mean(line["gold_best"] for line in lines), color="gray", linestyle=":", label="ideal replies"
    )
    axes.set_xlabel("KL to the SFT model, nats per response")
    axes.set_ylabel("gold reward, held-out prompts")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    """Runs what was asked for, or shows what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("algorithms", nargs="*", choices=[[], *ALGORITHMS], default=[])
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--root", type=Path, default=Path("runs/bench"))
    runs.add_argument("--threads", type=int, default=2)
    shown = commands.add_parser("table")
    shown.add_argument("root", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        sys.stdout.write(table(arguments.root) + "\n")
        return
    for seed in arguments.seeds:
        for algorithm in arguments.algorithms or ALGORITHMS:
            line = run(algorithm, seed, arguments.root, arguments.threads)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
