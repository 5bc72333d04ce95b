"""The losses of keel.algo on packed steps: the one place where the classic algorithms call them."""

import math

from torch import Tensor

from keel.algo.masking import masked_mean, masked_whiten
from keel.algo.policy_loss import ppo_clip
from keel.algo.value_loss import value_loss
from keel.classic.experience import everything


def policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip: float = math.inf
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, with its metrics as means over steps. Without a clip it is TRPO's, and at a ratio of 1
    its gradient is REINFORCE's."""
    loss, metrics = ppo_clip(
        logprobs_N,
        old_logprobs_N,
        advantages_N,
        everything(logprobs_N),
        len(logprobs_N),
        clip_low=clip,
        clip_high=clip,
    )
    largest = metrics["log_ratio_abs_max"]
    return loss, {name: metrics[name] / len(logprobs_N) for name in ("clip_fraction", "approx_kl")} | {
        "log_ratio_abs_max": largest
    }


def critic_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error, optionally clipped."""
    return value_loss(values_N, old_values_N, returns_N, everything(values_N), clip, len(values_N))[0]


def mean(x_N: Tensor) -> Tensor:
    """Mean over the steps of a batch."""
    return masked_mean(x_N, everything(x_N), len(x_N))


def whitened(advantages_N: Tensor, whiten: bool) -> Tensor:
    """Advantages as a policy step reads them. One alone is left as it is: it would become 0."""
    return masked_whiten(advantages_N, everything(advantages_N)) if whiten and len(advantages_N) > 1 else advantages_N
