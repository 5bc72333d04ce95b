"""Bytes of a model's weights, adapters, cache and activations, from its shapes alone: nothing is loaded."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Size:
    """A model's shapes.

    parameters: weights in all, tied ones once. adapter: weights of a LoRA adapter of rank 1 on every linear layer but
    the output. keys: width of the keys of one token in all layers; values are as many.
    """

    parameters: int
    adapter: int
    keys: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    def cache(self, tokens: int, dtype: str) -> int:
        """Bytes of the keys and values of so many tokens."""
        return 2 * self.keys * tokens * BYTES[dtype]

    def activations(self, tokens: int, dtype: str, recomputed: bool = False) -> int:
        """An estimate of what a training pass keeps of a micro-batch, in bytes: a Llama-like layer saves about twelve
        tensors of the hidden width and four of the feed-forward's for its backward pass; where they are recomputed,
        one layer does so at a time, beside the inputs of all."""
        one = 12 * self.hidden + 4 * self.intermediate
        return tokens * (one + self.layers * self.hidden if recomputed else one * self.layers) * BYTES[dtype]


def size_of(config: PretrainedConfig) -> Size:
    """Counted on a model without memory (torch's device meta)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Size(
        sum(p.numel() for p in model.parameters()),
        sum(m.in_features + m.out_features for m in linear),
        text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * width,
        text.num_hidden_layers,
        text.hidden_size,
        getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        text.vocab_size,
    )
