"""Checkpoints that a crash, a full disk or a flipped bit cannot take: written aside, synced, renamed, verified on load.

    checkpoints/step-N/         tensors.safetensors, state.json; manifest.json (sizes, SHA-256) is written last
    checkpoints/.tmp-*          being written or removed; left over: of no use
    checkpoints/.old-step-N     making way for a new step-N

Only safetensors and JSON are read: a checkpoint from anywhere cannot run code. `save` and `load_latest` tidy up, so
they are for the process that holds the run's lock.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from keel.errors import RunError
from keel.runs.files import encode, read_json, sync_folder, write_json

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
FORMAT = 1
SPACE_MARGIN = 1.05


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given, and why newer checkpoints were passed over (one sentence each)."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    passed_over: list[str] = field(default_factory=list)


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int = 2,
    also: Collection[int] = (),
    abandoned: Callable[[], bool] = lambda: False,
) -> Path:
    """Writes folder/step-N and, when it is safe on disk, removes all but the newest `keep`, itself included, and those
    of the steps in `also`.

    A checkpoint of a later step can only be one that was passed over as damaged, and is removed too.

    Args:
        tensors: on any device, of any dtype that safetensors knows; tied ones are stored once a name.
        state: JSON-like with string keys; floats come back exactly.
        abandoned: asked after each file whether to give up.

    Raises:
        NumberError: a number in `state` is not finite.
        RunError: too little space, the disk failed, or it was given up; the older checkpoints are as they were.
    """
    assert keep >= 1 and step >= 0
    content = encode(state, where=f"step-{step}/{STATE}", pretty=True)
    own = _own_memory(tensors)
    target, temporary = folder / f"step-{step}", folder / f".tmp-step-{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        _tidy(folder)
        _require_space(folder, len(content) + sum(tensor.nbytes for tensor in own.values()))
        _write(temporary, step, own, content, abandoned)
        _put_in_place(temporary, target)
        steps = _steps(folder)
        past = [number for number in steps if number <= step]
        kept = {*past[:keep], *(number for number in past if number in also)}
        for number in set(steps) - kept:
            _discard(folder / f"step-{number}")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} could not be saved: {error}",
            where=str(folder),
            remedy="free some space and make the folder writable; the same command goes on from "
            + ("the checkpoint before" if folder.is_dir() and _steps(folder) else "the start of the stage"),
        ) from error
    return target


def load_latest(folder: Path) -> Checkpoint | None:
    """`newest`, after what interrupted saves have left was tidied up."""
    try:
        if folder.exists():
            _tidy(folder)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return newest(folder)


def newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, on the CPU; None where none was ever saved. Reads only, without the run's lock.

    Raises:
        RunError: there are checkpoints and all are damaged, with the reason for each.
    """
    passed_over: list[str] = []
    try:
        steps = _steps(folder) if folder.exists() else []
    except OSError as error:
        raise _unreadable(folder, error) from error
    for step in steps:
        try:
            tensors, state = _load(folder / f"step-{step}", step)
        except RunError as error:
            passed_over.append(f"step-{step} passed over: {error.what}")
        else:
            return Checkpoint(step, tensors, state, passed_over)
    if passed_over:
        raise RunError(
            "\n    ".join(["every checkpoint is damaged:", *passed_over]),
            where=str(folder),
            remedy="restore one from a copy, or remove the folder to start this stage from the beginning",
        )
    return None


def load(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of one step. Raises RunError where it is not there or damaged. Reads only."""
    try:
        return Checkpoint(step, *_load(folder / f"step-{step}", step))
    except RunError as error:
        raise RunError(
            f"the checkpoint of step {step} cannot be used: {error.what}",
            where=str(folder / f"step-{step}"),
            remedy="take the newest instead",
        ) from error


def _unreadable(folder: Path, error: OSError) -> RunError:
    return RunError(
        f"the checkpoints cannot be read: {error.strerror or error}",
        where=str(folder),
        remedy="make the folder readable and writable",
    )


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU tensors that share no storage: safetensors refuses tied ones."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return own


def _require_space(folder: Path, size: int) -> None:
    need, free = int(size * SPACE_MARGIN), shutil.disk_usage(folder).free
    if need > free:
        raise RunError(
            f"no room for a checkpoint: it needs {need / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free",
            where=str(folder),
            remedy="free some space; the checkpoints before are untouched",
        )


def _write(temporary: Path, step: int, tensors: dict[str, Tensor], state: bytes, abandoned: Callable[[], bool]) -> None:
    temporary.mkdir()
    save_file(tensors, temporary / TENSORS)
    (temporary / STATE).write_bytes(state)
    files = {}
    for name in (TENSORS, STATE):
        if abandoned():
            shutil.rmtree(temporary)
            raise RunError(f"the checkpoint of step {step} was given up")
        with open(temporary / name, "rb") as file:
            os.fsync(file.fileno())
            files[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": _digest(temporary / name)}
    write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "files": files})


def _put_in_place(temporary: Path, target: Path) -> None:
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    sync_folder(target.parent)
    if old.exists():
        _discard(old)


def _discard(path: Path) -> None:
    """Removes a checkpoint under another name: half removed, it must not look like a damaged one."""
    gone = path.with_name(f".tmp-gone-{path.name}")
    os.rename(path, gone)
    _remove(gone)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _tidy(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(".tmp-"):
            _remove(path)
        elif path.name.startswith(".old-"):
            target = folder / path.name.removeprefix(".old-")
            _discard(path) if target.exists() else os.rename(path, target)


def _steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, newest first."""
    matches = (re.fullmatch(r"step-(0|[1-9][0-9]*)", path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _load(path: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Raises RunError with the reason where anything is not as it was written."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or manifest.get("step") != step or not isinstance(files, dict):
        raise RunError(f"{MANIFEST} is not that of step {step} in format {FORMAT}")
    for name in (TENSORS, STATE):
        _verify(path / name, files.get(name))
    try:
        return load_file(path / TENSORS), read_json(path / STATE)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{TENSORS} is unreadable: {error}") from error


def _verify(path: Path, expected: Any) -> None:
    if not isinstance(expected, dict):
        raise RunError(f"{path.name} is not in the manifest")
    try:
        if not path.is_file():
            raise RunError(f"{path.name} is missing")
        size = path.stat().st_size
        if size != expected.get("size"):
            raise RunError(f"{path.name} has {size} bytes, the manifest says {expected.get('size')}")
        if _digest(path) != expected.get("sha256"):
            raise RunError(f"{path.name} is not what was written: its SHA-256 differs from the manifest's")
    except OSError as error:
        raise RunError(f"{path.name} is unreadable: {error.strerror or error}") from error


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
