"""The sandbox's language model before training: a small Llama of the stock transformers architecture."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from keel.errors import ConfigError

MLP_SCALE = 0.3


def build_model(
    *,
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    seed: int,
    bos_token_id: int,
    eos_token_id: int,
    pad_token_id: int,
    max_length: int = 1024,
) -> LlamaForCausalLM:
    """A float32 Llama with tied embeddings, no dropout, in evaluation mode; the weights depend on the arguments only.

    Weights are normal with standard deviation 1/sqrt(hidden): at these widths it learns to copy facts sooner than with
    the customary 0.02. The global random state is left as it was.

    Raises:
        ConfigError: `hidden` is not an even multiple of `heads` (rotary embeddings turn pairs).
    """
    if hidden % (2 * heads):
        raise ConfigError(
            f"hidden width {hidden} cannot be split into {heads} heads of even width",
            where="hidden, heads",
            remedy="make hidden a multiple of twice the number of heads",
        )
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for place in (f"model.layers.{i}" for i in range(layers)):
            weights[f"{place}.mlp.down_proj.weight"].mul_(MLP_SCALE)
            weights[f"{place}.self_attn.o_proj.weight"].copy_(weights[f"{place}.self_attn.v_proj.weight"].T)
    model.generation_config = GenerationConfig(
        bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id, do_sample=True
    )
    return model.float().eval()
