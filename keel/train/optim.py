"""Optimizers, learning-rate schedules as pure functions of the step, and the guarded step."""

import math
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import AdamW, Optimizer

from keel.errors import NumberError
from keel.models import spare


def make_optimizer(parameters: Iterable[nn.Parameter], beta2: float = 0.95, eps: float = 1e-5) -> AdamW:
    """AdamW without weight decay; betas (0.9, 0.95) and eps 1e-5 for PPO [arXiv:1909.08593, released code].

    The learning rate is set before each step by `set_rate`.
    """
    return AdamW(list(parameters), lr=0.0, betas=(0.9, beta2), eps=eps, weight_decay=0.0, fused=True)


def linear_rate(step: int, steps: int, peak: float, warmup: float = 0.0, hold: float = 0.0) -> float:
    """Rate of 0-based `step` of `steps`: a linear rise over the share `warmup`, the peak until the share `hold`, then
    linear decay towards 0."""
    rise = int(steps * warmup)
    if step < rise:
        return peak * (step + 1) / rise
    flat = max(rise, int(steps * hold))
    return peak if step < flat else peak * (steps - step) / max(1, steps - flat)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def guarded_step(
    optimizers: Mapping[str, Optimizer], max_grad_norms: Mapping[str, float], where: str
) -> dict[str, float]:
    """Clips each optimizer's gradients to their global norm, steps all, clears, and returns the norms before clipping.

    Raises:
        NumberError: a norm is not finite; no optimizer has stepped by then, and all gradients are cleared. Or a weight
            is not after the step, which must not be saved (`final`).
    """
    norms: dict[str, float] = {}
    for name, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms[name] = nn.utils.clip_grad_norm_(parameters, max_grad_norms[name]).item()
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if not bad:
        for optimizer in optimizers.values():
            optimizer.step()
            stepped = [p.detach() for group in optimizer.param_groups for p in group["params"]]
            if not math.isfinite(nn.utils.get_total_norm(stepped).item()):
                raise NumberError(
                    "a weight is no longer finite after this step, which is not saved",
                    where=where,
                    remedy="lower the learning rate; the same command goes on from the last checkpoint",
                    final=True,
                )
    for optimizer in optimizers.values():
        spare.release(p for group in optimizer.param_groups for p in group["params"])
    if bad:
        raise NumberError(
            f"the gradient of the {bad[0]} has the norm {norms[bad[0]]}; no weight was changed",
            where=where,
            remedy="lower the learning rate; the same command goes on from the last checkpoint",
        )
    return norms
