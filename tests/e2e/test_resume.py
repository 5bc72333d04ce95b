"""Going on with a run: by its folder, after a signal, from the checkpoint before a damaged one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.errors import RunError
from keel.runs.log import JsonLines
from keel.train.context import Session
from tests.e2e.command import keel

FUNCTIONS = """
import os, pathlib, signal

def score(response):
    stop = pathlib.Path("stop")
    if stop.exists():
        signals = stop.read_text().split() or ["SIGTERM"]
        stop.unlink()
        for name in signals:
            os.kill(os.getpid(), getattr(signal, name))
    raises = pathlib.Path("raises")
    if raises.exists():
        raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[raises.read_text()]
    return -len(response) / 10
"""


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    Path("fn.py").write_text(FUNCTIONS)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"Where is lamp {i}?"}) + "\n" for i in range(30)))
    ppo = {"data": {"path": ["rows.jsonl"]}, "reward": "fn.py:score", "updates": 4, "rollouts": 6, "minibatches": 2}
    ppo |= {"checkpoint_every": 1, "keep_best": "score", "critic": {"warmup_cap": 1}, "policy": {"learning_rate": 1e-3}}
    recipe = {"name": "x", "model": {"path": "model", "backbone": "separate", "max_response_tokens": 6}, "ppo": ppo}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


CALLED = ("--ppo.reward", "fn.py:score")


def test_what_was_cut_before_the_stop_is_counted(place):
    """Six prompts an update for four updates, each cut: as many in the run that was stopped."""
    limit = ("--model.max-prompt-tokens", "4")
    assert keel("run", "recipe.yaml", "--name", "whole", *limit) == 0
    Path("stop").touch()
    assert keel("run", "recipe.yaml", *limit) == 143
    assert keel("run", "recipe.yaml", *limit) == 0
    cut = [json.loads(Path(f"runs/{name}/ppo/done.json").read_text())["result"]["cut"] for name in ("whole", "x")]
    assert cut[0] == cut[1] == {"prompts cut": 24}


def test_a_finished_run_keeps_the_peak_memory_of_the_process_that_did_the_work(place):
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    Path("recipe.yaml").write_text(yaml.safe_dump({**recipe, "eval": {"prompts": 2}}))
    assert keel("run", "recipe.yaml") == 0
    file = Path("runs/x/summary.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peak_rss_bytes": 1}))
    assert keel("run", "recipe.yaml") == 0
    assert json.loads(file.read_text())["peak_rss_bytes"] == 1


def test_a_run_goes_on_by_its_folder_and_says_when_it_is_finished(place, capsys):
    Path("stop").touch()
    assert keel("run", "recipe.yaml") == 143  # SIGTERM in the first update
    told = capsys.readouterr().err
    assert "stopped at step 1 of stage ppo" in told and "keel run recipe.yaml" in told
    assert keel("resume", "runs/x") == 2
    told = capsys.readouterr().err
    assert "must not make Keel do" in told and "keel resume runs/x --ppo.reward fn.py:score" in told
    assert keel("resume", "runs/x", *CALLED, "--ppo.temperature", "0.5") == 2
    assert "ppo.temperature: 1.0 -> 0.5" in capsys.readouterr().err
    assert keel("resume", "runs/x", *CALLED, "--keep-checkpoints", "1") == 0
    assert "going on from step 1" in capsys.readouterr().out
    weights = Path("runs/x/ppo/model/model.safetensors").read_bytes()
    for command in (("resume", "runs/x", *CALLED), ("run", "recipe.yaml")):
        assert keel(*command) == 0
        assert "x is finished; nothing was left to do" in capsys.readouterr().out
    # The best by its score is kept beside the newest, the reason for passing over a damaged one is told.
    lines = [json.loads(line) for line in Path("runs/x/ppo/metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: line["score"])["step"]
    steps = sorted(int(path.name[5:]) for path in Path("runs/x/ppo/checkpoints").iterdir())
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and steps == sorted({best, 4})
    state = json.loads(Path("runs/x/ppo/checkpoints/step-4/state.json").read_text())
    assert state["loop"]["best"] == {"metric": "score", "step": best, "value": lines[best - 1]["score"]}
    if best != 4:
        Path("runs/x/ppo/done.json").unlink()
        Path("runs/x/ppo/checkpoints/step-4/state.json").write_text("{}")
        assert keel("run", "recipe.yaml") == 0
        told = capsys.readouterr().out
        assert "passed over a damaged checkpoint: step-4" in told and f"going on from step {best}" in told
        assert Path("runs/x/ppo/model/model.safetensors").read_bytes() == weights
        events = [json.loads(line) for line in Path("runs/x/ppo/events.jsonl").read_text().splitlines()]
        resumed = [event["passed_over"] for event in events if event["event"] == "resumed"]
        assert "state.json" in resumed[-1][0]


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (None, "manifest.json is missing"),
        ("{", "manifest.json is damaged"),
        ('{"classic": {}}', "a classic task, which holds no checkpoints"),
        ('{"recipe": {"name": "x"}}', "model: this setting is needed"),
        ('{"recipe": []}', "a recipe is a mapping"),
    ],
)
def test_a_folder_that_is_no_run_of_a_recipe(tmp_path, monkeypatch, capsys, manifest, told):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    if manifest is not None:
        Path("runs/x/manifest.json").write_text(manifest)
    for command in ("resume", "chat"):
        assert keel(command, "runs/x") == 2
        assert told in capsys.readouterr().err
    assert keel("resume") == 2 and keel("resume", "gone") == 2


@pytest.mark.parametrize(("second", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_second_signal_stops_at_once_and_is_told_by_its_number(place, capsys, second, code):
    assert keel("run", "recipe.yaml", "--name", "whole") == 0
    whole = Path("runs/whole/ppo/model/model.safetensors").read_bytes()
    Path("stop").write_text("SIGTERM")
    assert keel("run", "recipe.yaml") == 143 and "at step 1" in capsys.readouterr().err
    Path("stop").write_text(f"SIGTERM {second}")
    assert keel("run", "recipe.yaml") == code
    told = capsys.readouterr().err
    assert "stopped at once" in told and "Traceback" not in told
    assert not Path("runs/x/ppo/done.json").exists()
    assert keel("run", "recipe.yaml") == 0
    assert "going on from step 1" in capsys.readouterr().out
    assert Path("runs/x/ppo/model/model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("what", ["KeyboardInterrupt", "SystemExit"])
def test_a_reward_function_that_raises_what_ctrl_c_raises_has_failed_as_any_other(place, capsys, what):
    Path("raises").write_text(what)
    assert keel("run", "recipe.yaml") == 2
    assert f"the reward function raised {what}" in capsys.readouterr().err


class Disk:
    """A disk that has no room at the given saves (counted from 1), as `shutil.disk_usage` tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *full: int):
        self.asked, real = 0, shutil.disk_usage

        def usage(path: Path) -> Any:
            self.asked += 1
            return real(path)._replace(free=0) if self.asked in full else real(path)

        monkeypatch.setattr(shutil, "disk_usage", usage)


