"""Order of rows: hand-worked epochs, every row once an epoch, resume from the step alone."""

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from keel.config import SourceConfig
from keel.data.stream import POOL, Mixture, batch_rows, mixture_of, steps_for
from keel.errors import DataError
from keel.types import Prompt

ORDER = [[3, 0, 2, 3], [3, 1, 3, 1], [3, 0, 2, 3]]
"""Worked by hand: the first source's own passes are 0 2 1 and 1 2 0, two places an epoch; the places 0 2 3 3, 1 1 3 3
and 2 0 3 3 stand in the orders 2 0 1 3, 3 0 2 1 and 2 1 0 3 of the epochs."""


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


def asked(*origins: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": "x"},), origin=origin) for origin in origins]


def source(*weights: float) -> SourceConfig:
    return SourceConfig(path=[f"{at}.jsonl" for at in range(len(weights))], weights=list(weights))


class TestMixtures:
    def test_places_by_hand(self):
        """Six rows, 4 + 2: equal weights give 3 + 3 places, 2 : 1 gives 4 + 2, 1 : 9 gives 0.6 -> 1 and 5.4 -> 5."""
        prompts = asked(0, 1, 0, 0, 1, 0)
        for weights, counts in (((1, 1), (3, 3)), ((2, 1), (4, 2)), ((1, 9), (1, 5))):
            mixture = mixture_of(source(*weights), prompts)
            assert mixture == Mixture((array("q", [0, 2, 3, 5]), array("q", [1, 4])), counts)
        assert mixture_of(SourceConfig(path=["a", "b"]), prompts) is None and mixture_of(None, prompts) is None

    def test_remainders_of_three(self):
        """Ten rows in three equal parts: 3.33 each, the place that is left goes to the first."""
        mixture = mixture_of(source(1, 1, 1), asked(*[0] * 8, 1, 2))
        assert mixture and mixture.counts == (4, 3, 3)

    def test_an_order_written_down(self):
        """Two epochs of 2 + 2 places from sources of 3 rows and 1 row: the first gives rows 0 to 2 before any again."""
        mixture = mixture_of(source(1, 1), asked(0, 0, 0, 1))
        assert [batch_rows(4, 4, step, 0, mixture=mixture) for step in range(3)] == ORDER

    @given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.data())
    def test_shares_are_exact_over_every_epoch_and_no_row_comes_twice_before_all_have(self, sizes, data):
        weights = [data.draw(st.floats(0.3, 3)) for _ in sizes]
        batch, seed = data.draw(st.integers(1, sum(sizes))), data.draw(st.integers(0, 9))
        origins = [at for at, size in enumerate(sizes) for _ in range(size)]
        try:
            mixture = mixture_of(source(*weights), asked(*origins))
        except DataError as error:
            assert "too small" in error.what
            return
        assert mixture and sum(mixture.counts) == len(origins)
        exact = [len(origins) * weight / sum(weights) for weight in weights]
        assert all(abs(count - share) < 1 for count, share in zip(mixture.counts, exact, strict=True))
        stream = list(
            itertools.chain.from_iterable(
                batch_rows(len(origins), batch, step, seed, mixture=mixture)
                for step in range(steps_for(len(origins), batch, 4))
            )
        )
        for epoch in range(4):
            some = [origins[row] for row in stream[epoch * len(origins) : (epoch + 1) * len(origins)]]
            assert [some.count(at) for at in range(len(sizes))] == list(mixture.counts)
        whole = stream[: 4 * len(origins)]
        for rows in mixture.rows:
            times = [whole.count(row) for row in rows]
            assert max(times) - min(times) <= 1

    def test_lengths_change_the_order_within_a_pool_alone(self):
        mixture = mixture_of(source(1, 3), asked(*[0] * 30, *[1] * 10))
        lengths = [(7 * row) % 50 for row in range(40)]
        plain = [row for step in range(POOL) for row in batch_rows(40, 5, step, 3, mixture=mixture)]
        sorted_rows = [row for step in range(POOL) for row in batch_rows(40, 5, step, 3, lengths, mixture)]
        assert sorted(plain) == sorted(sorted_rows) and plain != sorted_rows
        assert sum(row >= 30 for row in plain) == 60  # two epochs of 40, three quarters each

    def test_a_path_without_a_row_or_a_place(self):
        for weights, origins, told in (
            ((1, 1), (0, 0), "no row"),
            ((1, 99), (0, 1, 1), "too small for one of the 3 rows"),
        ):
            with pytest.raises(DataError, match=told) as caught:
                mixture_of(source(*weights), asked(*origins))
            assert caught.value.where in ("0.jsonl", "1.jsonl") and caught.value.remedy

    def test_weights_that_say_nothing_are_refused(self):
        for paths, weights, told in (
            (["a"], [1], "nothing with a single path"),
            (["a", "b"], [1], "weights are 1, but path names 2"),
            (["a", "b"], [1, 0], "greater than 0"),
        ):
            with pytest.raises(ValidationError, match=told):
                SourceConfig.model_validate({"path": paths, "weights": weights})
