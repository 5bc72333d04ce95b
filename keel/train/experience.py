"""Experience of an online step, before any weight moves: responses, their scores, KL, rewards, advantages, returns."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.algo import moments
from keel.algo.kl import ESTIMATORS
from keel.algo.masking import masked_mean, masked_sum
from keel.algo.moments import Moments
from keel.algo.shaping import monte_carlo_returns, penalise_unfinished, token_rewards
from keel.algo.value_loss import explained_variance, popart
from keel.config import GROUPED, PpoConfig
from keel.data.encode import micro_batches, padding_share
from keel.errors import RewardError, StepError
from keel.models.roles import Roles, exact_kl_BT, lengths_with_kin, logprobs_BT, values_BT
from keel.rewards.base import Reward
from keel.rollout.engine import Engine, Sampling
from keel.train.choices import advantages
from keel.train.learner import Learner, moments_of
from keel.train.numbers import check_rows
from keel.train.profile import Clock
from keel.types import Experience, Prompt, Rollouts, TokenSequence


@dataclass(frozen=True)
class Scored:
    """Scores of a step. given_B: as the reward gave it; scores_B: as it is trained on; greedy_B: likewise, of the
    likeliest response to each row's prompt (remax). NaN where the reward failed on a response. scored: the other rows.
    failed: why."""

    given_B: Tensor
    scores_B: Tensor
    greedy_B: Tensor | None
    scored: frozenset[int]
    failed: list[RewardError]


def sample(learner: Learner, engine: Engine, chosen: Sequence[Prompt], step: int, clock: Clock) -> list[Rollouts]:
    """Responses of the policy to the prompts of a step; for remax also the likeliest response to each prompt."""
    ppo, seed = learner.ppo, learner.seed
    asked = [prompt for prompt in chosen for _ in range(ppo.responses_per_prompt)]
    sampling = Sampling(ppo.temperature, learner.max_tokens)
    sampled = [engine.generate(asked, sampling, seed=seed, step=step, version=step)]
    if ppo.advantage == "remax":
        greedy = replace(sampling, temperature=0.0)
        sampled.append(engine.generate(chosen, greedy, seed=seed, step=step, version=step))
    clock.lap("generate")
    return sampled


def score_rollouts(learner: Learner, reward: Reward, sampled: Sequence[Rollouts], state: dict[str, Any]) -> Scored:
    """Scores of what `sample` gave. Moves `score_moments` in the state where scores are normalised. Raises NumberError
    where the sampler's log-probabilities are not finite."""
    ppo, (rollouts, *likeliest) = learner.ppo, sampled
    parts = {"the sampler's log-probability": rollouts.sampler_logprobs_BT}
    check_rows(parts, rollouts.response_mask_BT, "")
    given_B = reward.score(rollouts)
    known_B = torch.isfinite(given_B)
    if ppo.normalise_scores:
        state["score_moments"] = moments.merge(moments_of(state, "score"), moments.of(given_B[known_B]))
    known, greedy_B = moments_of(state, "score"), None
    failed = dict(reward.failed)
    for one in likeliest:
        try:
            greedy_B = trained_scores(reward.score(one), one, ppo, known).repeat_interleave(ppo.responses_per_prompt)
        except StepError as error:
            error.rows = [p * ppo.responses_per_prompt for p in error.rows]
            raise
        known_B &= torch.isfinite(greedy_B)
        failed |= reward.failed
    scored = frozenset(known_B.nonzero().flatten().tolist())
    return Scored(given_B, trained_scores(given_B, rollouts, ppo, known), greedy_B, scored, list(failed.values()))


