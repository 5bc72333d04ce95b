"""A run's folder: one writer at a time, stages that know what made them, and a manifest. No torch here."""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from keel.errors import Interrupted, KeelError, RunError
from keel.runs.files import decode, encode, read_json, write_json

StageState = Literal["new", "resume", "finished"]
"""What a stage folder holds: nothing, a part of the work, or all of it."""

DISTRIBUTIONS = ("keel-rl", "torch", "transformers", "peft")
SHOWN_CHANGES = 20

_locks: set[int] = set()


def _close_locks_in_child() -> None:
    # A forked child shares the lock; were it to outlive a killed parent, the run would stay locked.
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks_in_child)


class RunFolder:
    """The folder of one run. `RunFolder(path)` reads one that exists; `RunFolder.open` makes it and keeps others out.

    Raises:
        RunError: there is no folder at `path`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock: int | None = None
        self._made: list[Path] = []
        try:
            found = self.path.is_dir()
        except (OSError, ValueError):
            found = False
        if not found:
            raise RunError("there is no run here", where=str(path), remedy="give the folder that `keel run` made")

    @classmethod
    def open(cls, root: Path | str, name: str) -> Self:
        """Makes root/name where it is missing and locks it for the life of this process (or until `close`).

        Raises:
            RunError: the name is no plain name, the folder cannot be made or written, or another process works in it.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise RunError(f"{name!r} cannot be the name of a run", remedy="take a plain name, without '/'")
        path = Path(root) / name
        try:
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run._lock = _lock(path / ".lock")
            run._made = made
        except OSError as error:
            raise RunError(
                f"the run folder cannot be used: {error.strerror or error}",
                where=str(path),
                remedy="take another --name or another place, one that is a folder and writable",
            ) from error
        return run

    def close(self) -> None:
        """Lets others in."""
        if self._lock is not None:
            _locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeelError) and not issubclass(kind, Interrupted):
            self._unmake()
        self.close()

    def _unmake(self) -> None:
        """Removes the folders that `open` made, where the run was refused before it had done anything."""
        idle = (".lock", "manifest.json", "inputs.json")
        if not self._made or any(f.is_file() and f.stat().st_size and f.name not in idle for f in self.path.rglob("*")):
            return
        with contextlib.suppress(OSError):  # not empty: others have put something there
            shutil.rmtree(self.path)
            for folder in self._made[1:]:
                folder.rmdir()

    def stage(self, name: str) -> "StageFolder":
        """The folder of one stage; nothing is made until `StageFolder.check`."""
        return StageFolder(self.path / name)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Writes manifest.json, with the versions of python and of the packages that decide a result."""
        write_json(self.path / "manifest.json", {**manifest, "versions": versions()})

    def manifest(self) -> dict[str, Any]:
        """What `write_manifest` wrote. Raises RunError where it is missing or damaged."""
        return read_json(self.path / "manifest.json")


class StageFolder:
    """The folder of one stage, the inputs that it was started with, and whether it is done."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.bad = path / "bad"
        self.model = path / "model"
        self._inputs = path / "inputs.json"
        self._done = path / "done.json"

    def check(self, fingerprint: str, parts: Mapping[str, Any], overwrite: bool = False) -> StageState:
        """Says where the stage stands, and records its inputs where it is new.

        Args:
            fingerprint: hash of everything that decides the stage's result.
            parts: the settings behind it, flat and JSON-like, only to show what changed.
            overwrite: empty a stage that was made from other inputs. One with the same inputs is kept.

        Raises:
            RunError: the stage holds the work of other inputs, or is damaged; nothing is touched.
        """
        try:
            if self._is_empty():
                self._make(fingerprint, parts)
                return "new"
            self._refuse_other_inputs(fingerprint, parts)
            return "finished" if self.finished(fingerprint) is not None else "resume"
        except RunError:
            if not overwrite or not self.path.is_dir():
                raise
        self.clear()
        self._make(fingerprint, parts)
        return "new"

    def finish(self, fingerprint: str, parts: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Marks the stage as done; `result` is what later stages and the summary need."""
        done = {"fingerprint": fingerprint, "parts": parts, "result": result, "sha256": _hash(result)}
        write_json(self._done, done)

    def finished(self, fingerprint: str | None = None) -> dict[str, Any] | None:
        """The result of the stage if it was finished with these inputs (None: with any), else None. Raises RunError
        where damaged."""
        if not self._done.exists():
            return None
        done = read_json(self._done)
        if not isinstance(done.get("result"), dict) or done.get("sha256") != _hash(done["result"]):
            raise RunError(
                "done.json is damaged: its result is not what was written",
                where=str(self._done),
                remedy="take another --name, or start this stage again with --overwrite",
            )
        return done["result"] if fingerprint in (None, done.get("fingerprint")) else None

    def require_model(self, result: Mapping[str, Any], found: str | None) -> None:
        """Raises RunError where the hash of the model that is there is not the one in the stage's result."""
        if result.get("model") != found:
            raise RunError(
                f"the model that the stage {self.path.name} left is not as it was left",
                where=str(self.model),
                remedy=f"put it back, or remove {self.path} to make it again",
            )

    def clear(self) -> None:
        """Removes the stage with all that it holds."""
        try:
            if self.path.exists():
                # Without its mark first: a stage half removed must not pass for a finished one.
                self._done.unlink(missing_ok=True)
                shutil.rmtree(self.path)
        except OSError as error:
            raise RunError(
                f"the stage cannot be removed: {error.strerror or error}",
                where=str(self.path),
                remedy="make the folder writable, or take another --name",
            ) from error

    def _is_empty(self) -> bool:
        """Whether no work is lost here: nothing but the inputs of an attempt that failed before it had done anything,
        and what it noted of that."""
        try:
            items = list(self.path.iterdir()) if self.path.exists() else []
            return all(
                item in (self._inputs, self.events, self.bad)
                or item.name.startswith(".tmp-")
                or (item != self._done and _holds_nothing(item))
                for item in items
            )
        except OSError as error:
            raise RunError(
                f"the stage folder cannot be read: {error.strerror or error}",
                where=str(self.path),
                remedy="take another --name, or move away what is in its place",
            ) from error

    def _make(self, fingerprint: str, parts: Mapping[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.bad.is_dir():
                shutil.rmtree(self.bad)
        except OSError as error:
            raise RunError(
                f"the stage folder cannot be made: {error.strerror or error}",
                where=str(self.path),
                remedy="make the run folder writable, or take another --name",
            ) from error
        write_json(self._inputs, {"fingerprint": fingerprint, "parts": parts})

    def _refuse_other_inputs(self, fingerprint: str, parts: Mapping[str, Any]) -> None:
        recorded = read_json(self._inputs)
        if recorded.get("fingerprint") == fingerprint:
            return
        before = recorded.get("parts")
        changes = _changes(before if isinstance(before, dict) else {}, parts)
        changes = changes or [f"fingerprint: {recorded.get('fingerprint')} -> {fingerprint}"]
        shown = changes[:SHOWN_CHANGES]
        if len(changes) > len(shown):
            shown.append(f"and {len(changes) - len(shown)} more")
        raise RunError(
            "\n    ".join([f"the stage {self.path.name!r} of this run was made from other inputs:", *shown]),
            where=str(self.path),
            remedy="take another --name to keep both, or --overwrite to replace this stage",
        )


def _hash(result: Mapping[str, Any]) -> str:
    # Encoded twice: what comes back from the file has strings where the result may have had numbers as keys.
    content = encode(decode(encode(result, where="result", pretty=True)), where="result", pretty=True)
    return hashlib.sha256(content).hexdigest()


def _holds_nothing(item: Path) -> bool:
    return not any(item.iterdir()) if item.is_dir() else item.stat().st_size == 0


def versions() -> dict[str, str]:
    """Versions of python and of the packages that decide a result; "not installed" where there is none."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found["keel" if name == "keel-rl" else name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["keel" if name == "keel-rl" else name] = "not installed"
    return found


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    # Compared as JSON, where a tuple and the list that it became are the same.
    def show(side: Mapping[str, Any], key: str) -> str:
        return encode(side[key], where=key).decode() if key in side else "(absent)"

    keys = [key for key in sorted(before.keys() | now.keys()) if show(before, key) != show(now, key)]
    return [f"{key}: {show(before, key)} -> {show(now, key)}" for key in keys]


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "another process"
        os.close(handle)
        raise RunError(
            f"the run is in use by {holder}",
            where=str(path.parent),
            remedy="wait for it, stop it, or take another --name",
        ) from None
    except OSError:
        os.close(handle)
        raise
    if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):
        os.close(handle)  # whoever held it has removed it with its folder; another may have made it again
        raise RunError("the run folder was removed a moment ago", where=str(path.parent), remedy="try again")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    _locks.add(handle)
    return handle
