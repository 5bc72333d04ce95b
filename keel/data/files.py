"""Files, folders and data sets of the Hub as one stream of rows: what a path stands for, unpacking, hashing."""

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from keel.data.rows import Line, Row, json_lines, json_list, text_lines
from keel.data.tables import arrow_rows, csv_rows, hub_rows
from keel.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
COLUMN_STORES = (".parquet", ".arrow")
KINDS = (*JSON_LINES, ".json", ".csv", ".tsv", *COLUMN_STORES)
"""Suffixes of files with named columns; any other is plain text."""

BINARY = (".xlsx", ".xls", ".ods", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".db", ".sqlite", ".pkl")
"""Suffixes that would be nonsense as lines of text."""

BOOKKEEPING = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
"""What `datasets` writes beside its data."""

SPLITS = re.compile(r"^(train|test|valid|val|dev|eval)", re.IGNORECASE)
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+){1,2}(:\w+)?$")


class RowStream:
    """The rows of files, folders and data sets, in order, one in memory at a time (`.json`, packed tables: one file).

    Iterating gives each row, or for a line that cannot be read the error that says why. Blank lines are no rows.

    Args:
        paths: files, folders (every data file directly in it, sorted by name) or Hub ids.
        text_as: the column that a line of plain text becomes; None where plain text has no meaning.

    Attributes:
        files: the files and Hub ids that the paths stand for.
        bytes_read: of the files on disk, so far.

    Raises:
        DataError: a file is missing, empty, of an unknown kind or damaged; with file, line and byte. At once where a
            path stands for nothing, otherwise while iterating.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], text_as: str | None):
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        if not given:
            raise DataError("No file is given.", remedy="Give at least one path.")
        self.text_as = text_as
        places = [_stands_for(path, text_as) for path in map(str, given)]
        self.files = [file for files in places for file in files]
        self._origins = [origin for origin, files in enumerate(places) for _ in files]
        self.bytes_read = 0
        self._digests: list[bytes] = []

    def __iter__(self) -> Iterator[Row | DataError]:
        self._digests = []
        for path, origin in zip(self.files, self._origins, strict=True):
            digest = hashlib.sha256()
            empty = True
            for row in self._rows(path, digest):
                empty = False
                yield replace(row, origin=origin) if origin and isinstance(row, Row) else row
            if empty:
                raise DataError("The file is empty.", where=path, remedy="Give a file with at least one row.")
            self._digests.append(digest.digest())

    @property
    def sha256(self) -> str:
        """Of the unpacked bytes of the one file, or of the digests of several in order (of a Hub id: of its rows)."""
        assert len(self._digests) == len(self.files), "all rows were read"
        digests = self._digests
        return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()

    def _rows(self, path: str, digest: "hashlib._Hash") -> Iterator[Row | DataError]:
        if HUB_ID.match(path) and not _exists(path):
            yield from hub_rows(path, digest)
            return
        try:
            with open(path, "rb") as packed:
                yield from self._file_rows(path, packed, digest)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            what = f"The gzip file is damaged: {error}."
            raise DataError(what, where=path, remedy="Fetch or pack it again.") from error
        except OSError as error:
            what = f"The file cannot be read: {error.strerror or error}."
            raise DataError(what, where=path, remedy="Mend its rights.") from error

    def _file_rows(self, path: str, packed: BinaryIO, digest: "hashlib._Hash") -> Iterator[Row | DataError]:
        suffix = _suffix(path)
        file = cast(BinaryIO, gzip.GzipFile(fileobj=packed)) if _packed(path) else packed
        if suffix in COLUMN_STORES:
            if file is not packed:
                file = io.BytesIO(file.read())
            while block := file.read(1 << 20):
                digest.update(block)
            file.seek(0)
            rows = arrow_rows(path, file, suffix)
        else:
            lines = _Lines(file, digest)
            if suffix in JSON_LINES:
                rows = json_lines(path, lines)
            elif suffix == ".json":
                content = b"".join(line.raw for line in lines)
                rows = json_list(path, content, len(lines.mark))
            elif suffix in (".csv", ".tsv"):
                rows = csv_rows(path, lines)
            else:
                assert self.text_as is not None, "_stands_for admits no plain text here"
                rows = text_lines(path, lines, self.text_as)
            rows = lines.marked(rows)
        before = self.bytes_read
        for row in rows:
            self.bytes_read = before + packed.tell()
            yield row
        self.bytes_read = before + packed.seek(0, io.SEEK_END)


class _Lines:
    """The lines of a file, parted at line feeds only, without a byte order mark at its start, and its digest."""

    def __init__(self, file: BinaryIO, digest: "hashlib._Hash"):
        self.file, self.digest, self.mark = file, digest, b""

    def __iter__(self) -> Iterator[Line]:
        offset = 0
        for number, raw in enumerate(self.file, start=1):
            self.digest.update(raw)
            if number == 1 and raw.startswith(codecs.BOM_UTF8):
                self.mark = codecs.BOM_UTF8
                offset, raw = len(self.mark), raw[len(self.mark) :]
            yield Line(raw, number, offset)
            offset += len(raw)

    def marked(self, rows: Iterator[Row | DataError]) -> Iterator[Row | DataError]:
        """The rows, the first with its byte order mark told as a repair."""
        told = False
        for row in rows:
            if self.mark and not told and isinstance(row, Row):
                row.repairs.append("byte order mark")
                told = True
            yield row


def _suffix(path: str) -> str:
    return Path(path.removesuffix(path[-3:]) if _packed(path) else path).suffix.lower()


def _packed(path: str) -> bool:
    return path.lower().endswith(".gz")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError) as error:  # too long a name; a zero byte in it
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"The file cannot be read: {reason}.", where=path[:200], remedy="Give another path.") from None


def _stands_for(path: str, text_as: str | None) -> list[str]:
    """The files of a folder, the file itself, or the Hub id itself; each of a kind that can be read."""
    if _exists(path):
        place = Path(path)
        if place.is_dir():
            return _of_folder(place, text_as)
        if not place.is_file():
            raise DataError("This is a device or a pipe.", where=path, remedy="Write the rows to a file first.")
        _check_kind(path, text_as)
        return [path]
    if HUB_ID.match(path) and _suffix(path) not in (*KINDS, *BINARY, ".txt"):
        return [path]
    raise DataError("There is no such file.", where=path, remedy=f"Paths start from {Path.cwd()}; check the name.")


def _check_kind(path: str, text_as: str | None) -> None:
    suffix = _suffix(path)
    if suffix in BINARY:
        raise DataError(f"'{suffix}' files are not read.", where=path, remedy="Convert it to .csv or .jsonl.")
    if suffix not in KINDS and text_as is None:
        remedy = f"Give one of {', '.join(KINDS)} (also .gz); if it is one, rename it."
        raise DataError(f"Plain text ('{suffix}') can hold prompts only.", where=path, remedy=remedy)


def _of_folder(folder: Path, text_as: str | None) -> list[str]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        reason = error.strerror or error
        what = f"The folder cannot be read: {reason}."
        raise DataError(what, where=str(folder), remedy="Mend its rights.") from None
    files = [file for file in inside if file.is_file() and file.name[0] != "." and file.name not in BOOKKEEPING]
    tables = [file for file in files if _suffix(file.name) in KINDS]
    texts = [file for file in files if file not in tables and not re.match("readme|license", file.name, re.IGNORECASE)]
    chosen = tables or (texts if text_as is not None else [])
    if not chosen:
        there = ", ".join(file.name for file in inside[:8]) or "nothing"
        remedy = f"Name the folder or the files themselves; read are {', '.join(KINDS)}, also .gz."
        raise DataError(f"There is no data file in this folder. It holds {there}.", where=str(folder), remedy=remedy)
    kinds = sorted({_suffix(file.name) for file in chosen})
    splits = sorted({match[1].lower() for file in chosen if (match := SPLITS.match(file.name))})
    for what, several in (("files of several kinds", kinds), ("several splits", splits)):
        if len(several) > 1:
            raise DataError(
                f"The folder holds {what}: {', '.join(several)}.",
                where=str(folder),
                remedy="Name the files that belong together, one after the other.",
            )
    for file in chosen:
        _check_kind(str(file), text_as)
    return [str(file) for file in chosen]
