"""The encoded rows of a stage: made once, on disk where they are large, and taken from there by a later start."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from keel.config import SourceConfig
from keel.data.encode import Encoder
from keel.data.spool import Codec, Spool
from keel.errors import RunError
from keel.runs.files import read_json, replacing, write_json
from keel.runs.folder import versions
from keel.train.context import Run

T = TypeVar("T")

FORMAT = 1
"""Of the files; another number wherever the same row would be encoded or packed otherwise."""
FOLDER = "encoded"
TOLD = 256
"""Rows between two looks at the clock and at the user's wish to stop."""


def encode_rows(
    run: Run,
    stage: str,
    encoder: Encoder,
    codec: Codec[T],
    count: int,
    make: Callable[[int], T],
    made_from: Mapping[str, Any],
) -> Spool[T]:
    """What `make` gives for the rows 0 to `count`, in order.

    Rows that do not fit into memory (`Spool`) are kept in the run's folder as `encoded/STAGE.rows`, and a later start
    takes them from there if it would make the same. That is said either way. Small ones are made anew each time.

    make: encodes a row; what the encoder counts meanwhile is kept with the rows.
    made_from: of `made_of`, what decides the rows beside the encoder.

    Raises:
        RunError: the disk is full. DataError: a row cannot be encoded.
    """
    store = _Store(run, stage, encoder, {**made_from, "count": count})
    if found := store.load(codec):
        run.console.line(f"the encoded rows of {stage} are taken from {store.rows}")
        encoder.counts.update(found[1])
        return found[0]
    before = encoder.counts.copy()
    rows = Spool(codec, run.folder.path)
    with run.console.task(f"encoding rows of {stage}", count, unit="row") as task:
        for row in range(count):
            if row % TOLD == 0:
                run.stop_if_asked(task.title)
                task.update(row)
            rows.append(make(row))
        task.update(count)
    if not rows.on_disk or not store.save(rows, encoder.counts - before):
        return rows
    run.console.line(f"the encoded rows of {stage} are kept in {store.rows} for a later start")
    kept = store.load(codec)  # the room of `rows` is free then
    return kept[0] if kept else rows


def made_of(sha256: str, source: SourceConfig | None, rows: Sequence[int], **options: Any) -> dict[str, Any]:
    """What decides encoded rows, for `encode_rows`.

    sha256: of the data. source: how it is read; None in the sandbox. rows: numbers of the records in their order, or of
    records and sizes of groups. options: what else.
    """
    columns = source.columns if source else {}
    numbers = hashlib.sha256(np.asarray(rows, dtype="<i8").tobytes()).hexdigest()
    return {"content": sha256, "columns": columns, "rows": numbers, **options}


class _Store:
    """The file of one stage's rows, and beside it what it was made from and its digest, which is written last."""

    def __init__(self, run: Run, stage: str, encoder: Encoder, made_from: Mapping[str, Any]):
        folder = run.folder.path / FOLDER
        self.rows, self.manifest = folder / f"{stage}.rows", folder / f"{stage}.json"
        self.console, self.stage = run.console, stage
        own = {"encoder": encoder.fingerprint(), "format": FORMAT, "bytes": sys.byteorder, "versions": versions()}
        self.key = _digest({**made_from, **own})

    def load(self, codec: Codec[T]) -> tuple[Spool[T], dict[str, int]] | None:
        """The rows and what the encoder counted, where they are whole and would be the same now; otherwise what is
        there is removed."""
        if not self.rows.exists() and not self.manifest.exists():
            return None
        try:
            manifest = read_json(self.manifest)
            if manifest.pop("check", None) != _digest(manifest):
                raise ValueError(f"{self.manifest.name} is damaged")
            if manifest["key"] != self.key:
                raise ValueError("it is of other data, or of another tokenizer, template, limit, option or version")
            rows = Spool.load(codec, self.rows, manifest["sha256"])
        except (RunError, ValueError, OSError) as error:
            reason = error.what if isinstance(error, RunError) else error
            self.console.line(f"{self.rows} is not used, its rows are encoded anew: {reason}", "yellow")
            self.discard()
            return None
        return rows, manifest["cut"]

    def save(self, rows: Spool[Any], cut: Mapping[str, int]) -> bool:
        """Keeps the rows; cut: what the encoder counted. Where that fails it is said, and the run goes on without."""
        try:
            self.rows.parent.mkdir(exist_ok=True)
            with replacing(self.rows) as file:
                manifest = {"key": self.key, "sha256": rows.save(file), "cut": dict(cut)}
            write_json(self.manifest, {**manifest, "check": _digest(manifest)})
        except (OSError, RunError) as error:
            self.console.line(f"the encoded rows of {self.stage} are not kept for a later start: {error}", "yellow")
            self.discard()
            return False
        return True

    def discard(self) -> None:
        """Removes what is there, as far as that is allowed."""
        for path in (self.manifest, self.rows):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
