"""One decoding step of a Llama model on a CPU: the model's own parameters, with less around the matrix products.

Activations are held as columns, [features, B]. A product then is weight @ x with the weight as it lies in memory; the
library's usual x @ weight.T rearranges the weight, the far larger of the two, at every step (docs/decisions.md).
Adapters are applied beside the weights, which are never written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm

from keel.algo.precision import emulated
from keel.rollout.cache import GrowingLayer


@dataclass(frozen=True)
class _Product:
    """weight @ x, with bias and adapter where the layer has them."""

    weight: Tensor
    bias_N1: Tensor | None
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

    def __call__(self, x_KB: Tensor, x32_KB: Tensor | None, out_NB: Tensor | None = None) -> Tensor:
        """x32_KB: the input in the adapter's dtype; not read without an adapter."""
        weight = self.weight.to(x_KB.dtype)  # the weight itself, but where its dtype is emulated
        y_NB = torch.mm(weight, x_KB) if out_NB is None else torch.mm(weight, x_KB, out=out_NB)
        if self.bias_N1 is not None:
            y_NB.add_(self.bias_N1)
        if self.adapter is not None:
            a, b, scale = self.adapter
            assert x32_KB is not None
            # Added in float32 and rounded once, as the learner's own layer does.
            y_NB.add_(torch.mm(b, torch.mm(a, x32_KB)), alpha=scale)
        return y_NB


@dataclass(frozen=True)
class _Layer:
    before: LlamaRMSNorm
    q: _Product
    k: _Product
    v: _Product
    o: _Product
    after: LlamaRMSNorm
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


class LlamaStep:
    """Reads a model's weights and adapter in force; see `supports`. Keeps no copy, so it is made anew in no time."""

    def __init__(self, model: PreTrainedModel):
        trunk = model.base_model
        assert isinstance(trunk, LlamaModel)
        config = trunk.config
        assert config.num_key_value_heads is not None
        self.trunk, self.heads, self.kv_heads = trunk, config.num_attention_heads, config.num_key_value_heads
        self.layers = [_layer(layer) for layer in trunk.layers]
        self.adapted = any(isinstance(module, LoraLinear) and not module.disable_adapters for module in trunk.modules())

    def __call__(self, ids_B: Tensor, places_B: Tensor, seen_BS: Tensor | None, cache: DynamicCache) -> Tensor:
        """The last hidden state after one more token a row: [B, H]. Writes the token's keys and values to the cache.

        Args:
            ids_B: the token.
            places_B: its position, padding not counted.
            seen_BS: which cached tokens a row may read, this one included; None: all of them.
            cache: of `growing_cache`.
        """
        x_HB = self.trunk.embed_tokens(ids_B).t().contiguous()
        dtype = x_HB.dtype
        if emulated(x_HB):
            x_HB = x_HB.float()
        cos_B1D, sin_B1D = self.trunk.rotary_emb(x_HB, places_B[:, None])
        cos_DB, sin_DB = cos_B1D[:, 0].t().contiguous(), sin_B1D[:, 0].t().contiguous()
        half = len(sin_DB) // 2
        sin_DB[:half].neg_()  # so that the rotation is x cos + rolled x sin
        mask = None
        if seen_BS is not None:
            mask = x_HB.new_zeros(seen_BS.shape).masked_fill_(~seen_BS, -torch.inf)[:, None, None]
        for layer, held in zip(self.layers, cache.layers, strict=True):
            assert isinstance(held, GrowingLayer)
            x_HB = x_HB + self._attention(layer, held, _norm(layer.before, x_HB), cos_DB, sin_DB, mask)
            y_HB = _norm(layer.after, x_HB)
            y32_HB = self._wide(y_HB)
            inner = layer.act(layer.gate(y_HB, y32_HB)).mul_(layer.up(y_HB, y32_HB))
            x_HB.add_(layer.down(inner, self._wide(inner)))
        return _norm(self.trunk.norm, x_HB).t().to(dtype)

    def _attention(
        self, layer: _Layer, held: GrowingLayer, x_HB: Tensor, cos_DB: Tensor, sin_DB: Tensor, mask: Tensor | None
    ) -> Tensor:
        wide, (width, rows) = self._wide(x_HB), cos_DB.shape
        both = x_HB.new_empty((self.heads + self.kv_heads) * width, rows)  # queries and keys are rotated together
        layer.q(x_HB, wide, both[: self.heads * width])
        layer.k(x_HB, wide, both[self.heads * width :])
        both = both.view(-1, width, rows)
        turned = (both * cos_DB).addcmul_(both.roll(width // 2, 1), sin_DB).permute(2, 0, 1)
        value = layer.v(x_HB, wide).view(self.kv_heads, width, rows).permute(2, 0, 1)
        keys, values = (t.to(x_HB.dtype) for t in held.update(turned[:, self.heads :, None], value[:, :, None]))
        # The queries of a key head stand as several queries of one head: no key or value is repeated.
        query = turned[:, : self.heads].mul(layer.scaling).reshape(rows, self.kv_heads, -1, width)
        scores = query @ keys.transpose(2, 3)
        if mask is not None:
            scores.add_(mask)
        out_HB = (scores.softmax(-1) @ values).reshape(rows, -1).t().contiguous()
        return layer.o(out_HB, self._wide(out_HB))

    def _wide(self, x: Tensor) -> Tensor | None:
        return x.float() if self.adapted else None


def supports(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether the model is a Llama on the CPU, its layers plain or with LoRA adapters, its cache written in place.

    Everything else goes through its own forward pass.
    """
    linear = {nn.Linear, LoraLinear}
    return (
        type(model.base_model) is LlamaModel
        and model.device.type == "cpu"
        and all(type(layer) is GrowingLayer for layer in cache.layers)
        and all(type(m) in linear for n, m in model.base_model.named_modules() if n.endswith("_proj"))
    )


def _norm(norm: LlamaRMSNorm, x_HB: Tensor) -> Tensor:
    wide = x_HB.float()
    scale = wide.square().mean(0).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x_HB.dtype).mul_(norm.weight[:, None])
