import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.policy_loss import ppo_clip

SEEDS = st.integers(0, 2**31)


def with_gradient(inputs, mask, clip, denominator):
    """Loss, gradient and metrics for inputs = (logprobs, old logprobs, advantages)."""
    logprobs, old, advantages = inputs
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = ppo_clip(logprobs, old, advantages, mask, clip, denominator)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad, metrics


def test_by_hand():
    # Ratios 2, 2, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 2 and clip 0.2:
    # min(2, 1.2) + min(-2, -1.2) + min(0.5, 0.8) + min(-0.5, -0.8) + 2.2 = 1.2 - 2 + 0.5 - 0.8 + 2.2 = 1.1
    ratios = torch.tensor([[2.0, 2.0, 0.5, 0.5, 1.1, 50.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, float("nan")]])
    mask = torch.tensor([[True] * 5 + [False]])
    loss, gradient, metrics = with_gradient((ratios.log(), torch.zeros(1, 6), advantages), mask, 0.2, 5)
    assert loss.item() == pytest.approx(-1.1 / 5)
    torch.testing.assert_close(gradient, -torch.tensor([[0.0, -2.0, 0.5, 0.0, 2.2, 0.0]]) / 5)
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    k3 = 2 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5) + 0.1 - math.log(1.1)
    assert metrics["approx_kl"].item() == pytest.approx(k3 / 5)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)
    assert metrics["log_ratio_abs_max"].item() == pytest.approx(math.log(2))


@given(SEEDS)
def test_at_ratio_1_it_is_the_policy_gradient(make_batch, seed):
    batch = make_batch(seed)
    inputs = batch.old_logprobs, batch.old_logprobs, batch.advantages
    _, gradient, metrics = with_gradient(inputs, batch.mask, 0.2, 7)
    torch.testing.assert_close(gradient, torch.where(batch.mask, -batch.advantages / 7, 0.0))
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] == 0 and metrics["ratio_max"] == 1


@given(SEEDS)
def test_without_clipping_it_is_importance_weighting(make_batch, seed):
    batch = make_batch(seed)
    inputs = batch.logprobs, batch.old_logprobs, batch.advantages
    loss, gradient, metrics = with_gradient(inputs, batch.mask, math.inf, 7)
    weighted = torch.where(batch.mask, (batch.logprobs - batch.old_logprobs).exp() * batch.advantages, 0.0)
    torch.testing.assert_close(loss, -weighted.sum() / 7)
    torch.testing.assert_close(gradient, -weighted / 7)
    assert metrics["clip_fraction"] == 0


@given(SEEDS, st.floats(0, 0.5))
def test_padding_order_and_split_change_nothing(make_batch, spoil, seed, clip):
    batch = make_batch(seed)
    inputs = batch.logprobs, batch.old_logprobs, batch.advantages
    count = batch.mask.sum()
    loss, gradient, metrics = with_gradient(inputs, batch.mask, clip, count)

    dirty = with_gradient([spoil(x, batch.mask) for x in inputs], batch.mask, clip, count)
    assert torch.equal(dirty[0], loss) and torch.equal(dirty[1], gradient) and dirty[2] == metrics

    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    moved = with_gradient([x[order] for x in inputs], batch.mask[order], clip, count)
    torch.testing.assert_close(moved[0], loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(moved[1], gradient[order], atol=1e-6, rtol=1e-6)

    parts = [with_gradient([x[s] for x in inputs], batch.mask[s], clip, count) for s in (slice(0, 1), slice(1, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient, atol=1e-6, rtol=1e-6)
    for name, value in metrics.items():
        combined = max(p[2][name] for p in parts) if name.endswith("_max") else sum(p[2][name] for p in parts)
        torch.testing.assert_close(combined, value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shift", [100.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(shift, sign):
    inputs = torch.tensor([[shift, 0.0]]), torch.zeros(1, 2), torch.full((1, 2), sign)
    loss, gradient, metrics = with_gradient(inputs, torch.ones(1, 2).bool(), 0.2, 2)
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient[0, 0] == 0 and gradient[0, 1] == -sign / 2
    assert metrics["approx_kl"].isfinite() and metrics["log_ratio_abs_max"] == abs(shift)
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20) if shift > 0 else 1, rel=1e-5)


def test_an_empty_response_is_finite_and_nothing():
    inputs = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    loss, gradient, metrics = with_gradient(inputs, torch.zeros(2, 3).bool(), 0.2, 4)
    assert loss == 0 and not gradient.any() and metrics["ratio_max"] == 1


def test_a_bad_number_on_a_real_token_is_not_hidden():
    logprobs = torch.tensor([[float("nan"), 0.0]])
    loss, _ = ppo_clip(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), 0.2, 2)
    assert loss.isnan()
