"""Log-probabilities, entropies and exact KL from hidden states, without ever holding a whole [N, V] tensor.

The vocabulary is worked through in blocks, each with the rows in parts; what a row needs of all its logits is summed as
they come, relative to the largest so far [Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3]. The matmul runs
in the inputs' dtype (autocast is ignored), the rest in float32. A few tensors of a part by a block are alive at a time;
a backward pass computes their logits again. Every row counts towards the weight's gradient, so padding rows (NaN in
them above all) must be left out.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from keel.algo.precision import blocks

AT_ONCE = 1 << 20
"""Logits worked on at a time, 4 MiB in float32: what is done with them stays in the processor's caches."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    temperature: float,
    at_once: int = AT_ONCE,
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
        at_once: logits worked on at a time; changes memory and speed only.

    Returns: (logprobs_N, entropy_N), float32, nats. Gradient flows from both to hidden, weight and bias, once (no
    second derivative). One that nothing is made of costs nothing in the backward pass.

    Raises: RuntimeError or IndexError from torch for an id outside the vocabulary (on a GPU: a device assertion).
    """
    _check(hidden_NH, weight_VH, temperature, at_once)
    assert ids_N.shape == hidden_NH.shape[:1], (ids_N.shape, hidden_NH.shape)
    weight_VH[:, 0].detach().index_select(0, ids_N)  # refuses ids that no block would be found to hold
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, ids_N, temperature, at_once)


def exact_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ref_hidden_NH: Tensor,
    ref_weight_VH: Tensor,
    ref_bias_V: Tensor | None,
    temperature: float,
    at_once: int = AT_ONCE,
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
        at_once: logits worked on at a time; changes memory and speed only.

    Returns: kl_N, float32, nats, 0 or more. Gradient flows to hidden, weight and bias, once; none to the reference's.
    """
    _check(hidden_NH, weight_VH, temperature, at_once)
    _check(ref_hidden_NH, ref_weight_VH, temperature, at_once)
    assert len(hidden_NH) == len(ref_hidden_NH), (hidden_NH.shape, ref_hidden_NH.shape)
    assert len(weight_VH) == len(ref_weight_VH), (weight_VH.shape, ref_weight_VH.shape)
    return _ExactKl.apply(hidden_NH, weight_VH, bias_V, ref_hidden_NH, ref_weight_VH, ref_bias_V, temperature, at_once)


def _check(hidden_NH: Tensor, weight_VH: Tensor, temperature: float, at_once: int) -> None:
    assert hidden_NH.shape[1] == weight_VH.shape[1], (hidden_NH.shape, weight_VH.shape)
    assert hidden_NH.dtype == weight_VH.dtype, (hidden_NH.dtype, weight_VH.dtype)
    assert temperature > 0 and at_once > 0, (temperature, at_once)


