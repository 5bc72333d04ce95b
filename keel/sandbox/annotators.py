"""Simulated annotators: they rank replies by gold, and disagree as people do."""

from collections.abc import Sequence

import numpy as np

TEMPERATURE = 0.6
"""Default noise. On pairs of SFT samples the better reply then wins about nine times in ten."""


def rank(golds: Sequence[float], temperature: float, rng: np.random.Generator) -> list[int]:
    """Indices of `golds`, best first, drawn from the Plackett-Luce model of golds / temperature.

    Gumbel noise is added to each golds / temperature and the sums are sorted (Yellott 1977). So reply a is placed
    before reply b with probability sigmoid((a - b) / temperature), Bradley-Terry exactly, whatever other replies are
    ranked.
    """
    noisy = np.asarray(golds, dtype=np.float64) / temperature + rng.gumbel(size=len(golds))
    return [int(index) for index in np.argsort(-noisy, kind="stable")]


def pairwise_ceiling(gold_differences: Sequence[float] | np.ndarray, temperature: float) -> float:
    """The best expected accuracy of any judge on noisy pairs: mean of sigmoid(|difference| / temperature).

    A judge that always sides with the higher gold agrees with the annotators that often. Pairs of equal gold count 1/2.
    """
    differences = np.abs(np.asarray(gold_differences, dtype=np.float64))
    return float(np.mean(1.0 / (1.0 + np.exp(-differences / temperature))))
