"""The policy's losses. All are called alike, so that a trainer can choose one by name:

    loss, metrics = f(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, denominator, weights_BT, **settings)

    loss = -(1 / denominator) * sum_{mask} w * J

with J the objective of one token, which is what each docstring below gives.

    logprobs_BT       policy log-probabilities now, nats, with gradient
    old_logprobs_BT   the same before the update (the trainer's own, not the sampler's)
    advantages_BT     in any unit; usually whitened
    mask_BT           bool, True on trainable tokens; nothing else is read
    denominator       counted over the whole (global) minibatch, larger than 0: see `masked_mean`
    weights_BT        weight of each token, detached, 0 or more (`truncated_importance`); None is 1

Weights multiply J rather than the advantages. For most losses that is the same (w * J(A) = J(w * A)), but the KL term
of `kl_penalised` does not hang on the advantage, and metrics should not see the weights.

rho = pi(a|s) / pi_old(a|s). Different from the papers: a log-ratio outside +-20 is bounded there, where its gradient
is 0.

Metrics are detached scalars. Those to be taken the maximum of: `ratio_max` (rho, 1 where the mask is empty) and
`log_ratio_abs_max` (nats, unbounded). All others are sums over the mask, unweighted, which add over micro-batches and
ranks; divided by the *tokens* of the minibatch, whatever the loss's denominator, they are what their names say:
`approx_kl` (k3 of KL(old || new), nats per token) and, where there is a clip, `clip_fraction` (share of tokens).
"""

import math

import torch
from torch import Tensor

from keel.algo.importance import LOG_RATIO_BOUND, weighted_mean
from keel.algo.kl import k3
from keel.algo.masking import masked_sum


