"""A classic task from start to end: play, experience, update, log; one loop for the three algorithms."""

import json
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.optim import Optimizer

from keel import metrics as registry
from keel.algo.moments import Moments, merge, of
from keel.classic import updates
from keel.classic.config import ClassicConfig
from keel.classic.environments import Environments, spaces_of
from keel.classic.experience import Experience, make_experience
from keel.classic.losses import mean
from keel.classic.networks import ActorCritic
from keel.classic.normalise import ObservationNormaliser, discounted_sums, scale_rewards
from keel.classic.rollout import Episodes, Rollout, play
from keel.errors import ConfigError, Interrupted, RunError, StopAtOnce
from keel.runs.console import Console
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import JsonLines
from keel.train.optim import linear_rate, make_optimizer, set_rate

STAGE = "classic"


def train_classic(
    config: ClassicConfig, folder: RunFolder, console: Console, command: str, overwrite: bool = False
) -> dict[str, Any]:
    """Trains in an open run folder and returns its summary; a run that is finished already gives its summary at once.

    Raises:
        ConfigError: the task cannot be made, or settings do not fit it.
        Interrupted: the user asked to stop; what is logged so far is kept.
        NumberError: a gradient is not finite.
        RunError: the folder is another run's, or holds one that was broken off.
    """
    torch.set_num_threads(config.threads)
    try:
        config = config.resolved(spaces_of(config.env).actions)
    except ValueError as error:
        raise ConfigError(str(error), where=f"keel classic {config.env}") from None
    settings = config.model_dump(mode="json", exclude_none=True)
    parts = {name: value for name, value in settings.items() if name not in ("name", "root")}
    fingerprint = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    stage = folder.stage(STAGE)
    state = stage.check(fingerprint, parts, overwrite)
    if state == "finished":
        result = stage.finished(fingerprint)
        assert result is not None
        return result
    if state != "new":
        _again(stage, fingerprint, parts, overwrite)
    folder.write_manifest({"classic": settings, "command": command})
    with Interrupt(lambda: console.line("finishing this update; again to stop at once")) as interrupt:
        summary = Learner(config).run(stage, console, interrupt, command)
    stage.finish(fingerprint, parts, summary)
    return summary


def _again(stage: StageFolder, fingerprint: str, parts: Mapping[str, Any], overwrite: bool) -> None:
    if not overwrite:
        raise RunError(
            "this run was stopped before its end, and runs of classic tasks hold no checkpoints to go on from",
            where=str(stage.path),
            remedy="--overwrite starts it again, another --name keeps both",
        )
    stage.clear()
    stage.check(fingerprint, parts)


