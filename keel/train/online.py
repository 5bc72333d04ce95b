"""PPO, one step read top to bottom: generate, score, experience, update, after.

Ouyang et al. 2022 (arXiv:2203.02155) and Ziegler et al. 2019 (arXiv:1909.08593): per-token KL to the reference inside
the reward, the score on the last token, GAE, clipped policy and value losses.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from keel.algo.advantages import gae
from keel.algo.kl import adaptive_coefficient, k1
from keel.algo.masking import masked_mean, masked_sum, masked_whiten
from keel.algo.policy_loss import ppo_clip
from keel.algo.shaping import monte_carlo_returns, penalise_unfinished, token_rewards
from keel.algo.value_loss import explained_variance, value_loss
from keel.config import KlConfig, PpoConfig
from keel.data.encode import Encoder, micro_batches, pad_sequences
from keel.data.stream import batch_rows
from keel.errors import NumberError
from keel.models.roles import Role, Roles, logprobs_BT, micro_logprobs, micro_values, values_BT
from keel.rewards.base import Reward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.train.context import Run, Session
from keel.train.optim import guarded_step, linear_rate, make_optimizer, set_rate
from keel.types import Experience, Prompt, Rollouts

SHOWN_SAMPLES = 4
"""Responses written to samples.jsonl per update."""


def train_ppo(
    run: Run,
    stage: StageFolder,
    roles: Roles,
    encoder: Encoder,
    prompts: Sequence[Prompt],
    reward: Reward,
    gold: Callable[[Rollouts], Tensor] | None,
) -> None:
    """Trains the roles `policy` and `critic`; goes on from the newest checkpoint.

    gold: scores that are only logged, never trained on. Raises Interrupted, NumberError, RewardError, RunError.
    """
    ppo, seed = _settings(run), run.recipe.seed
    assert ppo.policy.learning_rate and ppo.critic.learning_rate
    peaks: dict[Role, float] = {"policy": ppo.policy.learning_rate, "critic": ppo.critic.learning_rate}
    optimizers: dict[str, Optimizer] = {role: make_optimizer(roles.parameters(role).values()) for role in peaks}
    start = {"kl_coefficient": ppo.kl.coefficient, "warming": ppo.critic.warmup_cap > 0}
    session = Session(run, stage, roles, optimizers, ppo.checkpoint_every, start)
    state = session.state
    engine = LocalEngine(roles, encoder)
    sampling = Sampling(ppo.temperature, run.recipe.model.max_response_tokens)
    with session, run.console.task("ppo", ppo.updates, unit="update", start=session.step) as task:
        while session.step < ppo.updates:
            step, clock = session.step, _Clock()
            rates = {role: linear_rate(step, ppo.updates, peak) for role, peak in peaks.items()}
            for role, rate in rates.items():
                set_rate(optimizers[role], rate)

            chosen = batch_rows(len(prompts), ppo.rollouts // ppo.responses_per_prompt, step, seed)
            asked = [prompts[i] for i in chosen for _ in range(ppo.responses_per_prompt)]
            rollouts = engine.generate(asked, sampling, seed=seed, step=step, version=step)
            clock.lap("generate")

            scores_B = reward.score(rollouts)
            seen = _rollout_metrics(rollouts, scores_B, gold)
            clock.lap("score")

            kept = _kept(rollouts, ppo)
            seen["dropped"] = len(rollouts) - len(kept)
            metrics: dict[str, float] = {}
            if kept:
                experience, metrics = make_experience(
                    roles, encoder.pad_id, rollouts.select(kept), scores_B[kept], ppo, state["kl_coefficient"]
                )
                clock.lap("experience")
                fresh = metrics["explained_variance"]
                if fresh >= ppo.critic.warmup_explained_variance or step >= ppo.critic.warmup_cap:
                    state["warming"] = False
                learners: list[Role] = ["critic"] if state["warming"] else ["policy", "critic"]
                metrics |= update(
                    roles, encoder.pad_id, experience, ppo, (seed, step), {role: optimizers[role] for role in learners}
                )
            clock.lap("update")

            metrics |= {
                "kl_coefficient": state["kl_coefficient"],
                "warming": float(state["warming"]),
                "learning_rate": rates["policy"],
            }
            if kept and ppo.kl.controller == "adaptive" and not state["warming"]:  # no policy, no KL to steer by
                state["kl_coefficient"] = _adapted(
                    state["kl_coefficient"], metrics["kl_per_response"], ppo.kl, len(kept)
                )
            session.step += 1
            numbers = session.log({**seen, **metrics, **clock.laps, "seconds": clock.total()})
            if kept:
                _write_samples(session, experience)
            task.update(session.step, **_shown(numbers))
            session.end_step(session.step == ppo.updates)


def make_experience(
    roles: Roles, pad_id: int, rollouts: Rollouts, scores_B: Tensor, ppo: PpoConfig, kl_coefficient: float
) -> tuple[Experience, dict[str, float]]:
    """All that an update needs, from the weights before it. Metrics are over the response tokens of these rollouts."""
    sequences, mask_BT = rollouts.sequences(), rollouts.response_mask_BT
    policy_BT, entropy_BT = logprobs_BT(roles, "policy", sequences, ppo.temperature, pad_id, ppo.micro_tokens)
    if roles.has("reference"):
        reference_BT, _ = logprobs_BT(roles, "reference", sequences, ppo.temperature, pad_id, ppo.micro_tokens)
    else:
        reference_BT = policy_BT
    before_BT, last_B = values_BT(roles, sequences, pad_id, ppo.micro_tokens)
    kl_BT = k1(policy_BT, reference_BT)
    stopped_B = torch.tensor([finish == "stop" for finish in rollouts.finish])
    shaped_B = penalise_unfinished(scores_B, stopped_B, ppo.missing_eos_penalty)
    rewards_BT = token_rewards(shaped_B, kl_BT, kl_coefficient, mask_BT)
    beyond_B = torch.where(stopped_B, 0.0, last_B) if ppo.truncated == "bootstrap" else None
    advantages_BT, returns_BT = gae(rewards_BT, before_BT, mask_BT, ppo.gamma, ppo.lam, beyond_B)
    experience = Experience(
        rollouts,
        scores_B,
        policy_BT,
        reference_BT,
        before_BT,
        kl_BT,
        rewards_BT,
        masked_whiten(advantages_BT, mask_BT),
        returns_BT,
    )
    # Explained variance is against what really came, not against returns that hold the critic's own guesses.
    came_BT = monte_carlo_returns(rewards_BT, mask_BT, ppo.gamma)
    metrics = {
        "entropy": masked_mean(entropy_BT, mask_BT, None).item(),
        "explained_variance": explained_variance(before_BT, came_BT, mask_BT).item(),
        "return_mean": masked_mean(came_BT, mask_BT, None).item(),
        "sampler_mismatch": (policy_BT - rollouts.sampler_logprobs_BT)[mask_BT].abs().max().item(),
    }
    if roles.has("reference"):
        metrics["kl_per_response"] = masked_sum(kl_BT, mask_BT).item() / len(rollouts)
        metrics["kl_per_token"] = masked_mean(kl_BT, mask_BT, None).item()
    return experience, metrics


def update(
    roles: Roles,
    pad_id: int,
    experience: Experience,
    ppo: PpoConfig,
    key: tuple[int, int],
    optimizers: Mapping[str, Optimizer],
) -> dict[str, float]:
    """Epochs of minibatches of micro-batches; each minibatch is one step of each optimizer that is given.

    key: (seed, step), from which the order of rows is drawn. Without the policy's optimizer only the critic learns.
    Returns means over the minibatches; `first_log_ratio` is the largest |log ratio| of the very first one.
    """
    minibatches = min(ppo.minibatches, len(experience.rollouts))
    totals: dict[str, float] = {}
    first: dict[str, float] = {}
    for epoch in range(ppo.epochs):
        # PCG64 by name: default_rng may change its bit generator between numpy versions.
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*key, epoch]))).permutation(
            len(experience.rollouts)
        )
        for number, rows in enumerate(np.array_split(order, minibatches)):
            metrics = accumulate(roles, pad_id, experience, rows.tolist(), ppo, optimizers.keys())
            largest = metrics.pop("log_ratio_abs_max", None)
            if largest is not None and not totals:
                first["first_log_ratio"] = largest
            bounds = {"policy": ppo.policy.max_grad_norm, "critic": ppo.critic.max_grad_norm}
            where = f"ppo, update {key[1] + 1}, epoch {epoch + 1}, minibatch {number + 1}"
            for role, norm in guarded_step(optimizers, bounds, where).items():
                metrics[f"{role}_grad_norm"] = norm
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
    return {name: value / (ppo.epochs * minibatches) for name, value in totals.items()} | first


def accumulate(
    roles: Roles, pad_id: int, experience: Experience, rows: Sequence[int], ppo: PpoConfig, learners: Collection[str]
) -> dict[str, float]:
    """Adds the gradients of one minibatch, micro-batch by micro-batch; both losses are means over its response tokens.

    Raises NumberError where a loss is not finite, before any optimizer has stepped.
    """
    sequences, mask_BT = experience.rollouts.sequences(), experience.rollouts.response_mask_BT
    tokens = int(mask_BT[list(rows)].sum())
    totals: Counter[str] = Counter()
    largest = 0.0
    for part in micro_batches([len(sequences[i]) for i in rows], ppo.micro_tokens):
        some = [rows[i] for i in part]
        ids_BS, places_BS, _ = pad_sequences([sequences[i] for i in some], pad_id)
        ids_BS, places_BS = ids_BS.to(roles.device), places_BS.to(roles.device)
        old = _Packed(experience, some, roles.device)
        if "policy" in learners:
            logprobs_N, _ = micro_logprobs(roles, "policy", ids_BS, places_BS, ppo.temperature)
            clip = ppo.policy.clip
            loss, metrics = ppo_clip(
                logprobs_N, old.logprobs_N, old.advantages_N, old.mask_N, tokens, clip_low=clip, clip_high=clip
            )
            _backward(loss, "policy")
            totals.update({"policy_loss": loss.item()})
            totals.update({name: metrics[name].item() / tokens for name in ("clip_fraction", "approx_kl")})
            largest = max(largest, metrics["log_ratio_abs_max"].item())
        values_N = micro_values(roles, ids_BS, places_BS)
        loss, _ = value_loss(values_N, old.values_N, old.returns_N, old.mask_N, ppo.critic.clip, tokens)
        _backward(loss, "critic")
        totals.update({"value_loss": loss.item()})
    return dict(totals) | ({"log_ratio_abs_max": largest} if "policy" in learners else {})


class _Packed:
    """What a micro-batch's losses need, its response tokens in the order in which the passes give them: [N]."""

    def __init__(self, experience: Experience, rows: list[int], device: torch.device):
        mask_BT = experience.rollouts.response_mask_BT[rows]

        def pack(x_BT: Tensor) -> Tensor:
            return x_BT[rows][mask_BT].to(device)

        self.logprobs_N, self.advantages_N = pack(experience.policy_logprobs_BT), pack(experience.advantages_BT)
        self.values_N, self.returns_N = pack(experience.values_BT), pack(experience.returns_BT)
        self.mask_N = torch.ones(len(self.values_N), dtype=torch.bool, device=device)


