"""Sequences outside memory: what is where, to the byte, and that nothing but the numbers asked for comes back."""

import errno
import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data import spool
from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.data.spool import (
    RECORDS,
    SEQUENCES,
    Codec,
    Each,
    Spool,
    digest_of,
    numbered,
    pack_numbers,
    unpack_numbers,
)
from keel.errors import RunError
from keel.train.reward import COMPARISONS, Comparisons
from keel.types import TokenSequence

TEXTS: Codec[str] = Codec(str.encode, bytes.decode)


def test_each_is_made_when_it_is_asked_for():
    asked: list[int] = []
    squares = Each(5, lambda place: asked.append(place) or place * place)
    assert len(squares) == 5 and asked == []
    assert squares[3] == 9 and squares[-1] == 16 and squares[1:4] == [1, 4, 9]
    assert asked == [3, 4, 1, 2, 3]
    assert list(squares) == [0, 1, 4, 9, 16] and 9 in squares and squares[::-2] == [16, 4, 0]
    for place in (5, -6):
        with pytest.raises(IndexError):
            squares[place]


def test_what_is_in_memory_and_what_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Five bytes may be in memory: "abc", "de" stay there, with "f" all six go to disk, and "ghij" comes after them."""
    monkeypatch.setattr(spool, "HELD", 5)
    rows = Spool(TEXTS, tmp_path)
    rows.extend(["abc", "", "de"])
    assert not rows.on_disk and list(rows) == ["abc", "", "de"]
    rows.append("f")
    assert rows.on_disk and rows._file and os.fstat(rows._file.fileno()).st_size == 6
    rows.append("ghij")
    assert os.fstat(rows._file.fileno()).st_size == 6
    assert list(rows) == ["abc", "", "de", "f", "ghij"] and rows[-2:] == ["f", "ghij"] and len(rows) == 5
    rows.extend(["k", "l"])
    assert os.fstat(rows._file.fileno()).st_size == 12 and rows[5] == "k" and rows[0] == "abc" and rows[-1] == "l"


def test_the_file_has_no_name_and_its_room_is_free_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So nothing is left after a kill either: what has no name is gone with the last process that has it open."""
    monkeypatch.setattr(spool, "HELD", 0)
    rows = Spool(TEXTS, tmp_path)
    rows.append("abc")
    assert rows._file and list(tmp_path.iterdir()) == [] and os.fstat(rows._file.fileno()).st_nlink == 0
    number = rows._file.fileno()
    del rows
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def full(dir: Path, buffering: int) -> Any:
    """Stands in for a new file: the disk is full."""
    return open("/dev/full", "wb", buffering)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spool, "HELD", 0)
    monkeypatch.setattr(spool.tempfile, "TemporaryFile", full)
    with pytest.raises(RunError, match="could not be put on disk: " + os.strerror(errno.ENOSPC)) as caught:
        Spool(TEXTS, tmp_path).append("abc")
    assert caught.value.where == str(tmp_path) and "make room" in caught.value.remedy


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spool, "HELD", 0)
    with pytest.raises(RunError, match="could not be put on disk: No such file"):
        Spool(TEXTS, tmp_path / "none").append("abc")


@pytest.mark.parametrize("held", [0, 5, 1000])
def test_saved_byte_for_byte_and_loaded(held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spool, "HELD", held)
    rows = Spool(TEXTS, tmp_path)
    rows.extend(["abc", "", "defg", "h"])
    path = tmp_path / "rows"
    with path.open("wb") as file:
        digest = rows.save(file)
    ends = b"".join(number.to_bytes(8, "little") for number in (0, 3, 3, 7, 8, 4))
    assert path.read_bytes() == b"abcdefgh" + ends
    loaded = Spool.load(TEXTS, path, digest)
    assert list(loaded) == list(rows) and loaded.on_disk
    path.write_bytes(b"abcdefgi" + ends)
    with pytest.raises(ValueError, match="digest"):
        Spool.load(TEXTS, path, digest)


def test_a_file_cut_while_it_is_read_is_told(tmp_path: Path):
    rows = Spool(TEXTS, tmp_path)
    rows.append("abc")
    with (tmp_path / "rows").open("wb") as file:
        digest = rows.save(file)
    loaded = Spool.load(TEXTS, tmp_path / "rows", digest)
    os.truncate(tmp_path / "rows", 2)
    with pytest.raises(RunError, match="shorter"):
        loaded[0]


def test_numbers_are_four_bytes_each():
    raw = pack_numbers([(7, 8), (), (2**31 - 1,)])
    assert raw == array("i", [3, 2, 0, 1, 7, 8, 2**31 - 1]).tobytes() and len(raw) == 28
    assert unpack_numbers(raw) == [(7, 8), (), (2**31 - 1,)] and unpack_numbers(pack_numbers([])) == []


def test_sequences_and_comparisons_come_back_as_they_were():
    some = [
        TokenSequence((1, 2), (3,)),
        TokenSequence((1,), (4, 5, 6), (True, False, True)),
        TokenSequence((9,), (8,), (False,)),
    ]
    assert SEQUENCES.unpack(SEQUENCES.pack(some)) == some and SEQUENCES.unpack(SEQUENCES.pack([])) == []
    a, b, c = (TokenSequence((1, 2), ids) for ids in ((3,), (4, 5), ()))
    group = Comparisons.of([(a, b), (c, a)], [0.1, 1e300])
    assert COMPARISONS.unpack(COMPARISONS.pack(group)) == group
    assert len(COMPARISONS.pack(group)) == 4 * (1 + 6 + 2 + 4 + 4 + 3)


def test_digests_tell_apart_what_joined_texts_would_not():
    assert digest_of("a", "b") == digest_of("a", "b") and len(digest_of("a")) == 16
    apart = [("a", "b"), ("ab",), ("a, b",), (("a",), "b"), ("a", ""), ("a'", "b"), ("\ud800",), (1,), ("1",)]
    assert len({digest_of(*parts) for parts in apart}) == len(apart)


@given(st.lists(st.integers(0, 6)))
def test_values_are_numbered_as_they_first_come(values: list[int]):
    """By a dictionary, which does the same in memory."""
    value, first = numbered(b"".join(digest_of(value) for value in values))
    known: dict[int, int] = {}
    assert value.tolist() == [known.setdefault(each, len(known)) for each in values]
    assert first.tolist() == [values.index(each) for each in known]


READERS = {
    "alpaca_en_demo.json": [read_demonstrations, read_prompts],
    "dpo_en_demo.json": [read_preferences, read_thumbs, read_prompts],
    "hh_harmless.jsonl.gz": [read_preferences, read_thumbs],
    "kto_en_demo.json": [read_thumbs],
}


@pytest.mark.parametrize("name", READERS)
def test_files_are_read_to_the_same_records_on_disk_and_in_memory(
    name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spool, "HELD", 1000)
    for read in READERS[name]:
        inside, outside = read(shared / "data" / name), read(shared / "data" / name, folder=tmp_path)
        assert isinstance(inside.records, list) and isinstance(outside.records, Spool) and outside.records.on_disk
        assert list(outside.records) == inside.records
        assert (outside.counts, outside.sha256) == (inside.counts, inside.sha256)
        at = random.Random(0).randrange(len(inside.records))
        assert outside.records[at] == inside.records[at]


def test_columns_of_any_kind_come_back(tmp_path: Path):
    import datetime
    import decimal

    columns = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.10"), "raw": b"\0", "text": "\ud800"}
    rows = Spool(RECORDS, tmp_path)
    rows.append(columns)
    assert rows[0] == columns
