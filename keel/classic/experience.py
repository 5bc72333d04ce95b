"""From a rollout to what an update needs, by the same functions that serve language models.

`gae` walks along a row and knows nothing of episodes, so each piece of an episode is a row of its own: nothing can leak
into its neighbour, and the one number that `gae` takes for what follows a row (`last_values_B`) says all there is to
say about its end: 0 where the episode terminated, V of the last observation where it was only cut, by a time limit or
by the end of the rollout.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from keel.algo.advantages import gae
from keel.algo.value_loss import explained_variance
from keel.classic.distributions import Distribution
from keel.classic.networks import ActorCritic
from keel.classic.normalise import ObservationNormaliser
from keel.classic.rollout import Rollout, network_input


@dataclass
class Experience:
    """A rollout's N steps, packed row after row; float32 and detached, from the weights before the update.

    policy: the distributions that acted. values_N, returns_N: the critic's predictions, and what it is trained towards;
    without a critic values are 0.
    """

    observations_NO: Tensor
    actions_N: Tensor
    policy: Distribution
    logprobs_N: Tensor
    values_N: Tensor
    advantages_N: Tensor
    returns_N: Tensor

    def __len__(self) -> int:
        return len(self.logprobs_N)

    def explained_variance(self) -> float:
        """Share of the variance of the returns that the critic foresaw."""
        return explained_variance(self.values_N, self.returns_N, everything(self.values_N)).item()


@torch.no_grad()
def make_experience(
    network: ActorCritic,
    rollout: Rollout,
    rewards_N: Tensor,
    normaliser: ObservationNormaliser | None,
    gamma: float,
    lam: float,
) -> Experience:
    """Log-probabilities, values, advantages and returns of a rollout. rewards_N: packed, normalised where they are.

    Without a critic values are 0 and an episode cut by its time limit counts as it stands.
    """
    observations_NO = torch.from_numpy(network_input(rollout.packed(rollout.observations_TEO), normaliser))
    actions_N = torch.from_numpy(rollout.packed(rollout.actions_TE))
    policy = network.policy(observations_NO).frozen()
    values_N, last_B = torch.zeros_like(rewards_N), None
    if network.value_head is not None:
        values_N = network.values(observations_NO)
        after_BO = torch.from_numpy(network_input(np.stack([row.last_O for row in rollout.rows]), normaliser))
        beyond_B = network.values(after_BO)
        last_B = torch.where(torch.tensor([row.terminated for row in rollout.rows]), 0.0, beyond_B)
    lengths = [row.stop - row.start for row in rollout.rows]
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards_BT, values_BT = (torch.zeros(mask_BT.shape).masked_scatter(mask_BT, x_N) for x_N in (rewards_N, values_N))
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma, lam, last_B)
    return Experience(
        observations_NO,
        actions_N,
        policy,
        policy.logprobs(actions_N),
        values_N,
        advantages_BT[mask_BT],
        returns_BT[mask_BT],
    )


def everything(x_N: Tensor) -> Tensor:
    """The mask of a packed batch: every step of it was chosen by the policy."""
    return torch.ones(x_N.shape, dtype=torch.bool)


def shuffled(size: int, parts: int, generator: torch.Generator) -> list[Tensor]:
    """The indices 0 to size - 1 in random order, cut into `parts` of equal size, or one apart."""
    order = torch.randperm(size, generator=generator)
    cuts = [size * i // parts for i in range(parts + 1)]
    return [order[low:high] for low, high in pairwise(cuts)]
