"""A training pass through the decoder of a Llama-like model on a CPU, without what training does not ask for.

The formulas are those of transformers' own modules, whose weights are read where they lie; so is the order of tokens.
Less is done than there in five ways (docs/decisions.md has the figures):

    no padding       norms, products and activations work on the real tokens, packed; only attention sees rows.
    no tail          nothing after the last token that is asked for; the last layer's queries, output and MLP only at
                     the tokens that are asked for.
    two nodes        around attention each layer is two autograd functions with written-out backward passes, which keep
                     inputs and gate, and make the rest again (norms, activations): fewer operations, half the memory.
    one beginning    tokens that several rows begin with are passed once (`shared_hidden`).
    adapters         a LoRA branch is part of its product; a frozen weight gets no gradient and nothing is kept for it.

Other architectures, and any on a GPU (where the stock kernels are better), pass through transformers.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from keel.algo.precision import compute_dtype, weight_as
from keel.models import spare
from keel.models.places import Places, SharedPlaces

WORTH_SHARING = 8
"""Beginnings are shared where that saves one in so many tokens: attention then needs a mask."""


class Product(NamedTuple):
    """A linear map with the LoRA adapter that is in force: x W^T + bias + scale (x A^T) B^T."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scale: float

    @classmethod
    def of(cls, layer: nn.Module) -> "Product":
        """What a linear layer, adapted by peft or plain, computes at this moment."""
        a, b, scale = None, None, 0.0
        if isinstance(layer, BaseTunerLayer):
            plain: Any = layer.get_base_layer()
            if not layer.disable_adapters:
                (name,) = layer.active_adapters
                adapter: Any = layer
                a, b, scale = adapter.lora_A[name].weight, adapter.lora_B[name].weight, adapter.scaling[name]
        else:
            plain = layer
        return cls(plain.weight, plain.bias, a, b, scale)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, in] -> [N, out], in the dtype of x."""
        bias = None if self.bias is None else self.bias.to(x_NI.dtype)
        y_NO = F.linear(x_NI, weight_as(self.weight, x_NI.dtype), bias)
        if self.a is not None and self.b is not None:
            inner_NR = x_NI.to(self.a.dtype) @ self.a.T
            if y_NO.dtype == self.b.dtype:
                return y_NO.addmm_(inner_NR, self.b.T, alpha=self.scale)
            y_NO += self.scale * (inner_NR @ self.b.T)
        return y_NO

    def back(
        self, grad_NO: Tensor, x_NI: Tensor, needs: tuple[bool, ...], sum_NI: Tensor | None, to_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of x, added to `sum_NI` where that is given, and of weight, bias, a and b where they are needed."""
        grads: list[Tensor | None] = [None] * 4
        if needs[0]:
            grads[0] = spare.product(grad_NO.T, x_NI)
        if needs[1]:
            grads[1] = grad_NO.sum(0)
        if to_input:
            weight = weight_as(self.weight, grad_NO.dtype)
            sum_NI = grad_NO @ weight if sum_NI is None else sum_NI.addmm_(grad_NO, weight)
        if self.a is not None and self.b is not None:
            wide_NO = grad_NO.to(self.b.dtype)
            inner_NR = (wide_NO @ self.b).mul_(self.scale)
            x_NI = x_NI.to(self.a.dtype)
            if needs[2]:
                grads[2] = inner_NR.T @ x_NI
            if needs[3]:
                grads[3] = (wide_NO.T @ (x_NI @ self.a.T)).mul_(self.scale)
            if sum_NI is not None and sum_NI.dtype == self.a.dtype:
                sum_NI.addmm_(inner_NR, self.a)
            elif sum_NI is not None:
                sum_NI += inner_NR @ self.a
        return sum_NI, grads

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd must know of."""
        return self.weight, self.bias, self.a, self.b


def _products(tensors: tuple[Any, ...], scales: tuple[float, ...]) -> list[Product]:
    groups = (tensors[4 * i : 4 * i + 4] for i in range(len(scales)))
    return [Product(weight, bias, a, b, scale) for (weight, bias, a, b), scale in zip(groups, scales, strict=True)]


def _norm(x_NH: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x), 1 / rms(x)) in float32: [N, H], [N, 1]."""
    x_NH = x_NH.float()
    inverse_N1 = torch.linalg.vector_norm(x_NH, dim=1, keepdim=True).square_().div_(x_NH.shape[1]).add_(eps).rsqrt_()
    return x_NH * inverse_N1, inverse_N1