class Learner:
    """All that changes while a task is learnt. config: resolved."""

    def __init__(self, config: ClassicConfig):
        assert config.environments and config.rollout
        self.config = config
        self.environments = Environments(config.env, config.environments, config.seed)
        # Independent streams: how much noise playing takes must not change the order of minibatches.
        streams = np.random.SeedSequence(config.seed, spawn_key=(1,)).generate_state(3, np.uint64)
        weights, self._noise, self._order = (torch.Generator().manual_seed(int(s >> 1)) for s in streams)
        spaces = self.environments.spaces
        critic = (config.trunk or "separate") if config.has_critic else None
        self.network = ActorCritic(spaces.observations, spaces.actions, spaces.count, config.hidden, critic, weights)
        self.normaliser = (
            ObservationNormaliser([Moments()] * spaces.observations) if config.normalise_observations else None
        )
        self.reward_moments, self._sums_E = Moments(), np.zeros(config.environments)
        self.optimizers = self._make_optimizers()
        self.episodes, self.steps, self.updates = Episodes(), 0, 0

    def _make_optimizers(self) -> dict[str, tuple[Optimizer, float]]:
        config, network = self.config, self.network

        def adam(parameters: list[torch.nn.Parameter]) -> Optimizer:
            return make_optimizer(parameters, beta2=0.999, eps=1e-5)

        if config.algorithm == "ppo":
            assert config.learning_rate
            return {"policy": (adam(list(network.parameters())), config.learning_rate)}
        made: dict[str, tuple[Optimizer, float]] = {}
        if config.learning_rate:
            made["policy"] = (adam(network.policy_parameters()), config.learning_rate)
        if config.critic_learning_rate:
            made["critic"] = (adam(network.value_parameters()), config.critic_learning_rate)
        return made

    def run(self, stage: StageFolder, console: Console, interrupt: Interrupt, command: str) -> dict[str, Any]:
        """Updates until the steps are used up; one line of metrics each, the weights at the end."""
        config, began, worked = self.config, time.monotonic(), time.process_time()
        try:
            with JsonLines(stage.metrics) as log, console.task(config.run_name, config.steps) as task:
                while self.steps < config.steps and not interrupt.requested:
                    metrics = self.update()
                    registry.check(set(metrics))
                    log.append({"step": self.updates, **metrics})
                    task.update(min(self.steps, config.steps), **_shown(metrics))
        except StopAtOnce as error:
            raise self._stopped(stage, command, error.number) from None
        finally:
            self.environments.close()
        if self.steps < config.steps:
            raise self._stopped(stage, command, interrupt.number)
        self._save(stage)
        seconds = time.monotonic() - began
        return {
            "env": config.env,
            "algorithm": config.algorithm,
            "seed": config.seed,
            "steps": self.steps,
            "updates": self.updates,
            "episodes": self.episodes.count,
            **self.episodes.means(),
            "seconds": seconds,
            "cpu_seconds": time.process_time() - worked,
            "steps_per_second": self.steps / seconds,
        }

    def _stopped(self, stage: StageFolder, command: str, number: int) -> Interrupted:
        error = Interrupted(
            f"stopped after {self.steps} steps; the metrics up to there are kept",
            where=str(stage.path),
            remedy=f"{command} --overwrite starts again",
        )
        error.exit_code = 128 + number
        return error

    def update(self) -> dict[str, float]:
        """Play, experience, one update of the algorithm, and its metrics."""
        config, start = self.config, time.monotonic()
        assert config.rollout
        rates = {}
        for name, (optimizer, peak) in self.optimizers.items():
            rates[name] = linear_rate(self.steps, config.steps, peak) if config.anneal else peak
            set_rate(optimizer, rates[name])
        whole = config.algorithm == "reinforce"
        rollout = play(self.environments, self.network, self.normaliser, config.rollout, whole, self._noise)
        self.episodes.add(rollout)
        played = time.monotonic()

        lam = 1.0 if config.lam is None else config.lam
        rewards_N = self._rewards(rollout)
        experience = make_experience(self.network, rollout, rewards_N, self.normaliser, config.gamma, lam)
        metrics = self._learn(experience, f"{config.run_name}, update {self.updates + 1}")
        with torch.no_grad():
            metrics["update_kl"] = mean(experience.policy.kl(self.network.policy(experience.observations_NO))).item()
        if self.normaliser:
            self.normaliser = self.normaliser.seen(rollout.packed(rollout.observations_TEO))
        self.steps += rollout.steps
        self.updates += 1
        return {
            "environment_steps": self.steps,
            "episodes": self.episodes.count,
            **self.episodes.means(),
            **metrics,
            "learning_rate": rates.get("policy", rates.get("critic", 0.0)),
            "seconds_generate": played - start,
            "seconds_update": time.monotonic() - played,
        }

    def _learn(self, experience: Experience, where: str) -> dict[str, float]:
        config, network = self.config, self.network
        optimizers = {name: optimizer for name, (optimizer, _) in self.optimizers.items()}
        foreseen = {"explained_variance": experience.explained_variance()} if config.has_critic else {}
        if config.algorithm == "ppo":
            return foreseen | updates.ppo(network, optimizers["policy"], experience, config, self._order, where)
        if config.algorithm == "trpo":
            metrics = updates.trpo(network, experience, config)
        else:
            metrics = updates.reinforce(network, optimizers["policy"], experience, config, where)
        if "critic" in optimizers:
            metrics |= updates.fit_critic(network, optimizers["critic"], experience, config, self._order, where)
        return foreseen | metrics

    def _rewards(self, rollout: Rollout) -> torch.Tensor:
        rewards = rollout.packed(rollout.rewards_TE)
        if self.config.normalise_rewards:
            sums_TE, self._sums_E = discounted_sums(
                rollout.rewards_TE, rollout.ended_TE, self.config.gamma, self._sums_E
            )
            sums_N = torch.from_numpy(rollout.packed(sums_TE))
            self.reward_moments = merge(self.reward_moments, of(sums_N))
            rewards = scale_rewards(rewards, self.reward_moments)
        return torch.from_numpy(rewards.astype(np.float32))

    def _save(self, stage: StageFolder) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.network.state_dict().items()}
        if self.network.value_trunk is self.network.policy_trunk:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("value_trunk.")}
        if self.normaliser:
            moments = self.normaliser.moments_O
            tensors["observation_mean"] = torch.tensor([m.mean for m in moments], dtype=torch.float64)
            tensors["observation_variance"] = torch.tensor([m.variance for m in moments], dtype=torch.float64)
        stage.model.mkdir(exist_ok=True)
        save_file(tensors, stage.model / "model.safetensors")


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    names = ("episode_return", "update_kl", "entropy", "explained_variance")
    return {name: metrics[name] for name in names if name in metrics}
