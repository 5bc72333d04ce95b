"""Every mistake of a user gives one clear message (what, where, remedy), exit code 2, and leaves what was there."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from keel import cli

FUNCTIONS = """
def good(response): return -len(response) / 10
def raises(response): raise ValueError("boom")
def none(response): return None
def nan(response): return float("nan")
"""


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    Path("fn.py").write_text(FUNCTIONS)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"Where is lamp {i}?"}) + "\n" for i in range(40)))
    Path("empty.jsonl").write_text("")
    Path("wrong.jsonl").write_text('{"query": "hi", "answer": "x"}\n')
    Path("broken.jsonl").write_text("not json\n")
    Path("no-model").mkdir()
    shutil.copytree(tiny_model, "no-eos")
    settings = json.loads(Path("no-eos/tokenizer_config.json").read_text())
    del settings["eos_token"]
    Path("no-eos/tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def run(model: str = "model", data: str = "rows.jsonl", **ppo: object) -> int:
    settings = {"data": {"path": [data]}, "reward": "fn.py:good", "updates": 1, "rollouts": 8, **ppo}
    recipe = {"name": "x", "model": {"path": model, "max_response_tokens": 8}, "ppo": settings, "eval": {"prompts": 4}}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "recipe.yaml"])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ({"data": "nowhere.jsonl"}, ["no such file", "nowhere.jsonl", "remedy"]),
        ({"data": "empty.jsonl"}, ["empty", "empty.jsonl", "remedy"]),
        ({"data": "wrong.jsonl"}, ["found query", "wrong.jsonl:1", "columns: {prompt: query}"]),
        ({"data": "broken.jsonl"}, ["Not JSON", "broken.jsonl:1", "remedy"]),
        ({"model": "no-model"}, ["config.json is missing", "no-model", "remedy"]),
        ({"model": "./gone"}, ["no such model folder", "./gone", "remedy"]),
        ({"model": "no-eos"}, ["no end token", "no-eos", "eos_token"]),
        ({"rollouts": 64}, ["an update takes 64 prompts", "only 36", "lower ppo.rollouts"]),
        ({"polcy": {}}, ["ppo.polcy: there is no such setting", "recipe.yaml", "did you mean policy?"]),
        ({"reward": "fn.py:raises"}, ["raised ValueError: boom", "fn.py:raises", "rows.jsonl:"]),
        ({"reward": "fn.py:none"}, ["returned NoneType, not a number", "fn.py:none", "one float"]),
        ({"reward": "fn.py:nan"}, ["rewards are not finite", "fn.py:nan", "finite number"]),
        ({"reward": "fn.py:gone"}, ["no function 'gone'", "good, nan, none, raises"]),
        ({"reward": "gone.py:f"}, ["cannot be imported", "gone.py:f", "remedy"]),
    ],
)
def test_one_clear_message_and_the_corrected_recipe_runs(place, capsys, mistake, told):
    assert run(**mistake) == 2
    message = capsys.readouterr().err
    assert message.startswith("keel: ") and "Traceback" not in message
    assert not [part for part in told if part not in message], message
    assert run() == 0  # nothing of the failed attempt is in the way


def test_a_run_folder_of_another_recipe_is_left_alone(place, capsys):
    assert run() == 0
    before = {
        p: p.read_bytes() for p in Path("runs/x").rglob("*") if p.is_file() and p.name not in (".lock", "manifest.json")
    }
    assert run(rollouts=12) == 2
    assert "ppo.rollouts: 8 -> 12" in capsys.readouterr().err
    assert all(p.read_bytes() == content for p, content in before.items())
