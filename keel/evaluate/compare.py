"""What PPO changed: two sets of responses to the same held-out prompts, side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.evaluate.intervals import mean_interval, wilson
from keel.types import Rollouts


def win_rate(before: Sequence[float], after: Sequence[float]) -> float:
    """Share of prompts whose response scores higher after than before; equal scores count half."""
    a, b = np.asarray(after), np.asarray(before)
    return float(((a > b) + 0.5 * (a == b)).mean())


def describe(rollouts: Rollouts) -> dict[str, float]:
    """Length (tokens), share that ended by itself, and distinct texts among the responses."""
    return {
        "length": rollouts.lengths_B.float().mean().item(),
        "eos_rate": sum(finish == "stop" for finish in rollouts.finish) / len(rollouts),
        "distinct": len(set(rollouts.texts)) / len(rollouts),
    }


def compare_scores(before: Tensor, after: Tensor) -> dict[str, Any]:
    """Means with intervals, standard deviations and the win rate of one kind of score, [B] before and after."""
    old, new = before.tolist(), after.tolist()
    rate = win_rate(old, new)
    return {
        "before": float(np.mean(old)),
        "before_sd": float(np.std(old)),
        "before_interval": mean_interval(old),
        "after": float(np.mean(new)),
        "after_sd": float(np.std(new)),
        "after_interval": mean_interval(new),
        "win_rate": rate,
        "win_rate_interval": wilson(rate, len(new)),
    }


def kl_per_response(policy_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> list[float]:
    """Log-ratio summed over each response (nats), on responses of the policy: an unbiased estimate of the KL."""
    return torch.where(mask_BT, policy_BT - reference_BT, 0.0).sum(1).tolist()


def side_by_side(before: Rollouts, after: Rollouts, old: Tensor, new: Tensor) -> list[dict[str, Any]]:
    """Each prompt with both responses and their scores."""
    return [
        {
            "prompt": before.prompts[b].text,
            "before": before.texts[b],
            "after": after.texts[b],
            "score_before": old[b].item(),
            "score_after": new[b].item(),
            "finish_before": before.finish[b],
            "finish_after": after.finish[b],
        }
        for b in range(len(before))
    ]
