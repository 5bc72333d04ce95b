"""Playing, and cutting what was played into rows: one row is one episode's piece inside one rollout."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from keel.classic.distributions import Categorical, Gaussian
from keel.classic.environments import Environments
from keel.classic.networks import ActorCritic
from keel.classic.normalise import ObservationNormaliser

NOISE_BLOCK = 128
"""Steps whose noise is drawn at once."""
LAST_EPISODES = 100
"""Episodes whose mean return is reported, as the field does."""


class Row(NamedTuple):
    """Steps start <= t < stop of one environment, all of one episode. terminated: the episode ended there by itself, so
    that nothing follows; otherwise it was cut (a time limit, or the end of the rollout) and V of `last_O` follows."""

    environment: int
    start: int
    stop: int
    terminated: bool
    last_O: NDArray


@dataclass
class Rollout:
    """What was played. playing_TE selects the steps that were made: an environment may stop before the others.

    observations_TEO: as the task gave them. actions_TE: [T, E] int64 or [T, E, A] float32, not yet bounded.
    ended_TE: True on the last step of an episode.
    """

    observations_TEO: NDArray
    actions_TE: NDArray
    rewards_TE: NDArray
    ended_TE: NDArray
    playing_TE: NDArray
    rows: list[Row]

    @property
    def steps(self) -> int:
        """Steps of all environments together."""
        return int(self.playing_TE.sum())

    def packed(self, x_TE: NDArray) -> NDArray:
        """[T, E, ...] -> [N, ...], row after row."""
        return np.concatenate([x_TE[row.start : row.stop, row.environment] for row in self.rows])


class Sampler:
    """The policy's forward pass for a handful of states, in numpy: a call into torch costs more than the arithmetic of
    layers this small (docs/classic.md). It reads the weights in place and holds none of its own.

    Only actions come from here. The log-probabilities that an update divides by are the network's own.
    """

    def __init__(self, network: ActorCritic):
        layers = [m for m in (*network.policy_trunk, network.policy_head) if isinstance(m, torch.nn.Linear)]
        self._layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in layers]
        self._sd_A = None if network.log_sd_A is None else network.log_sd_A.detach().exp().numpy()
        self._family = Categorical if self._sd_A is None else Gaussian

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> NDArray:
        """What `sample` takes, one number for each of the A scores or means."""
        return self._family.noise(shape, generator).numpy()

    def scores(self, observations_EO: NDArray) -> NDArray:
        """Logits, or means, [E, A]."""
        x = observations_EO
        for weight, bias in self._layers[:-1]:
            x = np.tanh(x @ weight + bias)
        weight, bias = self._layers[-1]
        return x @ weight + bias

    def sample(self, observations_EO: NDArray, noise_EA: NDArray) -> NDArray:
        """Actions: [E] int64 by the Gumbel-max trick, or [E, A]."""
        scores_EA = self.scores(observations_EO)
        return (scores_EA + noise_EA).argmax(1) if self._sd_A is None else scores_EA + self._sd_A * noise_EA


@dataclass
class Episodes:
    """Return and length of the episodes that ended, over rollouts. Both are of the task, before any normalisation."""

    count: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))
    _open: dict[int, tuple[float, int]] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> None:
        """Counts a rollout's rows; one that did not end its episode goes on with the environment's next row."""
        for row in sorted(rollout.rows, key=lambda row: row.stop):
            before, length = self._open.pop(row.environment, (0.0, 0))
            total = before + float(rollout.rewards_TE[row.start : row.stop, row.environment].sum())
            length += row.stop - row.start
            if rollout.ended_TE[row.stop - 1, row.environment]:
                self.count += 1
                self.returns.append(total)
                self.lengths.append(length)
            else:
                self._open[row.environment] = (total, length)

    def means(self) -> dict[str, float]:
        """Means over the last 100 episodes; empty before the first."""
        if not self.returns:
            return {}
        count = len(self.returns)
        return {"episode_return": sum(self.returns) / count, "episode_length": sum(self.lengths) / count}


def play(
    environments: Environments,
    network: ActorCritic,
    normaliser: ObservationNormaliser | None,
    steps: int,
    whole_episodes: bool,
    generator: torch.Generator,
) -> Rollout:
    """Samples `steps` steps of every environment from the policy.

    whole_episodes: each environment plays on until the episode that it is in then is over, and stands still after.
    Whatever the policy sees is normalised by `normaliser`, as it stands before the rollout.
    """
    sampler, count = Sampler(network), len(environments.observations_EO)
    playing, started = list(range(count)), [0] * count
    seen, acted, rewards, ended, active, rows = [], [], [], [], [], []
    t = 0
    while playing:
        if t % NOISE_BLOCK == 0:
            noise = sampler.noise((NOISE_BLOCK, count, environments.spaces.count), generator)
        observed_EO = environments.observations_EO.copy()
        actions = sampler.sample(network_input(observed_EO, normaliser), noise[t % NOISE_BLOCK])
        done = environments.step(actions, playing)
        seen.append(observed_EO)
        acted.append(actions)
        rewards.append(done.rewards)
        ended.append(done.ended)
        active.append([e in playing for e in range(count)])
        t += 1
        late = t >= steps
        if not (late or any(done.ended)):
            continue
        for e in list(playing):
            if done.ended[e] or (late and not whole_episodes):
                last_O = done.finals[e] if e in done.finals else environments.observations_EO[e].copy()
                rows.append(Row(e, started[e], t, done.terminated[e], last_O))
                started[e] = t
                if late:
                    playing.remove(e)
    rows.sort(key=lambda row: row[:2])
    return Rollout(np.stack(seen), np.stack(acted), np.array(rewards), np.array(ended), np.array(active), rows)


def network_input(observations: NDArray, normaliser: ObservationNormaliser | None) -> NDArray:
    """Observations [..., O] as the networks read them: float32, normalised where there is a normaliser."""
    return normaliser(observations) if normaliser else observations.astype(np.float32)
