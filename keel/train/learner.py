"""What every part of an online step works with, and what it changes beside weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.algo.moments import Moments
from keel.config import PpoConfig
from keel.models.roles import Roles

FIRST_PENALTY = 1.0
"""Where the penalty of `policy.loss: kl_penalty` starts (advantage per nat); it soon adapts [PPO, section 4]."""


@dataclass(frozen=True)
class Learner:
    """What every part of a step works with.

    max_tokens: the limit of a response. ptx: adds the gradient of language modelling for the n-th minibatch of the run,
    and returns its loss.
    """

    roles: Roles
    pad_id: int
    max_tokens: int
    ppo: PpoConfig
    seed: int
    ptx: Callable[[int], float] | None = None


def first_state(ppo: PpoConfig) -> dict[str, Any]:
    """What the loop changes beside weights, as plain values for a checkpoint. Moments are count, mean, m2. cut: what
    the encoder has counted."""
    return {
        "cut": {},
        "kl_coefficient": ppo.kl.coefficient,
        "warming": ppo.has_critic and ppo.critic.warmup_cap > 0,
        "old_kl_penalty": FIRST_PENALTY,
        "score_moments": Moments(),
        "return_moments": Moments(),
    }


def moments_of(state: Mapping[str, Any], what: str) -> Moments:
    """Running moments in the state: what is `score` or `return`."""
    count, mean, m2 = state[f"{what}_moments"]  # a list, once it has been in a checkpoint
    return Moments(count, mean, m2)
