"""Advantages and value targets from per-token rewards and values."""

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float | Tensor,
    last_values_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each row.

        delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V(s_t)

    Schulman et al. 2016 (arXiv 1506.02438), equation 16, in its recursive form; lam = 0 and 1 are equations 17 and 18.
    `rewards[:, t]` is what follows the t-th token, `values[:, t]` the value before it. Different from the paper: t + 1
    is the row's next *masked* token, so the recursion (and the discount) steps over gaps such as observation tokens.

    Args:
        rewards_BT: per-token rewards; read on the mask only.
        values_BT: V(s_t) in units of reward; read on the mask only.
        mask_BT: bool, True on the tokens that the policy chose.
        gamma: discount per token, 0 to 1.
        lam: lambda, 0 (one-step) to 1 (Monte Carlo), for all rows or one a row [B]. Another lambda for the critic's
            targets (VC-PPO, arXiv 2503.01491: 1 for them, less for the policy) is a second call.
        last_values_B: V(s_T) after the last masked token, for rows cut off by the limit (bootstrap) and 0 for rows that
            ended. None is 0 for all.

    Returns: (advantages_BT, returns_BT) in units of reward, detached, 0 outside the mask.
    """
    assert rewards_BT.shape == values_BT.shape == mask_BT.shape, (rewards_BT.shape, values_BT.shape, mask_BT.shape)
    next_value_B = torch.zeros_like(values_BT[:, 0]) if last_values_B is None else last_values_B
    assert next_value_B.shape == mask_BT.shape[:1], next_value_B.shape
    decay = gamma * lam
    if isinstance(decay, Tensor):
        assert decay.shape == mask_BT.shape[:1], decay.shape
        decay = decay.to(rewards_BT)
    running_B = torch.zeros_like(rewards_BT[:, 0])
    advantages_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(mask_BT.shape[1])):
        selected_B, value_B = mask_BT[:, t], values_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        running_B = torch.where(selected_B, delta_B + decay * running_B, running_B)
        next_value_B = torch.where(selected_B, value_B, next_value_B)
        advantages_BT[:, t] = torch.where(selected_B, running_B, 0.0)
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def length_adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """One lambda a row that rises with its length: lam = 1 - 1 / (alpha * length), bounded to 0..1.

    Yue et al. 2025 (VAPO, arXiv 2504.05118), section on length-adaptive GAE, there with alpha = 0.05. The weights
    lam^k of the TD errors then sum to 1 / (1 - lam) = alpha * length: the horizon is a fixed share of the response.
    Different from the paper: bounded below, because up to length 1 / alpha (20 tokens) the formula is not positive.

    Args:
        lengths_B: masked tokens of each row.
        alpha: the share, larger than 0.

    Returns: lambda_B without a unit, float32; 0 for a row without tokens.
    """
    assert alpha > 0, alpha
    return (1.0 - 1.0 / (alpha * lengths_B.float())).clamp(0.0, 1.0)
