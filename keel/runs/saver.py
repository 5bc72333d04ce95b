"""Checkpoints written beside training: the loop waits for a copy in memory, a thread does the rest, one at a time."""

import copy
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.errors import RunError
from keel.runs import checkpoint
from keel.runs.resources import free_bytes


@dataclass(frozen=True)
class Outcome:
    """How a save ended. seconds: of writing. error: None where the checkpoint is whole and on disk."""

    step: int
    seconds: float
    error: Exception | None


class Saver:
    """Writes the checkpoints of one stage as `checkpoint.save` does, `keep` newest of them kept."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._copies: dict[str, Tensor] = {}
        self._abandoned = threading.Event()

    def start(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], also: Collection[int], wait: bool
    ) -> None:
        """Saves this step. `finish` must have told of the one before.

        wait: return when it is on disk; no copy is then made. It is so too where memory has no room for a copy and as
            much again.
        """
        assert self._thread is None and self._outcome is None, "the save before was not finished"
        # A copy that is there already needs no more room.
        if wait or (not self._copies and 2 * sum(t.nbytes for t in tensors.values()) > free_bytes()):
            self._write(step, tensors, state, also)
            return
        self._copies = {name: self._copied(name, tensor.detach()) for name, tensor in tensors.items()}
        arguments = (step, self._copies, copy.deepcopy(state), also)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, wait: bool) -> Outcome | None:
        """How the save that was started last ended, told once; None where there is nothing to tell, or not yet.

        wait: until it has ended. Raises what is no RunError.
        """
        if self._thread is not None:
            if wait:
                self._thread.join()
            if self._thread.is_alive():
                return None
            self._thread = None
        outcome, self._outcome = self._outcome, None
        if outcome and outcome.error and not isinstance(outcome.error, RunError):
            raise outcome.error
        return outcome

    def abandon(self) -> None:
        """Gives up the save that is under way, after the file that is being written; what is on disk stays."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        # Into the memory of the copy before: fresh pages cost several times what copying does.
        old = self._copies.get(name)
        fits = old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype
        into = old if old is not None and fits else torch.empty(tensor.shape, dtype=tensor.dtype)
        return into.copy_(tensor)

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], also: Collection[int]) -> None:
        began, error = time.monotonic(), None
        try:
            checkpoint.save(self.folder, step, tensors, state, self.keep, also, self._abandoned.is_set)
        except Exception as caught:  # told by `finish`, in the thread of the loop
            error = caught
        self._outcome = Outcome(step, time.monotonic() - began, error)
