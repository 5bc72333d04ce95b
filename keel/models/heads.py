"""The scalar head of critic and reward model."""

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """One number per hidden state, in float32 whatever the trunk's dtype: [..., H] -> [...]."""

    def __init__(self, hidden: int, generator: torch.Generator | None = None):
        """Weights are normal with sd 1 / sqrt(H + 1) [arXiv:2009.01325, appendix B.1]; zero without a generator."""
        super().__init__()
        self.linear = nn.Linear(hidden, 1, dtype=torch.float32)
        with torch.no_grad():
            self.linear.bias.zero_()
            if generator is None:
                self.linear.weight.zero_()
            else:
                self.linear.weight.normal_(std=(hidden + 1) ** -0.5, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...]."""
        return self.linear(hidden.float()).squeeze(-1)

    @torch.no_grad()
    def normalise(self, mean: float, sd: float) -> None:
        """Folds (x - mean) / sd into the weights, so that there is no further state."""
        self.linear.weight.div_(sd)
        self.linear.bias.sub_(mean).div_(sd)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one output."""
        return self.linear.weight.detach(), self.linear.bias.detach()

    @torch.no_grad()
    def rewrite(self, weight: Tensor, bias: Tensor) -> None:
        """Puts in what `weights` gave, changed."""
        self.linear.weight.copy_(weight)
        self.linear.bias.copy_(bias)
