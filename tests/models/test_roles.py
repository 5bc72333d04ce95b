"""Both backbones: what a role computes, what it owns, and what training must not touch."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.data.encode import pad_sequences
from keel.models.roles import (
    Role,
    checkpoint_tensors,
    logprobs_BT,
    micro_logprobs,
    micro_scores,
    micro_values,
    restore_tensors,
    scores_B,
    values_BT,
)
from keel.models.shared import SharedRoles
from tests.tiny import backbone, load, sequences

BACKBONES = ["shared", "separate"]
ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward")


def plain_logprobs(model, sequence, temperature=1.0):
    ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
    start = len(sequence.prompt_ids)
    return torch.stack([logprobs[start + t - 1, token] for t, token in enumerate(sequence.response_ids)])


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_plain_model(kind, temperature, tiny_model):
    roles, rows = backbone(kind, tiny_model), sequences(5)
    got, _ = logprobs_BT(roles, "policy", rows, temperature, 0, 10_000)
    for b, row in enumerate(rows):
        want = plain_logprobs(roles.model("policy"), row, temperature)
        torch.testing.assert_close(got[b, : len(row.response_ids)], want, atol=1e-5, rtol=1e-5)
        assert (got[b, len(row.response_ids) :] == 0).all()


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_reference_is_the_model_that_was_loaded(kind, tiny_model):
    roles, rows, plain = backbone(kind, tiny_model), sequences(3), load(tiny_model)
    reference, _ = logprobs_BT(roles, "reference", rows, 1.0, 0, 10_000)
    policy, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 10_000)
    for b, row in enumerate(rows):
        torch.testing.assert_close(
            reference[b, : len(row.response_ids)], plain_logprobs(plain, row), atol=1e-5, rtol=1e-5
        )
    assert not torch.allclose(policy, reference)


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_row_does_not_depend_on_its_batch_mates(kind, tiny_model):
    roles, rows = backbone(kind, tiny_model), sequences(9)
    together, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 10_000)
    split, _ = logprobs_BT(roles, "policy", rows, 1.0, 7, 30)
    alone = torch.cat(
        [
            torch.nn.functional.pad(
                logprobs_BT(roles, "policy", [r], 1.0, 0, 99)[0], (0, together.shape[1] - len(r.response_ids))
            )
            for r in rows
        ]
    )
    torch.testing.assert_close(split, together, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-5)
    values, last = values_BT(roles, rows, 0, 10_000)
    values_split, last_split = values_BT(roles, rows, 9, 30)
    torch.testing.assert_close(values_split, values, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last_split, last, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scores_B(roles, rows, 3, 30), scores_B(roles, rows, 0, 10_000), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_values_come_before_their_token_and_scores_from_the_last(kind, tiny_model):
    roles, (row, *_) = backbone(kind, tiny_model), sequences(1)
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    with torch.no_grad():
        hidden = roles.model("critic").base_model(input_ids=ids).last_hidden_state[0]
        want = roles.head("critic")(hidden)
        hidden = roles.model("reward").base_model(input_ids=ids).last_hidden_state[0]
        score = roles.head("reward")(hidden[-1])
    values, last = values_BT(roles, [row], 0, 1000)
    start = len(row.prompt_ids)
    torch.testing.assert_close(values[0], want[start - 1 : -1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last[0], want[-1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scores_B(roles, [row], 0, 1000)[0], score, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_gradients_reach_the_role_that_computes_and_no_other(kind, tiny_model):
    roles, rows = backbone(kind, tiny_model), sequences(4)
    ids, mask, lengths = pad_sequences(rows, 0)
    (-micro_logprobs(roles, "policy", ids, mask, 1.0)[0]).sum().backward()
    assert all(p.grad is not None for n, p in roles.parameters("policy").items())
    assert all(p.grad is None for p in roles.parameters("critic").values())
    micro_values(roles, ids, mask).sum().backward()
    trunk = [p for n, p in roles.parameters("critic").items() if "lm_head" not in n]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trunk)
    score = micro_scores(roles, ids, lengths).sum()
    assert not score.requires_grad
    assert all(p.grad is None for p in roles.parameters("reward").values())
    if isinstance(roles, SharedRoles):
        adapters = {id(p) for r in ("policy", "critic") for p in roles.parameters(r).values()}
        assert all(p.grad is None for p in roles.base.parameters() if id(p) not in adapters)


@pytest.mark.parametrize("kind", BACKBONES)
def test_training_leaves_frozen_roles_byte_identical(kind, tiny_model):
    roles, rows = backbone(kind, tiny_model), sequences(4)
    before = {role: roles.fingerprint(role) for role in ROLES}
    ids, mask, _ = pad_sequences(rows, 0)
    trained = [p for role in ("policy", "critic") for p in roles.parameters(role).values()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    (micro_logprobs(roles, "policy", ids, mask, 1.0)[0].sum() + micro_values(roles, ids, mask).sum()).backward()
    optimizer.step()
    after = {role: roles.fingerprint(role) for role in ROLES}
    assert after["reference"] == before["reference"] and after["reward"] == before["reward"]
    assert after["policy"] != before["policy"] and after["critic"] != before["critic"]


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_export_is_a_plain_model_that_computes_the_same(kind, tiny_model, tmp_path):
    roles, rows = backbone(kind, tiny_model), sequences(3)
    want, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 1000)
    roles.export("policy", tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    for b, row in enumerate(rows):
        torch.testing.assert_close(plain_logprobs(plain, row), want[b, : len(row.response_ids)], atol=1e-4, rtol=1e-4)
    roles.export("reference", tmp_path / "ref")
    for ours, theirs in zip(load(tmp_path / "ref").parameters(), load(tiny_model).parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", BACKBONES)
def test_weights_go_round_through_a_checkpoint(kind, tiny_model):
    roles, other = backbone(kind, tiny_model), backbone(kind, tiny_model)
    with torch.no_grad():
        for role in ("policy", "critic"):
            for parameter in roles.parameters(role).values():
                parameter.mul_(1.5)
    restore_tensors(other, checkpoint_tensors(roles))
    assert other.fingerprint("policy") == roles.fingerprint("policy")
    assert other.fingerprint("critic") == roles.fingerprint("critic")


def test_the_critic_starts_as_the_reward_model(tiny_model, tmp_path):
    rows = sequences(3)
    shared = backbone("shared", tiny_model, ("reward",), ("reward",))
    shared.save_headed("reward", tmp_path / "shared")
    fresh = backbone("shared", tiny_model)
    assert isinstance(fresh, SharedRoles)
    fresh.load_headed(tmp_path / "shared", ["critic", "reward"])
    torch.testing.assert_close(scores_B(fresh, rows, 0, 1000), scores_B(shared, rows, 0, 1000))
    torch.testing.assert_close(scores_B(fresh, rows, 0, 1000, "critic"), scores_B(shared, rows, 0, 1000))


def test_bfloat16_base_keeps_float32_adapters(tiny_model):
    roles = SharedRoles(load(tiny_model, "bfloat16"), ["policy", "reference"], ["policy"], 4, 8.0, 0)
    assert {p.dtype for p in roles.parameters("policy").values()} == {torch.float32}
    got, _ = logprobs_BT(roles, "policy", sequences(3), 1.0, 0, 1000)
    reference, _ = logprobs_BT(roles, "reference", sequences(3), 1.0, 0, 1000)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference, atol=0, rtol=0)
