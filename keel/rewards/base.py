"""What every source of rewards offers."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from keel.errors import NumberError, RewardError
from keel.types import Rollouts


class Reward(Protocol):
    """Scores responses, higher is better."""

    @property
    def failed(self) -> Mapping[int, RewardError]:
        """Why rows of the last batch have no score, by row."""
        ...

    def score(self, rollouts: Rollouts) -> Tensor:
        """[B] float32 on the CPU; NaN for a row that failed, where the source lets so many fail. Raises RewardError
        that names the row where more did."""
        ...


def score_rows(rollouts: Rollouts, one: Callable[[int], float], most: float, failed: dict[int, RewardError]) -> Tensor:
    """`one` of each row as [B] float32, NaN where it raised RewardError, each of which goes into `failed`.

    most: the share of the rows that may fail. Raises the first error as soon as more have, or where all have.
    """
    failed.clear()
    scores_B = torch.full((len(rollouts),), math.nan)
    for b in range(len(rollouts)):
        try:
            scores_B[b] = one(b)
        except RewardError as error:
            failed[b] = error
            if len(failed) > most * len(rollouts) or len(failed) == len(rollouts):
                raise _told(failed, b + 1, most, final=len(failed) == len(rollouts)) from error
    return scores_B


def _told(failed: Mapping[int, RewardError], tried: int, most: float, final: bool) -> RewardError:
    """The first of these errors, with the number of the others."""
    first = next(iter(failed.values()))
    more = f" ({len(failed)} of the {tried} responses tried so far failed)" if len(failed) > 1 else ""
    remedy = f"{first.remedy}; ppo.scoring.max_failed ({most:g}) is the share of a batch that may fail"
    return RewardError(first.what + more, where=first.where, remedy=remedy, rows=list(failed), final=final)


def checked(scores_B: Tensor, rollouts: Rollouts, source: str) -> Tensor:
    """The scores, or NumberError where one is not finite."""
    bad = (~torch.isfinite(scores_B)).nonzero().flatten().tolist()
    if bad:
        row = bad[0]
        raise NumberError(
            f"{len(bad)} of {len(rollouts)} rewards are not finite; the first is {scores_B[row].item()} for the "
            f"response {rollouts.texts[row][:200]!r}",
            where=f"{source}, prompt {rollouts.prompts[row].source or row}",
            remedy="look at the model that gives them",
            rows=bad,
        )
    return scores_B
