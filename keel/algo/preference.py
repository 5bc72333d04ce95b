"""Losses on preference pairs."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_B: Tensor, rejected_B: Tensor, denominator: float | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the preferences: -(1 / denominator) * sum_b log sigmoid(chosen[b] - rejected[b]).

    Bradley and Terry 1952; as a reward model's loss: Ouyang et al. 2022 (arXiv 2203.02155), equation 1, with one pair a
    row instead of the K(K-1)/2 pairs of one prompt averaged together.

    Args:
        chosen_B: scores of the preferred responses; a difference of 1 is odds of e.
        rejected_B: scores of the others, same shape.
        denominator: pairs of the whole (global) batch, larger than 0.

    Returns: (loss in nats, metrics), metrics detached scalars that add over micro-batches of one denominator:
    `accuracy` (share of pairs with chosen above rejected; a tie is wrong), `margin` (mean difference of scores).
    """
    assert chosen_B.shape == rejected_B.shape, (chosen_B.shape, rejected_B.shape)
    margin_B = chosen_B - rejected_B
    loss = -logsigmoid(margin_B).sum() / denominator
    with torch.no_grad():
        metrics = {"accuracy": (margin_B > 0).float().sum() / denominator, "margin": margin_B.sum() / denominator}
    return loss, metrics
