"""Run folders: one writer, inputs that are shown when they change, JSON that is whole or refused."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import keel
from keel.errors import NumberError, RunError
from keel.runs import folder
from keel.runs.files import read_json, write_json
from keel.runs.folder import RunFolder, StageFolder, versions

HERE = {**os.environ, "PYTHONPATH": str(Path(keel.__file__).parents[1])}
HOLD = """
import os, sys, time
from keel.runs.folder import RunFolder
run = RunFolder.open(sys.argv[1], "demo")
if len(sys.argv) > 2 and os.fork():
    time.sleep(60)
sys.stdout.write("held\\n")
sys.stdout.flush()
time.sleep(60)
"""


def holder(root: Path, *extra: str) -> "subprocess.Popen[str]":
    # A group of its own, so that a forked child can be ended with it.
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), *extra],
        env=HERE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def end_group(child: "subprocess.Popen[str]") -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path):
    child = holder(tmp_path)
    try:
        with pytest.raises(RunError, match=rf"in use by process {child.pid} on"):
            RunFolder.open(tmp_path, "demo")
        RunFolder(tmp_path / "demo")  # reading needs no lock
    finally:
        end_group(child)
    RunFolder.open(tmp_path, "demo").close()  # killed, not closed: the lock is free


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    child = holder(tmp_path, "fork")
    try:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        RunFolder.open(tmp_path, "demo").close()
    finally:
        end_group(child)


def test_one_process_cannot_open_twice_until_it_closes(tmp_path: Path):
    with RunFolder.open(tmp_path, "a"):
        with pytest.raises(RunError, match=f"process {os.getpid()} "):
            RunFolder.open(tmp_path, "a")
        RunFolder.open(tmp_path, "b").close()
    RunFolder.open(tmp_path, "a").close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str):
    with pytest.raises(RunError, match="name of a run"):
        RunFolder.open(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_run(tmp_path: Path):
    (tmp_path / "demo").write_text("mine")
    with pytest.raises(RunError, match="cannot be used"):
        RunFolder.open(tmp_path, "demo")
    with pytest.raises(RunError, match="no run here"):
        RunFolder(tmp_path / "demo")
    with pytest.raises(RunError, match="cannot be used"):
        RunFolder.open(tmp_path / "demo", "below")
    with pytest.raises(RunError, match="cannot be used"):
        RunFolder.open(tmp_path, "x" * 300)
    assert (tmp_path / "demo").read_text() == "mine"


def test_a_folder_that_cannot_be_written():
    with tempfile.TemporaryDirectory() as place:  # tmp_path lies below a folder that is its owner's alone
        (Path(place) / "demo").mkdir()
        for folder in (Path(place) / "demo", Path(place)):
            folder.chmod(0o555)
        before = os.geteuid()
        if before == 0:  # who may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(RunError, match="Permission denied"):
                RunFolder.open(place, "demo")
        finally:
            os.seteuid(before)
            Path(place).chmod(0o755)


def test_no_run_there(tmp_path: Path):
    for path in (tmp_path / "gone", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(RunError, match="no run here"):
            RunFolder(path)


def test_the_life_of_a_stage(tmp_path: Path):
    stage = RunFolder.open(tmp_path, "demo").stage("sft")
    assert stage.metrics == tmp_path / "demo/sft/metrics.jsonl" and stage.model == tmp_path / "demo/sft/model"
    assert not stage.path.exists()
    parts = {"sft.lr": 0.001, "sft.betas": (0.9, 0.95)}
    assert stage.check("f1", parts) == "new"
    stage.metrics.touch()
    assert stage.check("f1", parts) == "new"  # nothing was written yet that could be lost
    stage.metrics.write_text('{"step": 1}\n')
    assert stage.check("f1", parts) == "resume"
    assert stage.finished("f1") is None
    stage.finish("f1", parts, {"loss": 0.5})
    assert stage.check("f1", parts) == "finished"
    assert stage.check("f1", parts, overwrite=True) == "finished"
    assert stage.finished("f1") == {"loss": 0.5}
    assert stage.finished("f2") is None
    stage.clear()
    assert not stage.path.exists() and stage.check("f1", parts) == "new"


def test_a_first_step_that_could_not_be_taken_is_no_work(tmp_path: Path):
    stage = StageFolder(tmp_path / "ppo")
    stage.check("f1", {})
    stage.bad.mkdir()
    (stage.bad / "step-1-1.json").write_text("{}")
    stage.events.write_text('{"step": 1, "event": "bad_step"}\n')
    assert stage.check("f2", {}) == "new" and not stage.bad.exists()
    stage.metrics.write_text('{"step": 1}\n')
    assert stage.check("f2", {}) == "resume"


def test_a_result_that_was_changed_is_damaged(tmp_path: Path):
    stage = StageFolder(tmp_path / "sft")
    stage.check("f1", {})
    stage.finish("f1", {}, {"loss": 0.5, "by": {1: (2.0, None)}})
    assert stage.finished("f1") == {"loss": 0.5, "by": {"1": [2.0, None]}}
    (stage.path / "done.json").write_text((stage.path / "done.json").read_text().replace("0.5", "0.4"))
    with pytest.raises(RunError, match="its result is not what was written"):
        stage.finished("f1")


def test_other_inputs_are_shown_and_nothing_is_touched(tmp_path: Path):
    stage = StageFolder(tmp_path / "sft")
    stage.check("f1", {"lr": 0.001, "betas": (0.9, 0.95), "gone": "x", "same": [1]})
    stage.metrics.write_text('{"step": 1}\n')
    before = snapshot(tmp_path)
    now = {"lr": 0.002, "betas": (0.9, 0.99), "added": None, "same": (1,)}
    with pytest.raises(RunError) as caught:
        stage.check("f2", now)
    lines = [line.strip() for line in caught.value.what.splitlines()]
    assert lines[1:] == [
        "added: (absent) -> null",
        "betas: [0.9, 0.95] -> [0.9, 0.99]",
        'gone: "x" -> (absent)',
        "lr: 0.001 -> 0.002",
    ]
    assert "--name" in caught.value.remedy and "--overwrite" in caught.value.remedy
    assert snapshot(tmp_path) == before
    assert stage.check("f2", now, overwrite=True) == "new"
    assert not stage.metrics.exists() and stage.check("f2", now) == "new"


def test_many_changes_are_cut_short_and_none_names_the_fingerprint(tmp_path: Path):
    stage = StageFolder(tmp_path / "sft")
    stage.check("f1", {f"k{i:02d}": i for i in range(25)})
    stage.metrics.write_text('{"step": 1}\n')
    with pytest.raises(RunError) as caught:
        stage.check("f2", {f"k{i:02d}": i + 1 for i in range(25)})
    assert len(caught.value.what.splitlines()) == 22 and caught.value.what.endswith("and 5 more")
    with pytest.raises(RunError, match="fingerprint: f1 -> f2"):
        stage.check("f2", {f"k{i:02d}": i for i in range(25)})


def test_a_folder_with_only_a_leftover_is_new_and_a_strangers_is_not(tmp_path: Path):
    stage = StageFolder(tmp_path / "sft")
    stage.path.mkdir()
    (stage.path / ".tmp-inputs.json").write_text("{")
    assert stage.check("f1", {}) == "new"
    assert [p.name for p in stage.path.iterdir()] == ["inputs.json"]
    other = StageFolder(tmp_path / "reward")
    other.path.mkdir()
    (other.path / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match=r"inputs\.json is missing"):
        other.check("f1", {})
    assert (other.path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"a": NaN}',
        b"\xff\xfe",
        b"\0" * 50,
        b"[" * 100_000,
        b'{"a": 1' + b"0" * 5000,
        b'{"fingerprint": "f1", "parts": ',
        b'{"fingerprint": "f1", "result": []}',
    ],
)
@pytest.mark.parametrize("name", ["inputs.json", "done.json"])
def test_damaged_json_is_refused_and_overwrite_heals(tmp_path: Path, damage: bytes, name: str):
    stage = StageFolder(tmp_path / "sft")
    stage.check("f1", {})
    stage.finish("f1", {}, {})
    (stage.path / name).write_bytes(damage)
    if name == "inputs.json" and b"result" in damage:
        assert stage.check("f1", {}) == "finished"  # whole JSON with the right fingerprint
        return
    with pytest.raises(RunError, match=rf"{name} is damaged") as caught:
        stage.check("f1", {})
    assert caught.value.where == str(stage.path / name)
    assert stage.check("f1", {}, overwrite=True) == "new"
    assert stage.finished("f1") is None


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "inputs.json")
    with pytest.raises(RunError, match="missing"):
        read_json(tmp_path / "inputs.json")


def test_write_json_gives_the_same_bytes_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 0.1 + 0.2, "a": "ü\ud800"})
    first = path.read_bytes()
    assert first == '{\n  "a": "ü\\ud800",\n  "b": 0.30000000000000004\n}\n'.encode()
    write_json(path, {"a": "ü\ud800", "b": 0.1 + 0.2})
    assert path.read_bytes() == first and read_json(path)["a"] == "ü\ud800"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_write_json_refuses_what_is_no_number_and_keeps_the_old(tmp_path: Path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(NumberError, match=r"streams\.kl\[1\] \(nan\)"):
        write_json(path, {"streams": {"kl": [0.0, float("nan")]}})
    assert read_json(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(RunError, match="could not be written"):
        write_json(tmp_path / "gone" / "a.json", {})


def test_the_manifest_carries_versions(tmp_path: Path):
    run = RunFolder.open(tmp_path, "demo")
    run.write_manifest({"seed": 1})
    assert run.manifest() == {"seed": 1, "versions": versions()}
    assert versions().keys() == {"python", "keel", "torch", "transformers", "peft"}
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.loads((run.path / "manifest.json").read_text())["versions"]["torch"][0].isdigit()


def test_no_torch_is_imported():
    modules = "folder", "files", "log", "interrupt", "console", "resources"
    code = "".join(f"import keel.runs.{name}\n" for name in modules) + "import sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=HERE, check=True)


@pytest.mark.parametrize("error", [RunError, KeyboardInterrupt])
def test_a_refused_run_leaves_no_folder_that_it_made(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), RunFolder.open(tmp_path / "deep" / "runs", "a") as run:
        run.write_manifest({})
        run.stage("ppo").check("f", {})
        (run.stage("ppo").metrics).touch()
        raise error("refused")
    assert (tmp_path / "deep").exists() == (error is KeyboardInterrupt)


def test_a_refused_run_leaves_what_holds_work_and_what_was_there_before(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for name, file in (("mine", None), ("worked", "ppo/bad/step-1-1.json")):
        with pytest.raises(RunError), RunFolder.open(tmp_path, name) as run:
            if file:
                (run.path / file).parent.mkdir(parents=True)
                (run.path / file).write_text("{}")
            raise RunError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "worked"]
    with pytest.raises(RunError), RunFolder.open(tmp_path / "runs", "a"):
        (tmp_path / "runs" / "b").mkdir()
        raise RunError("refused")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]


def test_a_lock_on_a_folder_that_is_no_longer_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process, which was refused, removes its folder between the opening of the lock and its taking."""
    real = folder.fcntl.flock

    def flock(handle: int, how: int) -> None:
        (tmp_path / "a" / ".lock").unlink()
        real(handle, how)

    monkeypatch.setattr(folder.fcntl, "flock", flock)
    with pytest.raises(RunError, match="removed a moment ago"):
        RunFolder.open(tmp_path, "a")
