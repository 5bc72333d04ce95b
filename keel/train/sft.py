"""Supervised fine-tuning: the loss is over response tokens only, their end tokens included, without their gaps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keel.algo.masking import masked_sum
from keel.data.encode import micro_batches, pad_sequences
from keel.models.roles import Role, Roles, logprobs_BT, micro_logprobs
from keel.models.side_by_side import add_gradients
from keel.types import TokenSequence


def token_loss(
    roles: Roles, role: Role, sequences: Sequence[TokenSequence], pad_id: int, micro_tokens: int, weight: float = 1.0
) -> Callable[[list[int]], dict[str, float]]:
    """A step for `supervised.fit`: cross entropy summed over the response tokens of the batch, divided by their number.

    weight: of its gradient, where it is mixed into another loss; the loss that is returned is without it.

    The denominator is counted over the whole batch before any backward pass, so that the split into micro-batches
    changes nothing.
    """
    step = _step(roles, role, pad_id, micro_tokens, weight)
    return lambda rows: step([sequences[row] for row in rows])


def _step(
    roles: Roles, role: Role, pad_id: int, micro_tokens: int, weight: float
) -> Callable[[list[TokenSequence]], dict[str, float]]:
    parameters, workers = list(roles.parameters(role).values()), roles.workers(role)

    def step(batch: list[TokenSequence]) -> dict[str, float]:
        tokens = sum(sum(sequence.spoken) for sequence in batch)

        def loss_of(part: list[int]) -> tuple[Tensor, float]:
            ids_BS, mask_BS, _ = pad_sequences([batch[i] for i in part], pad_id)
            logprobs_N, _ = micro_logprobs(roles, role, ids_BS.to(roles.device), mask_BS.to(roles.device), 1.0)
            loss = -masked_sum(logprobs_N, torch.ones_like(logprobs_N, dtype=torch.bool)) / tokens
            return weight * loss, loss.item()

        parts = micro_batches([len(sequence) for sequence in batch], micro_tokens, workers)
        return {"loss": sum(add_gradients(loss_of, parts, parameters, workers)), "tokens": tokens}

    return step


def conversation_loss(
    roles: Roles, role: Role, conversations: Sequence[Sequence[TokenSequence]], pad_id: int, micro_tokens: int
) -> Callable[[list[int]], dict[str, float]]:
    """`token_loss` over rows that are one sequence or several: a batch holds all of each of its conversations."""
    step = _step(roles, role, pad_id, micro_tokens, 1.0)
    return lambda rows: step([sequence for row in rows for sequence in conversations[row]])


def mean_loss(
    roles: Roles, role: Role, sequences: Sequence[TokenSequence], pad_id: int, micro_tokens: int
) -> dict[str, float]:
    """The same loss over all response tokens of the sequences, without gradient, as `heldout_loss`."""
    if not sequences:
        return {}
    logprobs, _ = logprobs_BT(roles, role, sequences, 1.0, pad_id, micro_tokens)
    return {"heldout_loss": -logprobs.sum().item() / sum(sum(s.spoken) for s in sequences)}
