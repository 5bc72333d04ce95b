"""`keel export`: a checkpoint as the folder that its stage would have left at that step, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.runs.folder import RunFolder
from keel.train.context import Session
from tests.e2e.command import keel

ROWS = [{"prompt": f"Where is lamp {i}?", "chosen": f"Here {i}.", "rejected": "Gone."} for i in range(24)]
DATA = {"path": ["rows.jsonl"]}
SUPERVISED = {"data": DATA, "held_out": 4, "batch": 4, "epochs": 1, "checkpoint_every": 1}
PPO = {"data": DATA, "reward": "fn.py:score", "updates": 4, "rollouts": 6, "minibatches": 2, "checkpoint_every": 1}
PPO |= {"keep_best": "score", "critic": {"warmup_cap": 1}, "policy": {"learning_rate": 1e-2}}
STAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo, separate": ("ppo", "separate", {"ppo": PPO}),
    "ppo, shared": ("ppo", "shared", {"ppo": PPO}),
    "dpo, shared": ("preference", "shared", {"preference": {**SUPERVISED, "keep_best": "heldout_loss"}}),
    "sft, full": ("sft", "separate", {"sft": {**SUPERVISED, "keep_best": "heldout_loss"}}),
    "sft, lora": ("sft", "separate", {"sft": {**SUPERVISED, "keep_best": "heldout_loss", "tuning": "lora"}}),
}


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    Path("fn.py").write_text("def score(response): return -len(response) / 10")
    return tmp_path


def recipe(backbone: str, sections: dict[str, Any]) -> None:
    rows = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in ROWS] if "sft" in sections else ROWS
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"path": "model", "backbone": backbone, "max_response_tokens": 6}
    Path("recipe.yaml").write_text(yaml.safe_dump({"name": "x", "model": model, **sections}))


def files(folder: str | Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", STAGES)
def test_it_is_byte_for_byte_what_the_stage_would_have_left(place, capsys, monkeypatch, kind):
    stage, backbone, sections = STAGES[kind]
    recipe(backbone, sections)
    ended = Session.end_step

    def end_step(session: Session, last: bool) -> None:
        session.roles.export("policy", Path(f"at-{session.step}"))
        ended(session, last)

    monkeypatch.setattr(Session, "end_step", end_step)
    assert keel("run", "recipe.yaml") == 0
    before, checkpoints = files("runs"), Path(f"runs/x/{stage}/checkpoints")
    assert keel("export", "runs/x", "last") == 0
    assert files("last") == files(f"runs/x/{stage}/model")
    newest = max(int(folder.name.removeprefix("step-")) for folder in checkpoints.iterdir())
    best = json.loads((checkpoints / f"step-{newest}/state.json").read_text())["loop"]["best"]["step"]
    assert keel("export", "runs/x", "deep/best", "--best") == 0
    assert f"the policy of stage {stage} after step {best} is in deep/best" in capsys.readouterr().out
    weights = "model.safetensors"
    assert (
        files("deep/best")[weights] == files(f"at-{best}")[weights]
        and files("deep/best").keys() == files("last").keys()
    )
    shutil.rmtree(checkpoints / f"step-{newest}")
    Path(f"runs/x/{stage}/done.json").unlink()  # as a run that was killed
    with RunFolder.open("runs", "x"):  # and goes on meanwhile
        assert keel("export", "runs/x", "before") == 0
    assert files("before")[weights] == files(f"at-{newest - 1}")[weights] != files("last")[weights]
    left = files("runs")
    del left["x/.lock"]
    assert left.items() <= before.items()


def test_what_it_refuses(place, capsys):
    def told(*arguments: str) -> str:
        assert keel("export", *arguments) == 2
        return capsys.readouterr().err

    recipe("separate", {"ppo": {**PPO, "keep_best": None}})
    assert keel("run", "recipe.yaml") == 0
    assert "needs a run folder and a new folder" in told("runs/x")
    assert "there is something already" in told("runs/x", "model")
    assert "stage ppo keeps no best checkpoint" in told("runs/x", "out", "--best")
    damaged = Path("runs/x/ppo/checkpoints/step-4/tensors.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert keel("export", "runs/x", "three") == 0
    shown = capsys.readouterr().out
    assert "step-4 passed over: tensors.safetensors has" in shown and "after step 3 is in three" in shown
    config = Path("model/config.json").read_text()
    Path("model/config.json").write_text(config + " ")
    assert "the model that the run began with is not as it was then" in told("runs/x", "out")
    Path("model/config.json").write_text(config)
    shutil.rmtree("runs/x/ppo/checkpoints")
    assert "no stage of this run has a checkpoint yet" in told("runs/x", "out")
    assert not Path("out").exists() and not list(Path(".").glob(".tmp-*"))
