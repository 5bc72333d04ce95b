"""Online training, one step read top to bottom: generate, score, experience, update, after.

PPO as in Ouyang et al. 2022 (arXiv:2203.02155) and Ziegler et al. 2019 (arXiv:1909.08593): per-token KL to the
reference inside the reward, the score on the last token, GAE, clipped policy and value losses. Other policy gradients
differ by the literals of `ppo.advantage`, `ppo.policy.loss` and `ppo.kl`, which choose functions of `keel.algo`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from keel.algo import moments
from keel.algo.kl import ESTIMATORS, adapt_penalty, adaptive_coefficient
from keel.algo.masking import loss_denominators, masked_mean, masked_sum
from keel.algo.moments import Moments
from keel.algo.shaping import monte_carlo_returns, penalise_unfinished, token_rewards
from keel.algo.value_loss import explained_variance, popart, value_loss
from keel.config import GROUPED, PpoConfig
from keel.data.encode import Encoder, micro_batches, pad_sequences
from keel.data.stream import batch_rows, mixture_of
from keel.errors import NumberError, RewardError, StepError
from keel.models.flops import products_of
from keel.models.roles import (
    Role,
    Roles,
    exact_kl_BT,
    lengths_with_kin,
    logprobs_BT,
    micro_policy,
    micro_values,
    unpacked,
    values_BT,
)
from keel.models.side_by_side import add_gradients
from keel.rewards.base import Reward
from keel.rollout.engine import Engine, Sampling
from keel.rollout.local import LocalEngine
from keel.runs.files import not_finite
from keel.runs.folder import StageFolder
from keel.train.choices import Before, Now, advantages, policy_objective
from keel.train.context import Run, Session
from keel.train.numbers import check_rows, rows_at_fault, told_rollouts
from keel.train.optim import guarded_step, linear_rate, make_optimizer, set_rate
from keel.train.profile import Clock, product_rate, profile_metrics, step_work
from keel.train.watching import rollout_metrics, shown, write_samples
from keel.types import Experience, Prompt, Rollouts

ROLES_TRAINED: tuple[Role, ...] = ("policy", "critic")
FIRST_PENALTY = 1.0
"""Where the penalty of `policy.loss: kl_penalty` starts (advantage per nat); it soon adapts [PPO, section 4]."""


@dataclass(frozen=True)
class Learner:
    """What every part of a step works with.

    max_tokens: the limit of a response. ptx: adds the gradient of language modelling for the n-th minibatch of the run,
    and returns its loss.
    """

    roles: Roles
    pad_id: int
    max_tokens: int
    ppo: PpoConfig
    seed: int
    ptx: Callable[[int], float] | None = None


def first_state(ppo: PpoConfig) -> dict[str, Any]:
    """What the loop changes beside weights, as plain values for a checkpoint. Moments are count, mean, m2."""
    return {
        "kl_coefficient": ppo.kl.coefficient,
        "warming": ppo.has_critic and ppo.critic.warmup_cap > 0,
        "old_kl_penalty": FIRST_PENALTY,
        "score_moments": Moments(),
        "return_moments": Moments(),
    }


def train_online(
    run: Run,
    stage: StageFolder,
    learner: Learner,
    encoder: Encoder,
    prompts: Sequence[Prompt],
    reward: Reward,
    gold: Callable[[Rollouts], Tensor] | None,
) -> None:
    """Trains the role `policy`, and `critic` where the advantage needs one; goes on from the newest checkpoint.

    gold: scores that are only logged, never trained on. Raises Interrupted, NumberError, RewardError, RunError.
    """
    roles, ppo, seed = learner.roles, learner.ppo, learner.seed
    assert ppo.policy.learning_rate
    peaks: dict[Role, float] = {"policy": ppo.policy.learning_rate}
    if ppo.has_critic:
        assert ppo.critic.learning_rate
        peaks["critic"] = ppo.critic.learning_rate
    optimizers: dict[str, Optimizer] = {role: make_optimizer(roles.parameters(role).values()) for role in peaks}
    session = Session(run, stage, roles, optimizers, ppo.checkpoint_every, first_state(ppo), best=ppo.keep_best)
    state, each = session.state, ppo.responses_per_prompt
    engine, mixture = LocalEngine(roles, encoder), mixture_of(ppo.data, prompts)
    products, speed = products_of(roles, "policy"), product_rate(roles.model("policy").dtype, roles.device)
    with session, run.console.task("ppo", ppo.updates, unit="update", start=session.step) as task:
        while session.step < ppo.updates:
            step, clock = session.step, Clock()
            rates = {role: linear_rate(step, ppo.updates, peak) for role, peak in peaks.items()}
            for role, rate in rates.items():
                set_rate(optimizers[role], rate)

            rows = batch_rows(len(prompts), ppo.rollouts // each, step, seed, mixture=mixture)
            chosen = [prompts[i] for i in rows]
            sampled = sample(learner, engine, chosen, step, clock)
            rollouts = sampled[0]
            seen: dict[str, float] = {}
            metrics: dict[str, float] = {}
            learners: list[Role] = []
            kept: list[int] = []
            experience: Experience | None = None
            try:
                scored = score_rollouts(learner, reward, sampled, state)
                seen = rollout_metrics(rollouts, scored.given_B, gold, each)
                clock.lap("score")
                kept = kept_rows(rollouts, ppo, scored.scored)
                seen["dropped"] = len(rollouts) - len(kept)
                if scored.failed:
                    seen["unscored"] = len(rollouts) - len(scored.scored)
                    session.unscored(scored.failed)
                if kept:
                    experience, metrics = make_experience(
                        learner,
                        rollouts.select(kept),
                        scored.scores_B[kept],
                        torch.tensor(kept) // each,
                        state,
                        None if scored.greedy_B is None else scored.greedy_B[kept],
                        clock,
                    )
            except StepError as error:
                error.rows = [kept[b] for b in error.rows] if kept else error.rows
                error.where = "; ".join(filter(None, (f"ppo, update {step + 1}", error.where)))
                session.bad_step(error, told_rollouts(rollouts, range(len(rollouts))))
            if experience:
                if ppo.has_critic:
                    fresh, critic = metrics["explained_variance"], ppo.critic
                    if fresh >= critic.warmup_explained_variance or step >= critic.warmup_cap:
                        state["warming"] = False
                learners = ["critic"] if state["warming"] else list(peaks)
                chosen_optimizers = {role: optimizers[role] for role in learners}
                metrics |= update(learner, experience, step, state, chosen_optimizers, session.bad_step)
            clock.lap("update")

            metrics |= {
                "kl_coefficient": state["kl_coefficient"],
                "warming": float(state["warming"]),
                "learning_rate": rates["policy"],
            }
            if metrics.get("steps_taken") and not state["warming"]:  # no policy has moved, no KL to steer by
                _steer(state, metrics, ppo, len(kept))
            session.step += 1
            work = step_work(
                products,
                sampled,
                experience.rollouts if experience else None,
                learners,
                ppo.epochs * metrics.get("steps_taken", 0.0),
                roles.has("reward"),
            )
            profile = profile_metrics(clock.laps, work, speed)
            numbers = session.log({**seen, **metrics, **clock.laps, **profile, "seconds": clock.total()})
            if experience:
                write_samples(session, experience)
            task.update(session.step, **shown(numbers))
            session.end_step(session.step == ppo.updates)


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
        state["score_moments"] = moments.merge(_moments(state, "score"), moments.of(given_B[known_B]))
    known, greedy_B = _moments(state, "score"), None
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
        known = _moments(state, "return")
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


def _reraise(error: StepError, batch: Sequence[Mapping[str, Any]]) -> None:
    raise error


def update(
    learner: Learner,
    experience: Experience,
    step: int,
    state: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    bad_step: Callable[[StepError, Sequence[Mapping[str, Any]]], None] = _reraise,
) -> dict[str, float]:
    """Epochs of minibatches of micro-batches; each minibatch is one step of each optimizer that is given.

    The order of rows is drawn from (seed, step). Without the policy's optimizer only the critic learns. Ends early at a
    minibatch whose approximate KL passes `policy.target_kl`, without that step. Returns means over the minibatches that
    were stepped; `first_log_ratio` is the largest |log ratio| of the very first one.

    bad_step: told of a minibatch with a number that is not finite, with its rows; where it returns, that minibatch is
    left out.
    """
    ppo, rows_in_all = learner.ppo, len(experience.rollouts)
    minibatches = min(ppo.minibatches, rows_in_all)
    planned = ppo.epochs * minibatches
    bounds = {"policy": ppo.policy.max_grad_norm, "critic": ppo.critic.max_grad_norm}
    totals: Counter[str] = Counter()
    first: dict[str, float] = {}
    done = 0
    for epoch in range(ppo.epochs):
        # PCG64 by name: default_rng may change its bit generator between numpy versions.
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([learner.seed, step, epoch]))).permutation(
            rows_in_all
        )
        for number, rows in enumerate(part.tolist() for part in np.array_split(order, minibatches)):
            where = f"ppo, update {step + 1}, epoch {epoch + 1}, minibatch {number + 1}"
            try:
                metrics = accumulate(learner, experience, rows, state, optimizers.keys(), where)
                if bad := not_finite(metrics):
                    raise NumberError(f"{bad} is not finite; no weight was changed", where=where)
                largest = metrics.pop("log_ratio_abs_max", None)
                # Not before the first step: there the policy is the old one, and all that is measured is rounding.
                if done and ppo.policy.target_kl and metrics.get("approx_kl", 0.0) > ppo.policy.target_kl:
                    for optimizer in optimizers.values():
                        optimizer.zero_grad(set_to_none=True)
                    return _means(totals, done, planned) | first
                if learner.ptx and "policy" in optimizers:
                    metrics["ptx_loss"] = learner.ptx(step * planned + done)
                for role, norm in guarded_step(optimizers, bounds, where).items():
                    metrics[f"{role}_grad_norm"] = norm
            except NumberError as error:
                if not error.final:
                    error.rows = _rows_at_fault(learner, experience, rows, state, optimizers.keys())
                bad_step(error, told_rollouts(experience.rollouts, rows, experience.scores_B))
                continue
            if largest is not None and not done:
                first["first_log_ratio"] = largest
            totals.update(metrics)
            done += 1
    return _means(totals, done, planned) | first


def _rows_at_fault(
    learner: Learner, experience: Experience, rows: list[int], state: Mapping[str, Any], learners: Collection[str]
) -> list[int]:
    parameters = [p for role in ROLES_TRAINED if role in learners for p in learner.roles.parameters(role).values()]
    return rows_at_fault(rows, lambda some: accumulate(learner, experience, some, state, learners, "alone"), parameters)


def accumulate(
    learner: Learner,
    experience: Experience,
    rows: Sequence[int],
    state: Mapping[str, Any],
    learners: Collection[str],
    where: str,
) -> dict[str, float]:
    """Adds the gradients of one minibatch, micro-batch by micro-batch; denominators are counted over all of it before.

    where: the minibatch, for errors. Raises NumberError where a loss is not finite, before any optimizer has stepped.
    """
    roles, ppo = learner.roles, learner.ppo
    sequences, lengths_B = experience.rollouts.sequences(), experience.rollouts.lengths_B
    tokens = int(lengths_B[list(rows)].sum())
    assert ppo.policy.aggregation is not None
    denominators_B1 = torch.ones(len(sequences), 1)
    denominators_B1[list(rows)] = loss_denominators(lengths_B[list(rows)], ppo.policy.aggregation, learner.max_tokens)

    def micro(part: list[int]) -> tuple[Tensor, Tensor, Before, list[int]]:
        some = [rows[i] for i in part]
        ids_BS, places_BS, _ = pad_sequences([sequences[i] for i in some], learner.pad_id)
        return ids_BS.to(roles.device), places_BS.to(roles.device), Before.of(experience, some, roles.device), some

    def policy_loss(part: list[int]) -> tuple[Tensor, dict[str, float]]:
        ids_BS, places_BS, old, some = micro(part)
        exact = ppo.kl.place == "loss" and ppo.kl.estimator == "exact"
        logprobs_N, entropy_N, kl_N = micro_policy(roles, ids_BS, places_BS, ppo.temperature, exact)
        now = Now(
            unpacked(logprobs_N, old.mask_BT),
            unpacked(entropy_N, old.mask_BT),
            None if kl_N is None else unpacked(kl_N, old.mask_BT),
        )
        loss, metrics = policy_objective(ppo, now, old, denominators_B1[some].to(roles.device), state)
        return _finite(loss, "policy", where), {
            "policy_loss": loss.item(),
            **{n: total.item() for n, total in metrics.items()},
        }

    known = _moments(state, "return")  # the critic's outputs are in their units; 0 and 1 without popart

    def critic_loss(part: list[int]) -> tuple[Tensor, float]:
        ids_BS, places_BS, old, _ = micro(part)
        assert old.values_BT is not None and old.returns_BT is not None
        values_BT = unpacked(micro_values(roles, ids_BS, places_BS), old.mask_BT)
        before_BT, returns_BT = (moments.normalised(x_BT, known) for x_BT in (old.values_BT, old.returns_BT))
        loss, _ = value_loss(values_BT, before_BT, returns_BT, old.mask_BT, ppo.critic.clip, tokens)
        return _finite(loss, "critic", where), loss.item()

    losses: dict[str, Callable[[list[int]], tuple[Tensor, Any]]] = {"policy": policy_loss, "critic": critic_loss}
    taught: list[Role] = [role for role in ROLES_TRAINED if role in learners]
    workers = min(roles.workers(role) for role in taught)
    # Where cores work side by side, each takes a role rather than a piece of both: fewer and larger operations.
    lengths = lengths_with_kin([sequences[i] for i in rows])
    parts = micro_batches(lengths, ppo.micro_tokens, max(1, workers // len(taught)))
    jobs = [(role, part) for role in taught for part in parts]
    parameters = [parameter for role in taught for parameter in roles.parameters(role).values()]
    found = add_gradients(lambda job: losses[job[0]](job[1]), jobs, parameters, workers)
    told = {role: [what for (own, _), what in zip(jobs, found, strict=True) if own == role] for role in taught}

    totals: dict[str, float] = {}
    if "policy" in told:
        largest = max(metrics.pop("log_ratio_abs_max") for metrics in told["policy"])
        loss = sum(metrics.pop("policy_loss") for metrics in told["policy"])
        sums = Counter[str]()
        for metrics in told["policy"]:
            sums.update(metrics)
        totals = {"policy_loss": loss, "log_ratio_abs_max": largest, **{name: n / tokens for name, n in sums.items()}}
    if "critic" in told:
        totals["value_loss"] = sum(told["critic"])
    return totals


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


def _stopped(rollouts: Rollouts) -> Tensor:
    return torch.tensor([finish == "stop" for finish in rollouts.finish])


def _moments(state: Mapping[str, Any], what: str) -> Moments:
    count, mean, m2 = state[f"{what}_moments"]  # a list, once it has been in a checkpoint
    return Moments(count, mean, m2)


def _move_popart(roles: Roles, state: dict[str, Any], returns_N: Tensor) -> None:
    old = _moments(state, "return")
    new = moments.merge(old, moments.of(returns_N))
    state["return_moments"] = new
    roles.head("critic").rewrite(*popart(*roles.head("critic").weights, old, new))


def _steer(state: dict[str, Any], metrics: Mapping[str, float], ppo: PpoConfig, episodes: int) -> None:
    """Moves the coefficients that follow a KL: to the reference, and to the policy before the update."""
    kl = ppo.kl
    if kl.controller == "adaptive":
        assert kl.target is not None and kl.horizon is not None
        state["kl_coefficient"] = adaptive_coefficient(
            state["kl_coefficient"], metrics["kl_per_response"], kl.target, kl.horizon, episodes
        )
    if ppo.policy.loss == "kl_penalty":
        assert ppo.policy.old_kl_target is not None
        state["old_kl_penalty"] = adapt_penalty(state["old_kl_penalty"], metrics["approx_kl"], ppo.policy.old_kl_target)


def _means(totals: Mapping[str, float], done: int, planned: int) -> dict[str, float]:
    return {name: value / max(done, 1) for name, value in totals.items()} | {"steps_taken": done / planned}


def _finite(loss: Tensor, part: str, where: str) -> Tensor:
    if not torch.isfinite(loss):
        raise NumberError(
            f"the {part}'s loss is {loss.item()}; the optimizer did not step",
            where=where,
            remedy="the same command goes on from the last checkpoint",
        )
    return loss