def _backward(loss: Tensor, part: str) -> None:
    if not torch.isfinite(loss):
        raise NumberError(
            f"the {part}'s loss is {loss.item()}; the optimizer did not step",
            where="ppo",
            remedy="look at the rewards of this step; the same command goes on from the last checkpoint",
        )
    loss.backward()


def _settings(run: Run) -> PpoConfig:
    assert run.recipe.ppo is not None
    return run.recipe.ppo


def _kept(rollouts: Rollouts, ppo: PpoConfig) -> list[int]:
    return [b for b, finish in enumerate(rollouts.finish) if ppo.truncated != "drop" or finish == "stop"]


def _adapted(coefficient: float, kl_per_response: float, kl: KlConfig, episodes: int) -> float:
    assert kl.target is not None and kl.horizon is not None
    return adaptive_coefficient(coefficient, kl_per_response, kl.target, kl.horizon, episodes)


def _rollout_metrics(
    rollouts: Rollouts, scores_B: Tensor, gold: Callable[[Rollouts], Tensor] | None
) -> dict[str, float]:
    seen = {
        "score": scores_B.mean().item(),
        "score_sd": scores_B.std(correction=0).item(),
        "length": rollouts.lengths_B.float().mean().item(),
        "eos_rate": sum(finish == "stop" for finish in rollouts.finish) / len(rollouts),
        "distinct": len(set(rollouts.texts)) / len(rollouts),
    }
    if gold:
        seen["gold"] = gold(rollouts).mean().item()
    return seen


def _shown(numbers: dict[str, float]) -> dict[str, float]:
    names = ("score", "gold", "kl_per_response", "length", "explained_variance")
    return {name: numbers[name] for name in names if name in numbers}


def _write_samples(session: Session, experience: Experience) -> None:
    rollouts = experience.rollouts
    for b in range(min(SHOWN_SAMPLES, len(rollouts))):
        inside = rollouts.response_mask_BT[b]
        streams = {"kl": experience.kl_BT, "value": experience.values_BT, "advantage": experience.advantages_BT}
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
                },
            }
        )


class _Clock:
    """Seconds of the parts of a step, by the names that the metrics have."""

    def __init__(self) -> None:
        self.start = self.mark = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[f"seconds_{name}"], self.mark = now - self.mark, now

    def total(self) -> float:
        return time.monotonic() - self.start
