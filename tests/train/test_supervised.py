"""Rates, guarded steps, the losses of SFT and of the reward model, and that each learns."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from keel.data.encode import pad_sequences
from keel.errors import NumberError
from keel.models.roles import logprobs_BT, scores_B
from keel.train.inputs import split_rows
from keel.train.optim import guarded_step, linear_rate, make_optimizer, set_rate
from keel.train.reward import Comparisons, accuracy, group_scores, normalise, pair_loss
from keel.train.sft import conversation_loss, mean_loss, token_loss
from keel.types import TokenSequence
from tests.tiny import backbone, comparisons, sequences


def test_rates_by_hand():
    assert [linear_rate(s, 4, 1.0) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [linear_rate(s, 4, 2.0, warmup=0.5) for s in range(4)] == [1.0, 2.0, 2.0, 1.0]
    assert [linear_rate(s, 4, 1.0, hold=0.5) for s in range(4)] == [1.0, 1.0, 1.0, 0.5]


def test_a_gradient_that_is_not_finite_moves_no_weight_of_any_optimizer():
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    good.grad, bad.grad = torch.ones(2), torch.tensor([1.0, float("nan")])
    optimizers = {"good": make_optimizer([good]), "bad": make_optimizer([bad])}
    for optimizer in optimizers.values():
        set_rate(optimizer, 0.1)
    with pytest.raises(NumberError, match="gradient of the bad"):
        guarded_step(optimizers, {"good": 1.0, "bad": 1.0}, "here")
    assert torch.equal(good, torch.ones(2)) and torch.equal(bad, torch.ones(2)) and good.grad is None


def test_gradients_are_clipped_to_the_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert guarded_step({"a": optimizer}, {"a": 1.0}, "here") == {"a": pytest.approx(5.0)}
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_sft_loss_is_over_response_tokens_only_end_token_included(kind, tiny_model):
    rows = sequences(5)
    roles = backbone(kind, tiny_model, ("policy",), ("policy",))
    got = token_loss(roles, "policy", rows, 0, 50)([0, 1, 2, 3, 4])
    ids, mask, _ = pad_sequences(rows, 0)
    with torch.no_grad():
        logits = roles.model("policy")(input_ids=ids).logits[:, :-1]
    labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert got["loss"] == pytest.approx(want.item(), abs=1e-5)
    assert got["tokens"] == sum(len(r.response_ids) for r in rows)
    assert mean_loss(roles, "policy", rows, 0, 50)["heldout_loss"] == pytest.approx(want.item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_sft_loss_leaves_out_gaps(kind, tiny_model):
    """Rows with one, two and no gaps, of which two share their first prompt, against the labels that they stand for."""
    first, second, third = sequences(3)
    rows = [
        TokenSequence(first.prompt_ids, (7, 8, 9, 10, 11, 12, 13), (True, True, False, False, True, False, True)),
        TokenSequence(first.prompt_ids, (7, 8, 9, 9, 9), (True, True, False, True, True)),
        second,
    ]
    roles = backbone(kind, tiny_model, ("policy",), ("policy",))
    ids, _, _ = pad_sequences(rows, 0)
    labels = torch.full_like(ids, -100)
    for row, sequence in enumerate(rows):
        for at, (token, on) in enumerate(zip(sequence.response_ids, sequence.spoken, strict=True)):
            labels[row, len(sequence.prompt_ids) + at] = token if on else -100
    with torch.no_grad():
        logits = roles.model("policy")(input_ids=ids).logits[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    got = token_loss(roles, "policy", rows, 0, 50)([0, 1, 2])
    assert got["loss"] == pytest.approx(want.item(), abs=1e-5)
    assert got["tokens"] == 4 + 4 + len(second.response_ids)
    assert mean_loss(roles, "policy", rows, 0, 50)["heldout_loss"] == pytest.approx(want.item(), abs=1e-5)
    logprobs, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 50)
    assert (logprobs[0, :7] != 0).tolist() == list(rows[0].spoken)
    split = conversation_loss(roles, "policy", [[third], [rows[0], rows[1]], [second]], 0, 50)([1, 2])
    assert split["loss"] == pytest.approx(got["loss"], abs=1e-6)


def test_a_response_in_several_pairs_is_held_once():
    group = comparisons(1)[0]
    assert len(group.sequences) == 3 and group.pairs == ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_pair_loss_is_the_mean_over_pairs_however_it_is_split(kind, tiny_model):
    """Case 48."""
    groups, gradients = comparisons(4), []
    for tokens in (10_000, 70):
        roles = backbone(kind, tiny_model, ("reward",), ("reward",))
        got = pair_loss(roles, groups, 0, tokens)([2, 0, 3])
        gradients.append(
            torch.cat([p.grad.flatten() for p in roles.parameters("reward").values() if p.grad is not None])
        )
    scores = [scores_B(roles, groups[i].sequences, 0, 10_000) for i in (2, 0, 3)]
    margins = torch.stack([s[a] - s[b] for s in scores for a, b in groups[0].pairs])
    assert got["loss"] == pytest.approx(-logsigmoid(margins).mean().item(), abs=1e-5)
    assert got["accuracy"] == pytest.approx((margins > 0).float().mean().item(), abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_prompts_weigh_the_same_margins_are_asked_for_and_scores_are_drawn_to_zero(tiny_model):
    """A prompt of three pairs and one of a single pair, each option against the formula on the scores."""
    three, two = comparisons(2)
    (a, b, c), (d, e, _) = three.sequences, two.sequences
    groups = [Comparisons.of([(a, b), (a, c), (b, c)], [1.0, 2.0, 0.0]), Comparisons.of([(d, e)], [3.0])]
    roles = backbone("separate", tiny_model, ("reward",), ("reward",))
    scores = [scores_B(roles, group.sequences, 0, 10_000) for group in groups]
    chosen, rejected = (
        torch.stack([s[pair[k]] for s, group in zip(scores, groups, strict=True) for pair in group.pairs])
        for k in (0, 1)
    )
    ahead, margins = chosen - rejected, torch.tensor([1.0, 2.0, 0.0, 3.0])
    each = -logsigmoid(ahead)
    wanted = {
        "weighting": (each[:3].mean() + each[3]) / 2,
        "margin": -logsigmoid(ahead - 0.5 * margins).mean(),
        "centring": (each + 0.1 * (chosen + rejected) ** 2).mean(),
    }
    options = {"weighting": "prompt", "margin": 0.5, "centring": 0.1}
    plain = pair_loss(roles, groups, 0, 70)([0, 1])["loss"]
    for name, want in wanted.items():
        got = pair_loss(roles, groups, 0, 70, **{name: options[name]})([0, 1])
        assert got["loss"] == pytest.approx(want.item(), abs=1e-5) and got["loss"] != pytest.approx(plain, abs=1e-4)
    assert pair_loss(roles, groups, 0, 70, weighting="prompt")([0, 1])["margin"] == pytest.approx(
        ((ahead[:3].mean() + ahead[3]) / 2).item(), abs=1e-5
    )


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_reward_model_learns_its_pairs_and_is_normalised(kind, tiny_model):
    groups = comparisons(6)
    roles = backbone(kind, tiny_model, ("reward",), ("reward",))
    optimizer = make_optimizer(roles.parameters("reward").values())
    step = pair_loss(roles, groups, 0, 4000)
    for _ in range(40):
        set_rate(optimizer, 5e-3)
        step(list(range(6)))
        guarded_step({"reward": optimizer}, {"reward": 1.0}, "here")
    assert accuracy(groups, group_scores(roles, groups, 0, 4000))[0] > 0.95
    samples = sequences(30, seed=9)
    normalise(roles, samples, 0, 4000)
    after = scores_B(roles, samples, 0, 4000)
    assert abs(after.mean()) < 1e-4 and abs(after.std(correction=0) - 1) < 1e-4
    assert accuracy(groups, group_scores(roles, groups, 0, 4000))[0] > 0.95


def test_at_most_so_many_rows_are_trained_on_and_the_same_ones_are_held_out():
    train, held = split_rows(20, 5, seed=3)
    some, held_again = split_rows(20, 5, seed=3, most=4)
    assert held == held_again and len(some) == 4 and set(some) < set(train)
    assert not set(train) & set(held) and sorted(train + held) == list(range(20))
    assert split_rows(20, 5, seed=3, most=100) == (train, held)
