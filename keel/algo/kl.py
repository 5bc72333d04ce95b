"""KL divergence between policy and reference: estimators, a loss term, and the controllers of their coefficients.

An estimator is a number per sampled token whose mean is the KL; its gradient is another matter. For tokens sampled
from the policy, with d = log pi(a|s) - log pi_ref(a|s):

    estimator               mean                      mean of its gradient
    k1 = d                  KL(pi || ref)             0
    k2 = d^2 / 2            KL to second order        the gradient of KL(pi || ref)
    k3 = e^-d - 1 + d       KL(pi || ref)             the gradient of KL(ref || pi), the other direction

So k1 and k3 are for measuring and for the reward, and a loss is `kl_loss`, whose gradient is right whichever of them
gives its value. Tang and Munos 2025 (arXiv 2506.09477), Liu et al. 2025 (arXiv 2510.01555); tests/algo/test_kl.py
enumerates each row above. `algo.logprobs.exact_kl` needs no estimator.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from keel.algo.importance import LOG_RATIO_BOUND, weighted_mean
from keel.algo.masking import masked_sum

K3_BOUND = 10.0
"""Largest k3, nats per token, as in veRL."""

Estimator = Literal["k1", "k2", "k3"]
"""Names of the estimators from sampled tokens."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference): k1 = log pi(a|s) - log pi_ref(a|s).

    Unbiased for tokens sampled from the policy, of high variance, and negative at times (Schulman 2020, "Approximating
    KL divergence"; there x ~ q and k1 = -log r with r = p/q, so q is the policy and p the reference).

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, nats, any shape.
        ref_logprobs: the same tokens under the reference, same shape and temperature.

    Returns: nats, same shape. No mask is applied: padding stays whatever it was.
    """
    assert logprobs.shape == ref_logprobs.shape, (logprobs.shape, ref_logprobs.shape)
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference): k2 = (log pi(a|s) - log pi_ref(a|s))^2 / 2.

    Schulman 2020, there (log r)^2 / 2. Never negative, biased where the two are far apart. Arguments and result as
    those of `k1`.
    """
    return 0.5 * k1(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, bound: float = K3_BOUND) -> Tensor:
    """Per-token estimate of KL(policy || reference): k3 = r - 1 - log r, r = pi_ref(a|s) / pi(a|s).

    Schulman 2020, there (r - 1) - log r. Never negative, of lower variance than k1, and unbiased for tokens sampled
    from the policy but for two bounds that are veRL's: log r is held within +-20 and the result under `bound`. Rare
    tokens with a large r carry part of the mean, so the bound lowers it where the two distributions are far apart.
    Arguments and result as those of `k1`.
    """
    log_ratio = k1(ref_logprobs, logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # Not a hair under 0 either, however a device rounds expm1.
    return (torch.expm1(log_ratio) - log_ratio).clamp(0.0, bound)


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators by name."""


def kl_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
    *,
    estimator: Estimator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(policy || reference) as a loss term with the gradient of the KL, for tokens sampled before the update.

        value    = (1 / denominator) * sum_{mask} w * rho * k            rho = pi(a|s) / pi_old(a|s)
        gradient = (1 / denominator) * sum_{mask} w * rho * d * grad log pi(a|s),   d = log pi(a|s) - log pi_ref(a|s)

    rho * d is detached. E_old[rho * d * grad log pi] = sum_a pi * d * grad log pi is the gradient of KL(pi || ref) in
    the states of the batch, whichever k is shown: k2 as a loss with an importance ratio (Liu et al. 2025, arXiv
    2510.01555). It is not the gradient of the whole response's KL: that a token leads to states of higher KL counts
    only where the KL is in the reward (Tang and Munos 2025, arXiv 2506.09477). Different from GRPO (arXiv 2402.03300,
    equation 4), which differentiates k3 itself. log rho is bounded to +-20.

    Args:
        logprobs_BT: policy log-probabilities now, nats, with gradient.
        old_logprobs_BT: those of the policy that chose the tokens.
        ref_logprobs_BT: those of the reference.
        mask_BT: bool, True on trainable tokens; nothing else is read.
        denominator: as in `masked_mean`.
        weights_BT: weight of each token (`truncated_importance`), detached; None is 1.
        estimator: whose value is shown.

    Returns: (loss in nats, metrics): `kl`, rho * k summed over the mask (nats), to be divided by the tokens of the
    whole minibatch.
    """
    assert logprobs_BT.shape == old_logprobs_BT.shape == ref_logprobs_BT.shape == mask_BT.shape, mask_BT.shape
    logprobs_BT, old_BT, ref_BT = (
        torch.where(mask_BT, x_BT, 0.0) for x_BT in (logprobs_BT, old_logprobs_BT, ref_logprobs_BT)
    )
    now_BT = logprobs_BT.detach()
    ratio_BT = (now_BT - old_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    value_BT = ratio_BT * ESTIMATORS[estimator](now_BT, ref_BT)
    # The second term is 0 and carries the gradient.
    term_BT = value_BT + ratio_BT * k1(now_BT, ref_BT) * (logprobs_BT - now_BT)
    return weighted_mean(term_BT, mask_BT, denominator, weights_BT), {"kl": masked_sum(value_BT, mask_BT)}


def adaptive_coefficient(coefficient: float, observed_kl: float, target: float, horizon: float, episodes: int) -> float:
    """The KL coefficient after one step of the proportional controller in log space.

        e      = clip(observed_kl / target - 1, -0.2, 0.2)
        beta'  = beta * (1 + e * episodes / horizon)

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. The paper writes a constant gain K_beta = 0.1 per update; here
    the gain is episodes / horizon, as in its published code, so that it does not hang on the batch size.

    Args:
        coefficient: beta before the step, reward per nat.
        observed_kl: mean KL of this step's episodes, nats per response.
        target: the KL to settle at, nats per response, larger than 0.
        horizon: episodes over which beta can change by a factor of about e^0.2, larger than 0.
        episodes: responses behind `observed_kl`.

    Returns: beta for the next step. Not finite where `observed_kl` is not a number.
    """
    assert target > 0 and horizon > 0, (target, horizon)
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * episodes / horizon)


def adapt_penalty(beta: float, kl: float, target: float) -> float:
    """The coefficient of PPO's penalty on the KL between old and new policy, after one update.

        beta' = beta / 2 if kl < target / 1.5,   beta * 2 if kl > target * 1.5,   else beta

    Schulman et al. 2017 (arXiv 1707.06347), section 4. Like the paper it has no floor or ceiling: n updates far from
    the target change beta by 2^n.

    Args:
        beta: the coefficient of `kl_penalised` during the update, units of advantage per nat.
        kl: mean KL(old || new) that the update ended with, nats per token.
        target: the KL to settle at, nats per token, larger than 0.

    Returns: beta for the next update; not a number where `kl` is none.
    """
    assert target > 0, target
    if math.isnan(kl):
        return kl
    if kl < target / 1.5:
        return beta / 2
    return beta * 2 if kl > target * 1.5 else beta