def events(kind: str) -> list[dict]:
    lines = map(json.loads, Path("runs/x/ppo/events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def test_a_disk_without_room_for_a_checkpoint_does_not_end_the_run(place, capsys, monkeypatch):
    """Case 43: training goes on with a finding, the older checkpoint stays, the next save is the next attempt."""
    assert keel("run", "recipe.yaml", "--name", "whole") == 0
    whole = Path("runs/whole/ppo/model/model.safetensors").read_bytes()
    kept: list[list[str]] = []
    Disk(monkeypatch, 2, 3)
    settle = Session._settle

    def seen(session: Session, wait: bool) -> None:
        settle(session, wait)
        kept.append(sorted(path.name for path in session.stage.checkpoints.glob("step-*")))

    monkeypatch.setattr(Session, "_settle", seen)
    assert keel("run", "recipe.yaml") == 0
    told = capsys.readouterr().out
    assert told.count("no room for a checkpoint") == 2 and "training goes on; the next checkpoint" in told
    assert [event["step"] for event in events("checkpoint_failed")] == [2, 3]
    assert [event["step"] for event in events("checkpoint")] == [1, 4] and ["step-1"] in kept
    best = json.loads(Path("runs/x/ppo/checkpoints/step-4/state.json").read_text())["loop"]["best"]["step"]
    assert best in (1, 4)  # the best of those that could be kept
    assert Path("runs/x/ppo/model/model.safetensors").read_bytes() == whole


def test_to_stop_where_the_step_cannot_be_saved_is_said_to_lose_it(place, capsys, monkeypatch):
    Disk(monkeypatch, 2)
    Path("fn.py").write_text(FUNCTIONS.replace('pathlib.Path("stop")', 'pathlib.Path("stop2")'))
    steps = iter(range(100))
    end = Session.end_step

    def ended(session: Session, last: bool) -> None:
        if next(steps) == 1:
            session.run.interrupt.requested = True
        end(session, last)

    monkeypatch.setattr(Session, "end_step", ended)
    assert keel("run", "recipe.yaml") == 2
    told = capsys.readouterr().err
    assert "stopped at step 2 of stage ppo, which could not be saved" in told and "goes on from step 1" in told
    assert keel("run", "recipe.yaml") == 0
    assert "going on from step 1" in capsys.readouterr().out


def test_a_metric_log_that_cannot_be_written_stops_the_run_cleanly(place, capsys, monkeypatch):
    """Case 43: a step of which nothing could be noted is not taken for done."""
    assert keel("run", "recipe.yaml", "--name", "whole") == 0
    append = JsonLines.append

    def full(log: JsonLines, record: dict) -> None:
        if log.path.name == "metrics.jsonl" and record["step"] == 3:
            log._file.write(b'{"step": 3, "sco')
            monkeypatch.undo()
            monkeypatch.chdir(place)
            raise RunError("the log cannot be used: No space left on device", where=str(log.path))
        append(log, record)

    monkeypatch.setattr(JsonLines, "append", full)
    assert keel("run", "recipe.yaml") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs/x/ppo/checkpoints").iterdir())[-1] == "step-2"
    assert keel("run", "recipe.yaml") == 0
    for name in ("model/model.safetensors", "samples.jsonl"):
        assert Path("runs/x/ppo", name).read_bytes() == Path("runs/whole/ppo", name).read_bytes()