def _norm_back(
    grad_NH: Tensor, unit_NH: Tensor, inverse_N1: Tensor, weight_H: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight from that of `unit * weight`; unit is spoilt."""
    grad_NH = grad_NH.float()
    grad_weight_H = (grad_NH * unit_NH).sum(0) if needs_weight else None
    grad_NH = grad_NH * weight_H
    along_N1 = (grad_NH * unit_NH).mean(1, keepdim=True)
    return grad_NH.sub_(unit_NH.mul_(along_N1)).mul_(inverse_N1), grad_weight_H


def _turn(x_NO: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotary positions: every head's halves (x, y) become (x cos - y sin, y cos + x sin); D is half a head."""
    x_N2 = x_NO.view(len(x_NO), -1, 2, cos_ND.shape[1])
    cos, sin = cos_ND[:, None], sin_ND[:, None]
    first, second = x_N2[:, :, 0], x_N2[:, :, 1]
    out = torch.empty_like(x_N2)
    torch.mul(first, cos, out=out[:, :, 0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[:, :, 1]).addcmul_(first, sin)
    return out.view(x_NO.shape)


class _Queries(torch.autograd.Function):
    """Norm, the products to queries, keys and values, and rotary positions; queries of the wanted tokens alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        norm_H: Tensor,
        cos_ND: Tensor,
        sin_ND: Tensor,
        wanted_M: Tensor | None,
        eps: float,
        scales: tuple[float, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[M, heads * width], and keys and values [N, heads of keys * width]."""
        query, key, value = _products(tensors, scales)
        unit_NH, _ = _norm(x_NH, eps)
        n_NH = unit_NH.mul_(norm_H).to(x_NH.dtype)
        n_MH = n_NH if wanted_M is None else n_NH[wanted_M]
        at = (cos_ND, sin_ND) if wanted_M is None else (cos_ND[wanted_M], sin_ND[wanted_M])
        ctx.save_for_backward(x_NH, norm_H, cos_ND, sin_ND, wanted_M, *tensors)
        ctx.eps, ctx.scales = eps, scales
        return _turn(query(n_MH), *at), _turn(key(n_NH), cos_ND, sin_ND), value(n_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the input and every weight that needs it."""
        x_NH, norm_H, cos_ND, sin_ND, wanted_M, *tensors = ctx.saved_tensors
        query, key, value = _products(tuple(tensors), ctx.scales)
        unit_NH, inverse_N1 = _norm(x_NH, ctx.eps)
        n_NH = (unit_NH * norm_H).to(x_NH.dtype)
        further = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        needs = ctx.needs_input_grad[7:]
        grad_NH, of_key = key.back(_turn(grads[1], cos_ND, -sin_ND), n_NH, needs[4:8], None, further)
        grad_NH, of_value = value.back(grads[2], n_NH, needs[8:12], grad_NH, further)
        if wanted_M is None:
            grad_NH, of_query = query.back(_turn(grads[0], cos_ND, -sin_ND), n_NH, needs[:4], grad_NH, further)
        else:
            grad_MO = _turn(grads[0], cos_ND[wanted_M], -sin_ND[wanted_M])
            grad_MH, of_query = query.back(grad_MO, n_NH[wanted_M], needs[:4], None, further)
            if grad_NH is not None and grad_MH is not None:
                grad_NH.index_add_(0, wanted_M, grad_MH)
        grad_norm_H = None
        if grad_NH is not None:
            grad_NH, grad_norm_H = _norm_back(grad_NH, unit_NH, inverse_N1, norm_H, ctx.needs_input_grad[1])
            grad_NH = grad_NH.to(x_NH.dtype)
        return grad_NH, grad_norm_H, *(None,) * 5, *of_query, *of_key, *of_value


class _Rest(torch.autograd.Function):
    """A layer after its attention: output product, residual, norm, gated MLP, residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        attended_NO: Tensor,
        norm_H: Tensor,
        eps: float,
        scales: tuple[float, ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        """[N, H] and what attention gave, to the layer's output [N, H]."""
        output, gate, up, down = _products(tensors, scales)
        middle_NH = output(attended_NO).add_(x_NH)
        n_NH = _norm(middle_NH, eps)[0].mul_(norm_H).to(x_NH.dtype)
        gate_NI, up_NI = gate(n_NH), up(n_NH)
        out_NH = down(F.silu(gate_NI).mul_(up_NI)).add_(middle_NH)
        ctx.save_for_backward(attended_NO, middle_NH, gate_NI, up_NI, norm_H, *tensors)
        ctx.eps, ctx.scales = eps, scales
        return out_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of both inputs and every weight that needs it."""
        attended_NO, middle_NH, gate_NI, up_NI, norm_H, *tensors = ctx.saved_tensors
        output, gate, up, down = _products(tuple(tensors), ctx.scales)
        needs = ctx.needs_input_grad[5:]
        (grad_NH,) = grads
        # One exponential for silu(g) = g s and its slope s + g s (1 - s), s the sigmoid; the library's two take two.
        sigmoid_NI = gate_NI.sigmoid()
        active_NI = gate_NI * sigmoid_NI
        slope_NI = torch.lerp(active_NI, gate_NI.new_ones(()), sigmoid_NI)
        grad_NI, of_down = down.back(grad_NH, active_NI * up_NI, needs[12:16], None)
        assert grad_NI is not None
        unit_NH, inverse_N1 = _norm(middle_NH, ctx.eps)
        n_NH = (unit_NH * norm_H).to(grad_NH.dtype)
        grad_n_NH, of_up = up.back(active_NI.mul_(grad_NI), n_NH, needs[8:12], None)
        grad_n_NH, of_gate = gate.back(slope_NI.mul_(grad_NI.mul_(up_NI)), n_NH, needs[4:8], grad_n_NH)
        assert grad_n_NH is not None
        grad_middle_NH, grad_norm_H = _norm_back(grad_n_NH, unit_NH, inverse_N1, norm_H, ctx.needs_input_grad[2])
        grad_middle_NH = grad_middle_NH.to(grad_NH.dtype).add_(grad_NH)
        grad_NO, of_output = output.back(grad_middle_NH, attended_NO, needs[:4], None, ctx.needs_input_grad[1])
        return grad_middle_NH, grad_NO, grad_norm_H, None, None, *of_output, *of_gate, *of_up, *of_down


class _Embed(torch.autograd.Function):
    """The embedding of each token."""

    @staticmethod
    def forward(ctx: Any, ids_N: Tensor, weight_VH: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        ctx.save_for_backward(ids_N, weight_VH)
        return F.embedding(ids_N, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Of the weight."""
        ids_N, weight_VH = ctx.saved_tensors
        return None, spare.zeros_like(weight_VH, grads[0].dtype).index_add_(0, ids_N, grads[0])


class _LastNorm(torch.autograd.Function):
    """The norm after the last layer."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, norm_H: Tensor, eps: float) -> Tensor:
        """[N, H] -> [N, H]."""
        ctx.save_for_backward(x_NH, norm_H)
        ctx.eps = eps
        return _norm(x_NH, eps)[0].mul_(norm_H).to(x_NH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the input and the weight."""
        x_NH, norm_H = ctx.saved_tensors
        grad_NH, grad_norm_H = _norm_back(grads[0], *_norm(x_NH, ctx.eps), norm_H, ctx.needs_input_grad[1])
        return grad_NH.to(x_NH.dtype), grad_norm_H, None


def covers(model: PreTrainedModel) -> bool:
    """Whether `packed_hidden` is the same function as the model's own pass."""
    body, config = model.base_model, model.config.get_text_config()
    return (
        type(body) in (LlamaModel, Qwen2Model)
        and body.device.type == "cpu"
        and config.hidden_act == "silu"
        and not config.attention_dropout
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )


def packed_hidden(model: PreTrainedModel, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
    """Last hidden states of the tokens that are asked for, row by row: [M, H]. Padding must be on the right.

    Rows that are alike up to the first token that is asked for, such as responses to one prompt, share that beginning.
    Asserts nothing about the model: `covers` says whether this is its function.
    """
    some_B = wanted_BS.any(1)
    ids_BS, wanted_BS = ids_BS[some_B], wanted_BS[some_B]
    starts_B = wanted_BS.int().argmax(1)
    found: dict[bytes, int] = {}
    of: list[int] = []
    firsts: list[int] = []
    for row, (ids_S, start) in enumerate(zip(ids_BS.numpy(), starts_B.tolist(), strict=True)):
        of.append(found.setdefault(ids_S[:start].tobytes(), len(found)))
        firsts += [row] if of[-1] == len(firsts) else []
    saved = int(starts_B.sum() - starts_B[firsts].sum())
    if saved * WORTH_SHARING < wanted_BS.numel() or not starts_B.all():
        places, needed_BS = Places.of(wanted_BS)
        return _through(model, ids_BS[:, : places.width][needed_BS], places)
    beginnings = [ids_BS[row, : starts_B[row]] for row in firsts]
    columns_BS = starts_B[:, None] + torch.arange(ids_BS.shape[1])
    inside_BS = columns_BS < ids_BS.shape[1]
    columns_BS = columns_BS.clamp_max(ids_BS.shape[1] - 1)
    own_BS = wanted_BS.gather(1, columns_BS) & inside_BS
    return shared_hidden(model, beginnings, torch.tensor(of), ids_BS.gather(1, columns_BS), own_BS)


def shared_hidden(
    model: PreTrainedModel, beginnings: Sequence[Tensor], of_B: Tensor, ids_BS: Tensor, wanted_BS: Tensor
) -> Tensor:
    """`packed_hidden` of rows that begin with `beginnings[of_B]`, which pass through the model once; ids_BS and
    wanted_BS are of what follows them, with at least one wanted token in every row."""
    lengths_G = torch.tensor([len(ids) for ids in beginnings])
    places, needed_BS = SharedPlaces.of(lengths_G, of_B, wanted_BS)
    ids_N = torch.cat([*beginnings, ids_BS[:, : places.rows.width][needed_BS]])
    return _through(model, ids_N, places)


class _Weights(NamedTuple):
    """A layer's own, as they are at this moment: which adapter is in force may change before the backward pass."""

    inner: list[Product]
    outer: list[Product]
    before: Any
    after: Any
    width: int

    @classmethod
    def of(cls, layer: Any) -> "_Weights":
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            [Product.of(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj)],
            [Product.of(m) for m in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)],
            layer.input_layernorm,
            layer.post_attention_layernorm,
            attention.head_dim,
        )


def _layer(
    own: _Weights, places: Places | SharedPlaces, cos_ND: Tensor, sin_ND: Tensor, last: bool, x_NH: Tensor
) -> Tensor:
    wanted_M = places.wanted_M if last else None
    query, key, value = _Queries.apply(
        x_NH,
        own.before.weight,
        cos_ND,
        sin_ND,
        wanted_M,
        own.before.variance_epsilon,
        tuple(p.scale for p in own.inner),
        *(t for p in own.inner for t in p.tensors),
    )
    return _Rest.apply(
        x_NH if wanted_M is None else x_NH[wanted_M],
        places.attend(query, key, value, last, own.width),
        own.after.weight,
        own.after.variance_epsilon,
        tuple(p.scale for p in own.outer),
        *(t for p in own.outer for t in p.tensors),
    )


def _through(model: PreTrainedModel, ids_N: Tensor, places: Places | SharedPlaces) -> Tensor:
    body: Any = model.base_model
    x_NH = _Embed.apply(ids_N, body.embed_tokens.weight)
    x_NH = x_NH.to(compute_dtype(x_NH.dtype))
    cos, sin = body.rotary_emb(x_NH, torch.arange(int(places.column_N.max()) + 1)[None])
    half = cos.shape[-1] // 2
    cos_ND, sin_ND = cos[0, places.column_N, :half], sin[0, places.column_N, :half]
    recomputed = model.is_activation_checkpointing and torch.is_grad_enabled()
    for number, layer in enumerate(body.layers):
        work = functools.partial(_layer, _Weights.of(layer), places, cos_ND, sin_ND, number == len(body.layers) - 1)
        x_NH = checkpoint(work, x_NH, use_reentrant=False, preserve_rng_state=False) if recomputed else work(x_NH)
    return _LastNorm.apply(x_NH, body.norm.weight, body.norm.variance_epsilon).to(body.embed_tokens.weight.dtype)
