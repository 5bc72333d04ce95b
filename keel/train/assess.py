"""The evaluation stage on held-out prompts: the trained policy, and the best of N, against the model before them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from keel.config import Recipe
from keel.evaluate.best_of import best_of, others_of
from keel.evaluate.compare import compare_scores, describe, distance, mean_of, side_by_side
from keel.models.loading import load_causal_lm, load_encoder
from keel.models.roles import Roles, logprobs_BT
from keel.models.separate import SeparateRoles
from keel.rewards.base import Reward
from keel.rewards.learned import LearnedReward
from keel.rewards.named import reward_named
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.train import world
from keel.train.context import Run
from keel.train.stages import build_frozen
from keel.train.world import write_lines
from keel.types import Prompt, Rollouts

EVAL_STEP = 1 << 42
"""Sampling step of evaluation; the same for both models, so that they answer with the same noise."""
BEST_OF_STEP = EVAL_STEP + 1
"""Sampling step of best-of-N, which also takes the one after it."""


def eval_stage(
    run: Run,
    stage: StageFolder,
    start: Path | str,
    policy_folder: Path | None,
    reward_folder: Path | None,
    prompts: list[Prompt],
) -> dict[str, Any]:
    """Samples the model before training and, where there is one, the policy after it, once per prompt, and the best of
    N where the recipe asks for it. Returns scores, win rates, KL, lengths, entropy and shares, each where there is a
    source for it; writes every response to samples.jsonl."""
    recipe = run.recipe
    assert recipe.eval is not None
    encoder = load_encoder(policy_folder or start, recipe.model)
    frozen = build_frozen(run, start, reward_folder)
    engine, sampling = (
        LocalEngine(frozen, encoder, "reference"),
        Sampling(_temperature(recipe), encoder.max_response_tokens),
    )
    judges = _judges(recipe, frozen, encoder.pad_id, reward_folder)
    with run.console.task("answering held-out prompts", len(prompts), unit="reply") as task:
        before = engine.generate(prompts, sampling, seed=recipe.seed, step=EVAL_STEP, progress=run.watch(task))
    scores = {name: judge.score(before) for name, judge in judges.items()}
    result: dict[str, Any] = {"prompts": len(prompts), "before": describe(before)}
    result |= {name: mean_of("before", values) for name, values in scores.items()}
    shown = list(judges)[-1] if judges else None  # gold where there is one
    sides: dict[str, tuple[Rollouts, Tensor | None]] = {"before": (before, scores[shown] if shown else None)}
    if policy_folder:
        after, numbers = _trained(run, policy_folder, frozen, prompts, sampling)
        result |= numbers
        new = {name: judge.score(after) for name, judge in judges.items()}
        result |= {name: compare_scores(scores[name], new[name]) for name in judges}
        sides["after"] = (after, new[shown] if shown else None)
    if n := recipe.eval.best_of:
        count = (n + others_of(n)) * len(prompts)
        with run.console.task(f"sampling for the best of {n}", count, unit="reply") as task:
            taken, numbers = best_of(
                engine,
                judges["score"],
                prompts,
                n,
                sampling,
                seed=recipe.seed,
                step=BEST_OF_STEP,
                progress=run.watch(task),
            )
        new = {name: judge.score(taken) for name, judge in judges.items()}
        result["best_of"] = (
            numbers | describe(taken) | {name: compare_scores(scores[name], new[name]) for name in judges}
        )
        sides["best"] = (taken, new[shown] if shown else None)
    samples = side_by_side(sides)
    write_lines(stage.samples, samples)
    result["shown"] = samples[: recipe.eval.shown]  # the first prompts as they come: no picking
    return result


def _trained(
    run: Run, folder: Path, frozen: Roles, prompts: list[Prompt], sampling: Sampling
) -> tuple[Rollouts, dict[str, Any]]:
    """The policy's responses, and their KL to the reference, entropy and shares."""
    recipe = run.recipe
    encoder = load_encoder(folder, recipe.model)
    trained = SeparateRoles({"policy": load_causal_lm(folder, recipe.model.dtype, run.device)}, {}, [])
    with run.console.task("answering them after training", len(prompts), unit="reply") as task:
        after = LocalEngine(trained, encoder).generate(
            prompts, sampling, seed=recipe.seed, step=EVAL_STEP, progress=run.watch(task)
        )
    rest = (after.sequences(), sampling.temperature, encoder.pad_id, _micro_tokens(recipe))
    policy, entropy = logprobs_BT(trained, "policy", *rest)
    reference, _ = logprobs_BT(frozen, "reference", *rest)
    return after, distance(policy, reference, entropy, after.response_mask_BT) | {"after": describe(after)}


def _judges(recipe: Recipe, frozen: Roles, pad_id: int, reward_folder: Path | None) -> dict[str, Reward]:
    """What scores responses: `score`, the reward that training has or could have; `gold`, the sandbox's own."""
    judges: dict[str, Reward] = {}
    if reward_folder:
        judges["score"] = LearnedReward(frozen, pad_id, _micro_tokens(recipe))
    elif recipe.ppo:
        judges["score"] = reward_named(recipe.ppo)
    if recipe.sandbox:
        judges["gold"] = world.gold_reward()
    return judges


def _temperature(recipe: Recipe) -> float:
    return recipe.ppo.temperature if recipe.ppo else 1.0


def _micro_tokens(recipe: Recipe) -> int:
    stage = recipe.ppo or recipe.preference or recipe.reward
    assert stage is not None
    return stage.micro_tokens
