"""Running normalisation of observations and rewards, merged exactly from rollout to rollout.

Observations are normalised with the moments from before the rollout, so that one rollout has one policy. Rewards are
divided after the rollout, with its own returns in the moments.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from keel.algo.moments import Moments, merge, of

BOUND = 10.0
"""Normalised observations and rewards are bounded to +- this [Baselines' VecNormalize, CleanRL]."""
EPS = 1e-8
"""Added to the variance [the same]."""


class ObservationNormaliser:
    """(x - mean) / sqrt(variance + 1e-8), bounded, for each of the O numbers by itself; a value, like its moments.

    Before the first observation it changes nothing but the bound.
    """

    def __init__(self, moments_O: Sequence[Moments]):
        self.moments_O = tuple(moments_O)
        seen = [m if m.count else Moments(1, 0.0, 1.0) for m in self.moments_O]
        self._mean_O = np.array([m.mean for m in seen])
        self._scale_O = 1.0 / np.sqrt(np.array([m.variance for m in seen]) + EPS)

    def __call__(self, observations: NDArray) -> NDArray[np.float32]:
        """[..., O] normalised, float32."""
        scaled = (observations - self._mean_O) * self._scale_O
        return np.minimum(np.maximum(scaled, -BOUND), BOUND).astype(np.float32)

    def seen(self, observations_NO: NDArray) -> "ObservationNormaliser":
        """The normaliser after these observations too."""
        columns = torch.from_numpy(np.ascontiguousarray(observations_NO.T))
        return ObservationNormaliser(
            [merge(before, of(column)) for before, column in zip(self.moments_O, columns, strict=True)]
        )


def discounted_sums(rewards_TE: NDArray, ended_TE: NDArray, gamma: float, before_E: NDArray) -> tuple[NDArray, NDArray]:
    """The running return of each environment, G_t = gamma * G_{t-1} + r_t, which starts again after an episode's end.

    It looks backwards: it is the statistic that Baselines' VecNormalize scales rewards by, not a value target.

    Args:
        rewards_TE: rewards, float64.
        ended_TE: bool, True on the last step of an episode.
        gamma: discount per step.
        before_E: G of the step before the first; 0 at the start.

    Returns: (sums_TE, G to go on with, [E]).
    """
    sums_TE, running_E = np.empty_like(rewards_TE), before_E.copy()
    for t in range(len(rewards_TE)):
        running_E = gamma * running_E + rewards_TE[t]
        sums_TE[t] = running_E
        running_E = np.where(ended_TE[t], 0.0, running_E)
    return sums_TE, running_E


def scale_rewards(rewards: NDArray, moments: Moments) -> NDArray:
    """Rewards divided by the standard deviation of the running returns, bounded; the mean stays (a shift would change
    the task: longer or shorter episodes would pay)."""
    return np.clip(rewards / np.sqrt(moments.variance + EPS), -BOUND, BOUND)
