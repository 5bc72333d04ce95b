"""What a step of online training shows of itself: metrics of the rollouts and samples."""

from collections.abc import Callable

import torch
from torch import Tensor

from keel.algo.baselines import equal_group_fraction
from keel.train.context import Session
from keel.types import Experience, Rollouts

SHOWN_SAMPLES = 4
"""Responses written to samples.jsonl per update."""


def rollout_metrics(
    rollouts: Rollouts, scores_B: Tensor, gold: Callable[[Rollouts], Tensor] | None, each: int
) -> dict[str, float]:
    """Metrics of responses as they came, before any penalty; scores of those that have one (the others are NaN). each:
    responses per prompt."""
    known_B = torch.isfinite(scores_B)
    own_B = scores_B[known_B]
    seen = {
        "score": own_B.mean().item(),
        "score_sd": own_B.std(correction=0).item(),
        "length": rollouts.lengths_B.float().mean().item(),
        "eos_rate": sum(finish == "stop" for finish in rollouts.finish) / len(rollouts),
        "distinct": len(set(rollouts.texts)) / len(rollouts),
    }
    if each > 1:
        seen["equal_groups"] = equal_group_fraction(own_B, (torch.arange(len(rollouts)) // each)[known_B]).item()
    if gold:
        seen["gold"] = gold(rollouts).mean().item()
    return seen


def shown(numbers: dict[str, float]) -> dict[str, float]:
    """Those that stand beside the progress bar."""
    names = ("score", "gold", "kl_per_response", "length", "explained_variance")
    return {name: numbers[name] for name in names if name in numbers}


def write_samples(session: Session, experience: Experience) -> None:
    """A few responses with their scores and what happened at each token."""
    rollouts = experience.rollouts
    streams = {"kl": experience.kl_BT, "value": experience.values_BT, "advantage": experience.advantages_BT}
    for b in range(min(SHOWN_SAMPLES, len(rollouts))):
        inside = rollouts.response_mask_BT[b]
        session.samples.append(
            {
                "step": session.step,
                "prompt": rollouts.prompts[b].text,
                "response": rollouts.texts[b],
                "score": experience.scores_B[b].item(),
                "kl": experience.kl_BT[b][inside].sum().item(),
                "finish": rollouts.finish[b],
                "ids": rollouts.response_ids_BT[b][inside].tolist(),
                **{
                    f"{name}_per_token": [round(x, 5) for x in stream[b][inside].tolist()]
                    for name, stream in streams.items()
                    if stream is not None
                },
            }
        )
