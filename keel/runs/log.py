"""Logs of one JSON object a line, which a resumed run cuts back to its checkpoint. No torch here."""

import errno
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from keel.errors import RunError
from keel.runs.files import decode, encode, replacing


class JsonLines:
    """A log that grows by one object a line; readers see each line as soon as it is appended.

    Opening drops a last line that a crash left unfinished, or the next one would be glued to it.

    Raises:
        RunError: the file cannot be opened, read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path)
        except OSError as error:
            raise _unusable(path, error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line.

        Raises:
            NumberError: a number in it is not finite; nothing is written.
        """
        line = encode(record, where=str(self.path)) + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unusable(self.path, error) from error

    def cut(self, step: int) -> None:
        """Drops the lines whose "step" is greater, all at once or not at all. Lines without a "step" stay.

        Raises:
            RunError: a line is damaged (with file:line), or the file cannot be written; the log is as it was.
        """
        try:
            with replacing(self.path) as new:
                for line, record in _lines(self.path):
                    if record.get("step", step) <= step:
                        new.write(line)
            self._file.close()
            self._file = _open(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Closes the file; the log can no longer be appended to."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a log, without a last line that is still being written.

    Raises:
        RunError: the file is missing or a line is damaged, with file:line.
    """
    try:
        for _, record in _lines(path):
            yield record
    except OSError as error:
        raise _unusable(path, error) from error


def _open(path: Path) -> io.FileIO:
    _require_plain(path)
    file = io.FileIO(path, "ab+")
    with open(path, "rb") as reader:
        whole = sum(len(line) for line in reader if line.endswith(b"\n"))
    file.truncate(whole)
    return file


def _require_plain(path: Path) -> None:
    """A pipe would be waited for without end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file")


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    _require_plain(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode(line)
                if not isinstance(record, dict) or not isinstance(record.get("step", 0), (int, float)):
                    raise ValueError("an object with a number as step was expected")
            except ValueError as error:
                raise RunError(
                    f"the log is damaged: {error}", where=f"{path}:{number}", remedy="remove that line, or the file"
                ) from error
            yield line, record


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"the log cannot be used: {error.strerror or error}",
        where=str(path),
        remedy="make the folder writable and free some space on its disk",
    )
