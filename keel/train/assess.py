"""The evaluation stage: the exported policy against the model that PPO started from, on held-out prompts."""

from pathlib import Path
from typing import Any

import numpy as np

from keel.evaluate.compare import compare_scores, describe, kl_per_response, side_by_side
from keel.evaluate.intervals import mean_interval
from keel.models.loading import load_causal_lm, load_encoder
from keel.models.roles import logprobs_BT
from keel.models.separate import SeparateRoles
from keel.rewards.base import Reward
from keel.rewards.functions import FunctionReward
from keel.rewards.learned import LearnedReward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.train import world
from keel.train.context import Run
from keel.train.stages import build_frozen
from keel.train.world import write_lines
from keel.types import Prompt

EVAL_STEP = 1 << 42
"""Sampling step of evaluation; the same for both models, so that they answer with the same noise."""


def eval_stage(
    run: Run,
    stage: StageFolder,
    start: Path | str,
    policy_folder: Path,
    reward_folder: Path | None,
    prompts: list[Prompt],
) -> dict[str, Any]:
    """Samples both models once per prompt and returns scores, win rate, KL, lengths, entropy and shares; writes every
    response to samples.jsonl."""
    recipe, ppo = run.recipe, run.recipe.ppo
    assert ppo is not None and recipe.eval is not None
    encoder = load_encoder(policy_folder, recipe.model)
    frozen = build_frozen(run, start, reward_folder)
    trained = SeparateRoles({"policy": load_causal_lm(policy_folder, recipe.model.dtype, run.device)}, {}, [])
    sampling = Sampling(ppo.temperature, recipe.model.max_response_tokens)
    with run.console.task("answering held-out prompts", 2 * len(prompts), unit="reply") as task:
        before = LocalEngine(frozen, encoder, "reference").generate(
            prompts, sampling, seed=recipe.seed, step=EVAL_STEP, progress=run.watch(task)
        )
        after = LocalEngine(trained, encoder).generate(
            prompts,
            sampling,
            seed=recipe.seed,
            step=EVAL_STEP,
            version=ppo.updates,
            progress=run.watch(task, len(prompts)),
        )
    source: Reward = (
        LearnedReward(frozen, encoder.pad_id, ppo.micro_tokens) if reward_folder else FunctionReward.named(ppo.reward)
    )
    old, new = source.score(before), source.score(after)
    policy, entropy = logprobs_BT(
        trained, "policy", after.sequences(), ppo.temperature, encoder.pad_id, ppo.micro_tokens
    )
    reference, _ = logprobs_BT(
        frozen, "reference", after.sequences(), ppo.temperature, encoder.pad_id, ppo.micro_tokens
    )
    kl = kl_per_response(policy, reference, after.response_mask_BT)
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "score": compare_scores(old, new),
        "kl_per_response": float(np.mean(kl)),
        "kl_interval": mean_interval(kl),
        "entropy_per_token": (entropy.sum() / after.response_mask_BT.sum()).item(),
        "before": describe(before),
        "after": describe(after),
    }
    if recipe.sandbox:
        gold = world.gold_reward()
        old, new = gold.score(before), gold.score(after)
        result["gold"] = compare_scores(old, new)
    samples = side_by_side(before, after, old, new)
    write_lines(stage.samples, samples)
    result["shown"] = samples[: recipe.eval.shown]  # the first prompts as they come: no picking
    return result
