"""Files as rows of named values: `.jsonl`, `.json`, plain text, each also packed as `.gz`."""

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.errors import DataError

TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
"""Suffixes that would be nonsense as lines of text."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    cells: column -> value, as in the file.
    path: the file; source: "file:line", or "file:row n" where lines mean nothing.
    repairs: what was mended while reading it.
    """

    cells: dict[str, Any]
    path: str
    source: str
    repairs: list[str] = field(default_factory=list)


def read_files(paths: str | Path | Sequence[str | Path], text_as: str | None) -> tuple[list[Row], str]:
    """All rows of one or several files, and the SHA-256 of their content.

    Blank lines are no rows. The digest is that of the unpacked bytes; of several files, that of their digests in order.

    Args:
        paths: one file or several.
        text_as: the column that a line of plain text becomes; None where plain text has no meaning.

    Raises:
        DataError: a file is missing, a folder, empty, of an unknown kind or damaged; with file, line and byte.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise DataError("No file is given.", remedy="Give at least one path.")
    rows: list[Row] = []
    digests: list[bytes] = []
    for path in map(str, files):
        content = _content(path)
        digests.append(hashlib.sha256(content).digest())
        of_file = list(_rows(path, content, text_as))
        if not of_file:
            raise DataError("The file is empty.", where=path, remedy="Give a file with at least one row.")
        rows += of_file
    return rows, (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()


def _content(path: str) -> bytes:
    try:
        if Path(path).is_dir():
            raise DataError("This is a folder, not a file.", where=path, remedy="Name the file or files in it.")
        packed = Path(path).read_bytes()
        return gzip.decompress(packed) if path.endswith(".gz") else packed
    except FileNotFoundError:
        raise DataError(
            "There is no such file.", where=path, remedy=f"Paths start from {Path.cwd()}; check the name."
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"The gzip file is damaged: {error}.", where=path, remedy="Fetch or pack it again.") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"The file cannot be read: {reason}.", where=path, remedy="Mend its rights.") from error


def _rows(path: str, content: bytes, text_as: str | None) -> Iterator[Row]:
    suffix = Path(path.removesuffix(".gz")).suffix.lower()
    if suffix in TABLES:
        raise DataError(f"'{suffix}' files are not read.", where=path, remedy="Convert it to .jsonl.")
    if suffix not in (".json", ".jsonl"):
        if text_as is None:
            raise DataError(
                f"Plain text ('{suffix}') can hold prompts only.",
                where=path,
                remedy="Give a .jsonl or .json file; if it is one, rename it.",
            )
        if b"\0" in content:
            raise DataError("The file is not text.", where=path, remedy="Give UTF-8 text, .jsonl or .json.")
    bom = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    repairs = ["byte order mark"] if bom else []
    if suffix == ".json":
        yield from _json_rows(path, content, len(bom), repairs)
        return
    offset = len(bom)
    for number, line in enumerate(content[offset:].split(b"\n"), start=1):
        if line.strip():
            source = f"{path}:{number}"
            if suffix == ".jsonl":
                yield Row(_json_object(line, source, offset), path, source, repairs)
            else:
                assert text_as is not None
                text, repaired = _text_line(line)
                yield Row({text_as: text}, path, source, repairs + repaired)
            repairs = []
        offset += len(line) + 1


def _json_rows(path: str, content: bytes, start: int, repairs: list[str]) -> Iterator[Row]:
    if not content[start:].strip():
        return
    items = _json_value(content[start:], path, start, "If it holds one object a line, name it .jsonl.")
    if not isinstance(items, list):
        raise DataError("The file holds no list.", where=path, remedy="Give a list of objects, or .jsonl.")
    for number, cells in enumerate(items, start=1):
        source = f"{path}:row {number}"
        if not isinstance(cells, dict):
            raise DataError("The row is not an object.", where=source, remedy='Write rows as {"name": value, ...}.')
        yield Row(cells, path, source, repairs if number == 1 else [])


def _json_object(line: bytes, source: str, offset: int) -> dict[str, Any]:
    cells = _json_value(line, source, offset, "Mend the line; each line is one JSON object.")
    if not isinstance(cells, dict):
        raise DataError("The line is not an object.", where=source, remedy='Write lines as {"name": value, ...}.')
    return cells


def _json_value(raw: bytes, source: str, offset: int, remedy: str) -> Any:
    """The value of UTF-8 JSON; `offset` is where `raw` starts in the unpacked file."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"Not UTF-8: byte 0x{raw[error.start]:02x}.",
            where=f"{source}, byte {offset + error.start}",
            remedy="Convert the file to UTF-8, for example with iconv -f latin1 -t utf-8.",
        ) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = offset + len(text[: error.pos].encode())
        raise DataError(f"Not JSON: {error.msg}.", where=f"{source}, byte {at}", remedy=remedy) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        raise DataError(f"Not usable JSON: {error}.", where=f"{source}, byte {offset}", remedy=remedy) from None


def _text_line(line: bytes) -> tuple[str, list[str]]:
    """The sentence without the blanks around it, and what was mended."""
    try:
        return line.decode().strip(), []
    except UnicodeDecodeError:
        return line.decode("latin-1").strip(), ["latin-1 line"]
