"""Tasks whose every number is known: step t of an episode (from 1) shows t and pays t."""

from typing import Any, ClassVar

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'keel-rl[classic]'")


class Count(gymnasium.Env):
    """Ends by itself after `ends` steps; a time limit is gymnasium's own (max_episode_steps)."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, ends: int = 0):
        self.ends, self.t, self.actions = ends, 0, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any):
        self.t += 1
        self.actions.append(action)
        return np.array([self.t], np.float32), float(self.t), self.t == self.ends, False, {}


class Push(Count):
    """The same with a continuous action between -1 and 0.5."""

    action_space = gymnasium.spaces.Box(-1.0, 0.5, (2,), np.float32)


class Pair(Count):
    """Actions that Keel has no policy for."""

    action_space = gymnasium.spaces.MultiDiscrete([2, 2])


def register() -> None:
    for name, entry, ends, limit in (
        ("Ends3", Count, 3, None),
        ("Limit3", Count, 0, 3),
        ("Both3", Count, 3, 3),
        ("Push4", Push, 4, None),
        ("Pair", Pair, 2, None),
    ):
        if f"Keel{name}-v0" not in gymnasium.registry:
            gymnasium.register(f"Keel{name}-v0", entry, max_episode_steps=limit, kwargs={"ends": ends})


register()
