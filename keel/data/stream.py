"""Which rows a training step sees: an endless, seeded stream of shuffled epochs that resumes from the step alone."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from keel.config import SourceConfig
from keel.errors import DataError
from keel.types import Prompt

POOL = 16
"""Batches that are drawn together where rows of similar length shall share a batch."""


@dataclass(frozen=True)
class Mixture:
    """Several sources of rows with a share of the epoch each.

    rows: the row numbers of each source.
    counts: how many places of an epoch each source fills. An epoch has as many places as there are rows.
    """

    rows: tuple["array[int]", ...]
    counts: tuple[int, ...]

    def places(self, epoch: int, seed: int) -> np.ndarray:
        """The row in each place of an epoch, source after source. Each source goes on where it was at the end of the
        epoch before, through shuffled passes of its own: none of its rows comes again before all have come."""
        found: list[np.ndarray] = []
        for source, (rows, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            own = _stream(len(rows), epoch * count, (epoch + 1) * count, _shuffled(len(rows), seed, source, 1))
            found.append(np.asarray(rows)[own])
        return np.concatenate(found)


def mixture_of(source: SourceConfig | None, prompts: Sequence[Prompt]) -> Mixture | None:
    """The mixture of the rows to train on, of which these are the prompts; None where their paths have no weights.

    Places go by weight, rounded by largest remainder, so that they add up; of equal remainders the first gains.

    Raises:
        DataError: a path has no row here, or so little weight that it would have no place.
    """
    if source is None or source.weights is None:
        return None
    of_path = [array("q") for _ in source.path]
    for row, prompt in enumerate(prompts):
        of_path[prompt.origin].append(row)
    exact = [len(prompts) * weight / sum(source.weights) for weight in source.weights]
    counts = [int(places) for places in exact]
    for at in sorted(range(len(counts)), key=lambda at: counts[at] - exact[at])[: len(prompts) - sum(counts)]:
        counts[at] += 1
    for path, rows, count in zip(source.path, of_path, counts, strict=True):
        if not rows:
            remedy = "Take the path out, give it more rows, or hold fewer out."
            raise DataError("This path has a weight, but no row that is trained on.", where=path, remedy=remedy)
        if not count:
            what = f"The weight of this path is too small for one of the {len(prompts)} rows of an epoch."
            raise DataError(what, where=path, remedy="Raise it, or take the path out.")
    return Mixture(tuple(of_path), tuple(counts))


def batch_rows(
    rows: int,
    batch: int,
    step: int,
    seed: int,
    lengths: Sequence[int] | None = None,
    mixture: Mixture | None = None,
) -> list[int]:
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
        mixture: of the rows. Given, an epoch is a permutation of its places, so that over an epoch each source has
            exactly its count.

    Raises:
        DataError: the batch is larger than the data.
    """
    _check(rows, batch)
    assert step >= 0 and seed >= 0, "the configuration admits no negative step or seed"
    shuffled = _shuffled(rows, seed)

    def epoch_of(epoch: int) -> np.ndarray:
        order = shuffled(epoch)
        return order if mixture is None else mixture.places(epoch, seed)[order]

    if lengths is None:
        return _stream(rows, step * batch, (step + 1) * batch, epoch_of)
    pool, place = divmod(step, POOL)
    drawn = _stream(rows, pool * POOL * batch, (pool + 1) * POOL * batch, epoch_of)
    drawn.sort(key=lambda row: lengths[row])
    start = batch * int(_generator(seed, pool, POOL).permutation(POOL)[place])
    return drawn[start : start + batch]


def _stream(rows: int, first: int, end: int, epoch_of: Callable[[int], np.ndarray]) -> list[int]:
    """Places `first` to `end` of the endless stream of epochs, each of which has `rows` places."""
    taken: list[int] = []
    for epoch in range(first // rows, (end - 1) // rows + 1):
        start = epoch * rows
        taken += epoch_of(epoch)[max(first - start, 0) : end - start].tolist()
    return taken


def _shuffled(rows: int, seed: int, *source: int) -> Callable[[int], np.ndarray]:
    """Epoch -> a permutation of the rows."""
    return lambda epoch: _generator(seed, epoch, *source).permutation(rows)


def _generator(*key: int) -> np.random.Generator:
    # PCG64 by name: default_rng may change its bit generator between numpy versions.
    # Zeros at the end of a key count for nothing, so the key of a source ends in 1.
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
