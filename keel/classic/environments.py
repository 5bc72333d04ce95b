"""Gymnasium environments side by side, in this process.

A plain loop over the environments: on CartPole it makes 1.6 times the steps of gymnasium's SyncVectorEnv, whose copies
cost as much as the task itself, and a finished episode's last observation needs no search in an info dictionary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.classic.config import Actions
from keel.errors import ConfigError


@dataclass(frozen=True)
class Spaces:
    """observations: O. actions, count: the kind of action, and A. first: the lowest discrete action.
    low_A, high_A: bounds of a continuous one, infinite where there is none."""

    observations: int
    actions: Actions
    count: int
    first: int
    low_A: NDArray
    high_A: NDArray


@dataclass
class Stepped:
    """What one step of all environments gave. ended: the episode is over; terminated: by itself, not by a time limit.
    finals: environment -> last observation of an episode that a time limit ended."""

    rewards: list[float]
    ended: list[bool]
    terminated: list[bool]
    finals: dict[int, NDArray]


class Environments:
    """`count` environments of one id. `observations_EO` is what each shows now; one whose episode ends starts the next
    at once.

    Raises:
        ConfigError: gymnasium or a package of the task is missing, the id is unknown, or a space is not supported.
    """

    def __init__(self, env: str, count: int, seed: int):
        self._environments = [_make(env) for _ in range(count)]
        self.spaces = _spaces(self._environments[0], env)
        self.observations_EO = np.empty((count, self.spaces.observations), np.float64)
        seeds = np.random.SeedSequence(seed).generate_state(count)
        for e, environment in enumerate(self._environments):
            self.observations_EO[e] = environment.reset(seed=int(seeds[e]))[0]

    def step(self, actions: NDArray, playing: list[int]) -> Stepped:
        """One step of the environments in `playing`; the others stand still. actions: [E] or [E, A]; continuous ones
        are bounded to the task's range on the way in."""
        spaces, count = self.spaces, len(self._environments)
        if spaces.actions == "discrete":
            given = (actions + spaces.first).tolist()
        else:
            given = np.minimum(np.maximum(actions, spaces.low_A), spaces.high_A)
        done = Stepped([0.0] * count, [False] * count, [False] * count, {})
        for e in playing:
            observation, reward, terminated, truncated, _ = self._environments[e].step(given[e])
            done.rewards[e] = float(reward)
            if terminated or truncated:
                done.ended[e], done.terminated[e] = True, terminated
                if not terminated:
                    done.finals[e] = np.array(observation, np.float64)
                observation = self._environments[e].reset()[0]
            self.observations_EO[e] = observation
        return done

    def close(self) -> None:
        """Lets go of windows and simulators."""
        for environment in self._environments:
            environment.close()


def spaces_of(env: str) -> Spaces:
    """What an environment shows and takes. Raises ConfigError as `Environments` does."""
    made = _make(env)
    try:
        return _spaces(made, env)
    finally:
        made.close()


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ConfigError("gymnasium is not installed", remedy="pip install 'keel-rl[classic]'") from None
    return gymnasium


def _make(env: str) -> Any:
    gymnasium = _gymnasium()
    try:
        made = gymnasium.make(env, disable_env_checker=True)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{env} needs a package: {error}", remedy="pip install 'keel-rl[mujoco]'") from None
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(
            f"gymnasium does not make {env!r}: {error}", remedy="CartPole-v1, Acrobot-v1, HalfCheetah-v5, ..."
        ) from None
    box = isinstance(made.observation_space, gymnasium.spaces.Box) and len(made.observation_space.shape or ()) == 1
    return made if box else gymnasium.wrappers.FlattenObservation(made)


def _spaces(environment: Any, env: str) -> Spaces:
    spaces = _gymnasium().spaces
    seen, action = environment.observation_space, environment.action_space
    width = int(np.prod(seen.shape))
    if isinstance(action, spaces.Discrete):
        none = np.zeros(0)
        return Spaces(width, "discrete", int(action.n), int(action.start), none, none)
    if isinstance(action, spaces.Box) and len(action.shape) == 1:
        return Spaces(width, "continuous", action.shape[0], 0, action.low, action.high)
    raise ConfigError(
        f"the actions of {env} are {action}", remedy="take a task whose actions are Discrete, or a Box with one axis"
    )
