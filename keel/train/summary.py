"""What a person is told at the end: a table, samples side by side, where things are; and summary.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.evaluate.curves import can_draw, draw_curves
from keel.runs.files import write_json
from keel.runs.log import read_lines
from keel.runs.resources import peak_rss_bytes
from keel.train.context import Run

PICTURE, SUMMARY = "curves.png", "summary.json"


def draw(run: Run, best_gold: float | None) -> None:
    """Writes the picture of the PPO stage into the run folder, where matplotlib is installed."""
    if not can_draw():
        run.console.line("no curves.png: matplotlib is not installed (pip install matplotlib)", "dim")
        return
    ppo = run.recipe.ppo
    rows = list(read_lines(run.folder.stage("ppo").metrics))
    draw_curves(rows, run.folder.path / PICTURE, f"{run.recipe.name}: PPO", ppo.kl.target if ppo else None, best_gold)


def summary_of(run: Run, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of summary.json; docs/runs.md says what each is. Numbers a recipe has no source for are absent."""
    recipe, evaluation = run.recipe, results["eval"]
    summary: dict[str, Any] = {
        "name": recipe.name,
        "seed": recipe.seed,
        "seconds": sum(r.get("seconds", 0.0) for r in results.values()),
        "seconds_by_stage": {name: r.get("seconds", 0.0) for name, r in results.items()},
        "peak_rss_bytes": peak_rss_bytes(),
        "prompts": evaluation["prompts"],
        "score_sft": evaluation["score"]["before"],
        "score_final": evaluation["score"]["after"],
        "score_sft_interval": evaluation["score"]["before_interval"],
        "score_final_interval": evaluation["score"]["after_interval"],
    }
    judged = evaluation["score"]
    if "gold" in evaluation:
        judged = evaluation["gold"]
        summary |= {
            "gold_sft": judged["before"],
            "gold_sft_sd": judged["before_sd"],
            "gold_sft_interval": judged["before_interval"],
            "gold_final": judged["after"],
            "gold_final_interval": judged["after_interval"],
            "gold_best": results["base"]["gold_best"],
        }
    summary |= {
        "win_rate": judged["win_rate"],
        "win_rate_interval": judged["win_rate_interval"],
        "kl_per_response": evaluation["kl_per_response"],
        "kl_interval": evaluation["kl_interval"],
        "kl_target": recipe.ppo.kl.target if recipe.ppo else None,
        "length_sft": evaluation["before"]["length"],
        "length_final": evaluation["after"]["length"],
        "eos_rate": evaluation["after"]["eos_rate"],
        "eos_rate_sft": evaluation["before"]["eos_rate"],
        "distinct_sft": evaluation["before"]["distinct"],
        "distinct_final": evaluation["after"]["distinct"],
        "entropy_per_token": evaluation["entropy_per_token"],
    }
    if "sft" in results:
        summary["length_demonstrations"] = results["sft"]["length_demonstrations"]
    if "reward" in results:
        summary |= {
            "reward_model_accuracy": results["reward"]["accuracy"],
            "reward_model_accuracy_interval": results["reward"]["accuracy_interval"],
        }
        if "accuracy_ceiling" in results["reward"]:
            summary["reward_model_accuracy_ceiling"] = results["reward"]["accuracy_ceiling"]
    return summary


def summarise(run: Run, results: Mapping[str, dict[str, Any]]) -> None:
    """Writes summary.json and shows the table, the samples, and where to go from here."""
    summary, console, folder = summary_of(run, results), run.console, run.folder.path
    write_json(folder / SUMMARY, summary)
    console.rule("summary")
    console.table(
        ["", "before", "after", "note"],
        _rows(summary),
        title=f"{run.recipe.name}, seed {run.recipe.seed}: {summary['prompts']} held-out prompts",
    )
    for sample in results["eval"]["shown"]:
        console.line()
        console.line(f"prompt  {sample['prompt']}", "bold")
        console.line(f"before  {sample['before']}   ({sample['score_before']:.2f})")
        console.line(f"after   {sample['after']}   ({sample['score_after']:.2f})", "green")
    console.line()
    for what, place in _places(folder):
        console.line(f"{what:<14} {place}")


def _rows(s: Mapping[str, Any]) -> list[list[str]]:
    def pair(name: str) -> list[str]:
        return [f"{s[f'{name}_sft']:.2f}", f"{s[f'{name}_final']:.2f}"]

    low, high = s["score_final_interval"]
    rows = [["score of the reward", *pair("score"), f"95 % interval after: {low:.2f} to {high:.2f}"]]
    if "gold_sft" in s:
        closed = (s["gold_final"] - s["gold_sft"]) / max(1e-9, s["gold_best"] - s["gold_sft"])
        rows.append(["gold reward", *pair("gold"), f"ideal replies {s['gold_best']:.2f}: {closed:.0%} of the way"])
    low, high = s["win_rate_interval"]
    rows.append(["win rate", "", f"{s['win_rate']:.1%}", f"against before; 95 % interval {low:.1%} to {high:.1%}"])
    target = f"target {s['kl_target']:.1f}" if s["kl_target"] else ""
    rows.append(["KL, nats/response", "0.00", f"{s['kl_per_response']:.2f}", target])
    demonstrations = f"demonstrations {s['length_demonstrations']:.1f}" if "length_demonstrations" in s else ""
    rows.append(["length, tokens", *pair("length"), demonstrations])
    rows.append(["ended by itself", f"{s['eos_rate_sft']:.1%}", f"{s['eos_rate']:.1%}", ""])
    rows.append(["distinct replies", f"{s['distinct_sft']:.1%}", f"{s['distinct_final']:.1%}", ""])
    if "reward_model_accuracy" in s:
        low, high = s["reward_model_accuracy_interval"]
        ceiling = s.get("reward_model_accuracy_ceiling")
        best = f"; best reachable {ceiling:.1%}" if ceiling else ""
        rows.append(
            [
                "reward model accuracy",
                "",
                f"{s['reward_model_accuracy']:.1%}",
                f"95 % interval {low:.1%} to {high:.1%}{best}",
            ]
        )
    by_stage = ", ".join(f"{name} {seconds:.0f}" for name, seconds in s["seconds_by_stage"].items())
    rows.append(["time, memory", f"{s['seconds']:.0f} s", f"{s['peak_rss_bytes'] / 2**30:.2f} GiB", by_stage])
    return rows


def _places(folder: Path) -> list[tuple[str, str]]:
    places = [
        ("model", f"{folder / 'ppo' / 'model'} (a plain Hugging Face folder)"),
        ("numbers", str(folder / SUMMARY)),
    ]
    if (folder / PICTURE).exists():
        places.append(("curves", str(folder / PICTURE)))
    return [*places, ("talk to it", f"keel chat {folder}")]
