"""Order of rows: hand-worked epochs, every row once an epoch, resume from the step alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.stream import batch_rows, steps_for
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
    with pytest.raises(DataError) as caught:
        call()
    assert "4 rows" in caught.value.what and "3" in caught.value.what and "at most 3" in caught.value.remedy
