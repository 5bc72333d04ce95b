"""Whether a reward model is any good, from its scores of held-out pairs: calibration, length, the worst pairs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 10


def calibration(margins: Sequence[float]) -> tuple[float, list[dict[str, float]]]:
    """How far the chances that a Bradley-Terry model gives are from what came, and the bins of it.

        error = sum_k n_k / n |right_k - confidence_k|          [Guo et al. 2017, arXiv:1706.04599, equation 3]

    The confidence in a pair is sigmoid(|margin|), at least a half, and bins are of equal width from there to 1. Empty
    bins are left out. 0 is best; a model that is too sure has confidences above the shares of right ones.

    margins: of each pair, raw score of the preferred response less that of the other. Right is a margin above 0; 0 is
    half.
    """
    margin = np.asarray(margins, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(margin)))
    right = (margin > 0) + 0.5 * (margin == 0)
    place = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = [
        {
            "pairs": float((place == k).sum()),
            "confidence": float(confidence[place == k].mean()),
            "right": float(right[place == k].mean()),
        }
        for k in sorted(set(place.tolist()))
    ]
    error = sum(b["pairs"] * abs(b["right"] - b["confidence"]) for b in bins) / len(margin)
    return error, bins


def length_report(
    scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], pairs: Sequence[Sequence[tuple[int, int]]]
) -> dict[str, float]:
    """What length has to do with score and preference, over groups of responses to one prompt.

    scores, lengths: of the responses of each group. pairs: (preferred, other) as places in the group.

    Returns: `length_correlation`, of score and length, both less their mean over the group (0 where either is
    constant); `longer_preferred`, the share of pairs of unequal length whose longer response was preferred; and
    `accuracy_longer_preferred`, `accuracy_shorter_preferred`: of these and of the rest. A share of nothing is absent.
    """
    score, length = (
        np.concatenate([np.asarray(group, dtype=np.float64) - np.mean(group) for group in groups])
        for groups in (scores, lengths)
    )
    spread = float(np.sqrt((score**2).sum() * (length**2).sum()))
    found = {"length_correlation": float((score * length).sum()) / spread if spread else 0.0}
    margin, longer = (
        np.array([x[a] - x[b] for x, own in zip(groups, pairs, strict=True) for a, b in own], dtype=np.float64)
        for groups in (scores, lengths)
    )
    right = (margin > 0) + 0.5 * (margin == 0)
    if (longer != 0).any():
        found["longer_preferred"] = float((longer[longer != 0] > 0).mean())
    for name, which in (("longer", longer > 0), ("shorter", longer < 0)):
        if which.any():
            found[f"accuracy_{name}_preferred"] = float(right[which].mean())
    return found


def judge_report(
    scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], pairs: Sequence[Sequence[tuple[int, int]]]
) -> dict[str, Any]:
    """Margins, calibration and length of held-out pairs; arguments as for `length_report`, scores raw."""
    margins = [group[a] - group[b] for group, own in zip(scores, pairs, strict=True) for a, b in own]
    error, bins = calibration(margins)
    return {
        "margin": float(np.mean(margins)),
        "calibration_error": error,
        "calibration": bins,
        **length_report(scores, lengths, pairs),
    }
