import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo import moments
from keel.algo.moments import Moments
from keel.algo.value_loss import explained_variance, popart, value_loss

NAN = float("nan")


def with_gradient(inputs, mask, clip, denominator):
    """Loss, gradient and metrics for inputs = (values, old values, returns)."""
    values, old, returns = inputs
    values = values.clone().requires_grad_()
    loss, metrics = value_loss(values, old, returns, mask, clip, denominator)
    loss.backward()
    assert values.grad is not None
    return loss.detach(), values.grad, metrics


def test_by_hand():
    # Values 1, 3, 0 from 0, 0, 0 towards 2, 1, 1; clip 0.5 gives 0.5, 0.5, 0.
    # Plain errors 1, 4, 1; clipped 2.25, 0.25, 1; the larger 2.25, 4, 1.
    values, returns = torch.tensor([[1.0, 3.0, 0.0, NAN]]), torch.tensor([[2.0, 1.0, 1.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    loss, gradient, metrics = with_gradient((values, torch.zeros(1, 4), returns), mask, None, 4)
    assert loss.item() == pytest.approx(0.5 * 6 / 4) and metrics["clip_fraction"] == 0
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 2.0, -1.0, 0.0]]) / 4)
    assert metrics["value_mean"].item() == pytest.approx(1.0)

    loss, gradient, metrics = with_gradient((values, torch.zeros(1, 4), returns), mask, 0.5, 4)
    assert loss.item() == pytest.approx(0.5 * 7.25 / 4) and metrics["clip_fraction"] == 0.25
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 2.0, -1.0, 0.0]]) / 4)


@given(st.integers(0, 2**31), st.sampled_from([None, 0.2, 1.0]))
def test_padding_order_and_split_change_nothing(make_batch, spoil, seed, clip):
    batch = make_batch(seed)
    inputs = batch.new_values, batch.values, batch.returns
    count = batch.mask.sum()
    loss, gradient, metrics = with_gradient(inputs, batch.mask, clip, count)

    dirty = with_gradient([spoil(x, batch.mask) for x in inputs], batch.mask, clip, count)
    assert torch.equal(dirty[0], loss) and torch.equal(dirty[1], gradient) and dirty[2] == metrics

    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    moved = with_gradient([x[order] for x in inputs], batch.mask[order], clip, count)
    torch.testing.assert_close(moved[0], loss, atol=1e-6, rtol=1e-6)

    parts = [with_gradient([x[s] for x in inputs], batch.mask[s], clip, count) for s in (slice(0, 2), slice(2, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]]), gradient, atol=1e-6, rtol=1e-6)
    for name, value in metrics.items():
        torch.testing.assert_close(parts[0][2][name] + parts[1][2][name], value, atol=1e-6, rtol=1e-6)


def test_a_wide_clip_is_no_clip(make_batch):
    batch = make_batch(2)
    inputs = batch.new_values, batch.values, batch.returns
    torch.testing.assert_close(
        with_gradient(inputs, batch.mask, 1e6, 9)[:2], with_gradient(inputs, batch.mask, None, 9)[:2]
    )


def test_explained_variance_by_hand(spoil):
    # Returns 1, 3, 5 have variance 8/3; errors 0, 1, -1 have 2/3.
    mask = torch.tensor([[True, True, True, False]])
    returns = spoil(torch.tensor([[1.0, 3.0, 5.0, 0.0]]), mask)
    values = spoil(torch.tensor([[1.0, 2.0, 6.0, 0.0]]), mask)
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.75)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 7, returns, mask).item() == pytest.approx(1)
    assert explained_variance(torch.ones(1, 4), returns, mask).item() == pytest.approx(0)
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3)


def test_explained_variance_of_constant_or_no_returns_is_0():
    values = torch.randn(3, 50)
    assert explained_variance(values, torch.full((3, 50), 0.1), torch.ones(3, 50).bool()) == 0
    assert explained_variance(values, torch.randn(3, 50), torch.zeros(3, 50).bool()) == 0


def test_popart_by_hand():
    # Mean 1, sd 2 become mean 5, sd 4: weights halve, bias (2 * 3 + 1 - 5) / 4.
    old, new = Moments(4, 1.0, 16.0), Moments(4, 5.0, 64.0)
    weight, bias = popart(torch.tensor([2.0, -4.0], requires_grad=True), torch.tensor(3.0), old, new)
    assert torch.equal(weight, torch.tensor([1.0, -2.0])) and bias == 0.5
    assert not weight.requires_grad


@given(st.integers(0, 2**31), st.floats(-1e3, 1e3), st.floats(0.01, 1e3), st.floats(-1e3, 1e3), st.floats(0.01, 1e3))
def test_popart_keeps_outputs_while_statistics_move(seed, mean, sd, new_mean, new_sd):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((9, 5), (1, 5), (1,)))
    batches = [sd * torch.randn(8, generator=generator) + mean, new_sd * torch.randn(8, generator=generator) + new_mean]
    seen = Moments()
    expected = hidden @ weight.T + bias  # in units of reward: mean 0 and sd 1 before the first batch
    for batch in batches:
        merged = moments.merge(seen, moments.of(batch))
        weight, bias = popart(weight, bias, seen, merged)
        seen = merged
        values = moments.denormalised(hidden @ weight.T + bias, seen)
        # Relative to the terms that the value is the sum of.
        size = abs(seen.mean) + seen.std + expected.abs().max().item()
        torch.testing.assert_close(values, expected, atol=1e-6 * size, rtol=1e-6)


def test_popart_error_in_normalised_units_is_the_error_over_the_sd():
    seen = Moments(4, 10.0, 16.0)
    values, returns = torch.tensor([[9.0, 12.0]]), torch.tensor([[11.0, 13.0]])
    inputs = [moments.normalised(x, seen) for x in (values, values, returns)]
    loss, gradient, _ = with_gradient(inputs, torch.ones(1, 2).bool(), None, 2)
    assert loss.item() == pytest.approx(0.5 * (2**2 + 1**2) / 2 / 2**2)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -0.5]]) / 2)
