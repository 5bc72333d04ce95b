"""Best-of-N sampling, the baseline that trains nothing: how far it is from the model that is sampled."""

import math

import torch
from torch import Tensor

SMALL = -20.0
"""Below this log, x and log(1 + x) are the same in float64."""


def best_of_bound(n: int) -> float:
    """log n - (n - 1) / n, an upper bound of the KL from the best of n responses to the model, in nats per response.

    Equal to the KL where no response has a noticeable probability and no two have one score; less where responses
    repeat. Beirami et al. 2024 (arXiv 2401.01879), abstract and section 3.
    """
    return math.log(n) - (n - 1) / n


def best_of_log_ratio(below_B: Tensor, tied_logp_B: Tensor, n: int) -> Tensor:
    """log(pi_n(y) / pi(y)) of the response that was taken from n: log((F + q)^n - F^n) - log q, in nats.

    Its mean over responses taken is an unbiased estimate of the KL from best-of-n to the model, where F and q are
    exact. Beirami et al. 2024 (arXiv 2401.01879), sections 2 and 4, where scores are all different, so that q is the
    probability of y itself; here equal scores are allowed, among which the draw is by chance.

    Args:
        below_B: F, the probability that a response of the model to this prompt scores lower; larger than 0.
        tied_logp_B: log q, q the probability that one scores the same: at least that of y itself.
        n: responses of which the best was taken.

    Returns: [B] float64.
    """
    log_f_B, log_q_B = below_B.double().log(), tied_logp_B.double()
    x_B = log_q_B - log_f_B  # (F + q)^n - F^n = F^n * (exp(n log(1 + e^x)) - 1)
    grown_B = n * torch.logaddexp(torch.zeros_like(x_B), x_B)
    log_growth_B = torch.where(
        x_B < SMALL, math.log(n) + x_B, grown_B + torch.log(-torch.expm1(-grown_B.clamp(min=1e-300)))
    )
    return n * log_f_B + log_growth_B - log_q_B


def rank_of(score_B: Tensor, logp_B: Tensor, others_BM: Tensor, same_BM: Tensor) -> tuple[Tensor, Tensor]:
    """F and log q of `best_of_log_ratio`, from M independent responses to the same prompt.

    The response's own probability p is known exactly, so only the rest is estimated, from the responses that differ:
    F = (1 - p) * share of them below, q = p + (1 - p) * share of them with the same score. Where none is below, half a
    response is, as the logarithm of F is wanted. With all scores different, M = max(32, n) and n from 2 to 64 the mean
    came out less than 0.02 nats too low (half a response added to every count made it 0.23 at n = 16); with two scores
    alone, M = 32 and n = 4 about 0.05 too high.

    Args:
        score_B: of the response.
        logp_B: its log-probability, nats.
        others_BM: scores of the others.
        same_BM: bool, True where the other is the very same response.
    """
    differs_BM = ~same_BM
    count_B = differs_BM.sum(1).clamp(min=1).double()
    below_B = (differs_BM & (others_BM < score_B[:, None])).sum(1).double()
    tied_B = (differs_BM & (others_BM == score_B[:, None])).sum(1).double()
    logp_B = logp_B.double()
    part_B = -torch.expm1(logp_B) / count_B
    lower_B = part_B * torch.minimum(below_B.clamp(min=0.5), count_B - tied_B)  # F + q is at most 1
    return lower_B.clamp(min=1e-300), torch.logaddexp(logp_B, (part_B * tied_B).log())
