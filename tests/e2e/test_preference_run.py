"""Recipes with the preference stage and with best-of-N through the command line, small enough for seconds."""

import io
import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.e2e.command import keel

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "sandbox": {
        "prompts": 120,
        "heldout_prompts": 16,
        "pretrain_rows": 300,
        "pretrain_steps": 8,
        "hidden": 32,
        "layers": 1,
        "heads": 2,
        "vocabulary": 400,
    },
    "sft": {"batch": 16, "held_out": 16},
    "eval": {"prompts": 12},
}
PREFERENCE = {"batch": 8, "held_out": 12, "learning_rate": 1e-3}
REWARD = {"prompts": 24, "batch": 8, "held_out": 12, "normalise_samples": 8}


def write(folder: Path, name: str, backbone: str = "separate", **sections: object) -> str:
    model = {"path": "sandbox", "backbone": backbone, "max_response_tokens": 16}
    recipe = {"name": name, "root": str(folder), "threads": 1, "model": model, **SMALL, **sections}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / f"{name}.yaml")


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_sft_preference_eval(backbone, tmp_path, capsys, monkeypatch):
    ranked = {"prompts": 24, "responses_per_prompt": 3}
    recipe = write(tmp_path, "run", backbone, preference={**PREFERENCE, **ranked})
    assert keel("eval", recipe) == 2 and "needs the stage 'sft'" in capsys.readouterr().err
    assert keel("run", recipe) == 0
    out = capsys.readouterr().out
    assert "gold reward" in out and "accuracy of the preference" in out and "score of the reward" not in out
    told = summary(tmp_path / "run")
    assert {"gold_sft", "gold_final", "win_rate", "kl_per_response", "eos_rate", "length_final"} <= told.keys()
    assert 0 <= told["preference_accuracy"] <= 1 and "preference_accuracy_ceiling" in told and "score_sft" not in told
    assert told["kl_per_response"] != 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "preference" / "model").num_parameters() > 0
    assert keel("run", recipe) == 0 and capsys.readouterr().out.count("already done") == 4
    assert keel("run", recipe, "--preference.beta", "0.2") == 2
    assert "preference.beta: 0.1 -> 0.2" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is my kettle?\n\n"))
    assert keel("chat", str(tmp_path / "run"), "--temperature", "0") == 0
    assert "\nafter" in capsys.readouterr().out


def test_the_reward_stages_pairs_are_used_and_best_of_n_stands_beside_the_policy(tmp_path, capsys):
    recipe = write(
        tmp_path,
        "run",
        reward={**REWARD, "responses_per_prompt": 3, "weighting": "prompt", "centring": 0.01},
        preference={**PREFERENCE, "loss": "kto"},
        eval={"prompts": 6, "best_of": 3},
    )
    assert keel("run", recipe) == 0
    assert "best of 3: gold reward" in capsys.readouterr().out
    told = summary(tmp_path / "run")
    assert {"score_sft", "score_final", "gold_final", "reward_model_accuracy", "preference_accuracy"} <= told.keys()
    best = told["best_of"]
    assert best["score"]["after"] > told["score_sft"] and best["kl_bound"] == pytest.approx(0.4319, abs=1e-4)
    assert best["gold"]["before"] == told["gold_sft"] and best["kl_interval"][0] <= best["kl_per_response"]
    assert not (tmp_path / "run" / "preference" / "preferences.jsonl").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "eval" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and rows[0].keys() >= {"prompt", "before", "after", "best", "score_best", "finish_best"}
    # The same pairs as the preference stage would have collected by itself
    alone = write(tmp_path, "alone", preference={**PREFERENCE, "prompts": 24, "responses_per_prompt": 3})
    assert keel("run", alone) == 0
    pairs = [tmp_path / name / "preferences.jsonl" for name in ("run/reward", "alone/preference")]
    assert pairs[0].read_bytes() == pairs[1].read_bytes()


