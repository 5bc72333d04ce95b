"""Policy and critic as tanh networks with orthogonal weights."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from keel.classic.config import Actions
from keel.classic.distributions import Categorical, Distribution, Gaussian


class ActorCritic(nn.Module):
    """A policy and, where `critic` is not None, V(s); two networks, or one trunk with two heads.

    Orthogonal weights with gain sqrt(2) in the layers, 0.01 at the policy's output and 1 at the critic's, biases 0
    [Engstrom et al. 2020, arXiv:2005.12729; CleanRL]. log sd of a Gaussian policy starts at 0.

    Args:
        observations: O.
        actions, count: the kind of action, and A.
        hidden: widths of the layers.
        critic: separate, shared (the policy's layers), or None.
        generator: of the weights.
    """

    def __init__(
        self,
        observations: int,
        actions: Actions,
        count: int,
        hidden: Sequence[int],
        critic: Literal["separate", "shared"] | None,
        generator: torch.Generator,
    ):
        super().__init__()
        self.policy_trunk = _trunk(observations, hidden, generator)
        width = hidden[-1] if hidden else observations
        self.policy_head = _layer(width, count, 0.01, generator)
        self.log_sd_A = nn.Parameter(torch.zeros(count)) if actions == "continuous" else None
        self.value_trunk, self.value_head = None, None
        if critic:
            self.value_trunk = self.policy_trunk if critic == "shared" else _trunk(observations, hidden, generator)
            self.value_head = _layer(width, 1, 1.0, generator)

    def policy(self, observations_NO: Tensor) -> Distribution:
        """pi( . | s)."""
        return self._distribution(self.policy_trunk(observations_NO))

    def values(self, observations_NO: Tensor) -> Tensor:
        """V(s), [N]."""
        assert self.value_trunk is not None and self.value_head is not None
        return self.value_head(self.value_trunk(observations_NO))[:, 0]

    def both(self, observations_NO: Tensor) -> tuple[Distribution, Tensor]:
        """Policy and values; a shared trunk is run once."""
        assert self.value_trunk is not None and self.value_head is not None
        hidden_NH = self.policy_trunk(observations_NO)
        own_NH = hidden_NH if self.value_trunk is self.policy_trunk else self.value_trunk(observations_NO)
        return self._distribution(hidden_NH), self.value_head(own_NH)[:, 0]

    def policy_parameters(self) -> list[nn.Parameter]:
        """Those that the policy depends on."""
        own = [*self.policy_trunk.parameters(), *self.policy_head.parameters()]
        return own if self.log_sd_A is None else [*own, self.log_sd_A]

    def value_parameters(self) -> list[nn.Parameter]:
        """Those that the critic depends on; none without a critic."""
        parts = [part for part in (self.value_trunk, self.value_head) if part is not None]
        return [parameter for part in parts for parameter in part.parameters()]

    def _distribution(self, hidden_NH: Tensor) -> Distribution:
        output_NA = self.policy_head(hidden_NH)
        return Categorical(output_NA) if self.log_sd_A is None else Gaussian(output_NA, self.log_sd_A)


def _trunk(inputs: int, hidden: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_layer(inputs, width, math.sqrt(2.0), generator), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers)


def _layer(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # skip_init: the layer's own first weights would be drawn from torch's global generator, and thrown away.
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
