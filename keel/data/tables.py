"""Rows of named values out of tables: `.csv` and `.tsv`, `.parquet` and `.arrow`, and data sets of the Hub."""

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from keel.data.rows import Line, Row, not_utf8, refuse_json
from keel.errors import DataError

csv.field_size_limit(2**31 - 1)  # Python's own limit, 128 KiB a cell, is less than a long document

BATCH = 1000
"""Rows of a column store that are in memory at a time."""

QUOTED = re.compile(r'"[^"]*"')


def csv_rows(path: str, lines: Iterable[Line]) -> Iterator[Row | DataError]:
    """Rows of a table in text, whose first row names the columns; every cell is text, an empty one is an empty text.

    The separator is the one of comma, semicolon and tab that stands most often in the first line, comma if none does.

    Raises:
        DataError: not UTF-8, JSON, a quotation mark that is not closed, a first row that names a column twice or is the
            only one.
    """
    texts = _Texts(path, lines)
    first = next(texts, "")
    refuse_json(path, first.encode())
    bare = QUOTED.sub("", first)
    reader = csv.reader(_back(first, texts), delimiter=max(",;\t", key=bare.count), strict=True)
    names: list[str] | None = None
    start, below = 1, False
    try:
        for cells in reader:
            source, start = f"{path}:{start}", reader.line_num + 1
            if not cells:  # a blank line
                continue
            if names is None:
                names = _names(cells, source)
                continue
            below = True
            if len(cells) != len(names):
                remedy = 'Put "quotation marks" around texts that hold a separator or a line break.'
                what = f"The row has {len(cells)} cells, but the first row names {len(names)} columns."
                yield DataError(what, where=source, remedy=remedy)
            else:
                yield Row(dict(zip(names, cells, strict=True)), path, source)
    except csv.Error as error:
        remedy = 'Texts with line breaks stand in "quotation marks", and a mark inside a text is doubled: "".'
        raise DataError(f"Not CSV: {error}.", where=f"{path}:{start}", remedy=remedy) from None
    if names is not None and not below:
        raise _no_rows(path, names)


class _Texts(Iterator[str]):
    """The lines as text."""

    def __init__(self, path: str, lines: Iterable[Line]):
        self.path, self.lines = path, iter(lines)

    def __next__(self) -> str:
        line = next(self.lines)
        try:
            return line.raw.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(line.raw, error.start, f"{self.path}:{line.number}", line.offset) from None


def _back(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _no_rows(path: str, names: list[str]) -> DataError:
    shown = ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)
    remedy = "Give one with rows too. Where the first row is no names, put a row of names before it."
    return DataError(f"The file has names of columns ({shown}) and no rows.", where=path, remedy=remedy)


def _names(cells: list[str], source: str) -> list[str]:
    twice = [name for at, name in enumerate(cells) if name in cells[:at]]
    if twice:
        raise DataError(
            f"Two columns are called '{twice[0]}'.",
            where=source,
            remedy="The first row names the columns, each by a name of its own.",
        )
    return cells


def arrow_rows(path: str, file: BinaryIO, suffix: str) -> Iterator[Row]:
    """Rows of a `.parquet` file, or of an `.arrow` file as `datasets` saves it, a thousand in memory at a time.

    A null inside an object counts as absent: such a table gives every object of a column the same names.

    Raises:
        DataError: the file is damaged, has columns and no rows, or holds what Python has no value for.
    """
    import pyarrow as pa

    number = 0
    try:
        batches, schema = (_parquet if suffix == ".parquet" else _arrow)(file)
        _names(schema.names, path)
        for batch in batches:
            for cells in batch.to_pylist():
                number += 1
                yield Row(_present(cells), path, f"{path}:row {number}")
    except (pa.ArrowException, ValueError, OverflowError, LookupError, OSError) as error:
        what = f"The {suffix} file cannot be read after row {number}: {first_line(error)}."
        raise DataError(what, where=path, remedy="Fetch or write it again, or write it as .jsonl.") from None
    if not number and schema.names:
        raise _no_rows(path, schema.names)


def _parquet(file: BinaryIO) -> tuple[Iterator[Any], Any]:
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    return table.iter_batches(batch_size=BATCH), table.schema_arrow


def _arrow(file: BinaryIO) -> tuple[Iterator[Any], Any]:
    from pyarrow import ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        stream = ipc.open_stream(file)
        return iter(stream), stream.schema
    table = ipc.open_file(file)
    return (table.get_batch(at) for at in range(table.num_record_batches)), table.schema


def _present(cells: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in cells.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def hub_rows(path: str, digest: "hashlib._Hash") -> Iterator[Row]:
    """Rows of a data set of the Hugging Face Hub, `owner/name[/config][:split]`; without a split, of "train".

    Fetched and kept by the library `datasets`. `digest` takes in every row.

    Raises:
        DataError: it cannot be had, with the reason.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    datasets.disable_progress_bars()
    place, _, split = path.partition(":")
    owner, name, *config = place.split("/")
    try:
        if not constants.HF_HUB_OFFLINE:  # asked once: without a network, load_dataset would try for minutes
            HfApi().dataset_info(f"{owner}/{name}", timeout=10)
        data = datasets.load_dataset(f"{owner}/{name}", *config, split=split or "train").with_format("arrow")
    except Exception as error:  # no network, no such set, not allowed, no such split: each library below has its own
        raise DataError(
            f"There is no file or folder of this name, and no such data set came from the Hugging Face Hub: "
            f"{type(error).__name__}: {first_line(error)}",
            where=path,
            remedy=f"For a file, check the name. For the Hub, check network, name and split "
            f"(OWNER/NAME[/CONFIG][:SPLIT]; here split {split or 'train'}). HF_HUB_OFFLINE=1 uses what is cached.",
        ) from None
    number = 0
    tables: Any = data.iter(batch_size=BATCH)  # of pyarrow, which their type does not say
    for table in tables:
        for cells in table.to_pylist():
            number += 1
            digest.update(json.dumps(cells, sort_keys=True, default=str).encode())
            yield Row(_present(cells), path, f"{path}:row {number}")


def first_line(error: Exception) -> str:
    """The first line of what an error of another library says, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
