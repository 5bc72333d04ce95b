"""Advantages without a critic: per-token rewards in, advantages out, the baseline taken from other responses.

All read `rewards_BT` on the mask only (KL penalty and score are inside), give 0 outside it, and carry no gradient. A
row's *score* is the sum of its masked rewards. A row without masked tokens has no score and is in no mean.

`groups_B` (int64) says which rows answer the same prompt: by place, not by text, so that a prompt that stands twice in
the data makes two groups.
"""

import torch
from torch import Tensor

from keel.algo.masking import masked_mean, masked_whiten
from keel.algo.shaping import monte_carlo_returns

GRPO_EPS = 1e-6
"""Added to a group's standard deviation, in units of reward (as in veRL)."""


@torch.no_grad()
def reinforce(rewards_BT: Tensor, mask_BT: Tensor, gamma: float, baseline: bool) -> Tensor:
    """Rewards to go, less one constant for the batch if asked: A_t = G_t - b, b = (1 / n) sum_{mask} G.

    Williams 1992, REINFORCE with a reinforcement baseline; G_t is `monte_carlo_returns`. b is the mean over the batch's
    n masked tokens, since each token's gradient is multiplied with it: near the constant of least variance, which is
    the mean weighted by squared gradients (Greensmith et al. 2004). Different from Williams: b is of this batch, not a
    running mean; it holds the row's own return, which shrinks the gradient by about 1 / rows.

    Args:
        rewards_BT: per-token rewards.
        mask_BT: bool, True on the tokens that the policy chose.
        gamma: discount per token, 0 to 1.
        baseline: False gives G_t itself.

    Returns: advantages_BT in units of reward; with baseline exactly 0 where every return is the same.
    """
    returns_BT = monte_carlo_returns(rewards_BT, mask_BT, gamma)
    if not baseline:
        return returns_BT
    mean = masked_mean(returns_BT.double(), mask_BT, None)
    return torch.where(mask_BT, returns_BT - mean, 0.0).to(rewards_BT.dtype)