def _parts(rows: int, columns: int, at_once: int) -> Iterator[slice]:
    """Of rows, each with at most `at_once` numbers of so many columns, but at least one row."""
    size = max(1, at_once // columns)
    for start in range(0, rows, size):
        yield slice(start, start + size)


Blocks = Iterator[tuple[slice, Tensor, Callable[[slice], Tensor]]]
"""Columns of a block of the vocabulary, its weights, and what makes its numbers for some rows: [rows, columns] in
float32, made anew at every call."""


def _logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Blocks:
    for columns, block in blocks(weight_VH):
        hidden_NH = hidden_NH.to(block.dtype)
        bias_C = None if bias_V is None else bias_V[columns].to(block.dtype)
        yield columns, block, partial(_logits_of, hidden_NH, block, bias_C, temperature)


def _logits_of(hidden_NH: Tensor, block: Tensor, bias_C: Tensor | None, temperature: float, rows: slice) -> Tensor:
    # Forward and backward must see the same logits; backward runs outside of any autocast, so forward does too.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        logits_NC = linear(hidden_NH[rows], block, bias_C).float()
    return logits_NC if temperature == 1 else logits_NC.div_(temperature)


class _Sums:
    """Over the blocks so far, of each row's logits z: the largest, and the sum of exp(z - largest)."""

    def __init__(self, hidden_NH: Tensor):
        self.top_N = hidden_NH.new_full((len(hidden_NH),), -1e30, dtype=torch.float32)
        self.sum_N = torch.zeros_like(self.top_N)

    def add(self, rows: slice, logits_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a block to some rows: logits_NC becomes z - largest. Returns exp of that and by how much the largest
        has changed (0 or less)."""
        top_N = torch.maximum(self.top_N[rows], logits_NC.amax(1))
        change_N = self.top_N[rows] - top_N
        logits_NC -= top_N[:, None]
        weights_NC = logits_NC.exp()
        self.sum_N[rows] = self.sum_N[rows] * change_N.exp() + weights_NC.sum(1)
        self.top_N[rows] = top_N
        return weights_NC, change_N

    def log(self) -> Tensor:
        """The log of the sum of exp(z)."""
        return self.sum_N.log() + self.top_N


def _within(ids_N: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Places of ids in a block [N, 1], some place for those that it does not hold, and which it holds [N]."""
    places_N = ids_N - columns.start
    held_N = (places_N >= 0) & (places_N < columns.stop - columns.start)
    return places_N.clamp(0, columns.stop - columns.start - 1)[:, None], held_N


def _input_gradients(
    ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, slopes: Blocks
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias. Sums are kept in float32: bfloat16 would round each addition.

    slopes: the gradient of the loss with respect to logits before temperature, in the place of the logits.
    """
    new = torch.empty if len(hidden_NH) else torch.zeros  # else every number is written
    grad_hidden_NH, grad_weight_VH, grad_bias_V = (
        new(x.shape, dtype=torch.float32, device=x.device) if needed and x is not None else None
        for needed, x in zip(ctx.needs_input_grad[:3], (hidden_NH, weight_VH, bias_V), strict=True)
    )
    for columns, block, slope in slopes:
        hidden_NH = hidden_NH.to(block.dtype)
        for rows in _parts(len(hidden_NH), len(block), ctx.at_once):
            slope_NC = slope(rows)
            if grad_bias_V is not None:
                sum_C = slope_NC.sum(0)
                grad_bias_V[columns] = sum_C if rows.start == 0 else grad_bias_V[columns] + sum_C
            slope_NC = slope_NC.to(block.dtype)
            if grad_hidden_NH is not None:
                _add(grad_hidden_NH[rows], slope_NC, block, columns.start == 0)
            if grad_weight_VH is not None:
                _add(grad_weight_VH[columns], slope_NC.T, hidden_NH[rows], rows.start == 0)
    # Autograd casts a gradient to its tensor's dtype by itself.
    return grad_hidden_NH, grad_weight_VH, grad_bias_V


def _add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Adds a @ b to the total, or puts it there."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


class _TokenLogprobs(torch.autograd.Function):
    """Saves the inputs and two numbers a row: the log of the partition sum, and the entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature: float,
        at_once: int,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies."""
        sums = _Sums(hidden_NH)
        token_N, mean_N = torch.zeros_like(sums.top_N), torch.zeros_like(sums.top_N)
        for columns, block, of in _logits(hidden_NH, weight_VH, bias_V, temperature):
            for rows in _parts(len(hidden_NH), len(block), at_once):
                # Few passes over the logits, and in place: with a small vocabulary they cost more than the product.
                logits_NC = of(rows)
                places_N1, held_N = _within(ids_N[rows], columns)
                token_N[rows] = torch.where(held_N, logits_NC.gather(1, places_N1)[:, 0], token_N[rows])
                before_N = sums.sum_N[rows].clone()
                weights_NC, change_N = sums.add(rows, logits_NC)
                # mean_N: the sum of exp(z - largest) (z - largest), which moves with the largest.
                mean_N[rows] = (mean_N[rows] + before_N * change_N) * change_N.exp()
                mean_N[rows] += weights_NC.mul_(logits_NC).sum(1)
        above_N = sums.sum_N.log()
        logprobs_N, entropy_N = (token_N - sums.top_N).sub_(above_N), above_N - mean_N / sums.sum_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, above_N + sums.top_N, entropy_N)
        ctx.temperature, ctx.at_once = temperature, at_once
        # An output that the loss does not use comes to backward as None, not as zeros to be multiplied by.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias; either output's gradient may be absent."""
        *inputs, ids_N, log_sum_N, entropy_N = ctx.saved_tensors

        def slope(columns: slice, logits: Callable[[slice], Tensor], rows: slice) -> Tensor:
            logprobs_NC = logits(rows).sub_(log_sum_N[rows, None])
            parts: list[Tensor] = []
            if grad_entropy_N is not None:
                parts.append((logprobs_NC + entropy_N[rows, None]).mul_(logprobs_NC.exp()))
                parts[0].mul_(-grad_entropy_N[rows, None] / ctx.temperature)
            if grad_N is not None:
                scaled_N = grad_N[rows] / ctx.temperature
                places_N1, held_N = _within(ids_N[rows], columns)
                parts.append(logprobs_NC.exp_().mul_(-scaled_N[:, None]))
                parts[-1].scatter_add_(1, places_N1, torch.where(held_N, scaled_N, 0.0)[:, None])
            return parts[0] if len(parts) == 1 else parts[0].add_(parts[1])

        hidden_NH, weight_VH, bias_V = inputs
        logits = _logits(hidden_NH, weight_VH, bias_V, ctx.temperature)
        slopes = ((columns, block, partial(slope, columns, of)) for columns, block, of in logits)
        return *_input_gradients(ctx, hidden_NH, weight_VH, bias_V, slopes), None, None, None


class _ExactKl(torch.autograd.Function):
    """Saves the inputs and three numbers a row (the logs of both partition sums, the KL)."""

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
        at_once: int,
    ) -> Tensor:
        """The KL of each row."""
        own, ref = _Sums(hidden_NH), _Sums(hidden_NH)
        apart_N = torch.zeros_like(own.top_N)  # the sum of exp(z - largest) (z - z of the reference)
        policy, reference = (hidden_NH, weight_VH, bias_V), (ref_hidden_NH, ref_weight_VH, ref_bias_V)
        both = zip(_logits(*policy, temperature), _logits(*reference, temperature), strict=True)
        for (_, block, of), (_, _, ref_of) in both:
            for rows in _parts(len(hidden_NH), len(block), at_once):
                logits_NC, ref_NC = of(rows), ref_of(rows)
                difference_NC = logits_NC - ref_NC
                weights_NC, change_N = own.add(rows, logits_NC)
                apart_N[rows] = apart_N[rows] * change_N.exp() + difference_NC.mul_(weights_NC).sum(1)
                ref.add(rows, ref_NC)
        kl_N = apart_N / own.sum_N - (own.log() - ref.log())
        ctx.save_for_backward(*policy, *reference, own.log(), ref.log(), kl_N)
        ctx.temperature, ctx.at_once = temperature, at_once
        return kl_N.clamp(min=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the policy's hidden, weight and bias."""
        *tensors, log_sum_N, ref_log_sum_N, kl_N = ctx.saved_tensors

        def slope(logits: Callable[[slice], Tensor], ref_logits: Callable[[slice], Tensor], rows: slice) -> Tensor:
            logprobs_NC, ref_NC = logits(rows).sub_(log_sum_N[rows, None]), ref_logits(rows)
            ref_NC -= ref_log_sum_N[rows, None]
            difference_NC = torch.sub(logprobs_NC, ref_NC, out=ref_NC).sub_(kl_N[rows, None])
            return logprobs_NC.exp_().mul_(difference_NC).mul_(grad_N[rows, None] / ctx.temperature)

        hidden_NH, weight_VH, bias_V, ref_hidden_NH, ref_weight_VH, ref_bias_V = tensors
        both = zip(
            _logits(hidden_NH, weight_VH, bias_V, ctx.temperature),
            _logits(ref_hidden_NH, ref_weight_VH, ref_bias_V, ctx.temperature),
            strict=True,
        )
        slopes = ((columns, block, partial(slope, of, ref_of)) for (columns, block, of), (_, _, ref_of) in both)
        return *_input_gradients(ctx, hidden_NH, weight_VH, bias_V, slopes), None, None, None, None, None
