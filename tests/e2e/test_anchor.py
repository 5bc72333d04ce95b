"""What follows an adapter's SFT starts from the model that SFT left, never from the raw base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from keel import cli
from tests.drills.trainers import ONLINE, RANKED, write_data
from tests.tiny import load

AFTER = {"ppo": {**ONLINE, "updates": 1, "critic": {"warmup_cap": 0}}, "preference": RANKED}


@pytest.mark.parametrize("backbone", ["shared", "separate"])
@pytest.mark.parametrize("stage", AFTER)
def test_margin_and_kl_are_0_at_the_first_step(stage, backbone, tiny_model, tmp_path, monkeypatch):
    """Case 53."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    write_data()
    Path("fn.py").write_text("def score(response):\n    return -len(response) / 10\n")
    sft = {
        "data": {"path": ["demonstrations.jsonl"]},
        "tuning": "lora",
        "batch": 5,
        "held_out": 4,
        "learning_rate": 0.1,
    }
    model = {"path": "model", "backbone": backbone, "lora_rank": 2, "max_response_tokens": 6}
    recipe = {"name": "x", "threads": 1, "model": model, "sft": sft, stage: AFTER[stage]}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "recipe.yaml"])
    assert not ended.value.code
    first = json.loads(Path(f"runs/x/{stage}/metrics.jsonl").read_text().splitlines()[0])
    if stage == "ppo":
        assert first["kl_per_response"] == pytest.approx(0, abs=1e-4) and first["length"] > 0
    else:
        assert first["loss"] == pytest.approx(0.693147, abs=1e-5) and first["margin"] == pytest.approx(0, abs=1e-5)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        base, tuned = (load(Path(place))(input_ids=ids).logits for place in ("model", "runs/x/sft/model"))
    assert (base - tuned).abs().max() > 0.1  # the adapter that SFT left is not nothing
