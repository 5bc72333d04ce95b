"""95 % intervals."""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054
"""The normal quantile of 97.5 %."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share seen in `count` trials [Wilson 1927; Brown, Cai, DasGupta 2001, eq. 4].

    (0, 1) where count is 0. Ties counted as halves make `share * count` no whole number; the formula does not mind.
    """
    if count == 0:
        return 0.0, 1.0
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    centre, scale = share + Z * Z / (2 * count), 1 + Z * Z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def t_quantile(freedom: int) -> float:
    """Student's quantile of 97.5 %, by bisection of P(|T| < t) [Abramowitz and Stegun, 26.7.3 and 26.7.4]."""
    if freedom > 2000:  # off by less than 0.0013 from there on
        return Z
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    odd, square = freedom % 2, math.cos(angle) ** 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * (total if freedom > 1 else 0.0))
    return math.sin(angle) * total


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean of two values or more: mean +- t sd / sqrt(n), sd with n - 1."""
    x = np.asarray(values, dtype=np.float64)
    assert len(x) > 1, "one value tells nothing of its spread"
    half = t_quantile(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


def clustered_share(hits: Sequence[float], counts: Sequence[int]) -> tuple[float, tuple[float, float]]:
    """A share of trials that come in groups, such as all pairs of one prompt, and its interval.

        share = sum h / sum n,   sd^2 = G / (G - 1) * sum (h - share * n)^2 / (sum n)^2      over G groups

    The ratio estimator of cluster sampling [Cochran 1977, section 9.9], with Student's t of G - 1,
    cut to 0 and 1. Trials of one
    group are alike, so that as many independent ones would say more. One trial a group: `wilson`.

    hits, counts: of each group, a tie is half a hit.
    """
    h, n = np.asarray(hits, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    share, groups = float(h.sum() / n.sum()), len(n)
    if groups == 1 or (n == 1).all():
        return share, wilson(share, groups)
    half = (
        t_quantile(groups - 1) * math.sqrt(groups / (groups - 1) * float(((h - share * n) ** 2).sum())) / float(n.sum())
    )
    return share, (max(0.0, share - half), min(1.0, share + half))
