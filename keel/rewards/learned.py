"""The reward model as a source of rewards."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from keel.errors import RewardError
from keel.models.roles import Roles, scores_B
from keel.rewards.base import checked
from keel.types import Rollouts


class LearnedReward:
    """The role `reward` of a backbone, read at the last token of each response."""

    failed: Mapping[int, RewardError] = MappingProxyType({})

    def __init__(self, roles: Roles, pad_id: int, micro_tokens: int):
        self.roles, self.pad_id, self.micro_tokens = roles, pad_id, micro_tokens

    def score(self, rollouts: Rollouts) -> Tensor:
        """See `base.Reward`. Raises NumberError where a score is not finite."""
        scores = scores_B(self.roles, rollouts.sequences(), self.pad_id, self.micro_tokens)
        self.roles.rest()  # the reference comes next: one frozen model in memory at a time
        return checked(scores, rollouts, "the reward model")
