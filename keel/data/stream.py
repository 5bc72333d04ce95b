"""Which rows a training step sees: an endless, seeded stream of shuffled epochs that resumes from the step alone."""

from collections.abc import Sequence

import numpy as np

from keel.errors import DataError

POOL = 16
"""Batches that are drawn together where rows of similar length shall share a batch."""


def batch_rows(rows: int, batch: int, step: int, seed: int, lengths: Sequence[int] | None = None) -> list[int]:
    """The row numbers of one training step.

    Each epoch is a permutation of all rows, drawn from (seed, epoch); epochs follow each other without a gap, so that a
    batch may straddle two of them, every batch is full and the tail of an epoch is trained. A pure function: nothing
    but the step has to be saved to resume.

    Args:
        rows: rows in the data.
        batch: rows a step.
        step: counted from 0 over the whole run.
        seed: not negative; the same seed gives the same order on every machine.
        lengths: of every row. Given, each `POOL` batches in a row are drawn as above, sorted by length among
            themselves, and come in an order drawn from (seed, pool), so that little of a batch is padding.

    Raises:
        DataError: the batch is larger than the data.
    """
    _check(rows, batch)
    assert step >= 0 and seed >= 0, "the configuration admits no negative step or seed"
    if lengths is None:
        return _stream(rows, step * batch, (step + 1) * batch, seed)
    pool, place = divmod(step, POOL)
    drawn = _stream(rows, pool * POOL * batch, (pool + 1) * POOL * batch, seed)
    drawn.sort(key=lambda row: lengths[row])
    start = batch * int(_generator(seed, pool, POOL).permutation(POOL)[place])
    return drawn[start : start + batch]


def _stream(rows: int, first: int, end: int, seed: int) -> list[int]:
    """Places `first` to `end` of the endless stream of shuffled epochs."""
    taken: list[int] = []
    for epoch in range(first // rows, (end - 1) // rows + 1):
        start = epoch * rows
        taken += _generator(seed, epoch).permutation(rows)[max(first - start, 0) : end - start].tolist()
    return taken


def _generator(*key: int) -> np.random.Generator:
    # PCG64 by name: default_rng may change its bit generator between numpy versions.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def steps_for(rows: int, batch: int, epochs: int) -> int:
    """Steps until every row was seen at least `epochs` times (the last of them may reach into the next epoch).

    Raises:
        DataError: the batch is larger than the data.
    """
    _check(rows, batch)
    return -(-rows * epochs // batch)


def _check(rows: int, batch: int) -> None:
    assert batch >= 1, "the configuration admits no empty batch"
    if batch > rows:
        raise DataError(
            f"A batch of {batch} rows is larger than the data, which has {rows}.",
            remedy=f"Set the batch size to at most {rows}, or add data.",
        )
