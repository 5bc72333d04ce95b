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


def pairwise_accuracy(gold_differences: Sequence[float], right: Sequence[float], temperature: float) -> float:
    """How often a judge is to expect that annotators agree with it, over their noise.

    gold_differences: of each pair, of its first reply to its second. right: 1 where the judge puts the first one
    higher, 0 where the second, 1/2 for neither. The accuracy on one draw of their answers scatters about this.
    """
    chance = 1.0 / (1.0 + np.exp(-np.asarray(gold_differences, dtype=np.float64) / temperature))
    sides = np.asarray(right, dtype=np.float64)
    return float(np.mean(sides * chance + (1.0 - sides) * (1.0 - chance)))


def pairwise_ceiling(gold_differences: Sequence[float], temperature: float) -> float:
    """The best expected accuracy of any judge on noisy pairs: mean of sigmoid(|difference| / temperature).

    A judge that always sides with the higher gold agrees with the annotators that often. Pairs of equal gold count 1/2.
    """
    return pairwise_accuracy(gold_differences, [float(gap > 0) for gap in gold_differences], temperature)
