"""Log-probabilities, entropies and exact KL from hidden states, without ever holding a whole [N, V] tensor.

The matmul runs in the inputs' dtype (autocast is ignored), the rest in float32. At most a few [chunk, V] tensors are
alive at a time; a backward pass computes each chunk's logits again. Every row counts towards the weight's gradient, so
padding rows (NaN in them above all) must be left out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.algo.precision import emulated, float_blocks, project


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

        d logprob_n / d z[n, v] = 1[v = ids_n] - p[n, v]
        d entropy_n / d z[n, v] = -p[n, v] * (log p[n, v] + entropy_n)

    Args:
        hidden_NH: last hidden states, one row for each token that is predicted.
        weight_VH: output embedding, same dtype as hidden.
        bias_V: its bias, or None.
        ids_N: int64 token ids, 0 to V - 1.
        temperature: larger than 0; of the distribution that is meant (the sampling temperature for a ratio or KL).
        chunk: rows worked on at once; changes memory only.

    Returns: (logprobs_N, entropy_N), float32, nats. Gradient flows from both to hidden, weight and bias, once (no
    second derivative). One that nothing is made of costs nothing in the backward pass.

    Raises: RuntimeError or IndexError from torch for an id outside the vocabulary (on a GPU: a device assertion).
    """
    _check(hidden_NH, weight_VH, temperature, chunk)
    assert ids_N.shape == hidden_NH.shape[:1], (ids_N.shape, hidden_NH.shape)
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, ids_N, temperature, chunk)


def exact_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ref_hidden_NH: Tensor,
    ref_weight_VH: Tensor,
    ref_bias_V: Tensor | None,
    temperature: float,
    chunk: int = 1024,
) -> Tensor:
    """KL(policy || reference) of the distributions at each row, over the whole vocabulary.

        kl_n               = sum_v p[n, v] * (log p[n, v] - log q[n, v])
        d kl_n / d z[n, v] = p[n, v] * (log p[n, v] - log q[n, v] - kl_n)

    p = softmax(z) is the policy's, z as in `token_logprobs`, q the reference's. No sampled token is read, so that value
    and gradient are right wherever the row's state came from. Rounding that would make a KL negative is cut to 0.

    Args:
        hidden_NH, weight_VH, bias_V: the policy's, as in `token_logprobs`.
        ref_hidden_NH, ref_weight_VH, ref_bias_V: the reference's, at the same rows and over the same vocabulary; its
            dtype and its H may differ.
        temperature: of both distributions, larger than 0.
        chunk: rows worked on at once; changes memory only.

    Returns: kl_N, float32, nats, 0 or more. Gradient flows to hidden, weight and bias, once; none to the reference's.
    """
    _check(hidden_NH, weight_VH, temperature, chunk)
    _check(ref_hidden_NH, ref_weight_VH, temperature, chunk)
    assert len(hidden_NH) == len(ref_hidden_NH), (hidden_NH.shape, ref_hidden_NH.shape)
    assert len(weight_VH) == len(ref_weight_VH), (weight_VH.shape, ref_weight_VH.shape)
    return _ExactKl.apply(hidden_NH, weight_VH, bias_V, ref_hidden_NH, ref_weight_VH, ref_bias_V, temperature, chunk)


def _check(hidden_NH: Tensor, weight_VH: Tensor, temperature: float, chunk: int) -> None:
    assert hidden_NH.shape[1] == weight_VH.shape[1], (hidden_NH.shape, weight_VH.shape)
    assert hidden_NH.dtype == weight_VH.dtype, (hidden_NH.dtype, weight_VH.dtype)
    assert temperature > 0 and chunk > 0, (temperature, chunk)


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, rows, chunk):
        yield slice(start, start + chunk)


def _scaled_logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    # Forward and backward must see the same logits; backward runs outside of any autocast, so forward does too.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        logits_NV = project(hidden_NH, weight_VH, bias_V).float()
    return logits_NV if temperature == 1 else logits_NV.div_(temperature)


def _new_rows(hidden_NH: Tensor, count: int) -> Iterator[Tensor]:
    """Float32 tensors [N], not rows of one: writing into a result must not touch what backward reads."""
    return (hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(count))


