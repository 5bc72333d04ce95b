"""What every rollout engine offers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from keel.types import Prompt, Rollouts


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. The pure distribution of the model at a temperature: nothing is cut or penalised, so
    that training's log-probabilities are of the distribution that was sampled.

    temperature: 0 takes the likeliest token (for looking at a model, never for training).
    rows: responses decoded together; bounds memory, never changes the result but for rounding.
    """

    temperature: float = 1.0
    max_tokens: int = 128
    rows: int = 512


class Engine(Protocol):
    """Makes responses with the newest weights that it was given."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        step: int,
        version: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Rollouts:
        """One response per prompt; repeat a prompt for several. The k-th response depends on (seed, step, k), the
        weights and its prompt alone. `progress` is told how many responses have ended."""
        ...
