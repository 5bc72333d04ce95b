"""Sums, means and whitening over the entries that a mask selects.

Whatever stands outside the mask (padding, even NaN or infinity) changes neither a value nor a gradient here: entries
are chosen with `torch.where`, never multiplied by 0.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
"""How a loss per token becomes one number; see `loss_denominators`."""


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum of `x_BT` over the mask: sum_{b,t: mask} x[b, t].

    Args:
        x_BT: any shape, in any unit.
        mask_BT: bool of the same shape, True on what counts.

    Returns: a scalar in x's unit, 0 where the mask is empty.
    """
    assert x_BT.shape == mask_BT.shape, (x_BT.shape, mask_BT.shape)
    return torch.where(mask_BT, x_BT, 0.0).sum()


def masked_mean(x_BT: Tensor, mask_BT: Tensor, denominator: float | Tensor | None) -> Tensor:
    """`masked_sum` divided by explicit denominators: sum_{b,t: mask} x[b, t] / denominator[b, t].

    Args:
        x_BT: any shape, in any unit.
        mask_BT: bool of the same shape, True on what counts.
        denominator: the count of the whole batch of which this may be a part, so that parts add up; larger than 0. One
            number, or a tensor that broadcasts to x (`loss_denominators`), read on the mask only. None divides by the
            mask's own count.

    Returns: a scalar in x's unit, 0 where the mask is empty.
    """
    if denominator is None:
        denominator = mask_BT.sum().clamp(min=1)
    if isinstance(denominator, Tensor) and denominator.ndim > 0:
        assert torch.broadcast_shapes(x_BT.shape, denominator.shape) == x_BT.shape, (x_BT.shape, denominator.shape)
        # Both are chosen before the division: 0 / 0 outside the mask would make a NaN of its gradient.
        return (torch.where(mask_BT, x_BT, 0.0) / torch.where(mask_BT, denominator, 1.0)).sum()
    return masked_sum(x_BT, mask_BT) / denominator


def loss_denominators(lengths_B: Tensor, mode: Aggregation, max_length: int) -> Tensor:
    """What each row's tokens are divided by, so that `masked_mean` over a whole (global) minibatch is the chosen mean.

        token_mean                sum_b length[b]         every token weighs the same
        sequence_mean_token_mean  sequences * length[b]   every sequence weighs the same
        sequence_mean_token_sum   sequences               a sequence weighs by its tokens
        constant                  sequences * max_length  the same in the size of a token mean

    In this order: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.3; Shao et al. 2024 (GRPO, arXiv 2402.03300),
    equation 3; the policy gradient of whole sequences, log pi of one being the sum over its tokens; Liu et al. 2025
    (Dr. GRPO, arXiv 2503.20783), section 3.

    Computed once from the lengths of all rows (of all ranks); micro-batches take their rows, and their losses add up to
    the whole. A row without trainable tokens is not a sequence and changes nothing, as in veRL.

    Args:
        lengths_B: trainable tokens of each row of the global minibatch.
        mode: one of the above.
        max_length: the longest response that generation allows, whatever came, tokens; read by `constant` only.

    Returns: denominators [B, 1], float32, larger than 0 even for a row or batch without tokens.
    """
    sequences = (lengths_B > 0).sum().clamp(min=1)
    match mode:
        case "token_mean":
            denominators_B = lengths_B.sum().clamp(min=1).expand(lengths_B.shape)
        case "sequence_mean_token_mean":
            denominators_B = sequences * lengths_B.clamp(min=1)
        case "sequence_mean_token_sum":
            denominators_B = sequences.expand(lengths_B.shape)
        case "constant":
            denominators_B = (sequences * max_length).expand(lengths_B.shape)
    return denominators_B[:, None].float()


def masked_whiten(x_BT: Tensor, mask_BT: Tensor, keep_mean: bool = False, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the mask: (x - mean) / sqrt(variance + eps).

    Mean and variance are over all selected entries together, not per row. The variance is the unbiased one (n - 1),
    as in veRL. Huang et al. 2022, The 37 Implementation Details of PPO, detail 7 (there per minibatch, with eps added
    to the standard deviation).

    Args:
        x_BT: any shape, float.
        mask_BT: bool of the same shape, True on what is whitened.
        keep_mean: scale only, about the mean, which stays.
        eps: added to the variance, in the square of x's unit.

    Returns: x's shape, without a unit; 0 outside the mask. A single selected entry has variance 0.
    """
    count = mask_BT.sum()
    mean = masked_mean(x_BT, mask_BT, None)
    centred_BT = torch.where(mask_BT, x_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (count - 1).clamp(min=1)
    white_BT = centred_BT * (variance + eps).rsqrt()
    return torch.where(mask_BT, white_BT + mean, 0.0) if keep_mean else white_BT