def _input_gradients(
    ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, slope: Callable[[slice], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, chunk by chunk.

    slope: for some rows, the gradient of the loss with respect to their logits before temperature, float32.
    """
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # Sums over chunks are kept in float32: bfloat16 would round each addition.
    grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
    grad_weight_VH: Tensor | None = None
    grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
    for rows in _chunks(len(hidden_NH), ctx.chunk):
        slope_NV = slope(rows)
        if grad_bias_V is not None:
            grad_bias_V += slope_NV.sum(0)
        if emulated(weight_VH):
            if grad_hidden_NH is not None:
                sum_NH = slope_NV.new_zeros(len(slope_NV), weight_VH.shape[1])
                for columns, block in float_blocks(weight_VH):
                    sum_NH.addmm_(slope_NV[:, columns], block)
                grad_hidden_NH[rows] = sum_NH
        else:
            slope_NV = slope_NV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[rows] = slope_NV @ weight_VH
        if needs_weight:
            grad_weight_VH = _added(grad_weight_VH, slope_NV.T, hidden_NH[rows].to(slope_NV.dtype))
    # Autograd casts a gradient to its tensor's dtype by itself.
    return grad_hidden_NH, grad_weight_VH, grad_bias_V


def _added(sum_VH: Tensor | None, slope_VN: Tensor, hidden_NH: Tensor) -> Tensor:
    """The sum with one more product, float32. No zeros to begin with and no product beside it: each is as large as the
    weight."""
    if sum_VH is not None and slope_VN.dtype == sum_VH.dtype:
        return sum_VH.addmm_(slope_VN, hidden_NH)
    product_VH = slope_VN @ hidden_NH
    return product_VH.float() if sum_VH is None else sum_VH.add_(product_VH)


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
        """Log-probabilities and entropies, chunk by chunk."""
        logprobs_N, entropy_N, log_sum_N = _new_rows(hidden_NH, 3)
        for rows in _chunks(len(ids_N), chunk):
            # Few passes over [chunk, V], and in place: with a small vocabulary they cost more than the product.
            logits_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, temperature)
            top_N1 = logits_NV.amax(1, keepdim=True)
            logits_NV -= top_N1
            weights_NV = logits_NV.exp()
            sum_N = weights_NV.sum(1)
            above_N = sum_N.log()
            logprobs_N[rows] = logits_NV.gather(1, ids_N[rows, None])[:, 0] - above_N
            entropy_N[rows] = above_N - weights_NV.mul_(logits_NV).sum(1) / sum_N
            log_sum_N[rows] = above_N.add_(top_N1[:, 0])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, log_sum_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        # An output that the loss does not use comes to backward as None, not as zeros to be multiplied by.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias; either output's gradient may be absent."""
        hidden_NH, weight_VH, bias_V, ids_N, log_sum_N = ctx.saved_tensors

        def slope(rows: slice) -> Tensor:
            logprobs_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, ctx.temperature)
            logprobs_NV -= log_sum_N[rows, None]
            parts: list[Tensor] = []
            if grad_entropy_N is not None:
                probs_NV = logprobs_NV.exp()
                terms_NV = probs_NV * logprobs_NV
                entropy_slope_NV = probs_NV.mul_(terms_NV.sum(1, keepdim=True)).sub_(terms_NV)
                parts.append(entropy_slope_NV.mul_(grad_entropy_N[rows, None] / ctx.temperature))
            if grad_N is not None:
                grad_N1 = grad_N[rows, None] / ctx.temperature
                slope_NV = logprobs_NV.exp_().mul_(-grad_N1)
                parts.append(slope_NV.scatter_add_(1, ids_N[rows, None], grad_N1))
            return parts[0] if len(parts) == 1 else parts[0].add_(parts[1])

        return *_input_gradients(ctx, hidden_NH, weight_VH, bias_V, slope), None, None, None


class _ExactKl(torch.autograd.Function):
    """Saves the inputs and two numbers a row (the logs of both partition sums)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ref_hidden_NH: Tensor,
        ref_weight_VH: Tensor,
        ref_bias_V: Tensor | None,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        """The KL of each row, chunk by chunk."""
        kl_N, log_sum_N, ref_log_sum_N = _new_rows(hidden_NH, 3)
        for rows in _chunks(len(hidden_NH), chunk):
            logprobs_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, temperature)
            ref_NV = _scaled_logits(ref_hidden_NH[rows], ref_weight_VH, ref_bias_V, temperature)
            log_sum_N[rows], ref_log_sum_N[rows] = logprobs_NV.logsumexp(1), ref_NV.logsumexp(1)
            logprobs_NV -= log_sum_N[rows, None]
            ref_NV -= ref_log_sum_N[rows, None]
            difference_NV = torch.sub(logprobs_NV, ref_NV, out=ref_NV)
            kl_N[rows] = (logprobs_NV.exp_() * difference_NV).sum(1)
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, ref_hidden_NH, ref_weight_VH, ref_bias_V, log_sum_N, ref_log_sum_N
        )
        ctx.temperature, ctx.chunk = temperature, chunk
        return kl_N.clamp_(min=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the policy's hidden, weight and bias."""
        hidden_NH, weight_VH, bias_V, ref_hidden_NH, ref_weight_VH, ref_bias_V, log_sum_N, ref_log_sum_N = (
            ctx.saved_tensors
        )

        def slope(rows: slice) -> Tensor:
            logprobs_NV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, ctx.temperature)
            logprobs_NV -= log_sum_N[rows, None]
            ref_NV = _scaled_logits(ref_hidden_NH[rows], ref_weight_VH, ref_bias_V, ctx.temperature)
            ref_NV -= ref_log_sum_N[rows, None]
            difference_NV = torch.sub(logprobs_NV, ref_NV, out=ref_NV)
            slope_NV = logprobs_NV.exp_()
            difference_NV -= (slope_NV * difference_NV).sum(1, keepdim=True)
            difference_NV *= grad_N[rows, None] / ctx.temperature
            return slope_NV.mul_(difference_NV)

        return *_input_gradients(ctx, hidden_NH, weight_VH, bias_V, slope), None, None, None, None, None
