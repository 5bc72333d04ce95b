"""The picture of a PPO run: learned reward, gold and KL over its updates."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.runs.files import replacing

PANELS = (
    ("score", "reward before KL penalty", "tab:blue"),
    ("gold", "gold reward (never trained on)", "goldenrod"),
    ("kl_per_response", "KL to the reference, nats per response", "tab:red"),
    ("length", "tokens per response", "tab:gray"),
)


def can_draw() -> bool:
    """Whether matplotlib is installed (extra `track`)."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(
    metrics: Sequence[dict[str, Any]],
    file: Path,
    title: str,
    kl_target: float | None = None,
    best_gold: float | None = None,
) -> None:
    """Writes a PNG with one panel per number that the metrics hold; thin line: each update, thick: a running mean.
    OSErrors pass through. Raises ValueError where there is nothing to draw."""
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(panel[0] in row for row in metrics)]
    if not panels:
        raise ValueError("the metrics hold nothing to draw")
    figure = Figure(figsize=(7.0, 2.1 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, label, colour) in zip(axes, panels, strict=True):
        rows = [row for row in metrics if name in row]
        steps, values = [row["step"] for row in rows], [row[name] for row in rows]
        axis.plot(steps, values, color=colour, alpha=0.35, linewidth=1)
        axis.plot(steps, _running_mean(values), color=colour, linewidth=2)
        axis.set_title(label, loc="left", fontsize=9)
        axis.grid(alpha=0.25)
        level, what = {"kl_per_response": (kl_target, "target"), "gold": (best_gold, "ideal replies")}.get(
            name, (None, "")
        )
        if level is not None:
            axis.axhline(level, color="black", linestyle="--", linewidth=1)
            axis.annotate(what, (steps[-1], level), fontsize=8, ha="right", va="top")
    axes[-1].set_xlabel("update")
    figure.suptitle(title, fontsize=11)
    with replacing(file) as handle:
        figure.savefig(handle, dpi=130, format="png")


def _running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
