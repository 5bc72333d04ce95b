"""The in-process sampler: what it draws, what it reports, and that a response is its own."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from keel.models.roles import Role, logprobs_BT
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.rollout.noise import sample_keys, uniforms
from tests.tiny import backbone, encoder_of, prompts


def engine(kind, folder, most=24, role: Role = "policy"):
    return LocalEngine(backbone(kind, folder), encoder_of(folder, most), role)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_logprobs_are_the_trainers(kind, tiny_model):
    sampler = engine(kind, tiny_model)
    rollouts = sampler.generate(prompts(12), Sampling(0.8, 24, rows=5), seed=1, step=2)
    trainer, _ = logprobs_BT(sampler.roles, "policy", rollouts.sequences(), 0.8, 0, 4000)
    torch.testing.assert_close(rollouts.sampler_logprobs_BT, trainer, atol=1e-5, rtol=1e-5)
    assert (rollouts.sampler_logprobs_BT[~rollouts.response_mask_BT] == 0).all()


def test_greedy_is_what_transformers_generates(tiny_model):
    sampler, asked = engine("separate", tiny_model), prompts(8)
    rollouts = sampler.generate(asked, Sampling(0.0, 24, rows=3), seed=0, step=0)
    model = cast(Any, sampler.roles.model("policy"))  # `generate` is not declared on PreTrainedModel
    for row, prompt_ids, mask in zip(
        rollouts.response_ids_BT, rollouts.prompt_ids, rollouts.response_mask_BT, strict=True
    ):
        out = model.generate(
            input_ids=torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
        )
        assert out[0, len(prompt_ids) :].tolist() == row[mask].tolist()


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
    model = sampler.roles.model("policy").base_model
    prefilled, forward = [], model.forward

    def counted(input_ids, **kwargs):
        if input_ids.shape[1] > 1:
            prefilled.append(len(input_ids))
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    shared = sampler.generate(asked, Sampling(1.0, 24, rows=rows), seed=3, step=4)
    assert prefilled == {12: [4], 5: [2, 3, 1]}[rows]
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
