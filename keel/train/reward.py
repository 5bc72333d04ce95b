"""The Bradley-Terry reward model: one scalar per response, read at its last token."""

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keel.algo import moments
from keel.algo.preference import bradley_terry
from keel.data.encode import micro_batches
from keel.data.spool import Codec, pack_numbers, unpack_numbers
from keel.evaluate.intervals import clustered_share
from keel.models.roles import Roles, micro_group_scores, scores_B
from keel.models.side_by_side import add_gradients, side_by_side
from keel.types import TokenSequence


@dataclass(frozen=True)
class Comparisons:
    """The responses to one prompt, and the pairs among them: (preferred, other), as places in `sequences`.

    margins: of each pair, how much better the preferred one was found; 0 where nobody said.
    """

    sequences: tuple[TokenSequence, ...]
    pairs: tuple[tuple[int, int], ...]
    margins: tuple[float, ...]

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[TokenSequence, TokenSequence]], margins: Sequence[float] | None = None
    ) -> "Comparisons":
        """From (preferred, other) sequences of one prompt; a response in several pairs is held once."""
        prompt_ids = pairs[0][0].prompt_ids
        assert all(s.prompt_ids == prompt_ids for pair in pairs for s in pair), "pairs of several prompts"
        places: dict[tuple[int, ...], int] = {}
        found = tuple(
            (places.setdefault(a.response_ids, len(places)), places.setdefault(b.response_ids, len(places)))
            for a, b in pairs
        )
        sequences = tuple(TokenSequence(prompt_ids, response_ids) for response_ids in places)
        return cls(sequences, found, (0.0,) * len(found) if margins is None else tuple(margins))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.sequences))


def _pack(group: Comparisons) -> bytes:
    margins = array("i", array("d", group.margins).tobytes())
    pairs = tuple(itertools.chain.from_iterable(group.pairs))
    responses = (s.response_ids for s in group.sequences)
    return pack_numbers([group.sequences[0].prompt_ids, pairs, margins, *responses])


def _unpack(raw: bytes) -> Comparisons:
    prompt_ids, pairs, margins, *responses = unpack_numbers(raw)
    sequences = tuple(TokenSequence(prompt_ids, response_ids) for response_ids in responses)
    of_pairs = tuple(array("d", array("i", margins).tobytes()))
    return Comparisons(sequences, tuple(zip(pairs[::2], pairs[1::2], strict=True)), of_pairs)


COMPARISONS = Codec(_pack, _unpack)
"""Token ids of the responses to one prompt, which is held once, and their pairs."""


def pair_loss(
    roles: Roles,
    groups: Sequence[Comparisons],
    pad_id: int,
    micro_tokens: int,
    *,
    weighting: Literal["pair", "prompt"] = "pair",
    margin: float | None = None,
    centring: float = 0.0,
) -> Callable[[list[int]], dict[str, float]]:
    """A step for `supervised.fit`: `bradley_terry` over all pairs of the prompts in the batch.

    Each response is scored once, whatever the number of its pairs, as in InstructGPT (arXiv:2203.02155, section 3.5).

    Args:
        weighting: pair: each pair weighs the same. prompt: each prompt does, as there.
        margin: factor of the pairs' margins; None: none.
        centring: weight of (preferred + other)^2.
    """

    parameters, workers = list(roles.parameters("reward").values()), roles.workers("reward")

    def step(rows: list[int]) -> dict[str, float]:
        count = sum(len(groups[i].pairs) for i in rows) if weighting == "pair" else len(rows)

        def loss_of(part: list[int]) -> tuple[Tensor, dict[str, float]]:
            some = [groups[rows[i]] for i in part]
            scores_B = micro_group_scores(roles, [group.sequences for group in some], pad_id)
            chosen_B, rejected_B = scores_B[pair_places(some).to(roles.device)]
            weights = [1 / len(group.pairs) for group in some for _ in group.pairs]
            margins = [m for group in some for m in group.margins]
            loss, metrics = bradley_terry(
                chosen_B,
                rejected_B,
                count,
                margin_B=margin * chosen_B.new_tensor(margins) if margin else None,
                weight_B=chosen_B.new_tensor(weights) if weighting == "prompt" else None,
                centring=centring,
            )
            return loss, {"loss": loss.item(), **{name: metrics[name].item() for name in ("accuracy", "margin")}}

        parts = micro_groups([groups[i] for i in rows], micro_tokens, workers)
        totals: Counter[str] = Counter()
        for metrics in add_gradients(loss_of, parts, parameters, workers):
            totals.update(metrics)
        return dict(totals)

    return step


def accuracy(groups: Sequence[Comparisons], scores: Sequence[Tensor]) -> tuple[float, tuple[float, float]]:
    """Share of pairs in which the preferred response scores higher, and its interval; equal scores count half."""
    hits = [sum(rights(group, scores_K)) for group, scores_K in zip(groups, scores, strict=True)]
    return clustered_share(hits, [len(group.pairs) for group in groups])


def rights(group: Comparisons, scores_K: Tensor) -> list[float]:
    """Of each pair: 1 where the preferred response scores higher, 0 where the other does, 1/2 where neither."""
    score = scores_K.tolist()
    return [float(score[a] > score[b]) + 0.5 * (score[a] == score[b]) for a, b in group.pairs]


def group_scores(roles: Roles, groups: Sequence[Comparisons], pad_id: int, micro_tokens: int) -> list[Tensor]:
    """The reward model's scores of the responses of each group, [K] each."""
    workers = roles.workers("reward")
    parts = micro_groups(groups, micro_tokens, workers)
    found = [torch.empty(0)] * len(groups)

    @torch.inference_mode()
    def score(part: list[int]) -> Sequence[Tensor]:
        some = [groups[i].sequences for i in part]
        return micro_group_scores(roles, some, pad_id).cpu().split([len(sequences) for sequences in some])

    for part, scores in zip(parts, side_by_side(score, parts, workers), strict=True):
        for i, scores_K in zip(part, scores, strict=True):
            found[i] = scores_K
    return found


def pair_places(groups: Sequence[Comparisons]) -> Tensor:
    """[2, pairs] int64: where the preferred and the other response of each pair stand among all sequences in a row."""
    starts = itertools.accumulate((len(group.sequences) for group in groups), initial=0)
    pairs = [(start + a, start + b) for start, group in zip(starts, groups, strict=False) for a, b in group.pairs]
    return torch.tensor(pairs).T


def micro_groups(groups: Sequence[Comparisons], tokens: int, workers: int) -> list[list[int]]:
    """Numbers of groups of similar length together, their padded tokens bounded; a group is never split."""
    return micro_batches([len(group.sequences) * group.longest for group in groups], tokens, workers)


def normalise(roles: Roles, samples: Sequence[TokenSequence], pad_id: int, micro_tokens: int) -> tuple[float, float]:
    """Gives the score mean 0 and sd 1 over samples of the SFT model, and returns mean and sd from before
    [arXiv:1909.08593, section 2.1]. A sd of 0 (a constant score) is left as it is."""
    over = moments.of(scores_B(roles, samples, pad_id, micro_tokens))
    roles.head("reward").normalise(over.mean, over.std or 1.0)
    return over.mean, over.std
