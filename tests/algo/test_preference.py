import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.algo import preference
from keel.algo.preference import bradley_terry, dpo, ipo, kto, kto_baseline, mean_nll, orpo, robust_dpo, simpo

LOG3 = math.log(3)
FOUR = {  # losses of policy and reference log-probabilities, chosen and rejected
    "dpo": partial(dpo, beta=0.1),
    "cdpo": partial(dpo, beta=0.1, label_smoothing=0.2),
    "robust": partial(robust_dpo, beta=0.1, label_smoothing=0.2),
    "ipo": partial(ipo, beta=0.1),
}
FREE = {"simpo": partial(simpo, beta=2.0, gamma=1.0), "orpo": partial(orpo, beta=0.1)}
"""Losses without a reference; they take lengths instead."""


def ready(values: list[float]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def call(name: str, chosen: Tensor, rejected: Tensor, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Any loss on pairs; references 0 (so that log-probabilities are log-ratios), lengths 2."""
    if name in FOUR:
        return FOUR[name](chosen, rejected, torch.zeros(len(chosen)), torch.zeros(len(chosen)), denominator=denominator)
    lengths = torch.full((len(chosen),), 2)
    return FREE[name](chosen, rejected, lengths, lengths, denominator=denominator)


class TestBradleyTerry:
    def test_by_hand(self):
        # Margins log 3, 0, -log 3: probabilities 3/4, 1/2, 1/4
        chosen, rejected = torch.tensor([LOG3, 1.0, 0.0]), torch.tensor([0.0, 1.0, LOG3])
        chosen.requires_grad_()
        loss, metrics = bradley_terry(chosen, rejected, 3)
        assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2) + math.log(1 / 4)) / 3)
        assert metrics["accuracy"].item() == pytest.approx(1 / 3)
        assert metrics["margin"].item() == pytest.approx(0, abs=1e-6)
        loss.backward()
        torch.testing.assert_close(chosen.grad, torch.tensor([-1 / 4, -1 / 2, -3 / 4]) / 3)

    def test_margin_by_hand(self):
        # 2 log 3 ahead, of which the margin asks for log 3
        loss, metrics = bradley_terry(torch.tensor([2 * LOG3]), torch.tensor([0.0]), 1, margin_B=torch.tensor([LOG3]))
        assert loss.item() == pytest.approx(-math.log(3 / 4))
        assert metrics["margin"].item() == pytest.approx(2 * LOG3) and metrics["accuracy"] == 1

    def test_centring_by_hand(self):
        chosen, rejected = ready([1.0]), ready([2.0])
        plain, _ = bradley_terry(chosen, rejected, 1)
        loss, _ = bradley_terry(chosen, rejected, 1, centring=0.01)
        assert (loss - plain).item() == pytest.approx(0.01 * 9)
        (loss - plain).backward()
        torch.testing.assert_close(chosen.grad, torch.tensor([0.06]))
        torch.testing.assert_close(rejected.grad, torch.tensor([0.06]))

    def test_pairs_of_a_prompt_averaged_as_instructgpt_does(self):
        # A prompt of three pairs and one of a single pair: each prompt weighs the same
        chosen, rejected = torch.tensor([1.0, 2.0, 3.0, -1.0]), torch.zeros(4)
        loss, metrics = bradley_terry(chosen, rejected, 2, weight_B=torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
        first, second = (bradley_terry(chosen[s], rejected[s], n)[0] for s, n in ((slice(3), 3), (slice(3, 4), 1)))
        torch.testing.assert_close(loss, (first + second) / 2)
        assert metrics["accuracy"].item() == pytest.approx(1 / 2)
        assert metrics["margin"].item() == pytest.approx((2 - 1) / 2)

    def test_split_and_a_common_shift_change_nothing(self):
        chosen, rejected = torch.randn(5), torch.randn(5)
        loss, metrics = bradley_terry(chosen, rejected, 5)
        parts = [bradley_terry(chosen[s], rejected[s], 5) for s in (slice(0, 2), slice(2, None))]
        torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
        for name, value in metrics.items():
            torch.testing.assert_close(parts[0][1][name] + parts[1][1][name], value)
        torch.testing.assert_close(bradley_terry(chosen + 3, rejected + 3, 5)[0], loss)

    def test_extreme_margins_are_finite(self):
        chosen = torch.tensor([1e4, -1e4], requires_grad=True)
        loss, _ = bradley_terry(chosen, torch.zeros(2), 2)
        loss.backward()
        assert loss.item() == pytest.approx(5e3)
        torch.testing.assert_close(chosen.grad, torch.tensor([0.0, -0.5]))


class TestByHand:
    """Policy and reference of one pair whose log-ratio margin h is 10 log 3, so that beta 0.1 makes odds of 3."""

    pair = (torch.tensor([-4.0]), torch.tensor([-9.0]), torch.tensor([-6.0]), torch.tensor([-11.0 + 10 * LOG3]))

    def test_dpo(self):
        loss, metrics = dpo(*self.pair, 0.1, 1)
        assert loss.item() == pytest.approx(-math.log(3 / 4))
        got = {name: value.item() for name, value in metrics.items()}
        assert got == pytest.approx(
            {"reward_chosen": 0.2, "reward_rejected": 0.2 - LOG3, "margin": LOG3, "accuracy": 1.0}
        )

    def test_conservative_dpo(self):
        loss, _ = dpo(*self.pair, 0.1, 1, label_smoothing=0.25)
        assert loss.item() == pytest.approx(-0.75 * math.log(3 / 4) - 0.25 * math.log(1 / 4))

    def test_robust_dpo(self):
        loss, _ = robust_dpo(*self.pair, 0.1, 1, label_smoothing=0.25)
        assert loss.item() == pytest.approx((-0.75 * math.log(3 / 4) + 0.25 * math.log(1 / 4)) / 0.5)

    def test_ipo(self):
        loss, metrics = ipo(*self.pair, 0.1, 1)
        assert loss.item() == pytest.approx((10 * LOG3 - 5) ** 2)
        assert metrics["margin"].item() == pytest.approx(LOG3)

    def test_simpo(self):
        # Means over tokens -1 and -2, times beta 2: 2 ahead, of which gamma asks for 2 - log 3
        loss, metrics = simpo(ready([-3.0]), ready([-8.0]), torch.tensor([3]), torch.tensor([4]), 2.0, 2 - LOG3, 1)
        assert loss.item() == pytest.approx(-math.log(3 / 4))
        assert metrics["reward_chosen"].item() == pytest.approx(-2) and metrics["margin"].item() == pytest.approx(2)

    def test_orpo(self):
        # Mean probabilities of a token 3/4 and 1/2: odds 3 and 1
        chosen, rejected = torch.tensor([2 * math.log(3 / 4)]), torch.tensor([5 * math.log(1 / 2)])
        loss, metrics = orpo(chosen, rejected, torch.tensor([2]), torch.tensor([5]), 0.5, 1)
        assert loss.item() == pytest.approx(-math.log(3 / 4) - 0.5 * math.log(3 / 4))
        assert metrics["margin"].item() == pytest.approx(LOG3, abs=1e-6)

    def test_kto(self):
        # Rewards 0.1 * (20, 0, -10), baseline 10 * log 3: the desirable ones are at sigmoid(2 - log 3) and 1/4
        policy, reference = torch.tensor([-10.0, -5.0, -20.0]), torch.tensor([-30.0, -5.0, -10.0])
        up, z = torch.tensor([True, True, False]), torch.tensor(10 * LOG3)
        loss, metrics = kto(policy, reference, up, z, 0.1, (1.0, 2.0), (2, 1))
        ahead = 2 - LOG3
        losses = [1 - 1 / (1 + math.exp(-ahead)), 3 / 4, 2 * (1 - 1 / (1 + math.exp(-1 - LOG3)))]
        assert loss.item() == pytest.approx(sum(losses) / 3)
        got = {name: value.item() for name, value in metrics.items()}
        assert got == pytest.approx(
            {"reward_chosen": 1.0, "reward_rejected": -1.0, "margin": 2.0, "accuracy": 2 / 3}, abs=1e-6
        )

    def test_kto_baseline(self):
        policy = ready([3.0, -1.0])
        baseline = kto_baseline(policy, torch.zeros(2))
        assert baseline == 1.0 and not baseline.requires_grad
        assert kto_baseline(-policy, torch.zeros(2)) == 0.0

    def test_likelihood_term(self):
        assert mean_nll(torch.tensor([-6.0, -8.0]), torch.tensor([3, 2]), 2).item() == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "robust"])
def test_at_policy_equal_to_reference_the_loss_is_log_two_and_the_margin_zero(name):
    same = torch.randn(6).mul(30)
    loss, metrics = FOUR[name](same, same * 2, same, same * 2, denominator=6)
    assert loss.item() == pytest.approx(math.log(2)) and metrics["margin"] == 0 and metrics["accuracy"] == 0.5


@pytest.mark.parametrize("name", [*FOUR, *FREE])
def test_the_chosen_response_is_pushed_up_and_the_other_down(name):
    chosen, rejected = ready([-3.0, -20.0]), ready([-4.0, -5.0])
    call(name, chosen, rejected, 2)[0].backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()


def test_ipo_and_conservative_dpo_stop_at_their_margin_and_robust_dpo_does_not():
    h = {"ipo": 1 / (2 * 0.1), "cdpo": math.log(0.8 / 0.2) / 0.1, "robust": 100.0}
    for name, at in h.items():
        chosen = ready([at])
        FOUR[name](chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), denominator=1)[0].backward()
        assert chosen.grad is not None
        assert abs(chosen.grad.item()) < 1e-5 if name != "robust" else chosen.grad.item() < -0.03


def test_robust_dpo_is_unbiased_under_flipped_labels():
    four = [torch.randn(8).mul(20) for _ in range(4)]
    flipped = [four[1], four[0], four[3], four[2]]
    mean = 0.8 * FOUR["robust"](*four, denominator=8)[0] + 0.2 * FOUR["robust"](*flipped, denominator=8)[0]
    torch.testing.assert_close(mean, FOUR["dpo"](*four, denominator=8)[0])


def test_kto_pushes_thumbs_up_and_down_and_not_at_all_far_from_the_baseline():
    policy, up = ready([0.0, 0.0, 1e4, -1e4]), torch.tensor([True, False, True, False])
    kto(policy, torch.zeros(4), up, torch.tensor(0.0), 0.1, (1.0, 1.0), (2, 2))[0].backward()
    torch.testing.assert_close(policy.grad, torch.tensor([-0.025, 0.025, 0, 0]) / 4)


@pytest.mark.parametrize("name", [*FOUR, *FREE, "kto"])
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_extremes_are_finite(name, size):
    """Log-ratios of both signs, and a response of probability 1."""
    chosen, rejected = ready([-size, 0.0, -size, 0.0]), ready([0.0, -size, -size, 0.0])
    if name == "kto":
        up = torch.tensor([True, False, True, False])
        loss, metrics = kto(chosen, rejected, up, torch.tensor(size), 0.1, (1.0, 1.0), (2, 2))
    else:
        loss, metrics = call(name, chosen, rejected, 4)
    loss.backward()
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    assert chosen.grad is not None and chosen.grad.isfinite().all()
    assert rejected.grad is not None and rejected.grad.isfinite().all()


ROWS = st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), min_size=2, max_size=6)


@settings(max_examples=20)
@given(rows=ROWS, cut=st.integers(1, 5), name=st.sampled_from([*FOUR, *FREE]))
def test_split_and_order_change_nothing(rows, cut, name):
    chosen, rejected = torch.tensor(rows).T
    whole, metrics = call(name, chosen, rejected, len(rows))
    parts = [call(name, chosen[s], rejected[s], len(rows)) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    for key, value in metrics.items():
        torch.testing.assert_close(parts[0][1][key] + parts[1][1][key], value)
    torch.testing.assert_close(call(name, chosen.flip(0), rejected.flip(0), len(rows))[0], whole)


@settings(max_examples=20)
@given(rows=ROWS, beta=st.floats(0.01, 2.0), shift=st.floats(-20, 20))
def test_dpo_sees_log_ratios_alone_and_its_gradient_is_the_papers(rows, beta, shift):
    """-beta * sigmoid(-beta h) on the chosen, the opposite on the rejected (the paper's equation after 7)."""
    chosen, rejected = torch.tensor(rows).T
    policy, other = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    loss, _ = dpo(policy, other, torch.zeros(len(rows)), torch.zeros(len(rows)), beta, len(rows))
    shifted, _ = dpo(chosen + shift, rejected, torch.full_like(chosen, shift), torch.zeros(len(rows)), beta, len(rows))
    torch.testing.assert_close(shifted, loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    want = beta * torch.sigmoid(-beta * (chosen - rejected)) / len(rows)
    torch.testing.assert_close(policy.grad, -want)
    torch.testing.assert_close(other.grad, want)


def test_thumbs_split_changes_nothing_with_the_baseline_of_the_whole_batch():
    policy, reference, up = torch.randn(6), torch.randn(6), torch.arange(6) % 3 == 0
    baseline = kto_baseline(policy.roll(1), reference.roll(1))
    arguments = (baseline, 0.1, (1.3, 0.7), (2, 4))
    whole, metrics = kto(policy, reference, up, *arguments)
    parts = [kto(policy[s], reference[s], up[s], *arguments) for s in (slice(1), slice(1, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    for key, value in metrics.items():
        torch.testing.assert_close(parts[0][1][key] + parts[1][1][key], value)


def test_the_bound_of_odds_is_where_float32_still_tells_odds():
    assert torch.tensor(preference.SURE).expm1() < 0
