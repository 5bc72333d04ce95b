"""Log-probabilities and entropies of tokens from hidden states, without ever holding a whole [N, V] tensor."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    temperature: float,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token and entropy of the distribution at each row.

        z         = (hidden @ weight^T + bias) / temperature
        logprob_n = z[n, ids_n] - logsumexp_v z[n, v]
        entropy_n = -sum_v p[n, v] * log p[n, v],   p = softmax(z)

    The matmul runs in the inputs' dtype (autocast is ignored), the rest in float32. At most [chunk, V] is alive at a
    time; the backward pass computes each chunk's logits again: d logprob_n / d z[n, v] = 1[v = ids_n] - p[n, v].

    Args:
        hidden_NH: last hidden states, one row for each token that is predicted. Every row counts towards weight's
            gradient, so padding rows (NaN in them above all) must be left out.
        weight_VH: output embedding, same dtype as hidden.
        bias_V: its bias, or None.
        ids_N: int64 token ids, 0 to V - 1.
        temperature: larger than 0; of the distribution that is meant (the sampling temperature for a ratio or KL).
        chunk: rows worked on at once; changes memory only.

    Returns: (logprobs_N, entropy_N), float32, nats. Gradient flows from logprobs to hidden, weight and bias, once (no
    second derivative); the entropy is detached.

    Raises: RuntimeError or IndexError from torch for an id outside the vocabulary (on a GPU: a device assertion).
    """
    assert hidden_NH.shape[:1] == ids_N.shape and hidden_NH.shape[1] == weight_VH.shape[1], hidden_NH.shape
    assert hidden_NH.dtype == weight_VH.dtype, (hidden_NH.dtype, weight_VH.dtype)
    assert temperature > 0 and chunk > 0, (temperature, chunk)
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, ids_N, temperature, chunk)


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, rows, chunk):
        yield slice(start, start + chunk)


def _scaled_logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    # Forward and backward must see the same logits; backward runs outside of any autocast, so forward does too.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return linear(hidden_NH, weight_VH, bias_V).float() / temperature


class _TokenLogprobs(torch.autograd.Function):
    """Saves the inputs and one number a row (the log of the partition sum) instead of [N, V] log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # Three tensors, not three rows of one: writing into a result must not touch what backward reads.
        logprobs_N, entropy_N, log_sum_N = (hidden_NH.new_empty(len(ids_N), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(ids_N), chunk):
            logits_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, temperature)
            log_sum_N[rows] = logits_NV.logsumexp(1)
            logits_NV -= log_sum_N[rows, None]
            logprobs_N[rows] = logits_NV.gather(1, ids_N[rows, None])[:, 0]
            entropy_N[rows] = -(logits_NV.exp() * logits_NV).sum(1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, log_sum_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_N, log_sum_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are kept in float32: bfloat16 would round each addition.
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(len(ids_N), ctx.chunk):
            logits_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, ctx.temperature)
            slope_NV = logits_NV.sub_(log_sum_N[rows, None]).exp_().neg_()
            slope_NV.scatter_add_(1, ids_N[rows, None], torch.ones_like(slope_NV[:, :1]))
            slope_NV *= grad_N[rows, None] / ctx.temperature
            if grad_bias_V is not None:
                grad_bias_V += slope_NV.sum(0)
            slope_NV = slope_NV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[rows] = slope_NV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += slope_NV.T @ hidden_NH[rows]
        # Autograd casts a gradient to its tensor's dtype by itself.
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None
