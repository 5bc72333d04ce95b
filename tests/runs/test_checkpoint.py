"""Checkpoints: what was saved comes back, and whatever strikes, the newest whole one is found with the reason told."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

import keel
from keel.errors import NumberError, RunError
from keel.runs import checkpoint
from keel.runs.checkpoint import load_latest, save

REPO = Path(keel.__file__).parents[1]
FILES = ["manifest.json", "state.json", "tensors.safetensors"]


def content(step: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(3, 4, generator=generator)}, {"kl": step / 3}


def put(folder: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save(folder, step, *content(step), keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def holds(folder: Path, step: int) -> list[str]:
    """Asserts that `step` is what loads, whole; returns why others were passed over."""
    found = load_latest(folder)
    assert found is not None and found.step == step
    tensors, state = content(step)
    assert found.state == state and found.tensors.keys() == tensors.keys()
    assert torch.equal(found.tensors["w"], tensors["w"])
    return found.passed_over


def test_every_kind_of_tensor_and_number_comes_back(tmp_path: Path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "f32": base,
        "tied": base,
        "transposed": base.T,
        "part": base[1:],
        "bf16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "f64": torch.tensor(1 / 3, dtype=torch.float64),
        "i64": torch.tensor([2**62]),
        "bool": torch.tensor([True, False]),
        "rng": torch.get_rng_state(),
        "empty": torch.zeros(0, 5),
        "grad": torch.ones(2, requires_grad=True),
    }
    state = {"lr": 0.1 + 0.2, "tiny": 5e-324, "n": 2**70, "none": None, "order": [3, 1, 2], "text": "ü\ud800"}
    path = save(tmp_path / "checkpoints", 7, tensors, state)
    assert path == tmp_path / "checkpoints" / "step-7" and names(path) == FILES
    found = load_latest(tmp_path / "checkpoints")
    assert found is not None and (found.step, found.passed_over, found.state) == (7, [], state)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = found.tensors[name]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        same = torch.equal(back.view(torch.int16), tensor.view(torch.int16)) if name == "bf16" else back.equal(tensor)
        assert same, name


def test_the_manifest_is_by_hand(tmp_path: Path):
    path = save(tmp_path, 3, {"a": torch.zeros(2)}, {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["files"].keys() == {"tensors.safetensors", "state.json"}
    # printf '{}' | sha256sum
    assert manifest["files"]["state.json"] == {
        "size": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }


def test_the_same_content_gives_the_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        put(tmp_path / name, 5)
    for file in FILES:
        assert (tmp_path / "a/step-5" / file).read_bytes() == (tmp_path / "b/step-5" / file).read_bytes()


def test_all_is_on_disk_before_the_name_and_the_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put(tmp_path, 1)
    events: list[tuple[str, object]] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(("sync", os.fstat(handle).st_ino)), sync(handle)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(("rename", Path(new).name)), rename(old, new)))
    path = save(tmp_path, 2, *content(2), keep=1)
    named, gone = events.index(("rename", "step-2")), events.index(("rename", ".tmp-gone-step-1"))
    written = [("sync", (path / name).stat().st_ino) for name in FILES]
    assert set(written) <= set(events[:named])
    assert events.index(written[0]) > max(events.index(written[1]), events.index(written[2]))  # the manifest last
    assert ("sync", path.stat().st_ino) in events[events.index(("rename", "manifest.json")) : named]
    assert ("sync", tmp_path.stat().st_ino) in events[named:gone]


def test_the_newest_are_kept_by_number(tmp_path: Path):
    put(tmp_path, 8, 9, 10, 11)
    assert names(tmp_path) == ["step-10", "step-11"]
    put(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["step-12"]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path):
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        save(tmp_path, step, *content(step), keep=1, also=[best])
        assert names(tmp_path) == sorted({f"step-{step}", f"step-{best}"})
    save(tmp_path, 2, *content(2), keep=1, also=[4])  # later steps were passed over, the best among them too
    assert names(tmp_path) == ["step-2"]


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path):
    put(tmp_path, 1, 2)
    for path in (tmp_path / "step-2").iterdir():
        os.utime(path, (1, 1))
    os.utime(tmp_path / "step-2", (1, 1))
    assert holds(tmp_path, 2) == []


def test_nothing_saved(tmp_path: Path):
    assert load_latest(tmp_path / "gone") is None
    assert load_latest(tmp_path) is None
    for name in (".tmp-step-3", "step-x", "step-07", "other"):
        (tmp_path / name).mkdir()
    assert load_latest(tmp_path) is None
    assert names(tmp_path) == ["other", "step-07", "step-x"]


def test_a_save_of_an_earlier_step_supersedes_later_ones(tmp_path: Path):
    put(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / "state.json").unlink()
    assert len(holds(tmp_path, 2)) == 1
    put(tmp_path, 3)  # the damaged one is replaced
    assert holds(tmp_path, 3) == [] and names(tmp_path) == ["step-2", "step-3"]
    (tmp_path / "step-3" / "state.json").unlink()
    put(tmp_path, 2)
    assert holds(tmp_path, 2) == [] and names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_told(tmp_path: Path, name: str):
    """Case 42."""
    put(tmp_path, 1, 2)
    (tmp_path / "step-2" / name).unlink()
    assert holds(tmp_path, 1) == [f"step-2 passed over: {name} is missing"]
    assert names(tmp_path) == ["step-1", "step-2"]  # left for whoever wants to look


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_seen(tmp_path: Path, name: str):
    put(tmp_path, 1, 2)
    file = tmp_path / "step-2" / name
    whole = file.read_bytes()
    for place in range(len(whole)):
        bit = 1 << place % 5
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        (reason,) = holds(tmp_path, 1)
        assert reason.startswith("step-2 passed over: "), (place, reason)
        if name != "manifest.json":
            assert (
                reason == f"step-2 passed over: {name} is not what was written: its SHA-256 differs from the manifest's"
            )
    file.write_bytes(whole)
    assert holds(tmp_path, 2) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [0, 1, 50])
def test_a_short_file_is_told(tmp_path: Path, name: str, cut: int):
    put(tmp_path, 1, 2)
    file = tmp_path / "step-2" / name
    size = file.stat().st_size
    os.truncate(file, min(cut, size - 1))
    (reason,) = holds(tmp_path, 1)
    if name != "manifest.json":
        assert reason == f"step-2 passed over: {name} has {min(cut, size - 1)} bytes, the manifest says {size}"


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "folder"])
def test_something_else_in_the_place_of_a_file_or_folder(tmp_path: Path, kind: str):
    put(tmp_path, 1, 2)
    for name in FILES:
        target = tmp_path / "step-2" / name
        target.unlink()
        if kind == "link":
            target.symlink_to(tmp_path / "nowhere")
        elif kind == "pipe":
            os.mkfifo(target)
        else:
            target.mkdir()
        (reason,) = holds(tmp_path, 1)
        assert "is missing" in reason
    if kind == "file":
        shutil.rmtree(tmp_path / "step-2")
        (tmp_path / "step-2").write_text("x")
        assert len(holds(tmp_path, 1)) == 1
    put(tmp_path, 2)
    assert holds(tmp_path, 2) == []


@pytest.mark.parametrize(
    "manifest",
    [
        *["", "{}", "[]", "null", "[" * 100_000],
        '{"format": 1, "step": 2}',
        '{"format": 1, "step": 2, "files": []}',
        '{"format": 1, "step": 2, "files": {"tensors.safetensors": 1}}',
        '{"format": 9, "step": 2, "files": {}}',
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, manifest: str):
    put(tmp_path, 1, 2)
    (tmp_path / "step-2" / "manifest.json").write_text(manifest)
    assert "manifest" in holds(tmp_path, 1)[0]


def test_files_that_match_their_manifest_but_are_no_checkpoint(tmp_path: Path):
    for name, junk, word in (("tensors.safetensors", b"\x80\x04junk", "tensors"), ("state.json", b"[1]", "state")):
        put(tmp_path, 1, 2)
        path = tmp_path / "step-2"
        (path / name).write_bytes(junk)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(junk), "sha256": checkpoint._digest(path / name)}
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert word in holds(tmp_path, 1)[0]


def test_when_all_are_damaged_the_user_decides(tmp_path: Path):
    put(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "state.json").unlink()
    with pytest.raises(RunError, match=r"step-2 passed over[^$]*step-1 passed over"):
        load_latest(tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    tensors = {"w": torch.zeros(2**18)}  # 1 MiB, so 1.05 MiB and a little are needed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 2**20))
    with pytest.raises(RunError, match=r"needs 1\.1 MiB, 1\.0 MiB are free"):
        save(tmp_path, 2, tensors, {})
    assert names(tmp_path) == ["step-1"] and holds(tmp_path, 1) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, int(1.06 * 2**20)))
    save(tmp_path, 2, tensors, {})


@pytest.mark.parametrize("part", ["tensors", "state", "manifest"])
def test_a_disk_that_fills_while_writing(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big: tuple[dict[str, Tensor], dict[str, object]] = (
        ({"w": torch.zeros(10**6)}, {}) if part == "tensors" else ({}, {"text": "x" * 10**6})
    )
    if part == "manifest":
        big = content(2)

        def full(path: Path, value: object) -> None:
            path.write_text("half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "write_json", full)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # a real refusal by the kernel
        with pytest.raises(RunError, match="step 2 could not be saved"):
            save(tmp_path, 2, *big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-1"] and holds(tmp_path, 1) == []


def test_a_state_that_is_no_number_leaves_all_as_it_was(tmp_path: Path):
    put(tmp_path, 1)
    with pytest.raises(NumberError, match=r"moments\.mean"):
        save(tmp_path, 2, {}, {"moments": {"mean": float("inf")}})
    assert names(tmp_path) == ["step-1"]


def test_a_place_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="could not be saved"):
            save(folder, 1, {}, {})
    with pytest.raises(RunError, match="cannot be read"):
        load_latest(tmp_path / "file")


# One process imports torch once and forks a child for each moment of death.
DRILL = """
import os, random, shutil, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import torch
torch.set_num_threads(1)
from keel.runs import checkpoint
from keel.runs.checkpoint import load_latest, save

