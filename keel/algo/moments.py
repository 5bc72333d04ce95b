"""Running mean and variance as a value: state goes in, state comes out. Plain floats, so that a checkpoint is JSON."""

import math
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations from the mean of the numbers seen so far.

    count: numbers seen. mean: their mean, in their unit, 0 before the first. m2: sum of (x - mean)^2, unit squared.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def variance(self) -> float:
        """Population variance m2 / count; 0 before the first number."""
        return self.m2 / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before the second distinct number."""
        return math.sqrt(self.variance)


def of(x_N: Tensor) -> Moments:
    """Moments of the numbers of a tensor of any shape, computed in float64; an empty one gives `Moments()`."""
    if x_N.numel() == 0:
        return Moments()
    x_N = x_N.detach().cpu().double()
    mean = x_N.mean()
    return Moments(x_N.numel(), mean.item(), (x_N - mean).square().sum().item())


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the numbers behind `a` and `b` together, as if seen at once.

        delta = mean_b - mean_a
        mean  = mean_a + delta * n_b / n
        m2    = m2_a + m2_b + delta^2 * n_a * n_b / n

    Chan, Golub and LeVeque 1979 (STAN-CS-79-773), the pairwise updating formula; its T is n * mean, its S is m2.
    """
    count = a.count + b.count
    if count == 0:
        return Moments()
    delta = b.mean - a.mean
    return Moments(count, a.mean + delta * b.count / count, a.m2 + b.m2 + delta * delta * a.count * b.count / count)
