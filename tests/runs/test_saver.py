"""Checkpoints written beside training: what is saved is what was there when it began, whatever happens after."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.errors import NumberError, RunError
from keel.runs import checkpoint, saver
from keel.runs.checkpoint import load_latest
from keel.runs.saver import Saver


class Gate:
    """Holds each save until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.reached, self.opened, real = threading.Event(), threading.Event(), checkpoint.save

        def save(*given: Any) -> Path:
            self.reached.set()
            assert self.opened.wait(60)
            return real(*given)

        monkeypatch.setattr(checkpoint, "save", save)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_of_the_moment_at_which_it_began(tmp_path: Path, gate: Gate):
    weights, state = torch.arange(6.0).reshape(2, 3), {"loop": {"kl": 0.5}}
    own = Saver(tmp_path, 2)
    for step in (1, 2):  # the second goes into the memory of the first one's copy
        before = weights.clone()
        gate.opened.clear()
        own.start(step, {"w": weights, "turned": weights.T}, state, (), wait=False)
        assert gate.reached.wait(60) and own.finish(wait=False) is None  # under way
        weights += 1
        state["loop"]["kl"] = 0.5 + step
        gate.opened.set()
        done = own.finish(wait=True)
        assert done and (done.step, done.error) == (step, None) and own.finish(wait=True) is None  # told once
        found = load_latest(tmp_path)
        assert found and found.step == step and torch.equal(found.tensors["w"], before)
        assert torch.equal(found.tensors["turned"], before.T)
        assert found.state == {"loop": {"kl": 0.5 if step == 1 else 1.5}}


def test_bytes_are_those_of_a_save_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tied = torch.ones(3)
    tensors = {"b": tied, "a": tied, "turned": torch.arange(6.0).reshape(2, 3).T, "half": tied.bfloat16()}
    for name, wait in (("beside", False), ("before", True)):
        own = Saver(tmp_path / name, 1)
        own.start(4, tensors, {"n": 1}, (), wait)
        assert own.finish(wait=True)
    for file in ("tensors.safetensors", "state.json", "manifest.json"):
        assert (tmp_path / "beside/step-4" / file).read_bytes() == (tmp_path / "before/step-4" / file).read_bytes()


@pytest.mark.parametrize("free", [7, 8])
def test_no_copy_is_made_where_memory_has_no_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int):
    """A tensor of four bytes asks for eight."""
    threads: list[threading.Thread] = []
    real: Callable[..., Path] = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given: (threads.append(threading.current_thread()), real(*given)))
    monkeypatch.setattr(saver, "free_bytes", lambda: free)
    own = Saver(tmp_path, 1)
    own.start(1, {"w": torch.ones(1)}, {}, (), wait=False)
    assert own.finish(wait=True) and (threads == [threading.main_thread()]) == (free < 8)


def test_one_that_is_given_up_leaves_the_one_before(tmp_path: Path, gate: Gate):
    gate.opened.set()
    own = Saver(tmp_path, 1)
    own.start(1, {"w": torch.ones(1)}, {}, (), wait=False)
    assert own.finish(wait=True)
    gate.opened.clear()
    own.start(2, {"w": torch.zeros(1)}, {}, (), wait=False)
    asking = threading.Thread(target=own.abandon)
    asking.start()
    assert own._abandoned.wait(60)
    gate.opened.set()
    asking.join()
    done = own.finish(wait=True)
    assert done and "given up" in str(done.error) and names(tmp_path) == ["step-1"]


def test_errors_come_to_whoever_asks(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    own = Saver(tmp_path / "file", 1)
    own.start(1, {}, {}, (), wait=False)
    done = own.finish(wait=True)
    assert done and isinstance(done.error, RunError)
    own = Saver(tmp_path, 1)
    own.start(1, {}, {"kl": float("nan")}, (), wait=False)
    with pytest.raises(NumberError, match="kl"):
        own.finish(wait=True)
