"""One step of decoding with a Llama or Qwen2 on a CPU: the model's own parameters, less around the matrix products.

Activations are held as columns, [features, N], N the tokens of B rows: one of each while responses are decoded, all S
of the prompts before. A product then is weight @ x with the weight as it lies in memory; the library's usual
x @ weight.T rearranges the weight, the far larger of the two while N is small, at every step (docs/decisions.md).
Adapters are applied beside the weights, which are never written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model, Qwen2RMSNorm

from keel.algo.precision import emulated, weight_as
from keel.rollout.cache import GrowingLayer

COLUMNS = 4096
"""Tokens that pass through an MLP at once: its inner activations are the largest of a long prompt."""


_Norm = LlamaRMSNorm | Qwen2RMSNorm


@dataclass(frozen=True)
class _Product:
    """weight @ x, with bias and adapter where the layer has them."""

    weight: Tensor
    bias_O1: Tensor | None
    adapter: tuple[Tensor, Tensor, float] | None

    @classmethod
    def of(cls, layer: nn.Module) -> "_Product":
        plain = layer.get_base_layer() if isinstance(layer, LoraLinear) else layer
        assert type(plain) is nn.Linear, type(plain)
        adapter = None
        if isinstance(layer, LoraLinear) and not layer.disable_adapters:
            (name,) = layer.active_adapters
            a, b = (cast(nn.Linear, part[name]) for part in (layer.lora_A, layer.lora_B))
            adapter = (a.weight, b.weight, layer.scaling[name])
        return cls(plain.weight, None if plain.bias is None else plain.bias[:, None], adapter)

    def __call__(self, x_IN: Tensor, wide_IN: Tensor | None, out_ON: Tensor | None = None) -> Tensor:
        """wide_IN: the input in the adapter's dtype; not read without an adapter."""
        weight = weight_as(self.weight, x_IN.dtype)  # the weight itself, but where its dtype is emulated
        y_ON = torch.mm(weight, x_IN) if out_ON is None else torch.mm(weight, x_IN, out=out_ON)
        if self.bias_O1 is not None:
            y_ON.add_(self.bias_O1)
        if self.adapter is not None:
            a, b, scale = self.adapter
            assert wide_IN is not None
            # Added in float32 and rounded once, as the learner's own layer does.
            y_ON.add_(torch.mm(b, torch.mm(a, wide_IN)), alpha=scale)
        return y_ON


@dataclass(frozen=True)
class _Layer:
    before: _Norm
    q: _Product
    k: _Product
    v: _Product
    o: _Product
    after: _Norm
    gate: _Product
    up: _Product
    down: _Product
    act: Callable[[Tensor], Tensor]
    scaling: float


def _layer(layer: Any) -> _Layer:  # a module's parts are typed as modules at large
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before=layer.input_layernorm,
        q=_Product.of(attention.q_proj),
        k=_Product.of(attention.k_proj),
        v=_Product.of(attention.v_proj),
        o=_Product.of(attention.o_proj),
        after=layer.post_attention_layernorm,
        gate=_Product.of(mlp.gate_proj),
        up=_Product.of(mlp.up_proj),
        down=_Product.of(mlp.down_proj),
        act=mlp.act_fn,
        scaling=attention.scaling,
    )


class _Attend(NamedTuple):
    """Attention of S tokens of each of B rows to all that the row holds.

    mask: what a query may read, for all layers: [B, 1, 1, L], added to the scores, where S is 1, else [B, 1, S, S] of
    bool; None: all up to itself.
    """

    rows: int
    tokens: int
    mask: Tensor | None

    @classmethod
    def of(cls, rows: int, tokens: int, seen_BS: Tensor | None, dtype: torch.dtype) -> "_Attend":
        if seen_BS is None:
            return cls(rows, tokens, None)
        if tokens == 1:
            mask = torch.zeros(seen_BS.shape, dtype=dtype).masked_fill_(~seen_BS, -torch.inf)[:, None, None]
            return cls(rows, tokens, mask)
        causal_SS = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return cls(rows, tokens, seen_BS[:, None, None] & causal_SS)  # of padding, which reads nothing, torch makes 0

    def rows_of(self, x_KDN: Tensor) -> Tensor:
        """[heads, width, B * S] -> [B, heads, S, width]."""
        return x_KDN.view(*x_KDN.shape[:2], self.rows, self.tokens).permute(2, 0, 3, 1)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """[B, heads, S, width], and keys and values [B, heads of keys, L, width], to [heads * width, B * S]."""
        if self.tokens > 1:
            out = F.scaled_dot_product_attention(
                query, keys, values, self.mask, is_causal=self.mask is None, scale=scaling, enable_gqa=True
            )
            return out.permute(1, 3, 0, 2).reshape(-1, self.rows * self.tokens)
        # The queries of a key head stand as several queries of one head: no key or value is repeated.
        grouped = query.mul(scaling).reshape(self.rows, keys.shape[1], -1, keys.shape[3])
        scores = grouped @ keys.transpose(2, 3)
        if self.mask is not None:
            scores.add_(self.mask)
        return (scores.softmax(-1) @ values).reshape(self.rows, -1).t().contiguous()


