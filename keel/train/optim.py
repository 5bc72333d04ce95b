"""Optimizers, learning-rate schedules as pure functions of the step, and the guarded step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from keel.errors import NumberError


def make_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW with betas (0.9, 0.95), eps 1e-5, no weight decay [eps: arXiv:1909.08593, released code].

    The learning rate is set before each step by `set_rate`.
    """
    return AdamW(list(parameters), lr=0.0, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0, fused=True)


def linear_rate(step: int, steps: int, peak: float, warmup: float = 0.0) -> float:
    """Rate of 0-based `step` of `steps`: a linear rise over the first `warmup` share, then linear decay towards 0."""
    rise = int(steps * warmup)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (steps - step) / max(1, steps - rise)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def guarded_step(optimizer: Optimizer, max_grad_norm: float, where: str) -> float:
    """Clips the gradient's global norm, steps, clears the gradients, and returns the norm before clipping.

    Raises:
        NumberError: the norm is not finite. No weight has been changed by then, and the gradients are cleared.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if not torch.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise NumberError(
            f"the gradient's norm is {norm.item()}; the optimizer did not step",
            where=where,
            remedy="lower the learning rate, or look at the rewards and rows of this step; "
            "the same command goes on from the last checkpoint",
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
