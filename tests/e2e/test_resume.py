"""Going on with a run: by its folder, after a signal, from the checkpoint before a damaged one."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from keel import cli

FUNCTIONS = """
import os, pathlib, signal

def score(response):
    stop = pathlib.Path("stop")
    if stop.exists():
        stop.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
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


def keel(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


CALLED = ("--ppo.reward", "fn.py:score")


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