class LlamaStep:
    """Reads a model's weights and adapter in force; see `supports`. Keeps no copy, so it is made anew in no time."""

    def __init__(self, model: PreTrainedModel):
        trunk = model.base_model
        assert isinstance(trunk, LlamaModel | Qwen2Model)
        config = trunk.config
        assert config.num_key_value_heads is not None
        self.trunk, self.heads, self.kv_heads = trunk, config.num_attention_heads, config.num_key_value_heads
        self.layers, self.dtype = [_layer(layer) for layer in trunk.layers], trunk.dtype
        self.adapted = any(isinstance(module, LoraLinear) and not module.disable_adapters for module in trunk.modules())

    def __call__(self, ids_BS: Tensor, places_BS: Tensor, seen_BS: Tensor | None, cache: DynamicCache) -> Tensor:
        """The last hidden state after one or more tokens a row: [B, H]. Writes their keys and values to the cache.

        Args:
            ids_BS: the tokens; several only where the cache is empty.
            places_BS: their positions, padding not counted.
            seen_BS: which cached tokens a row may read, these included, padding being on the left; None: all of them.
            cache: of `growing_cache`.
        """
        rows, tokens = ids_BS.shape
        x_HN = self.trunk.embed_tokens(ids_BS.flatten()).t().contiguous()
        if emulated(x_HN):
            x_HN = x_HN.float()
        cos_1ND, sin_1ND = self.trunk.rotary_emb(x_HN, places_BS.reshape(1, -1))
        cos_DN, sin_DN = cos_1ND[0].t().contiguous(), sin_1ND[0].t().contiguous()
        sin_DN[: len(sin_DN) // 2].neg_()  # so that the rotation is x cos + rolled x sin
        attend = _Attend.of(rows, tokens, seen_BS, x_HN.dtype)
        for layer, held in zip(self.layers, cache.layers, strict=True):
            assert isinstance(held, GrowingLayer)
            x_HN = x_HN + self._attention(layer, held, _norm(layer.before, x_HN), cos_DN, sin_DN, attend)
            for some_HN in x_HN.split(COLUMNS, 1):
                some_HN.add_(self._mlp(layer, _norm(layer.after, some_HN)))
        last_HB = x_HN.view(len(x_HN), rows, tokens)[:, :, -1]
        return _norm(self.trunk.norm, last_HB).t().to(self.dtype)

    def _attention(
        self, layer: _Layer, held: GrowingLayer, x_HN: Tensor, cos_DN: Tensor, sin_DN: Tensor, attend: "_Attend"
    ) -> Tensor:
        wide, (width, columns) = self._wide(x_HN), cos_DN.shape
        both = x_HN.new_empty((self.heads + self.kv_heads) * width, columns)  # queries and keys are rotated together
        layer.q(x_HN, wide, both[: self.heads * width])
        layer.k(x_HN, wide, both[self.heads * width :])
        both = both.view(-1, width, columns)
        turned = attend.rows_of((both * cos_DN).addcmul_(both.roll(width // 2, 1), sin_DN))
        value = attend.rows_of(layer.v(x_HN, wide).view(self.kv_heads, width, columns))
        keys, values = held.update(turned[:, self.heads :].to(self.dtype), value.to(self.dtype))
        query = turned[:, : self.heads]
        out_HN = attend(query, keys.to(x_HN.dtype), values.to(x_HN.dtype), layer.scaling)
        return layer.o(out_HN, self._wide(out_HN))

    def _mlp(self, layer: _Layer, x_HN: Tensor) -> Tensor:
        wide = self._wide(x_HN)
        inner = layer.act(layer.gate(x_HN, wide)).mul_(layer.up(x_HN, wide))
        return layer.down(inner, self._wide(inner))

    def _wide(self, x: Tensor) -> Tensor | None:
        return x.float() if self.adapted else None


def supports(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether the model is a Llama or Qwen2 on the CPU, its layers plain or with LoRA adapters, its cache in place.

    Everything else goes through its own forward pass.
    """
    linear = {nn.Linear, LoraLinear}
    return (
        type(model.base_model) in (LlamaModel, Qwen2Model)
        and model.device.type == "cpu"
        and all(type(layer) is GrowingLayer for layer in cache.layers)
        and all(type(m) in linear for n, m in model.base_model.named_modules() if n.endswith("_proj"))
    )


def _norm(norm: _Norm, x_HB: Tensor) -> Tensor:
    wide = x_HB.float()
    scale = wide.square().mean(0).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x_HB.dtype).mul_(norm.weight[:, None])
