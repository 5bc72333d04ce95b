"""Small files written so that a crash leaves the old one or the new one, never half of one. No torch here."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from keel.errors import NumberError, RunError


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries (new names, renames) survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well, and vanishes when it does not.

    The temporary has a fixed name beside `path`, so what a crash leaves is overwritten by the next attempt. One writer
    at a time (the run's lock). OSErrors pass through.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def encode(value: Any, *, where: str, pretty: bool = False) -> bytes:
    """UTF-8 JSON; pretty means indented with sorted keys.

    Raises:
        NumberError: a number in it is not finite (JSON has none), with its key.
    """
    bad = not_finite(value)
    if bad:
        raise NumberError(f"{bad} is not a finite number", where=where, remedy="log null, or leave the key out")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2 if pretty else None, sort_keys=pretty)
    # A lone surrogate (from a "\ud800" in someone's data) has no UTF-8; its backslash form is JSON's own escape for it.
    return text.encode("utf-8", "backslashreplace")


def not_finite(value: Any, key: str = "") -> str:
    """The first NaN or infinity inside, as in "loss (nan)" or "streams.kl[3] (inf)"; "" where all is well."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{key or 'the value'} ({value})"
    if isinstance(value, Mapping):
        inside = ((f"{key}.{name}" if key else str(name), item) for name, item in value.items())
    elif isinstance(value, (list, tuple)):
        inside = ((f"{key}[{i}]", item) for i, item in enumerate(value))
    else:
        return ""
    return next((bad for name, item in inside if (bad := not_finite(item, name))), "")


def decode(text: bytes | str) -> Any:
    """Parses JSON strictly. Raises ValueError for anything that is no JSON, NaN and endless nesting included."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Writes `value` at once or not at all: sorted keys, the same value gives the same bytes.

    Raises:
        NumberError: a number in it is not finite.
        RunError: the disk is full or the folder is not writable; what was at `path` is still there.
    """
    content = encode(value, where=str(path), pretty=True) + b"\n"
    try:
        with replacing(path) as handle:
            handle.write(content)
    except OSError as error:
        raise RunError(
            f"{path.name} could not be written: {error.strerror or error}",
            where=str(path),
            remedy="make the folder writable and free some space on its disk",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder.

    Raises:
        RunError: the file is missing, unreadable or no JSON object.
    """
    try:
        # A pipe or a device would hang or never end.
        if not path.is_file():
            raise RunError(f"{path.name} is missing", where=str(path), remedy="is this the folder of a run?")
        value = decode(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"an object was expected, not {type(value).__name__}")
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path.name} is damaged: {error}",
            where=str(path),
            remedy="take another --name, or start this stage again with --overwrite",
        ) from error
    return value
