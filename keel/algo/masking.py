"""Sums, means and whitening over the entries that a mask selects.

Whatever stands outside the mask (padding, even NaN or infinity) changes neither a value nor a gradient here: entries
are chosen with `torch.where`, never multiplied by 0.
"""

import torch
from torch import Tensor


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
    """`masked_sum` divided by an explicit denominator: (1 / denominator) * sum_{b,t: mask} x[b, t].

    Args:
        x_BT: any shape, in any unit.
        mask_BT: bool of the same shape, True on what counts.
        denominator: the count of the whole batch of which this may be a part, so that parts add up; larger than 0.
            None divides by the mask's own count.

    Returns: a scalar in x's unit, 0 where the mask is empty.
    """
    if denominator is None:
        denominator = mask_BT.sum().clamp(min=1)
    return masked_sum(x_BT, mask_BT) / denominator


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
