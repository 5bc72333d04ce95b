import math

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
