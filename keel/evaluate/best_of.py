"""Best-of-N sampling: the best of several responses of one model by a reward, and how far that is from the model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keel.algo.best_of import best_of_bound, best_of_log_ratio, rank_of
from keel.evaluate.intervals import mean_interval
from keel.rewards.base import Reward
from keel.rollout.engine import Engine, Sampling
from keel.types import Prompt, Rollouts

LEAST_OTHERS = 32
"""Independent responses to a prompt, at least, from which the rank of the response that was taken is estimated."""


def best_of(
    engine: Engine,
    source: Reward,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[Rollouts, dict[str, Any]]:
    """The best of n responses to each prompt, and the KL of that choice from the model: its bound and its estimate.

    The estimate takes the rank of each response among others that were drawn for that alone (at sampling step
    `step` + 1), and its exact log-probability from the sampler.
    """
    others = others_of(n)
    drawn = engine.generate([p for p in prompts for _ in range(n)], sampling, seed=seed, step=step, progress=progress)
    scores_BN = _lowest_for_none(source.score(drawn)).view(len(prompts), n)
    best_B = scores_BN.argmax(1)
    taken = drawn.select([b * n + k for b, k in enumerate(best_B.tolist())])
    more = engine.generate(
        [p for p in prompts for _ in range(others)],
        sampling,
        seed=seed,
        step=step + 1,
        progress=(lambda done: progress(len(drawn) + done)) if progress else None,
    )
    rows = more.sequences()
    same = [
        row == own
        for own, start in zip(taken.sequences(), range(0, len(more), others), strict=True)
        for row in rows[start : start + others]
    ]
    logp_B = torch.where(taken.response_mask_BT, taken.sampler_logprobs_BT, 0.0).double().sum(1)
    shape = (len(prompts), others)
    others_BM = _lowest_for_none(source.score(more)).view(shape)
    ranks = rank_of(scores_BN.amax(1), logp_B, others_BM, torch.tensor(same).view(shape))
    kl = best_of_log_ratio(*ranks, n).tolist()
    return taken, {
        "n": n,
        "kl_bound": best_of_bound(n),
        "kl_per_response": sum(kl) / len(kl),
        "kl_interval": mean_interval(kl),
    }


def _lowest_for_none(scores_B: Tensor) -> Tensor:
    """A response that could not be scored (NaN) is not taken before one that could."""
    return scores_B.nan_to_num(nan=scores_B.nan_to_num(nan=torch.inf).min().item())


def others_of(n: int) -> int:
    """Responses to each prompt beyond the n, for the estimate."""
    return max(n, LEAST_OTHERS)
