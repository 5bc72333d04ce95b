"""The Bradley-Terry reward model: one scalar per response, read at its last token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from keel.algo import moments
from keel.algo.preference import bradley_terry
from keel.data.encode import micro_batches, pad_sequences
from keel.models.roles import Roles, micro_scores, scores_B
from keel.types import TokenSequence


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of a prompt with the preferred response and with the other."""

    chosen: TokenSequence
    rejected: TokenSequence


def pair_loss(
    roles: Roles, pairs: Sequence[EncodedPair], pad_id: int, micro_tokens: int
) -> Callable[[list[int]], dict[str, float]]:
    """A step for `supervised.fit`: mean -log sigmoid(chosen - rejected) over the pairs, the two of a pair in one pass."""

    def step(rows: list[int]) -> dict[str, float]:
        totals = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0}
        longest = [max(len(pairs[i].chosen), len(pairs[i].rejected)) for i in rows]
        for part in micro_batches(longest, max(1, micro_tokens // 2)):
            some = [pairs[rows[i]] for i in part]
            ids_BS, _, lengths_B = pad_sequences([p.chosen for p in some] + [p.rejected for p in some], pad_id)
            chosen_B, rejected_B = micro_scores(roles, ids_BS.to(roles.device), lengths_B).chunk(2)
            loss, metrics = bradley_terry(chosen_B, rejected_B, len(rows))
            loss.backward()
            totals["loss"] += loss.item()
            for name in ("accuracy", "margin"):
                totals[name] += float(metrics[name])
        return totals

    return step


def pair_scores(roles: Roles, pairs: Sequence[EncodedPair], pad_id: int, micro_tokens: int) -> torch.Tensor:
    """Scores of the preferred and of the other responses: [2, B]."""
    flat = [p.chosen for p in pairs] + [p.rejected for p in pairs]
    return scores_B(roles, flat, pad_id, micro_tokens).view(2, -1)


def accuracy(scores_2B: torch.Tensor) -> float:
    """Share of pairs in which the preferred response scores higher; equal scores count half."""
    chosen_B, rejected_B = scores_2B
    return ((chosen_B > rejected_B).float() + 0.5 * (chosen_B == rejected_B).float()).mean().item()


def normalise(roles: Roles, samples: Sequence[TokenSequence], pad_id: int, micro_tokens: int) -> tuple[float, float]:
    """Gives the score mean 0 and sd 1 over samples of the SFT model, and returns mean and sd from before
    [arXiv:1909.08593, section 2.1]. A sd of 0 (a constant score) is left as it is."""
    over = moments.of(scores_B(roles, samples, pad_id, micro_tokens))
    roles.head("reward").normalise(over.mean, over.std or 1.0)
    return over.mean, over.std
