"""Best-of-N against a model whose responses and scores are known."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from keel.errors import RewardError
from keel.evaluate.best_of import best_of
from keel.rollout.engine import Sampling
from keel.types import Finish, Prompt, Rollouts
from tests.tiny import prompts

PROBABILITIES = torch.tensor([0.4, 0.3, 0.2, 0.1])
"""Of four responses; the last has the highest score."""


class Dice:
    """An engine whose response is one token, drawn from PROBABILITIES."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        version: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Rollouts:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        ids_B1 = torch.multinomial(PROBABILITIES, len(prompts), replacement=True, generator=generator)[:, None]
        if progress:
            progress(len(prompts))
        mask_B1, texts = torch.ones_like(ids_B1, dtype=torch.bool), [str(i) for i in ids_B1[:, 0].tolist()]
        finish: list[Finish] = ["stop"] * len(prompts)
        logprobs_B1 = PROBABILITIES[ids_B1].log()
        return Rollouts(list(prompts), [(1,)] * len(prompts), ids_B1, mask_B1, logprobs_B1, finish, texts, version)


class Face:
    """Scores a response by its token, several of which may be the same."""

    def __init__(self, values: list[float]):
        self.values = torch.tensor(values)
        self.failed: dict[int, RewardError] = {}

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.values[rollouts.response_ids_BT[:, 0]]


@pytest.mark.parametrize(
    ("values", "groups"),
    [([0.0, 1.0, 2.0, 3.0], [0.4, 0.3, 0.2, 0.1]), ([0.0, 0.0, 1.0, 1.0], [0.7, 0.3]), ([5.0] * 4, [1.0])],
)
def test_the_estimated_kl_is_the_enumerated_one(values, groups):
    n, told = 4, []
    taken, numbers = best_of(Dice(), Face(values), prompts(600), n, Sampling(), seed=0, step=1, progress=told.append)
    below, enumerated, mean = 0.0, 0.0, 0.0
    for value, p in zip(sorted(set(values)), groups, strict=True):
        chosen = (below + p) ** n - below**n
        enumerated, mean, below = enumerated + chosen * math.log(chosen / p), mean + chosen * value, below + p
    assert numbers["kl_per_response"] == pytest.approx(enumerated, abs=0.08)
    assert numbers["kl_per_response"] <= numbers["kl_bound"] + 0.05
    assert Face(values).score(taken).mean().item() == pytest.approx(mean, abs=0.1)
    assert len(taken) == 600 and told == [2400, 2400 + 600 * 32]