root, mode = Path(sys.argv[1]), sys.argv[2]
os.fsync = lambda handle: None  # the kernel outlives the process: it changes nothing here but the time
POINTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}

def content(step, n):
    return {"w": torch.full((n,), float(step))}, {"step": step}

def check(folder, allowed, n):
    found = load_latest(folder)
    assert found is not None and found.step in allowed, (found and found.step, allowed)
    assert found.passed_over == [], found.passed_over
    assert found.state == {"step": found.step} and torch.equal(found.tensors["w"], content(found.step, n)[0]["w"])
    assert {p.name for p in folder.iterdir()} <= {"step-%d" % s for s in range(found.step + 1)}
    assert not [p for p in folder.rglob("*") if p.name.startswith((".tmp", ".old"))]
    return found.step

def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
    return pid

def strike_at(point, folder, step):
    def work():
        left = point
        def hook(event, args):
            nonlocal left
            if event in POINTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(folder, step, *content(step, 10), keep=2)
    return os.waitpid(fork(work), 0)[1]

if mode == "points":
    # step 3 is new; step 2 is written over, as after a resume
    for step in (3, 2):
        seen, point = set(), 0
        while True:
            folder = root / f"{step}-{point}"
            for earlier in (1, 2):
                save(folder, earlier, *content(earlier, 10))
            status = strike_at(point, folder, step)
            assert status in (0, signal.SIGKILL), status
            seen.add(check(folder, {2, step}, 10))
            save(folder, 4, *content(4, 10))
            check(folder, {4}, 10)
            assert len(list(folder.iterdir())) == 2
            if status == 0:
                break
            point += 1
        assert point >= 15 and seen == {2, step}, (point, seen)
        sys.stdout.write(f"{point} ")
else:
    chance, n, folder = random.Random(0), 500_000, root / "times"
    save(folder, 0, *content(0, n))
    reached = 0
    for _ in range(8):
        def work():
            for step in range(reached + 1, reached + 1000):
                save(folder, step, *content(step, n))
        pid = fork(work)
        time.sleep(chance.uniform(0.01, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = max(int(p.name[5:]) for p in folder.iterdir() if p.name.startswith("step-"))
        reached = check(folder, {newest}, n)
    assert reached > 0
    sys.stdout.write(str(reached))
"""


@pytest.mark.parametrize("mode", ["points", "times"])
def test_kill_9_at_any_moment_of_a_save(tmp_path: Path, mode: str):
    command = [sys.executable, "-W", "ignore", "-c", DRILL, str(tmp_path), mode, str(REPO)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
