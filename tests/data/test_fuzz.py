"""Arbitrary rows, bytes and types: each row is read, repaired and counted, or refused with file, line and reason, and
what is read is what was written."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from keel.data.files import RowStream
from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.data.rows import Row
from keel.errors import DataError
from keel.inspect import page, report, survey

READERS = [read_demonstrations, read_preferences, read_thumbs, read_prompts]
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = st.sampled_from(["prompt", "completion", "chosen", "rejected", "messages", "label", "question", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMED = ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.txt"]


def place(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return tmp_path_factory.getbasetemp() / name


@given(
    content=st.binary(max_size=60) | st.text('{}[]",:;\n\r\t\\ua1 promt', max_size=60).map(str.encode),
    name=st.sampled_from(NAMED),
    packed=st.booleans(),
    read=st.sampled_from(READERS),
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, packed: bool, read: Any):
    path = place(tmp_path_factory, name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    try:
        counts = read(path).counts
    except DataError as error:
        assert error.where.startswith(str(path)) and error.what and error.remedy
    else:
        assert counts["read"] == counts["kept"] + sum(counts["dropped"].values()) > 0


@given(
    rows=st.lists(st.dictionaries(NAMES | TEXT, JSON, max_size=4), min_size=1, max_size=4),
    read=st.sampled_from(READERS),
)
def test_any_rows_are_surveyed_as_they_are_read(tmp_path_factory: pytest.TempPathFactory, rows: Any, read: Any):
    """`keel inspect` never stops at a row, tells where the reader does, and its page and JSON can be made."""
    path = place(tmp_path_factory, "rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = {read_demonstrations: "demonstrations", read_preferences: "preferences", read_thumbs: "thumbs"}
    taken = survey.take(path, kind=kind.get(read, "prompts"), shown=4)
    told = report.report(taken, {}, [])
    json.dumps(told)
    page.page(told).encode(errors="backslashreplace")
    assert told["rows"]["read"] == len(rows) == sum(told["rows"][name] for name in ("kept", "dropped", "refused"))
    try:
        counts = read(path).counts
    except DataError as error:
        refused = [where for each in taken.refused.values() for where in each.places]
        assert error.where in refused or taken.kept == 0
    else:
        assert not taken.refused and counts["kept"] == taken.kept
        assert {name: each.count for name, each in taken.dropped.items()} == counts["dropped"]
        assert {name: each.count for name, each in taken.repaired.items()} == counts["repaired"]


@given(prompt=TEXT, completion=TEXT, extra=JSON)
def test_no_text_and_no_column_is_changed_in_lines(tmp_path_factory: pytest.TempPathFactory, prompt, completion, extra):
    path = place(tmp_path_factory, "kept.jsonl")
    path.write_text(json.dumps({"prompt": prompt, "completion": completion, "extra": extra}))
    try:
        read = read_demonstrations(path)
    except DataError as error:
        assert "empty" in error.what and not (prompt.strip() and completion.strip())
    else:
        (record,) = read.records
        assert (record.prompt.text, record.response) == (prompt, completion)
        assert repr(record.prompt.columns) == repr({"extra": extra})  # repr: a NaN is equal to itself there


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=4), separator=st.sampled_from(",;\t"))
def test_no_cell_of_a_table_is_changed(tmp_path_factory: pytest.TempPathFactory, rows: Any, separator: str):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    comma, columns = place(tmp_path_factory, "a.csv"), place(tmp_path_factory, "a.parquet")
    comma.write_bytes(text.getvalue().encode())
    parquet.write_table(pa.Table.from_pylist([{"prompt": a, "completion": b} for a, b in rows]), columns)
    for path in (comma, columns):
        read = [row.cells if isinstance(row, Row) else row for row in RowStream(path, None)]
        assert read == [{"prompt": a, "completion": b} for a, b in rows]
