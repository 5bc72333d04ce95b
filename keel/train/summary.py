"""What a person is told at the end: a table, samples side by side, where things are; and summary.json."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.errors import RunError
from keel.evaluate.curves import can_draw, draw_curves
from keel.runs.files import read_json, write_json
from keel.runs.resources import peak_rss_bytes
from keel.train.context import Run, read_metrics
from keel.train.profile import profile_sentence

PICTURE, SUMMARY = "curves.png", "summary.json"


def draw(run: Run, best_gold: float | None) -> None:
    """Writes the picture of the PPO stage into the run folder, where matplotlib is installed."""
    if not can_draw():
        run.console.line("no curves.png: matplotlib is not installed (pip install matplotlib)", "dim")
        return
    ppo = run.recipe.ppo
    rows = read_metrics(run.folder.stage("ppo").metrics)
    target = ppo.kl.target if ppo else None
    try:
        draw_curves(rows, run.folder.path / PICTURE, f"{run.recipe.name}: PPO", target, best_gold)
    except (OSError, ValueError) as error:
        run.console.line(f"no {PICTURE}: {error}", "yellow")


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
    }
    for name in ("score", "gold"):
        for ours, side in (("sft", "before"), ("final", "after")):
            for part in ("", "_interval"):
                if side + part in evaluation.get(name, {}):
                    summary[f"{name}_{ours}{part}"] = evaluation[name][side + part]
    if "gold" in evaluation:
        summary |= {"gold_sft_sd": evaluation["gold"]["before_sd"], "gold_best": results["base"]["gold_best"]}
    judged = evaluation.get("gold") or evaluation.get("score") or {}
    for name in ("win_rate", "win_rate_interval"):
        if name in judged:
            summary[name] = judged[name]
    for name in ("kl_per_response", "kl_interval", "entropy_per_token"):
        if name in evaluation:
            summary[name] = evaluation[name]
    summary["kl_target"] = recipe.ppo.kl.target if recipe.ppo else None
    for ours, side in (("sft", "before"), ("final", "after")):
        if side in evaluation:
            summary |= {f"{name}_{ours}": evaluation[side][name] for name in ("length", "eos_rate", "distinct")}
    if "eos_rate_final" in summary:
        summary["eos_rate"] = summary.pop("eos_rate_final")
    if "best_of" in evaluation:
        summary["best_of"] = evaluation["best_of"]
    if "profile" in results.get("ppo", {}):
        summary["profile"] = results["ppo"]["profile"]
    return summary | _of_training(results)


def _of_training(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "sft" in results:
        found["length_demonstrations"] = results["sft"]["length_demonstrations"]
    if "reward" in results:
        for name in ("accuracy", "accuracy_interval", "accuracy_ceiling", "accuracy_of_ceiling"):
            if name in results["reward"]:
                found[f"reward_model_{name}"] = results["reward"][name]
        found["reward_model_report"] = results["reward"]["report"]
    if "preference" in results:
        found["preference_accuracy"] = results["preference"]["heldout_accuracy"]
        for name in ("accuracy_interval", "accuracy_ceiling"):
            if name in results["preference"]:
                found[f"preference_{name}"] = results["preference"][name]
    return found


def summarise(run: Run, results: Mapping[str, dict[str, Any]], worked: bool) -> None:
    """Writes summary.json and shows the table, the samples, and where to go from here. worked: whether this process has
    made any of it; else the peak memory that was noted stays."""
    summary, console, folder = summary_of(run, results), run.console, run.folder.path
    if not worked:
        with contextlib.suppress(RunError):  # no summary, or a damaged one
            summary["peak_rss_bytes"] = read_json(folder / SUMMARY).get("peak_rss_bytes", summary["peak_rss_bytes"])
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
        for side, style in (("before", ""), ("after", "green"), ("best", "green")):
            if side in sample:
                score = f"   ({sample[f'score_{side}']:.2f})" if f"score_{side}" in sample else ""
                console.line(f"{side:<7} {sample[side]}{score}", style)
    console.line()
    if "profile" in summary:
        console.line(f"profile        {profile_sentence(summary['profile'])}")
    for what, place in _places(folder, results):
        console.line(f"{what:<14} {place}")


def _rows(s: Mapping[str, Any]) -> list[list[str]]:
    def pair(name: str, form: str = ".2f") -> list[str]:
        return [format(s[side], form) if side in s else "" for side in (f"{name}_sft", f"{name}_final")]

    rows: list[list[str]] = []
    if "score_sft" in s:
        low, high = s.get("score_final_interval", s["score_sft_interval"])
        when = "after" if "score_final" in s else "before"
        rows.append(["score of the reward", *pair("score"), f"95 % interval {when}: {low:.2f} to {high:.2f}"])
    if "gold_sft" in s:
        rows.append(["gold reward", *pair("gold"), f"ideal replies {s['gold_best']:.2f}{_way(s, s.get('gold_final'))}"])
    if "win_rate" in s:
        low, high = s["win_rate_interval"]
        rows.append(["win rate", "", f"{s['win_rate']:.1%}", f"against before; 95 % interval {low:.1%} to {high:.1%}"])
    if "kl_per_response" in s:
        target = f"target {s['kl_target']:.1f}" if s["kl_target"] else ""
        shown = round(s["kl_per_response"], 2) + 0.0  # no -0.00
        rows.append(["KL, nats/response", "0.00", f"{shown:.2f}", target])
    demonstrations = f"demonstrations {s['length_demonstrations']:.1f}" if "length_demonstrations" in s else ""
    rows.append(["length, tokens", *pair("length"), demonstrations])
    rows.append(["ended by itself", f"{s['eos_rate_sft']:.1%}", f"{s['eos_rate']:.1%}" if "eos_rate" in s else "", ""])
    rows.append(["distinct replies", *pair("distinct", ".1%"), ""])
    for name, label in (("reward_model", "reward model accuracy"), ("preference", "accuracy of the preference")):
        if f"{name}_accuracy" in s:
            rows.append([label, "", f"{s[f'{name}_accuracy']:.1%}", _accuracy_note(s, name)])
    if "reward_model_report" in s:
        rows.append(["   how sure, and of what", "", *_report_note(s["reward_model_report"])])
    if "best_of" in s:
        rows += _best_rows(s, s["best_of"])
    by_stage = ", ".join(f"{name} {seconds:.0f}" for name, seconds in s["seconds_by_stage"].items())
    rows.append(["time, memory", f"{s['seconds']:.0f} s", f"{s['peak_rss_bytes'] / 2**30:.2f} GiB", by_stage])
    return rows


def _way(s: Mapping[str, Any], gold: float | None) -> str:
    if gold is None:
        return ""
    return f": {(gold - s['gold_sft']) / max(1e-9, s['gold_best'] - s['gold_sft']):.0%} of the way"


def _accuracy_note(s: Mapping[str, Any], name: str) -> str:
    if f"{name}_accuracy_interval" not in s:
        return "a held-out thumb up above one down"
    low, high = s[f"{name}_accuracy_interval"]
    ceiling = s.get(f"{name}_accuracy_ceiling")
    share = s.get(f"{name}_accuracy_of_ceiling")
    return (
        f"95 % interval {low:.1%} to {high:.1%}"
        + (f"; best reachable {ceiling:.1%}" if ceiling else "")
        + (f", {share:.1%} of it reached" if share else "")
    )


def _report_note(report: Mapping[str, Any]) -> tuple[str, str]:
    """Calibration and length of a reward model, for the table."""
    sides = [
        f"{report[key]:.1%}"
        for key in (f"accuracy_{which}_preferred" for which in ("longer", "shorter"))
        if key in report
    ]
    told = f"; accuracy where the longer, the shorter was preferred: {', '.join(sides)}" if len(sides) == 2 else ""
    return (
        f"{report['calibration_error']:.1%}",
        f"calibration error; correlation of score and length {report['length_correlation']:.2f}{told}",
    )


def _best_rows(s: Mapping[str, Any], best: Mapping[str, Any]) -> list[list[str]]:
    """Best-of-N beside the trained policy: gold where there is one, win rate and KL."""
    name, judged = f"best of {best['n']}", best.get("gold") or best["score"]
    way = _way(s, judged["after"]) if "gold" in best else ""
    what = "gold reward" if "gold" in best else "score of the reward"
    low, high = judged["win_rate_interval"]
    return [
        [f"{name}: {what}", f"{judged['before']:.2f}", f"{judged['after']:.2f}", way.removeprefix(": ")],
        [
            f"{name}: win rate",
            "",
            f"{judged['win_rate']:.1%}",
            f"against before; 95 % interval {low:.1%} to {high:.1%}",
        ],
        [f"{name}: KL", "0.00", f"{best['kl_per_response']:.2f}", f"nats/response; at most {best['kl_bound']:.2f}"],
    ]


def _places(folder: Path, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    trained = next((name for name in ("ppo", "preference", "sft") if name in results), None)
    places = [("model", f"{folder / trained / 'model'} (a plain Hugging Face folder)")] if trained else []
    places.append(("numbers", str(folder / SUMMARY)))
    if (folder / PICTURE).exists():
        places.append(("curves", str(folder / PICTURE)))
    return [*places, ("talk to it", f"keel chat {folder}")] if trained != "sft" else places
