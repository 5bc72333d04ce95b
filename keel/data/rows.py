"""Rows of named values out of lines: one JSON object a line, one JSON list, or plain text.

A line that cannot be read is given back as the error that says why, so that whoever only counts can go on; what no
reader can get over is raised.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keel.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row of a file.

    cells: column -> value, as in the file.
    path: the file; source: "file:line", or "file:row n" where lines mean nothing.
    repairs: what was mended while reading it.
    origin: which of the given paths it was read from, counted from 0.
    """

    cells: dict[str, Any]
    path: str
    source: str
    repairs: list[str] = field(default_factory=list)
    origin: int = 0


@dataclass(frozen=True)
class Line:
    """A line of a file as bytes, its line break included: its number from 1, and where it starts in the file."""

    raw: bytes
    number: int
    offset: int


def json_lines(path: str, lines: Iterable[Line]) -> Iterator[Row | DataError]:
    """One object a line; blank lines are no rows."""
    for line in lines:
        if line.raw.strip():
            source = f"{path}:{line.number}"
            try:
                remedy = "Mend the line; each line is one JSON object."
                cells = _value(
                    line.raw, source, line.offset, _for_table(line.raw, remedy) if line.number == 1 else remedy
                )
            except DataError as error:
                yield error
                continue
            if isinstance(cells, dict):
                yield Row(cells, path, source)
            else:
                remedy = 'Write lines as {"name": value, ...}; name a file that is one list .json.'
                yield DataError("The line is not an object.", where=source, remedy=remedy)


def json_list(path: str, content: bytes, offset: int) -> Iterator[Row | DataError]:
    """One list of objects, which starts at byte `offset` of the file.

    Raises:
        DataError: it is no JSON, or no list.
    """
    if not content.strip():
        return
    remedy = _for_table(content.partition(b"\n")[0], "If it holds one object a line, name it .jsonl.")
    items = _value(content, path, offset, remedy)
    if not isinstance(items, list):
        raise DataError("The file holds no list.", where=path, remedy="Give a list of objects, or .jsonl.")
    for number, cells in enumerate(items, start=1):
        source = f"{path}:row {number}"
        if isinstance(cells, dict):
            yield Row(cells, path, source)
        else:
            yield DataError("The row is not an object.", where=source, remedy='Write rows as {"name": value, ...}.')


def refuse_json(path: str, first: bytes) -> None:
    """Raises DataError where a first line that is to be text or names of columns is an object in JSON."""
    try:
        found = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return
    if found:
        raise DataError("The first line is JSON.", where=path, remedy="If there is one object a line, name it .jsonl.")


def text_lines(path: str, lines: Iterable[Line], column: str) -> Iterator[Row]:
    """One row a line that is not blank, without the blanks around its text.

    Raises:
        DataError: the file is no text, or JSON.
    """
    for line in lines:
        if line.number == 1:
            refuse_json(path, line.raw)
        if b"\0" in line.raw:
            raise DataError("The file is not text.", where=path, remedy="Give UTF-8 text, .jsonl or .json.")
        text, repairs = line.raw.strip(), []
        if text:
            try:
                cell = text.decode()
            except UnicodeDecodeError:
                cell, repairs = text.decode("latin-1"), ["latin-1 line"]
            yield Row({column: cell.strip()}, path, f"{path}:{line.number}", repairs)


def not_utf8(raw: bytes, at: int, source: str, offset: int) -> DataError:
    """The error of a byte that is no UTF-8, at `raw[at]`; `offset` is where `raw` starts in the unpacked file."""
    if offset == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        remedy = "It begins as UTF-16 does. Convert it with iconv -f utf-16 -t utf-8."
    elif b"\0" in raw:
        remedy = "It holds zero bytes, as text does not: give a text file, or another suffix for another format."
    else:
        remedy = "Convert the file to UTF-8, for example with iconv -f latin1 -t utf-8."
    return DataError(
        f"Not UTF-8: byte 0x{raw[at]:02x}.",
        where=f"{source}, byte {offset + at}",
        remedy=remedy,
    )


def _value(raw: bytes, source: str, offset: int, remedy: str) -> Any:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(raw, error.start, source, offset) from None
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        at = offset + len(text[: error.pos].encode())
        raise DataError(f"Not JSON: {error.msg}.", where=f"{source}, byte {at}", remedy=remedy) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        raise DataError(f"Not usable JSON: {error}.", where=f"{source}, byte {offset}", remedy=remedy) from None


def _for_table(first: bytes, otherwise: str) -> str:
    """The remedy for a first line that is no JSON, where it reads like the names of a table's columns."""
    names = re.split(rb"[,;\t]", first.strip())
    if len(names) > 1 and all(re.fullmatch(rb'"?[\w .-]+"?', name) for name in names):
        return "Its first line reads like the names of a table's columns: if it is one, name the file .csv or .tsv."
    return otherwise


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):  # Python would keep the last and lose the others without a word
        twice = next(name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1)
        raise ValueError(f"an object has the name '{twice}' twice")
    return cells