def policy_gradient(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient: J = A * log pi(a|s).

    Williams 1992 (REINFORCE), section 5, with the advantage in place of reward minus baseline. Right for tokens of the
    policy as it is now: the first minibatch. `old_logprobs_BT` is read for the metrics only; it corrects nothing.

    Arguments, loss and metrics: see the module's docstring.
    """
    logprobs_BT, old_BT, advantages_BT = _masked(mask_BT, logprobs_BT, old_logprobs_BT, advantages_BT)
    objective_BT = advantages_BT * logprobs_BT
    return -weighted_mean(objective_BT, mask_BT, denominator, weights_BT), _metrics(logprobs_BT, old_BT, mask_BT)


def ppo_clip(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate.

        J = min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)
        J = max(J, dual_clip * A) where A < 0                              with a dual clip

    Schulman et al. 2017 (arXiv 1707.06347), equation 7. Two sides of the range: "clip-higher" of Yu et al. 2025 (DAPO,
    arXiv 2503.14476), section 3.1. Dual clip: Ye et al. 2020 (arXiv 1912.09729), which bounds J from below where a
    token of negative advantage has become much more likely.

    Args:
        clip_low, clip_high: widths of the clip range below and above 1; infinity on both sides gives importance
            weighting.
        dual_clip: the paper's c, larger than 1 (3 there). None is off.

    Other arguments, loss and metrics: see the module's docstring. `clip_fraction`: the clipped branch was the smaller.
    `dual_clip_fraction`, with a dual clip: the token met that bound.
    """
    assert dual_clip is None or dual_clip > 1, dual_clip
    logprobs_BT, old_BT, advantages_BT = _masked(mask_BT, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_BT = _log_ratio(logprobs_BT, old_BT).exp()
    objective_BT, clipped_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    metrics = _metrics(logprobs_BT, old_BT, mask_BT, clip_fraction=clipped_BT)
    if dual_clip is not None:
        floor_BT = torch.where(advantages_BT < 0, dual_clip * advantages_BT, -math.inf)
        metrics["dual_clip_fraction"] = masked_sum((objective_BT < floor_BT).float(), mask_BT)
        objective_BT = torch.maximum(objective_BT, floor_BT)
    return -weighted_mean(objective_BT, mask_BT, denominator, weights_BT), metrics


def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with one ratio a response: the geometric mean of its tokens' ratios.

        s   = exp(mean_{mask of the row} log rho)
        s_t = detach(s) * pi(a_t) / detach(pi(a_t))           the value of s, the gradient of token t
        J   = min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)

    Zheng et al. 2025 (arXiv 2507.18071), equations 5 and 7, in the form that the paper calls GSPO-token (section 4.3).
    Where all tokens of a response have one advantage, its gradient is GSPO's; it also takes advantages that differ.
    The paper's mean over responses is the denominator (responses * tokens of the row). Each token's log-ratio is
    bounded before the mean.

    Args:
        mask_BT: rows must be whole responses.
        clip_low, clip_high: widths of the range of s. The mean varies far less than a token's ratio: the paper has
            3e-4 and 4e-4.

    Other arguments, loss and metrics: see the module's docstring. `clip_fraction`: tokens of responses whose clipped
    branch was the smaller. `ratio_max` is still a token's.
    """
    assert mask_BT.ndim == 2, mask_BT.shape
    logprobs_BT, old_BT, advantages_BT = _masked(mask_BT, logprobs_BT, old_logprobs_BT, advantages_BT)
    log_ratio_BT = _log_ratio(logprobs_BT, old_BT)
    mean_B1 = log_ratio_BT.detach().sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    ratio_BT = (mean_B1 + (log_ratio_BT - log_ratio_BT.detach())).exp()
    objective_BT, clipped_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    metrics = _metrics(logprobs_BT, old_BT, mask_BT, clip_fraction=clipped_BT)
    return -weighted_mean(objective_BT, mask_BT, denominator, weights_BT), metrics


def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with clipped importance weights.

        J = detach(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log pi(a|s)

    MiniMax 2025 (arXiv 2506.13585), equations 4 and 5. Unlike PPO's clip it bounds a token's gradient and never drops
    it, also where the log-ratio is outside +-20.

    Args:
        clip_low, clip_high: widths of the range of the weight below and above 1. The paper sets no lower bound:
            clip_low of 1 or more.

    Other arguments, loss and metrics: see the module's docstring. `clip_fraction`: tokens whose weight was clipped.
    """
    logprobs_BT, old_BT, advantages_BT = _masked(mask_BT, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_BT = _log_ratio(logprobs_BT, old_BT).exp().detach()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_BT = clipped_BT * advantages_BT * logprobs_BT
    metrics = _metrics(logprobs_BT, old_BT, mask_BT, clip_fraction=clipped_BT != ratio_BT)
    return -weighted_mean(objective_BT, mask_BT, denominator, weights_BT), metrics


def kl_penalised(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
    *,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's other form, a penalty in place of the clip: J = rho * A - beta * KL[old, new].

    Schulman et al. 2017 (arXiv 1707.06347), equation 8; `kl.adapt_penalty` moves beta. The paper's KL is exact; here it
    is estimated from the sampled token by rho - 1 - log rho, which is k3 with the old policy as the one that samples,
    without k3's upper bound. The samples come from the fixed side, so that differentiating the estimate is right: its
    gradient (rho - 1) * grad log pi has the mean of the gradient of KL[old, new], and it is 0 for every token at
    rho = 1 (for -log rho, also unbiased, only on average).

    Args:
        beta: units of advantage per nat, 0 or more.

    Other arguments, loss and metrics: see the module's docstring. `approx_kl` is the KL of the penalty.
    """
    logprobs_BT, old_BT, advantages_BT = _masked(mask_BT, logprobs_BT, old_logprobs_BT, advantages_BT)
    ratio_BT = _log_ratio(logprobs_BT, old_BT).exp()
    objective_BT = ratio_BT * advantages_BT - beta * k3(old_BT, logprobs_BT, bound=math.inf)
    return -weighted_mean(objective_BT, mask_BT, denominator, weights_BT), _metrics(logprobs_BT, old_BT, mask_BT)


def _masked(mask_BT: Tensor, *inputs_BT: Tensor) -> list[Tensor]:
    # Before any exp: an infinite ratio on padding would turn its zero gradient into NaN.
    assert all(x_BT.shape == mask_BT.shape for x_BT in inputs_BT), [*(x_BT.shape for x_BT in inputs_BT), mask_BT.shape]
    return [torch.where(mask_BT, x_BT, 0.0) for x_BT in inputs_BT]


def _log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return (logprobs_BT - old_logprobs_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's objective of each token, and where the clipped branch is the smaller."""
    plain_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_BT
    return torch.minimum(plain_BT, clipped_BT), clipped_BT < plain_BT


@torch.no_grad()
def _metrics(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, **chosen_BT: Tensor) -> dict[str, Tensor]:
    """What the module's docstring lists, and the number of tokens where each of `chosen_BT` is True."""
    counts = {name: masked_sum(where_BT.float(), mask_BT) for name, where_BT in chosen_BT.items()}
    return counts | {
        "approx_kl": masked_sum(k3(old_logprobs_BT, logprobs_BT, bound=math.inf), mask_BT),
        "ratio_max": _log_ratio(logprobs_BT, old_logprobs_BT).exp().max(),
        "log_ratio_abs_max": (logprobs_BT - old_logprobs_BT).abs().max(),
    }
