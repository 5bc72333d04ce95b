"""The two families of policies, each a value over N states: log-probabilities, entropy and exact KL, all in nats."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Categorical(NamedTuple):
    """Discrete actions. scores_NA: logits, whose softmax is the distribution of row n."""

    scores_NA: Tensor

    @staticmethod
    def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise, -log(-log u): the argmax of logits plus it is a draw from their softmax."""
        return -torch.empty(shape).exponential_(generator=generator).log_()

    def logprobs(self, actions_N: Tensor) -> Tensor:
        """log pi(a|s), [N]."""
        return self.scores_NA.log_softmax(-1).gather(-1, actions_N[:, None])[:, 0]

    def entropy(self) -> Tensor:
        """-sum_a pi(a) log pi(a), [N]."""
        log_NA = self.scores_NA.log_softmax(-1)
        return -(log_NA.exp() * log_NA).sum(-1)

    def kl(self, other: "Distribution") -> Tensor:
        """KL(self || other) = sum_a pi(a) (log pi(a) - log pi'(a)), [N]."""
        assert isinstance(other, Categorical)
        log_NA, other_NA = self.scores_NA.log_softmax(-1), other.scores_NA.log_softmax(-1)
        return (log_NA.exp() * (log_NA - other_NA)).sum(-1)

    def frozen(self) -> "Categorical":
        """The same, apart from the weights: no gradient, and no change when they move."""
        return Categorical(self.scores_NA.detach().clone())


class Gaussian(NamedTuple):
    """Continuous actions, independent of each other. mean_NA by state, log_sd_A the same in all states."""

    mean_NA: Tensor
    log_sd_A: Tensor

    @staticmethod
    def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise."""
        return torch.randn(shape, generator=generator)

    def logprobs(self, actions_NA: Tensor) -> Tensor:
        """Log of the density, summed over A: -0.5 z^2 - log sd - 0.5 log(2 pi), z = (a - mean) / sd, [N]."""
        z_NA = (actions_NA - self.mean_NA) * (-self.log_sd_A).exp()
        constant = self.log_sd_A.sum() + 0.5 * math.log(2.0 * math.pi) * self.log_sd_A.numel()
        return -0.5 * z_NA.square().sum(-1) - constant

    def entropy(self) -> Tensor:
        """sum_A log sd + 0.5 log(2 pi e), [N]."""
        one = (self.log_sd_A + 0.5 * math.log(2.0 * math.pi * math.e)).sum()
        return one.expand(len(self.mean_NA))

    def kl(self, other: "Distribution") -> Tensor:
        """KL(self || other) = sum_A log(sd' / sd) + (sd^2 + (mean - mean')^2) / (2 sd'^2) - 1/2, [N]."""
        assert isinstance(other, Gaussian)
        shift_NA = self.mean_NA - other.mean_NA
        ratio_NA = ((2.0 * self.log_sd_A).exp() + shift_NA.square()) * (0.5 * (-2.0 * other.log_sd_A).exp())
        return (other.log_sd_A - self.log_sd_A + ratio_NA - 0.5).sum(-1)

    def frozen(self) -> "Gaussian":
        """The same, apart from the weights: no gradient, and no change when they move."""
        return Gaussian(self.mean_NA.detach().clone(), self.log_sd_A.detach().clone())


Distribution = Categorical | Gaussian
