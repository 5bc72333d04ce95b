"""Online training, one step read top to bottom: generate, score, experience, update, after.

PPO as in Ouyang et al. 2022 (arXiv:2203.02155) and Ziegler et al. 2019 (arXiv:1909.08593): per-token KL to the
reference inside the reward, the score on the last token, GAE, clipped policy and value losses. Other policy gradients
differ by the literals of `ppo.advantage`, `ppo.policy.loss` and `ppo.kl`, which choose functions of `keel.algo`.

`train.experience` has what is computed before any weight moves, `train.update` what moves them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from keel.algo.kl import adapt_penalty, adaptive_coefficient
from keel.config import PpoConfig
from keel.data.encode import Encoder
from keel.data.stream import batch_rows, mixture_of
from keel.errors import StepError
from keel.models.flops import products_of
from keel.models.roles import Role
from keel.rewards.base import Reward
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.train.context import Run, Session
from keel.train.experience import kept_rows, make_experience, sample, score_rollouts
from keel.train.learner import Learner, first_state
from keel.train.numbers import told_rollouts
from keel.train.optim import linear_rate, make_optimizer, set_rate
from keel.train.profile import Clock, product_rate, profile_metrics, step_work
from keel.train.update import update
from keel.train.watching import rollout_metrics, shown, write_samples
from keel.types import Experience, Prompt, Rollouts


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
    peaks = _peak_rates(ppo)
    optimizers: dict[str, Optimizer] = {role: make_optimizer(roles.parameters(role).values()) for role in peaks}
    session = Session(run, stage, roles, optimizers, ppo.checkpoint_every, first_state(ppo), best=ppo.keep_best)
    state, engine, mixture = session.state, LocalEngine(roles, encoder), mixture_of(ppo.data, prompts)
    if session.step:  # what was cut before the run broke off
        encoder.counts.clear()
        encoder.counts.update(state["cut"])
    products, speed = products_of(roles, "policy"), product_rate(roles.model("policy").dtype, roles.device)
    with session, run.console.task("ppo", ppo.updates, unit="update", start=session.step) as task:
        while session.step < ppo.updates:
            step, clock = session.step, Clock()
            rates = {role: linear_rate(step, ppo.updates, peak) for role, peak in peaks.items()}
            for role, rate in rates.items():
                set_rate(optimizers[role], rate)
            rows = batch_rows(len(prompts), ppo.rollouts // ppo.responses_per_prompt, step, seed, mixture=mixture)
            sampled = sample(learner, engine, [prompts[i] for i in rows], step, clock)
            experience, metrics = collect(learner, session, sampled, reward, gold, clock)
            roles.rest()  # frozen ones: an update needs its memory for gradients
            taught: list[Role] = []
            if experience:
                state["warming"] = still_warming(ppo, state, metrics, step)
                taught = ["critic"] if state["warming"] else list(peaks)
                some = {role: optimizers[role] for role in taught}
                metrics |= update(learner, experience, step, state, some, session.bad_step)
            clock.lap("update")
            metrics |= {
                "kl_coefficient": state["kl_coefficient"],
                "warming": float(state["warming"]),
                "learning_rate": rates["policy"],
            }
            taken = metrics.get("steps_taken", 0.0)
            used = experience.rollouts if experience else None
            if used and taken and not state["warming"]:  # no policy has moved, no KL to steer by
                _steer(state, metrics, ppo, len(used))
            session.step += 1
            work = step_work(products, sampled, used, taught, ppo.epochs * taken, roles.has("reward"))
            profile = profile_metrics(clock.laps, work, speed)
            numbers = session.log({**metrics, **clock.laps, **profile, "seconds": clock.total()})
            if experience:
                write_samples(session, experience)
            task.update(session.step, **shown(numbers))
            state["cut"] = dict(encoder.counts)
            session.end_step(session.step == ppo.updates)


def _peak_rates(ppo: PpoConfig) -> dict[Role, float]:
    assert ppo.policy.learning_rate
    peaks: dict[Role, float] = {"policy": ppo.policy.learning_rate}
    if ppo.has_critic:
        assert ppo.critic.learning_rate
        peaks["critic"] = ppo.critic.learning_rate
    return peaks


def collect(
    learner: Learner,
    session: Session,
    sampled: Sequence[Rollouts],
    reward: Reward,
    gold: Callable[[Rollouts], Tensor] | None,
    clock: Clock,
) -> tuple[Experience | None, dict[str, float]]:
    """Scores and experience of what `sample` gave, with their metrics. No experience where no row is left to train on,
    or where a number is bad and the session lets the run go on; that one is told the rows and why."""
    ppo, rollouts, step = learner.ppo, sampled[0], session.step
    metrics: dict[str, float] = {}
    kept: list[int] = []
    experience: Experience | None = None
    try:
        scored = score_rollouts(learner, reward, sampled, session.state)
        metrics = rollout_metrics(rollouts, scored.given_B, gold, ppo.responses_per_prompt)
        clock.lap("score")
        kept = kept_rows(rollouts, ppo, scored.scored)
        metrics["dropped"] = len(rollouts) - len(kept)
        if scored.failed:
            metrics["unscored"] = len(rollouts) - len(scored.scored)
            session.unscored(scored.failed)
        if kept:
            experience, more = make_experience(
                learner,
                rollouts.select(kept),
                scored.scores_B[kept],
                torch.tensor(kept) // ppo.responses_per_prompt,
                session.state,
                None if scored.greedy_B is None else scored.greedy_B[kept],
                clock,
            )
            metrics |= more
    except StepError as error:
        error.rows = [kept[b] for b in error.rows] if kept else error.rows
        error.where = "; ".join(filter(None, (f"ppo, update {step + 1}", error.where)))
        session.bad_step(error, told_rollouts(rollouts, range(len(rollouts))))
    return experience, metrics


def still_warming(ppo: PpoConfig, state: Mapping[str, Any], metrics: Mapping[str, float], step: int) -> bool:
    """Whether only the critic learns: until it explains enough of fresh returns, or `critic.warmup_cap` updates."""
    critic = ppo.critic
    if not state["warming"]:
        return False
    return not (metrics["explained_variance"] >= critic.warmup_explained_variance or step >= critic.warmup_cap)


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
