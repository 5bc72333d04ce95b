from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo.masking import Aggregation, loss_denominators, masked_mean, masked_sum, masked_whiten

X = torch.tensor([[1.0, 2.0, float("nan")], [5.0, float("inf"), 100.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])
MODES = get_args(Aggregation)


def test_sum_and_mean_by_hand():
    assert masked_sum(X, MASK) == 8.0
    assert masked_mean(X, MASK, None) == pytest.approx(8 / 3)
    assert masked_mean(X, MASK, 4.0) == 2.0
    assert masked_mean(X, MASK, torch.tensor(16)) == 0.5


def test_whiten_by_hand():
    # 1, 2, 6: mean 3, deviations -2, -1, 3, unbiased variance 14 / 2 = 7
    x = torch.tensor([[1.0, 2.0, float("nan")], [6.0, float("inf"), 100.0]])
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / 7**0.5
    torch.testing.assert_close(masked_whiten(x, MASK), expected)
    torch.testing.assert_close(masked_whiten(x, MASK, keep_mean=True), torch.where(MASK, expected + 3.0, 0.0))


def test_empty_and_single_masks_are_finite():
    empty, single = torch.zeros_like(MASK), torch.zeros_like(MASK)
    single[1, 0] = True
    assert masked_sum(X, empty) == 0 and masked_mean(X, empty, None) == 0
    assert torch.equal(masked_whiten(X, empty), torch.zeros(2, 3))
    assert torch.equal(masked_whiten(X, single), torch.zeros(2, 3))
    assert masked_whiten(X, single, keep_mean=True)[1, 0] == 5.0


@given(st.integers(0, 2**31), st.floats(-10, 10), st.floats(0.1, 100))
def test_whitened_has_mean_0_and_sd_1_over_exactly_the_mask(make_batch, spoil, seed, shift, scale):
    batch = make_batch(seed)
    x = batch.values.double() * scale + shift  # float64, where a mean far larger than the spread costs no digits
    white = masked_whiten(spoil(x, batch.mask), batch.mask, eps=0.0)
    assert white[batch.mask].mean().item() == pytest.approx(0, abs=1e-9)
    assert white[batch.mask].std().item() == pytest.approx(1, abs=1e-9)
    assert torch.equal(white != 0, batch.mask)
    kept = masked_whiten(batch.values, batch.mask, keep_mean=True)
    assert kept[batch.mask].mean().item() == pytest.approx(batch.values[batch.mask].mean().item(), abs=1e-5)


def test_gradient_ignores_what_is_outside():
    x = X.clone().requires_grad_()
    masked_mean(x, MASK, 2.0).backward()
    assert x.grad is not None and torch.equal(x.grad, MASK / 2)


def test_parts_with_the_same_denominator_add_up(make_batch):
    batch = make_batch(3)
    parts = sum(masked_mean(batch.values[i : i + 2], batch.mask[i : i + 2], batch.mask.sum()) for i in (0, 2, 4))
    torch.testing.assert_close(parts, masked_mean(batch.values, batch.mask, None))


def test_a_denominator_a_row_or_a_token_by_hand():
    assert masked_mean(X, MASK, torch.tensor([[2.0], [10.0]])) == 1.5 + 0.5
    a_token = torch.tensor([[1.0, 4.0, 0.0], [5.0, float("nan"), 0.0]])
    x = X.clone().requires_grad_()
    mean = masked_mean(x, MASK, a_token)
    assert mean == 1 + 0.5 + 1
    mean.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.tensor([[1, 0.25, 0], [0.2, 0, 0]]))
    packed = masked_mean(X[MASK], torch.ones(3).bool(), a_token[MASK])
    assert packed == mean


def test_a_denominator_of_another_layout_is_caught():
    with pytest.raises(AssertionError):  # [B, 1] against tokens packed to [N] would broadcast to [B, N]
        masked_mean(X[MASK], torch.ones(3).bool(), torch.ones(2, 1))


def test_aggregations_by_hand():
    # Rows of 2, 1 and 0 tokens that hold 1 and 2, and 6: 9 in 3 tokens; row means 1.5 and 6; row sums 3 and 6.
    x = torch.tensor([[1.0, 2.0, 7.0], [6.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    means = {mode: masked_mean(x, mask, loss_denominators(mask.sum(1), mode, 10)).item() for mode in MODES}
    assert means == pytest.approx(
        {
            "token_mean": 3.0,
            "sequence_mean_token_mean": 3.75,
            "sequence_mean_token_sum": 4.5,
            "constant": 9 / (2 * 10),
        }
    )


@pytest.mark.parametrize("mode", MODES)
@given(st.integers(0, 2**31))
def test_denominators_once_for_the_minibatch_serve_any_split(make_batch, spoil, mode, seed):
    batch = make_batch(seed)
    x = spoil(batch.values, batch.mask)
    denominators = loss_denominators(batch.mask.sum(1), mode, 9)
    assert denominators.shape == (6, 1)
    whole = masked_mean(x, batch.mask, denominators)
    for rows in ([slice(0, 2), slice(2, 3), slice(3, 6)], [slice(b, b + 1) for b in range(6)]):
        parts = sum(masked_mean(x[s], batch.mask[s], denominators[s]) for s in rows)
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    packed = masked_mean(x[batch.mask], batch.mask[batch.mask], denominators.expand(6, 9)[batch.mask])
    torch.testing.assert_close(packed, whole, atol=1e-6, rtol=1e-6)
    # Row 1 is empty: without it every other row's denominator is the same.
    kept = [0, 2, 3, 4, 5]
    assert torch.equal(loss_denominators(batch.mask.sum(1)[kept], mode, 9), denominators[kept])


@pytest.mark.parametrize("mode", MODES)
def test_a_minibatch_without_tokens_has_loss_0(mode):
    denominators = loss_denominators(torch.zeros(2, dtype=torch.long), mode, 3)
    assert (denominators > 0).all()
    assert masked_mean(X, torch.zeros_like(MASK), denominators) == 0
