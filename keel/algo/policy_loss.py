"""The policy's loss. Metrics come divided by the loss's own denominator, so that those of micro-batches add up."""

import torch
from torch import Tensor

from keel.algo.masking import masked_mean

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to +- this before exp, so that one broken token cannot make a batch infinite (as in veRL)."""


def ppo_clip(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip: float,
    denominator: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, negated, summed over the mask and divided by `denominator`.

        rho  = exp(log pi(a|s) - log pi_old(a|s))
        loss = -(1 / denominator) * sum_{mask} min(rho * A, clip(rho, 1 - clip, 1 + clip) * A)

    Schulman et al. 2017 (arXiv 1707.06347), equation 7. Different from the paper: a log-ratio outside +-20 is bounded
    there, where its gradient is 0.

    Args:
        logprobs_BT: policy log-probabilities now, nats, with gradient.
        old_logprobs_BT: the same before the update (the trainer's own, not the sampler's).
        advantages_BT: in any unit; usually whitened.
        mask_BT: bool, True on trainable tokens; nothing else is read.
        clip: half width of the clip range; infinity gives plain importance weighting.
        denominator: trainable tokens of the whole (global) minibatch, larger than 0.

    Returns: (loss, metrics), metrics detached scalars. Add over micro-batches of one denominator: `clip_fraction`
    (share of tokens where the clipped branch was the smaller), `approx_kl` (k3 = rho - 1 - log rho, nats per token,
    Schulman 2020). Take the maximum: `ratio_max` (1 where the mask is empty), `log_ratio_abs_max` (nats, unbounded).
    """
    assert logprobs_BT.shape == old_logprobs_BT.shape == advantages_BT.shape == mask_BT.shape, mask_BT.shape
    # Masked before exp: an infinite ratio on padding would turn its zero gradient into NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    bounded_BT = log_ratio_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_BT = bounded_BT.exp()
    plain_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1.0 - clip, 1.0 + clip) * advantages_BT
    loss = -masked_mean(torch.minimum(plain_BT, clipped_BT), mask_BT, denominator)
    with torch.no_grad():
        metrics = {
            "clip_fraction": masked_mean((clipped_BT < plain_BT).float(), mask_BT, denominator),
            "approx_kl": masked_mean(torch.expm1(bounded_BT) - bounded_BT, mask_BT, denominator),
            "ratio_max": ratio_BT.max(),
            "log_ratio_abs_max": log_ratio_BT.abs().max(),
        }
    return loss, metrics
