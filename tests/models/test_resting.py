"""Frozen roles at rest: the same numbers from a mapped file, memory given back, and what happens beside that."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from keel.errors import RunError
from keel.models.loading import unembedding
from keel.models.resting import Resting
from keel.models.roles import Role, logprobs_BT, scores_B
from keel.models.separate import SeparateRoles
from keel.runs.resources import peak_rss_bytes, resident_bytes, restart_peak
from tests.tiny import load, sequences

ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward")
MIB = 1 << 20


class Elsewhere(Resting):
    """A stand-in for a device: what is moved there is a copy, and is written down."""

    moved: list[int]

    def to_another_device(self) -> None:
        self.device, self.moved = torch.device("meta"), []

    def _moved(self, host):
        self.moved.append(host.numel())
        return host.clone()


def built(model: Path, rest_in: Path | None) -> SeparateRoles:
    return SeparateRoles.build(load(model), ROLES, ["policy", "critic"], 0, rest_in=rest_in)


def test_resting_roles_compute_the_same_bytes_and_leave_no_file(tiny_model, tmp_path):
    plain, resting, rows = built(tiny_model, None), built(tiny_model, tmp_path), sequences(9)
    assert not list(tmp_path.iterdir()) and resting.resting.keys() == {"reference", "reward"}
    for _ in range(2):
        for role in ROLES:
            assert resting.fingerprint(role) == plain.fingerprint(role)
        want, got = (logprobs_BT(roles, "reference", rows, 0.7, 0, 40) for roles in (plain, resting))
        assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
        assert torch.equal(scores_B(plain, rows, 0, 40), scores_B(resting, rows, 0, 40))
        resting.rest()
    resting.export("reference", tmp_path)
    assert all(map(torch.equal, load(tmp_path).parameters(), load(tiny_model).parameters()))


def test_weights_lie_in_the_mapping_where_torch_would_put_them(tmp_path):
    """12, 68 and 8 bytes, each beginning at a multiple of 64."""
    model = nn.ParameterList([nn.Parameter(torch.arange(float(n)), requires_grad=False) for n in (3, 17, 2)])
    resting = Resting(model, tmp_path)
    start = torch.frombuffer(resting.map, dtype=torch.uint8).data_ptr()
    assert [p.data_ptr() - start for p in model.parameters()] == [0, 64, 192] and len(resting.map) == 200
    assert [p.tolist() for p in model.parameters()] == [[*map(float, range(n))] for n in (3, 17, 2)]


def test_tied_weights_stay_tied_and_frozen(tiny_model, tmp_path):
    model = built(tiny_model, tmp_path).model("reward")
    assert unembedding(model)[0] is model.get_input_embeddings().weight
    assert not any(p.requires_grad for p in model.parameters())


def test_a_write_to_resting_weights_is_seen_by_the_fingerprint(tiny_model, tmp_path):
    roles = built(tiny_model, tmp_path)
    before = roles.fingerprint("reference")
    with torch.no_grad():
        next(iter(roles.parameters("reference").values())).view(-1)[3] += 1
    roles.rest()
    assert roles.fingerprint("reference") != before


def test_memory_is_given_back_and_comes_again(tmp_path):
    """64 MiB of weights: in memory while they are read, not before and not after."""
    model = nn.Linear(4096, 4096, bias=False).requires_grad_(False)
    model.weight.fill_(0.5)
    held = resident_bytes()
    resting = Resting(model, tmp_path)
    assert resident_bytes() - held < -48 * MIB  # where the weights were
    held = resident_bytes()
    for _ in range(2):
        assert restart_peak()
        assert model.weight.sum() == 4096 * 4096 / 2
        assert peak_rss_bytes() - held > 48 * MIB
        resting.rest()
        assert abs(resident_bytes() - held) < 8 * MIB
        assert restart_peak() and peak_rss_bytes() - held < 16 * MIB


def test_on_another_device_weights_are_copied_for_their_passes_alone(tiny_model, tmp_path):
    model = load(tiny_model)
    want = [p.clone() for p in model.parameters()]
    resting = Elsewhere(model, tmp_path)
    resting.wake()  # on the CPU nothing is copied
    resting.to_another_device()
    with torch.inference_mode():
        resting.wake()
        resting.wake()
    assert resting.moved == [p.numel() for p in want]
    for parameter, host, was in zip(model.parameters(), resting.hosts, want, strict=True):
        assert parameter.data_ptr() != host.data_ptr() and not parameter.is_inference()
        assert torch.equal(parameter, was)
    resting.rest()
    for parameter, host, was in zip(model.parameters(), resting.hosts, want, strict=True):
        assert parameter.data_ptr() == host.data_ptr() and torch.equal(parameter, was)


def test_a_device_that_is_full_half_way_leaves_a_model_that_rests_and_wakes(tiny_model, tmp_path, monkeypatch):
    model = load(tiny_model)
    resting = Elsewhere(model, tmp_path)
    resting.to_another_device()

    def full(self, host):
        if len(self.moved) == 3:
            raise torch.OutOfMemoryError("no room")
        return moved(self, host)

    moved = Elsewhere._moved
    monkeypatch.setattr(Elsewhere, "_moved", full)
    with pytest.raises(torch.OutOfMemoryError):
        resting.wake()
    monkeypatch.setattr(Elsewhere, "_moved", moved)
    resting.wake()
    assert len(resting.moved) == len(resting.hosts)  # three before, then the others
    resting.rest()
    assert all(p.data_ptr() == h.data_ptr() for p, h in zip(model.parameters(), resting.hosts, strict=True))


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_told(late, tiny_model, tmp_path, monkeypatch):
    """late: a disk that takes the bytes and says only afterwards that it has no room for them."""
    model, (soft, hard) = load(tiny_model), resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_room(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if late:
        monkeypatch.setattr(os, "fsync", no_room)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError, match="No space left" if late else "File too large") as error:
            Resting(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.where == str(tmp_path) and "model.rest_frozen" in error.value.remedy
    assert not list(tmp_path.iterdir())
    assert all(map(torch.equal, model.parameters(), load(tiny_model).parameters()))