def test_best_of_n_needs_nothing_trained_beyond_the_reward_model(tmp_path, capsys):
    recipe = write(tmp_path, "run", reward=REWARD, eval={"prompts": 6, "best_of": 2, "shown": 1})
    assert keel("run", recipe) == 0
    out = capsys.readouterr().out
    assert "best of 2: win rate" in out and "talk to it" not in out
    told = summary(tmp_path / "run")
    assert "gold_final" not in told and "win_rate" not in told and told["best_of"]["n"] == 2


@pytest.fixture
def files(tmp_path, tiny_model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [(f"Where is lamp {i}?", f"on shelf {i}", "I do not know") for i in range(40)]
    pairs = [{"prompt": p, "chosen": a, "rejected": b, "margin": 1 + i % 2} for i, (p, a, b) in enumerate(rows)]
    thumbs = [{"prompt": p, "completion": t, "label": up} for p, a, b in rows for t, up in ((a, True), (b, False))]
    for name, some in (("pairs", pairs), ("thumbs", thumbs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return tiny_model


def of_files(model: Path, **sections: object) -> str:
    recipe = {"name": "x", "threads": 1, "model": {"path": str(model), "max_response_tokens": 8}, **sections}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    return "recipe.yaml"


@pytest.mark.parametrize(("loss", "file"), [("ipo", "pairs"), ("kto", "thumbs"), ("kto", "pairs")])
def test_files_without_a_reward_are_evaluated_by_kl_and_shares(loss, file, files):
    recipe = of_files(
        files, preference={**PREFERENCE, "loss": loss, "data": {"path": [f"{file}.jsonl"]}}, eval={"prompts": 5}
    )
    assert keel("run", recipe) == 0
    told = summary(Path("runs/x"))
    assert "kl_per_response" in told and "eos_rate" in told and told["prompts"] == 5
    assert not {"win_rate", "score_sft", "gold_sft"} & told.keys()
    held = {json.loads(line)["prompt"] for line in Path("runs/x/eval/samples.jsonl").read_text().splitlines()}
    assert len(held) == 5


def test_best_of_n_on_files_asks_the_prompts_that_the_reward_stage_holds_out(files):
    reward = {"data": {"path": ["pairs.jsonl"]}, "batch": 8, "held_out": 8, "normalise_samples": 4}
    assert keel("run", of_files(files, reward=reward, eval={"prompts": 8, "best_of": 2})) == 0
    told = summary(Path("runs/x"))
    assert told["best_of"]["score"]["after"] > told["score_sft"] and "gold" not in told["best_of"]


def test_a_margin_reaches_the_reward_models_loss(files, capsys):
    reward = {"data": {"path": ["pairs.jsonl"]}, "batch": 8, "held_out": 8, "normalise_samples": 4}
    losses = []
    for margin in (None, 5.0):
        recipe = of_files(files, reward={**reward, "margin": margin})
        assert keel("run", recipe, "--name", f"margin-{margin}") == 0
        lines = Path(f"runs/margin-{margin}/reward/metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[0])["loss"])
    assert losses[1] > losses[0] + 3  # margins of 5 and 10 at scores about 0
    recipe = of_files(files, reward={**reward, "data": {"path": ["rows.jsonl"]}, "margin": 1.0})
    Path("rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert keel("run", recipe, "--name", "none") == 2
    assert "prompt + chosen + rejected + margin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"data": {"path": ["thumbs.jsonl"]}}, ["A preference pair has", "thumbs.jsonl:1"]),
        (
            {"batch": 64},
            ["40 preference pairs leave 28 prompts", "once 12 are held out", "a batch of 64", "preference.batch"],
        ),
        (
            {"loss": "kto", "batch": 80},
            ["80 thumbs leave 68 of them to train on once 12 are held out, less than a batch of 80"],
        ),
        ({"held_out": 2}, ["eval.prompts is 5", "have 2 prompts", "raise preference.held_out"]),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(changed, told, files, capsys):
    preference = {**PREFERENCE, "data": {"path": ["pairs.jsonl"]}, **changed}
    assert keel("run", of_files(files, preference=preference, eval={"prompts": 5})) == 2
    message = capsys.readouterr().err
    assert not [part for part in told if part not in message], message
    assert not Path("runs/x/preference").exists()
