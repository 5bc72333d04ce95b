import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.algo import moments
from keel.algo.moments import Moments

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), max_size=20)


def test_by_hand():
    # 1, 3 and 5, 7, 9: together 1, 3, 5, 7, 9 of mean 5 and squared deviations 16 + 4 + 0 + 4 + 16
    a, b = moments.of(torch.tensor([1.0, 3.0])), moments.of(torch.tensor([[5.0], [7.0], [9.0]]))
    assert a == Moments(2, 2.0, 2.0) and a.variance == 1.0
    whole = moments.merge(a, b)
    assert whole.count == 5 and whole.mean == pytest.approx(5.0) and whole.m2 == pytest.approx(40.0)
    assert whole.std == pytest.approx(math.sqrt(8))


@given(NUMBERS, NUMBERS, NUMBERS)
def test_merging_parts_in_any_order_is_the_whole(x, y, z):
    a, b, c = (moments.of(torch.tensor(part)) for part in (x, y, z))
    whole = moments.of(torch.tensor(x + y + z))
    for merged in (moments.merge(moments.merge(a, b), c), moments.merge(c, moments.merge(a, b))):
        assert merged.count == whole.count
        assert merged.mean == pytest.approx(whole.mean, abs=1e-6)
        assert merged.m2 == pytest.approx(whole.m2, rel=1e-9, abs=1e-6)


def test_nothing_is_neutral_and_inputs_stay():
    a = moments.of(torch.tensor([1.0, 2.0]))
    assert moments.merge(Moments(), a) == a == moments.merge(a, Moments())
    assert moments.of(torch.empty(0)) == moments.merge(Moments(), Moments()) == Moments()
    assert Moments().variance == 0 and Moments().std == 0


def test_a_far_mean_does_not_eat_the_variance():
    x = 1e4 + torch.arange(10.0)
    merged = moments.merge(moments.of(x[:3]), moments.of(x[3:]))
    assert merged.variance == pytest.approx(8.25)


@given(
    st.lists(st.lists(st.floats(-100, 100), max_size=8), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e8, -1e8]),
    st.booleans(),
)
def test_merged_over_batches_and_ranks_is_numpy_on_all_numbers(batches, offset, in_pairs):
    parts = [torch.tensor(batch, dtype=torch.float64) + offset for batch in batches]
    found = [moments.of(part) for part in parts]
    while in_pairs and len(found) > 1:  # as a tree of ranks would
        found = [reduce(moments.merge, found[i : i + 2]) for i in range(0, len(found), 2)]
    merged = reduce(moments.merge, found)  # as one batch after another
    numbers = np.concatenate([part.numpy() for part in parts])
    assert merged.count == len(numbers)
    if len(numbers):
        assert merged.mean == pytest.approx(numbers.mean(), rel=1e-14, abs=1e-11)
        # A number near 1e8 has a spacing of 1.5e-8, times a deviation of up to 200.
        assert merged.variance == pytest.approx(numbers.var(), rel=1e-9, abs=1e-5 if offset else 1e-9)


def test_normalised_by_hand():
    seen = Moments(count=4, mean=10.0, m2=16.0)  # standard deviation 2
    x = torch.tensor([10.0, 12.0, 7.0, 100.0])
    assert torch.equal(moments.normalised(x, seen), torch.tensor([0.0, 1.0, -1.5, 45.0]))
    assert torch.equal(moments.normalised(x, seen, bound=1.0), torch.tensor([0.0, 1.0, -1.0, 1.0]))
    assert torch.equal(moments.normalised(x, seen, centre=False), torch.tensor([5.0, 6.0, 3.5, 50.0]))
    assert torch.equal(moments.denormalised(torch.tensor([0.0, 1.0, -1.5]), seen), x[:3])


def test_without_a_spread_numbers_are_only_shifted():
    x = torch.tensor([3.0, 4.0])
    assert torch.equal(moments.normalised(x, Moments()), x)
    constant = moments.of(torch.full((3,), 0.1))
    assert constant.scale == 1.0
    # Different roundings of 0.1 are not a spread that later numbers may be measured in.
    rounded = moments.merge(Moments(3, 0.1, 0.0), Moments(3, math.nextafter(0.1, 1), 0.0))
    assert rounded.std > 0 and rounded.scale == 1.0
    assert moments.normalised(torch.tensor([5.0]), Moments(3, 5.0, 0.0)) == 0


@given(st.integers(0, 2**31), st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_normalising_what_was_seen_gives_mean_0_and_sd_1_and_back(seed, shift, scale):
    x = torch.randn(20, generator=torch.Generator().manual_seed(seed)).double() * scale + shift
    seen = moments.of(x)
    white = moments.normalised(x, seen)
    assert white.mean().item() == pytest.approx(0, abs=1e-9)
    assert white.std(correction=0).item() == pytest.approx(1)
    torch.testing.assert_close(moments.denormalised(white, seen), x)
