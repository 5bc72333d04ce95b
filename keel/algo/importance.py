"""Importance ratios between the policies behind a token, and means that are weighted by them."""

import torch
from torch import Tensor

from keel.algo.masking import masked_mean

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to +- this before exp, so that one broken token cannot make a batch infinite (as in veRL)."""


@torch.no_grad()
def truncated_importance(old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, cap: float) -> Tensor:
    """Weights that correct a loss for tokens sampled by another engine than the one that trains.

        w = min(pi_old(a|s) / pi_sampler(a|s), cap)

    Ionides 2008, Truncated Importance Sampling, per token as IMPALA truncates its rho (Espeholt et al. 2018, arXiv
    1802.01561, section 4.1), between sampler and trainer as in veRL. Each loss takes the result as `weights_BT`: what
    was E_old[loss] is E_sampler[w * loss], up to the truncation, which lowers the variance and biases towards the
    sampler. A log-ratio is bounded to +20 before exp; that shows only with a cap above e^20.

    Args:
        old_logprobs_BT: the trainer's log-probabilities before the update, nats.
        sampler_logprobs_BT: the sampler's, of the same tokens at the same temperature, nats.
        mask_BT: bool, True on trainable tokens; nothing else is read.
        cap: largest weight, larger than 0; 2 is usual.

    Returns: weights_BT, detached, 0 to cap; 0 outside the mask.
    """
    assert old_logprobs_BT.shape == sampler_logprobs_BT.shape == mask_BT.shape, mask_BT.shape
    assert cap > 0, cap
    ratio_BT = (old_logprobs_BT - sampler_logprobs_BT).clamp(max=LOG_RATIO_BOUND).exp()
    return torch.where(mask_BT, ratio_BT.clamp(max=cap), 0.0)


def weighted_mean(x_BT: Tensor, mask_BT: Tensor, denominator: float | Tensor, weights_BT: Tensor | None) -> Tensor:
    """`masked_mean` of w * x: sum_{mask} w * x / denominator; None weighs every token 1.

    Args:
        x_BT: any unit. Must be finite outside the mask where it carries a gradient.
        mask_BT: bool, True on what counts; weights are read on it only.
        denominator: as in `masked_mean`. The weights are not in it: it counts tokens, not weight.
        weights_BT: detached, without a unit.

    Returns: a scalar in x's unit.
    """
    if weights_BT is not None:
        # Masked first: a NaN weight on padding times a zero gradient would be NaN.
        x_BT = x_BT * torch.where(mask_BT, weights_BT, 0.0)
    return masked_mean(x_BT, mask_BT, denominator)
