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

    @property
    def scale(self) -> float:
        """The standard deviation to divide by; 1 where there are no numbers yet or all are the same up to rounding."""
        return self.std if self.std > 1e-12 * abs(self.mean) else 1.0


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


def normalised(x_N: Tensor, moments: Moments, centre: bool = True, bound: float = math.inf) -> Tensor:
    """Numbers in units of the standard deviation seen so far: clip((x - mean) / sd, -bound, bound).

    Running normalisation of observations, rewards or returns: Huang et al. 2022, The 37 Implementation Details of PPO,
    details 6 to 9 on continuous actions (bound 10, and rewards not centred, because a shift changes which episode
    lengths pay). Different from the usual code: no eps; a spread of 0 counts as 1. With the batch merged into the
    moments before, a first batch comes out with mean 0 and sd 1.

    Args:
        x_N: any shape, in the unit of the moments. No mask is applied: padding stays whatever it was.
        moments: of everything seen so far, on all ranks.
        centre: False divides only.
        bound: largest size of a result, in standard deviations.

    Returns: x's shape, without a unit.
    """
    return ((x_N - moments.mean if centre else x_N) / moments.scale).clamp(-bound, bound)


def denormalised(x_N: Tensor, moments: Moments) -> Tensor:
    """The inverse of `normalised` with centre and without bound: sd * x + mean, in the unit of the moments."""
    return moments.scale * x_N + moments.mean
