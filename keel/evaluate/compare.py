"""What training changed: two sets of responses to the same held-out prompts, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algo.masking import masked_mean
from keel.errors import RewardError
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


def mean_of(name: str, scores: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and interval of scores [B], under that name. NaN: not scored, left out. Raises
    RewardError where fewer than two are left."""
    values = scores[torch.isfinite(scores)].tolist()
    if len(values) < 2:
        raise RewardError(
            f"{len(values)} of the responses to compare have a score, and an interval needs two",
            where="eval",
            remedy="mend the reward, or raise eval.prompts",
        )
    return {
        name: float(np.mean(values)),
        f"{name}_sd": float(np.std(values)),
        f"{name}_interval": mean_interval(values),
    }


def compare_scores(before: Tensor, after: Tensor) -> dict[str, Any]:
    """Means with intervals, standard deviations and the win rate of one kind of score, [B] before and after, over the
    prompts that are scored (not NaN) on both sides."""
    both_B = torch.isfinite(before) & torch.isfinite(after)
    before, after = before[both_B], after[both_B]
    rate = win_rate(before.tolist(), after.tolist())
    return {
        **mean_of("before", before),
        **mean_of("after", after),
        "win_rate": rate,
        "win_rate_interval": wilson(rate, len(after)),
    }


def kl_per_response(policy_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> list[float]:
    """Log-ratio summed over each response (nats), on responses of the policy: an unbiased estimate of the KL."""
    return torch.where(mask_BT, policy_BT - reference_BT, 0.0).sum(1).tolist()


def distance(policy_BT: Tensor, reference_BT: Tensor, entropy_BT: Tensor, mask_BT: Tensor) -> dict[str, Any]:
    """How far the policy is from the reference on its own responses: mean KL per response with its interval (nats), and
    the policy's mean entropy per response token (nats)."""
    kl = kl_per_response(policy_BT, reference_BT, mask_BT)
    return {
        "kl_per_response": float(np.mean(kl)),
        "kl_interval": mean_interval(kl),
        "entropy_per_token": masked_mean(entropy_BT, mask_BT, None).item(),
    }


def side_by_side(sides: Mapping[str, tuple[Rollouts, Tensor | None]]) -> list[dict[str, Any]]:
    """Each prompt with the response of each side, its score where it has one, and why it ended."""
    rows: list[dict[str, Any]] = []
    for b, prompt in enumerate(next(iter(sides.values()))[0].prompts):
        row: dict[str, Any] = {"prompt": prompt.text}
        for name, (rollouts, scores) in sides.items():
            row |= {name: rollouts.texts[b], f"finish_{name}": rollouts.finish[b]}
            if scores is not None and scores[b].isfinite():
                row[f"score_{name}"] = scores[b].item()
        rows.append(row)
    return rows
