"""What every source of rewards offers."""

from typing import Protocol

import torch
from torch import Tensor

from keel.errors import RewardError
from keel.types import Rollouts


class Reward(Protocol):
    """Scores responses, higher is better."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """[B] float32 on the CPU, finite. Raises RewardError that names the row."""
        ...


def checked(scores_B: Tensor, rollouts: Rollouts, source: str) -> Tensor:
    """The scores, or RewardError where one is not finite."""
    bad = (~torch.isfinite(scores_B)).nonzero().flatten().tolist()
    if bad:
        row = bad[0]
        raise RewardError(
            f"{len(bad)} of {len(rollouts)} rewards are not finite; the first is {scores_B[row].item()} for the "
            f"response {rollouts.texts[row][:200]!r}",
            where=f"{source}, prompt {rollouts.prompts[row].source or row}",
            remedy="return a finite number for every response",
            rows=bad,
        )
    return scores_B