def kept_rows(rollouts: Rollouts, ppo: PpoConfig, scored: Collection[int]) -> list[int]:
    """Rows that are trained on: those that have a score, and with `truncated: drop` ended by themselves; where a
    response is compared with others to its prompt, one whose others were all left out goes too."""
    kept = [b for b in range(len(rollouts)) if b in scored]
    if ppo.truncated == "drop":
        kept = [b for b in kept if rollouts.finish[b] == "stop"]
    groups = Counter(b // ppo.responses_per_prompt for b in kept)
    alone = ppo.advantage in GROUPED
    return [b for b in kept if not alone or groups[b // ppo.responses_per_prompt] > 1]


def trained_scores(scores_B: Tensor, rollouts: Rollouts, ppo: PpoConfig, known: Moments) -> Tensor:
    """Scores as they are trained on: in units of what is known of them, less the penalty for a missing end."""
    return penalise_unfinished(moments.normalised(scores_B, known), _stopped(rollouts), ppo.missing_eos_penalty)


def make_experience(
    learner: Learner,
    rollouts: Rollouts,
    scores_B: Tensor,
    groups_B: Tensor,
    state: dict[str, Any],
    greedy_B: Tensor | None = None,
    clock: Clock | None = None,
) -> tuple[Experience, dict[str, float]]:
    """All that an update needs, from the weights before it. Metrics are over the response tokens of these rollouts.
    Raises NumberError where any of it is not finite, before anything in the state has moved.

    groups_B: which rows answer one prompt. greedy_B: score of each prompt's likeliest response, for remax. Moves
    `return_moments` in the state, and the critic's head with them, where the critic has popart. clock:
    takes the time of each pass.
    """
    clock = clock or Clock()
    roles, ppo, pad_id = learner.roles, learner.ppo, learner.pad_id
    sequences, mask_BT = rollouts.sequences(), rollouts.response_mask_BT
    passes = (sequences, ppo.temperature, pad_id, ppo.micro_tokens)
    policy_BT, entropy_BT = logprobs_BT(roles, "policy", *passes)
    clock.lap("policy")
    reference_BT, kl_BT = policy_BT, torch.zeros_like(policy_BT)
    if roles.has("reference"):
        reference_BT, _ = logprobs_BT(roles, "reference", *passes)
        estimator = ppo.kl.estimator
        kl_BT = exact_kl_BT(roles, *passes) if estimator == "exact" else ESTIMATORS[estimator](policy_BT, reference_BT)
        clock.lap("reference")
    parts = {"the policy's log-probability": policy_BT, "the reference's log-probability": reference_BT}
    check_rows({**parts, "the KL": kl_BT, "the reward": scores_B}, mask_BT, "")
    in_reward = state["kl_coefficient"] if ppo.kl.place == "reward" else 0.0
    rewards_BT = token_rewards(scores_B, kl_BT, in_reward, mask_BT)
    came_BT = monte_carlo_returns(rewards_BT, mask_BT, ppo.gamma)
    metrics = {
        "padding_experience": _padding(roles, sequences, ppo.micro_tokens),
        "entropy": masked_mean(entropy_BT, mask_BT, None).item(),
        "return_mean": masked_mean(came_BT, mask_BT, None).item(),
        "sampler_mismatch": (policy_BT - rollouts.sampler_logprobs_BT)[mask_BT].abs().max().item(),
    }
    if roles.has("reference"):
        metrics["kl_per_response"] = masked_sum(kl_BT, mask_BT).item() / len(rollouts)
        metrics["kl_per_token"] = masked_mean(kl_BT, mask_BT, None).item()
    before_BT = beyond_B = None
    if ppo.has_critic:
        clock.lap("experience")
        before_BT, last_B = values_BT(roles, sequences, pad_id, ppo.micro_tokens)
        clock.lap("values")
        known = moments_of(state, "return")
        before_BT, last_B = moments.denormalised(before_BT, known), moments.denormalised(last_B, known)
        if ppo.truncated == "bootstrap":
            beyond_B = torch.where(_stopped(rollouts), 0.0, last_B)
        # Explained variance is against what really came, not against returns that hold the critic's own guesses.
        metrics["explained_variance"] = explained_variance(before_BT, came_BT, mask_BT).item()
    advantages_BT, returns_BT = advantages(ppo, rewards_BT, mask_BT, before_BT, beyond_B, groups_B, greedy_B)
    check_rows(
        {
            **({} if before_BT is None else {"the critic's value": before_BT}),
            "the reward per token": rewards_BT,
            "the advantage": advantages_BT,
            **({} if returns_BT is None else {"the return": returns_BT}),
        },
        mask_BT,
        "",
    )
    if ppo.has_critic and ppo.critic.popart:
        assert returns_BT is not None
        _move_popart(roles, state, returns_BT[mask_BT])
    experience = Experience(
        rollouts,
        scores_B,
        policy_BT,
        reference_BT,
        before_BT,
        kl_BT,
        rewards_BT,
        advantages_BT,
        returns_BT,
    )
    clock.lap("experience")
    return experience, metrics


def _padding(roles: Roles, sequences: Sequence[TokenSequence], micro_tokens: int) -> float:
    parts = micro_batches(lengths_with_kin(sequences), micro_tokens, roles.workers("policy"))
    return padding_share([len(s) for s in sequences], parts)


def _move_popart(roles: Roles, state: dict[str, Any], returns_N: Tensor) -> None:
    old = moments_of(state, "return")
    new = moments.merge(old, moments.of(returns_N))
    state["return_moments"] = new
    roles.head("critic").rewrite(*popart(*roles.head("critic").weights, old, new))


def _stopped(rollouts: Rollouts) -> Tensor:
    return torch.tensor([finish == "stop" for finish in rollouts.finish])
