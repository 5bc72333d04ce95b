"""The packed pass against transformers' own: same hidden states, same gradients, nothing that was not asked for."""

import copy

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from keel.errors import ModelError
from keel.models import decoder
from keel.models.decoder import covers, packed_hidden
from keel.models.loading import recompute_activations
from keel.models.roles import hidden_at
from keel.models.shared import SharedRoles

KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, 4),
    "llama, grouped": (LlamaForCausalLM, LlamaConfig, 2),
    "qwen2, biases": (Qwen2ForCausalLM, Qwen2Config, 2),
}
LENGTHS = ([7, 9, 4, 9, 2], [9, 9, 9, 9, 9])
S = 9


def make(kind: str) -> PreTrainedModel:
    model_class, config, kv_heads = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(
        config(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=True,
        )
    ).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def wanted(what: str, lengths: list[int]) -> torch.Tensor:
    place, lengths_B1 = torch.arange(S), torch.tensor(lengths)[:, None]
    return {
        "response": (place >= 3) & (place < lengths_B1 - 1),  # the last row has none
        "all": place < lengths_B1,
        "last": place == lengths_B1 - 1,
    }[what]


def compare(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, rtol: float = 1e-5) -> None:
    assert covers(model)
    found = []
    for pass_ in (
        lambda: model.base_model(input_ids=ids, use_cache=False).last_hidden_state[mask],
        lambda: packed_hidden(model, ids, mask),
    ):
        model.zero_grad()
        hidden = pass_()
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        found.append((hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (theirs, their_grads), (ours, our_grads) = found
    assert torch.allclose(theirs, ours, atol=1e-5)
    assert their_grads.keys() == our_grads.keys()
    for name, grad in their_grads.items():
        assert torch.allclose(grad, our_grads[name], rtol=rtol, atol=1e-5 * float(grad.abs().max())), name


@pytest.mark.parametrize("what", ["response", "all", "last"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, lengths: list[int], what: str) -> None:
    compare(make(kind), torch.randint(0, 40, (5, S)), wanted(what, lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_that_rows_share_is_passed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0, 2 and 4 begin alike for three tokens, row 3 with those of row 1 for two; rows 0 and 1 differ in one."""
    ids, lengths = torch.randint(5, 40, (5, S)), torch.tensor([7, 9, 6, 9, 8])
    ids[[0, 2, 4], :3], ids[[1, 3], :2] = torch.tensor([1, 2, 3]), torch.tensor([1, 4])
    starts_B1, place = torch.tensor([3, 2, 3, 2, 3])[:, None], torch.arange(S)
    mask = (place >= starts_B1) & (place < lengths[:, None] - 1)
    mask[3, 4] = False  # a gap: tokens of a tool
    passed: list[int] = []
    through = decoder._through
    monkeypatch.setattr(decoder, "_through", lambda m, ids_N, p: [passed.append(len(ids_N)), through(m, ids_N, p)][1])
    compare(make(kind), ids, mask)
    assert passed == [int((lengths - 1).sum()) - 2 * 3 - 2]


@pytest.mark.parametrize("kind", ["llama, grouped", "qwen2, biases"])
def test_equals_peft(kind: str) -> None:
    roles = SharedRoles(make(kind), ["policy", "critic", "reference"], ["policy", "critic"], 4, 8.0, 0)
    for role in ("policy", "critic"):
        for name, parameter in roles.parameters(role).items():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.3)
    for role in ("policy", "critic"):
        model = roles.model(role)
        compare(model, torch.randint(0, 40, (5, S)), wanted("response", LENGTHS[0]))
        trained = {n for n, p in model.named_parameters() if p.grad is not None}
        assert trained and all(f".{role}." in name for name in trained)
    with torch.no_grad():
        ids, mask = torch.randint(0, 40, (5, S)), wanted("all", LENGTHS[0])
        plain = roles.model("reference").base_model(input_ids=ids).last_hidden_state[mask]
        assert torch.allclose(packed_hidden(roles.base, ids, mask), plain, atol=1e-5)


@pytest.mark.parametrize("unit", [True, False])
def test_bfloat16_is_as_near_to_float32_as_transformers(unit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a matrix unit for bfloat16, LoRA in float32 included."""
    monkeypatch.setattr(decoder, "compute_dtype", lambda dtype: dtype if unit else torch.float32)
    base = make("llama, grouped").bfloat16()
    roles = SharedRoles(base, ["policy", "reference"], ["policy"], 4, 8.0, 0)
    for name, parameter in roles.parameters("policy").items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    model, ids, mask = roles.model("policy"), torch.randint(0, 40, (5, S)), wanted("response", LENGTHS[0])
    exact = copy.deepcopy(model).float()

    def pass_of(net: PreTrainedModel, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        net.zero_grad()
        hidden = (
            packed_hidden(net, ids, mask) if packed else net.base_model(input_ids=ids, use_cache=False)[0][mask]
        ).float()
        hidden.square().sum().backward()
        return hidden.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    right, theirs, ours = pass_of(exact, False), pass_of(model, False), pass_of(model, True)
    for i in range(2):
        assert (ours[i] - right[i]).norm() <= 1.5 * (theirs[i] - right[i]).norm()
    assert packed_hidden(model, ids, mask).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])
def test_activations_are_computed_again_where_asked_for(kind: str) -> None:
    """The same numbers; every layer's feed-forward runs a second time, and only for gradients."""
    if kind == "gpt2":
        torch.manual_seed(0)
        plain = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=40, n_positions=S, bos_token_id=1, eos_token_id=2)
        ).eval()
    else:
        plain = make(kind)
    again, ids, mask = copy.deepcopy(plain), torch.randint(0, 40, (5, S)), wanted("response", LENGTHS[0])
    recompute_activations(again)
    runs: list[int] = []
    for layer in again.base_model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.get_submodule("mlp").register_forward_pre_hook(lambda *_: runs.append(1))
    found = []
    for model in (plain, again):
        hidden = hidden_at(model, ids, mask)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        found.append((hidden.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    with torch.no_grad():
        assert torch.equal(hidden_at(again, ids, mask), found[0][0])
    assert len(runs) == (
        9 if kind == "gpt2" else 0
    )  # forward, again, without gradient; the packed pass calls no module


def test_the_packed_pass_computes_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another adapter has come into force before the backward pass."""
    roles = SharedRoles(make("llama"), ["policy", "critic", "reference"], ["policy", "critic"], 4, 8.0, 0)
    for parameter in (*roles.parameters("policy").values(), *roles.parameters("critic").values()):
        parameter.data.normal_(0, 0.3)
    ids, mask = torch.randint(0, 40, (5, S)), wanted("response", LENGTHS[0])
    layers: list[int] = []
    layer = decoder._layer
    monkeypatch.setattr(decoder, "_layer", lambda *a: [layers.append(1), layer(*a)][1])
    found = []
    for again in (False, True):
        if again:
            recompute_activations(roles.base)
        loss = packed_hidden(roles.model("policy"), ids, mask).square().sum()
        roles.model("critic")
        own = list(roles.adapters["policy"].values())
        for parameter in own:
            parameter.requires_grad_(True)
        found.append(torch.autograd.grad(loss, own))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and len(layers) == 3 + 6


def test_an_architecture_that_cannot_recompute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"does not support activation checkpointing[\s\S]*micro_tokens"):
        recompute_activations(model)


def test_padding_and_what_follows_is_never_read() -> None:
    model, mask = make("llama"), wanted("response", LENGTHS[0])
    ids = torch.randint(0, 40, (5, S))
    other = torch.where(torch.arange(S) >= torch.tensor(LENGTHS[0])[:, None] - 1, 7, ids)
    assert torch.equal(packed_hidden(model, ids, mask), packed_hidden(model, other, mask))


def test_other_architectures_pass_through_transformers() -> None:
    assert not covers(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)))
    windowed = Qwen2Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    assert not covers(Qwen2ForCausalLM(windowed))
