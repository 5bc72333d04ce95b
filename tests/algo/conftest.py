from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., SimpleNamespace]:
    """Random float32 inputs for a seed: rows of random length, gaps in the middle, one row empty."""

    def make(seed: int, rows: int = 6, tokens: int = 9) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        lengths[0], lengths[1] = tokens, 0
        mask = torch.arange(tokens) < lengths[:, None]
        mask &= torch.rand(rows, tokens, generator=generator) > 0.2
        mask[0, :2] = True
        old = -normal(rows, tokens).exp()
        return SimpleNamespace(
            mask=mask,
            old_logprobs=old,
            logprobs=old + 0.3 * normal(rows, tokens),
            advantages=normal(rows, tokens),
            values=normal(rows, tokens),
            new_values=normal(rows, tokens),
            rewards=normal(rows, tokens),
            returns=normal(rows, tokens),
            scores=normal(rows),
            kl=normal(rows, tokens),
        )

    return make


@pytest.fixture(scope="session")
def spoil() -> Callable[..., torch.Tensor]:
    """A copy with NaN, infinities and huge numbers outside the mask."""

    def spoiled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rubbish = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30])
        return torch.where(mask, x, rubbish[torch.arange(x.numel()).reshape(x.shape) % 4])

    return spoiled
