"""The critic's loss and how much of the returns it explains."""

import torch
from torch import Tensor

from keel.algo.masking import masked_mean
from keel.algo.moments import Moments


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    clip: float | None,
    denominator: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error to the returns, optionally the larger of plain and clipped.

        V_c  = clip(V, V_old - clip, V_old + clip)
        loss = (1 / denominator) * sum_{mask} 0.5 * max((V - R)^2, (V_c - R)^2)

    The squared-error term of Schulman et al. 2017 (arXiv 1707.06347), equation 9, with the value clipping of OpenAI
    Baselines (Engstrom et al. 2020, arXiv 2005.12729, section 3). The factor 0.5 is Baselines'; the paper has none.

    Args:
        values_BT: the critic's values now, units of reward, with gradient.
        old_values_BT: the values before the update; read only where `clip` is given.
        returns_BT: the targets R.
        mask_BT: bool, True on trainable tokens; nothing else is read.
        clip: largest useful move of a value in one update, units of reward. None is the plain squared error.
        denominator: trainable tokens of the whole (global) minibatch, larger than 0.

    Returns: (loss, metrics), metrics detached scalars that add over micro-batches of one denominator: `clip_fraction`
    (share of tokens where the clipped error was the larger, 0 without clip), `value_mean` (units of reward).
    """
    assert values_BT.shape == old_values_BT.shape == returns_BT.shape == mask_BT.shape, mask_BT.shape
    # Masked before squaring: an infinite error on padding would turn its zero gradient into NaN.
    plain_BT = torch.where(mask_BT, values_BT - returns_BT, 0.0).square()
    clipped_BT = plain_BT
    if clip is not None:
        bounded_BT = torch.clamp(values_BT, old_values_BT - clip, old_values_BT + clip)
        clipped_BT = torch.where(mask_BT, bounded_BT - returns_BT, 0.0).square()
    loss = 0.5 * masked_mean(torch.maximum(plain_BT, clipped_BT), mask_BT, denominator)
    with torch.no_grad():
        metrics = {
            "clip_fraction": masked_mean((clipped_BT > plain_BT).float(), mask_BT, denominator),
            "value_mean": masked_mean(values_BT, mask_BT, denominator),
        }
    return loss, metrics


@torch.no_grad()
def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """How much of the returns' variance the values explain: 1 - Var(R - V) / Var(R), both over the mask.

    1 is a perfect critic, 0 as good as a constant, negative is worse than a constant. A constant offset of the values
    costs nothing (the variance ignores it), as in Baselines' and Stable-Baselines3's function of this name.

    Args:
        values_BT: the critic's values, units of reward.
        returns_BT: what they predict.
        mask_BT: bool, True on the tokens that count; nothing else is read.

    Returns: a detached scalar without a unit; 0, where a ratio has no meaning, if the returns are constant (standard
    deviation under 1e-5 of their size) or the mask is empty.
    """
    mean = masked_mean(returns_BT, mask_BT, None)
    error_BT = returns_BT - values_BT
    error_mean = masked_mean(error_BT, mask_BT, None)
    variance = masked_mean((returns_BT - mean).square(), mask_BT, None)
    residual = masked_mean((error_BT - error_mean).square(), mask_BT, None)
    constant = variance <= 1e-10 * mean.square()
    return torch.where(constant, 0.0, 1.0 - residual / variance)


@torch.no_grad()
def popart(weight_H: Tensor, bias: Tensor, old: Moments, new: Moments) -> tuple[Tensor, Tensor]:
    """A linear head rewritten for new statistics of the returns, so that what it predicts does not move.

        V      = sd * (w . h + b) + mean
        w'     = w * sd / sd'
        b'     = (sd * b + mean - mean') / sd'

    Van Hasselt et al. 2016 (PopArt, arXiv 1602.07714), proposition 1, for one output. The head's output is
    `moments.normalised` of a return and is trained towards that; `moments.denormalised` makes values of it. Different
    from the paper: the moments are of all returns seen (`moments.merge`), not exponentially forgetting. The optimizer's
    running averages for the head are left alone.

    Args:
        weight_H: the head's weight, any shape.
        bias: its bias, any shape.
        old: moments that the head was trained with; `Moments()` (mean 0, sd 1) for a head in units of reward.
        new: moments from now on, usually `old` merged with those of this batch's returns.

    Returns: (weight_H, bias), new tensors, detached, in the inputs' dtypes.
    """
    return weight_H * (old.scale / new.scale), (old.scale * bias + (old.mean - new.mean)) / new.scale
