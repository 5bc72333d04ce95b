"""Order of rows: hand-worked epochs, every row once an epoch, resume from the step alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.stream import POOL, batch_rows, steps_for
from keel.errors import DataError


def epoch_of(rows: int, seed: int, epoch: int) -> list[int]:
    sequence = np.random.SeedSequence([seed, epoch])
    return np.random.Generator(np.random.PCG64(sequence)).permutation(rows).tolist()


def test_batches_walk_through_the_epochs_and_straddle_them():
    first, second, third = (epoch_of(5, 7, epoch) for epoch in range(3))
    assert [batch_rows(5, 2, step, 7) for step in range(6)] == [
        first[:2],
        first[2:4],
        [first[4], second[0]],
        second[1:3],
        second[3:],
        third[:2],
    ]


def test_an_order_written_down():
    """The same seed gives the same order on every machine and in every version: a change here breaks resumed runs."""
    assert [batch_rows(5, 5, step, 0) for step in range(2)] == [[2, 4, 3, 0, 1], [1, 4, 3, 0, 2]]


@given(st.integers(1, 40), st.data())
def test_every_row_once_an_epoch(rows: int, data: st.DataObject):
    batch, seed = data.draw(st.integers(1, rows)), data.draw(st.integers(0, 2**32))
    stream = [row for step in range(steps_for(rows, batch, 3)) for row in batch_rows(rows, batch, step, seed)]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_seeds_and_epochs_differ():
    orders = {tuple(batch_rows(50, 50, epoch, seed)) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [(6, 2, 1, 3), (7, 2, 1, 4), (7, 2, 2, 7), (7, 2, 3, 11), (2, 2, 1, 1), (1, 1, 1, 1)],
)
def test_steps_for(rows: int, batch: int, epochs: int, steps: int):
    assert steps_for(rows, batch, epochs) == steps


@pytest.mark.parametrize("call", [lambda: batch_rows(3, 4, 0, 0), lambda: steps_for(3, 4, 1)])
def test_a_batch_larger_than_the_data(call):
    """Case 51."""
    with pytest.raises(DataError) as caught:
        call()
    assert "4 rows" in caught.value.what and "3" in caught.value.what and "at most 3" in caught.value.remedy


@given(st.integers(16, 200), st.integers(1, 16), st.integers(0, 3))
def test_rows_of_similar_length_share_a_batch_and_none_is_lost(rows: int, batch: int, seed: int):
    """Over one pool the same rows come as without lengths, each batch is full, and batches do not overlap in length."""
    lengths = [(7 * row) % 50 for row in range(rows)]
    plain = [row for step in range(POOL) for row in batch_rows(rows, batch, step, seed)]
    batches = [batch_rows(rows, batch, step, seed, lengths) for step in range(POOL)]
    assert sorted(row for some in batches for row in some) == sorted(plain)
    assert all(len(some) == batch for some in batches)
    spans = sorted((min(lengths[r] for r in some), max(lengths[r] for r in some)) for some in batches)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_batches_of_a_pool_do_not_come_in_the_order_of_their_lengths():
    lengths = list(range(1000))
    first = [min(batch_rows(1000, 10, step, 0, lengths)) for step in range(POOL)]
    assert first != sorted(first) and first != sorted(first, reverse=True)
    assert batch_rows(1000, 10, POOL, 0, lengths) != batch_rows(1000, 10, 0, 0, lengths)