@torch.no_grad()
def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Rewards to go, whitened over all masked tokens of the batch: A_t = (G_t - mean G) / sd G.

    Hu et al. 2025 (REINFORCE++, arXiv 2501.03262); gamma as in veRL (1 in the paper). sd is the unbiased one of
    `masked_whiten`, as in veRL.

    Args:
        rewards_BT: per-token rewards; the paper has its k1 penalty in them.
        mask_BT: bool, True on the tokens that the policy chose.
        gamma: discount per token, 0 to 1.

    Returns: advantages_BT without a unit, mean 0 and sd 1 over the mask; exactly 0 where every return is the same.
    """
    return _whitened(monte_carlo_returns(rewards_BT, mask_BT, gamma), mask_BT)


@torch.no_grad()
def reinforce_plus_plus_baseline(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor) -> Tensor:
    """Scores less their group's mean, on every token, whitened over all masked tokens of the batch.

        d[b, t] = score[b] - mean of the scores of b's group
        A_t     = (d - mean d) / sd d

    Hu et al. 2025 (arXiv 2501.03262), REINFORCE++ with baseline. sd is the unbiased one. A row alone in its group keeps
    its score as d, as in veRL.

    Args:
        rewards_BT: per-token rewards; the paper has its KL penalty in the loss instead.
        mask_BT: bool, True on the tokens that the policy chose.
        groups_B: rows of one prompt, see above.

    Returns: advantages_BT without a unit, mean 0 and sd 1 over the mask; exactly 0 where no group's scores differ.
    """
    deviations_B, _, _ = _against_group(rewards_BT, mask_BT, groups_B)
    return _whitened(_on_tokens(deviations_B, rewards_BT, mask_BT), mask_BT)


@torch.no_grad()
def rloo(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor) -> Tensor:
    """Scores less the mean score of the *other* rows of the group, on every token.

        A[b, t] = score[b] - 1/(k-1) * sum_{j != b} score[j]  =  k/(k-1) * (score[b] - group mean),   k rows a group

    Ahmadian et al. 2024 (arXiv 2402.14740), REINFORCE leave-one-out. Unbiased, because the baseline does not hold the
    row's own score. A row alone in its group has no baseline and keeps its score, as in veRL.

    Args:
        rewards_BT: per-token rewards; the paper has its KL penalty in the score.
        mask_BT: bool, True on the tokens that the policy chose.
        groups_B: rows of one prompt, see above.

    Returns: advantages_BT in units of reward; exactly 0 where a group's scores are equal.
    """
    deviations_B, sizes_B, _ = _against_group(rewards_BT, mask_BT, groups_B)
    return _on_tokens(deviations_B * sizes_B / (sizes_B - 1).clamp(min=1), rewards_BT, mask_BT)


@torch.no_grad()
def grpo(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor, divide_by_sd: bool) -> Tensor:
    """Scores less their group's mean, on every token, divided by the group's standard deviation if asked.

        A[b, t] = (score[b] - mean) / (sd + 1e-6)        GRPO
        A[b, t] =  score[b] - mean                       Dr. GRPO

    Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), section 3,
    who leave out the division because it weighs a prompt the more, the more alike its scores are. sd is the unbiased
    one (k - 1), as in veRL. The mean holds the row's own score: without division this is RLOO times (k - 1) / k. A row
    alone in its group keeps its score (mean 0, sd 1), as in veRL.

    Args:
        rewards_BT: per-token rewards; GRPO has its KL penalty in the loss, Dr. GRPO has none.
        mask_BT: bool, True on the tokens that the policy chose.
        groups_B: rows of one prompt, see above.
        divide_by_sd: True is GRPO; False is Dr. GRPO, whose aggregation is `constant` in `masking.loss_denominators`.

    Returns: advantages_BT, without a unit or in units of reward; exactly 0 where a group's scores are equal.
    """
    deviations_B, _, sds_B = _against_group(rewards_BT, mask_BT, groups_B)
    return _on_tokens(deviations_B / (sds_B + GRPO_EPS) if divide_by_sd else deviations_B, rewards_BT, mask_BT)


@torch.no_grad()
def remax(rewards_BT: Tensor, mask_BT: Tensor, greedy_scores_B: Tensor, gamma: float) -> Tensor:
    """Rewards to go, less the score of the greedy response to the same prompt: A_t = G_t - greedy score.

    Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1. Different from the paper: rewards to go where it has the
    whole score, as in veRL (the same unless there is a KL penalty); and gamma, which neither has. The baseline is not
    discounted: by how much would depend on the sampled length, so on the actions, and bias the gradient.

    Args:
        rewards_BT: per-token rewards of the sampled responses.
        mask_BT: bool, True on the tokens that the policy chose.
        greedy_scores_B: score of the response to row b's prompt that takes the likeliest token each time.
        gamma: discount per token, 0 to 1.

    Returns: advantages_BT in units of reward.
    """
    assert greedy_scores_B.shape == mask_BT.shape[:1], greedy_scores_B.shape
    return torch.where(mask_BT, monte_carlo_returns(rewards_BT, mask_BT, gamma) - greedy_scores_B[:, None], 0.0)


@torch.no_grad()
def equal_group_fraction(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Share of the groups whose rows all score the same, so that their scores teach nothing.

    Args:
        scores_B: scores before KL, which differs between rows and would hide it.
        groups_B: rows of one prompt, see above. Groups of a single row are not counted.

    Returns: a scalar, 0 to 1; 0 where no group has two rows.
    """
    _, index_B, sizes_P = groups_B.unique(return_inverse=True, return_counts=True)
    some_P = scores_B.new_zeros(len(sizes_P)).scatter(0, index_B, scores_B)  # one score of each group, whichever
    unlike_P = torch.zeros_like(some_P).index_add(0, index_B, (scores_B != some_P[index_B]).to(scores_B.dtype))
    return masked_mean((unlike_P == 0).float(), sizes_P > 1, None)


def _against_group(rewards_BT: Tensor, mask_BT: Tensor, groups_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: score less the group's mean, rows in the group, their unbiased sd. Alone: the score itself, 1, 1.

    In float64, where the mean of equal float32 scores is exactly that score, and where padding does not tell.
    """
    assert rewards_BT.shape == mask_BT.shape and groups_B.shape == mask_BT.shape[:1], (rewards_BT.shape, groups_B.shape)
    scores_B, chosen_B = torch.where(mask_BT, rewards_BT, 0.0).double().sum(1), mask_BT.any(1)
    groups_P, index_B = groups_B.unique(return_inverse=True)

    def total_B(x_B: Tensor) -> Tensor:
        return x_B.new_zeros(len(groups_P)).index_add(0, index_B, x_B)[index_B]

    sizes_B = total_B(chosen_B.double())
    deviations_B = torch.where(chosen_B, scores_B - total_B(scores_B) / sizes_B.clamp(min=1), 0.0)
    sds_B = (total_B(deviations_B.square()) / (sizes_B - 1).clamp(min=1)).sqrt()
    alone_B = sizes_B == 1
    return torch.where(alone_B, scores_B, deviations_B), sizes_B, torch.where(alone_B, 1.0, sds_B)


def _on_tokens(x_B: Tensor, rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, x_B[:, None].to(rewards_BT.dtype), 0.0)


def _whitened(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # In float64 the mean of equal float32 numbers is that number; else its rounding would be blown up by 1 / eps.
    return masked_whiten(x_BT.double(), mask_BT).to(x_BT.dtype)
