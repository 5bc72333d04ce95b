"""Every mistake of a user gives one clear message (what, where, remedy), exit code 2, and leaves what was there."""

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from keel import cli

FUNCTIONS = """
def good(response): return -len(response) / 10
def raises(response): raise ValueError("boom")
def none(response): return None
def nan(response): return float("nan")
def leaves(response): raise SystemExit(0)
def huge(response): return 10 ** 400
class Dumb(Exception):
    def __str__(self): raise ValueError("no text")
def dumb(response): raise Dumb
def foreign(foo): return 1.0
def stars(*a): return 1.0
def anything(**kw): return float(len(kw["response"]))
def rewrites(response, messages):
    messages[0]["content"] = "CHANGED"
    return 0.0
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
    for broken in ("nan-model", "cut-model", "list-model", "other-sizes"):
        shutil.copytree(tiny_model, broken)
    weights = load_file("nan-model/model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] = float("nan")
    save_file(weights, "nan-model/model.safetensors", metadata={"format": "pt"})
    Path("cut-model/model.safetensors").write_bytes(Path("cut-model/model.safetensors").read_bytes()[:1000])
    Path("list-model/config.json").write_text("[]")
    config = json.loads(Path("other-sizes/config.json").read_text())
    del config["intermediate_size"]
    Path("other-sizes/config.json").write_text(json.dumps(config))
    settings = json.loads(Path("no-eos/tokenizer_config.json").read_text())
    del settings["eos_token"]
    Path("no-eos/tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def run(model: str = "model", data: str = "rows.jsonl", prompt_tokens: int = 512, **ppo: object) -> int:
    settings = {"data": {"path": [data]}, "reward": "fn.py:good", "updates": 1, "rollouts": 8, **ppo}
    limits = {"max_prompt_tokens": prompt_tokens, "max_response_tokens": 8}
    recipe = {"name": "x", "model": {"path": model, **limits}, "ppo": settings, "eval": {"prompts": 4}}
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
        ({"reward": "fn.py:raises"}, ["raised ValueError: boom (", "fn.py:3)", "fn.py:raises", "rows.jsonl:"]),
        ({"reward": "fn.py:none"}, ["is NoneType, not a number", "fn.py:none", "one float"]),
        ({"reward": "fn.py:leaves"}, ["raised SystemExit", "fn.py:leaves", "rows.jsonl:"]),
        ({"reward": "fn.py:huge"}, ["not a finite number", "fn.py:huge"]),
        ({"reward": "fn.py:dumb"}, ["raised Dumb", "fn.py:dumb"]),
        (
            {"reward": "fn.py:foreign"},
            ["needs foo", "fn.py:foreign, prompt rows.jsonl:", "prompt, response, finish_reason"],
        ),
        ({"reward": "fn.py:stars"}, ["takes no argument by name", "fn.py:stars", "prompt, response, finish_reason"]),
        ({"reward": "builtins:max"}, ["does not say which arguments it takes", "builtins:max", "wrap it"]),
        ({"model": "nan-model"}, ["not finite", "nan-model", "weights"]),
        ({"model": "cut-model"}, ["the model cannot be loaded", "cut-model", "remedy"]),
        ({"model": "other-sizes"}, ["config.json makes", "other-sizes", "look for sizes missing"]),
        ({"model": "list-model"}, ["cannot be loaded", "list-model", "remedy"]),
        ({"prompt_tokens": 5000}, ["5008 tokens", "1024 positions", "lower model.max_prompt_tokens"]),
        ({"model": "x" * 5000}, ["remedy"]),
        ({"data": "x" * 5000}, ["cannot be read", "remedy"]),
        ({"reward": "fn.py:nan"}, ["nan, which is not a finite number", "fn.py:nan", "rows.jsonl:"]),
        (
            {"reward": "fn.py:away"},
            ["no function 'away'", "anything, dumb, foreign, good, huge, leaves, nan, none, raises, rewrites, stars"],
        ),
        ({"reward": "fn.py:godo"}, ["no function 'godo'", "remedy: did you mean fn.py:good?"]),
        ({"reward": ".:f"}, ["names no function", "recipe.yaml:", "give 'file.py:function'"]),
        ({"reward": "gone.py:f"}, ["there is no file gone.py", "ppo.reward", "paths start from"]),
    ],
)
def test_one_clear_message_and_the_corrected_recipe_runs(place, capsys, mistake, told):
    assert run(**mistake) == 2
    message = capsys.readouterr().err
    assert message.startswith("keel: ") and "Traceback" not in message
    assert not [part for part in told if part not in message], message
    assert not Path("runs").exists() or list(Path("runs/x/ppo/bad").glob("*.json"))  # no folder, or what to look into
    assert run() == 0  # nothing of the failed attempt is in the way


def test_a_run_folder_of_another_recipe_is_left_alone(place, capsys):
    assert run() == 0
    before = {
        p: p.read_bytes() for p in Path("runs/x").rglob("*") if p.is_file() and p.name not in (".lock", "manifest.json")
    }
    assert run(rollouts=12) == 2
    assert "ppo.rollouts: 8 -> 12" in capsys.readouterr().err
    assert all(p.read_bytes() == content for p, content in before.items())


def test_a_reward_function_cannot_change_the_prompts(place):
    assert run(reward="fn.py:rewrites") == 0
    assert "CHANGED" not in Path("runs/x/ppo/samples.jsonl").read_text()


def test_a_function_of_keywords_is_given_all(place):
    assert run(reward="fn.py:anything") == 0


def test_weights_that_overflow_are_not_saved(place, capsys):
    """The gradient is finite, the step is not: the run ends, and the checkpoint before it is what is left."""
    code = run(policy={"learning_rate": 1e39}, critic={"warmup_cap": 0}, minibatches=1, checkpoint_every=1, updates=2)
    assert code == 3 and "no longer finite" in capsys.readouterr().err
    assert not Path("runs/x/ppo/model").exists() and not list(Path("runs/x/ppo/checkpoints").glob("step-*"))


def test_a_full_disk_at_export_is_told(place, capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert run() == 2
    told = capsys.readouterr().err
    assert "No space left on device" in told and "make room" in told and "Traceback" not in told


def test_a_finished_model_that_was_changed_is_not_used(place, capsys):
    assert run() == 0
    file = Path("runs/x/ppo/model/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert run() == 2
    told = capsys.readouterr().err
    assert "is not as it was left" in told and "runs/x/ppo/model" in told and "make it again" in told
    shutil.rmtree("runs/x/ppo")
    assert run() == 0


def chat(capsys, folder: str = "runs/x") -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", folder])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_chat_tells_what_is_wrong_with_a_run(place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run() == 0
    code, told = chat(capsys)
    assert code == 0 and "For example:\n  Where is lamp" in told
    shutil.rmtree("runs/x/eval")
    Path("runs/x/ppo/samples.jsonl").write_text("")
    code, told = chat(capsys)
    assert code == 0 and "ends\n" in told and "example" not in told
    for file, said in (
        ("runs/x/ppo/model/model.safetensors", "the model that the stage ppo left is not as it was left"),
        ("model/config.json", "the model that the run began with is not as it was then"),
        ("runs/x/ppo/done.json", "done.json is damaged"),
    ):
        whole = Path(file).read_bytes()
        Path(file).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        code, told = chat(capsys)
        assert code == 2 and said in told and "Traceback" not in told, told
        Path(file).write_bytes(whole)
    Path("runs/x/ppo/done.json").unlink()
    code, told = chat(capsys)
    assert code == 2 and "no trained model yet" in told and "finish it with keel run" in told


def test_chat_after_sft_alone_and_after_a_reward_model_alone(place, capsys, monkeypatch):
    Path("demos.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 12)
    Path("pairs.jsonl").write_text("".join(f'{{"prompt": "{i}", "chosen": "b", "rejected": "c"}}\n' for i in range(12)))
    fitted = {"batch": 4, "held_out": 4}
    for stage, file, more in (("sft", "demos.jsonl", {}), ("reward", "pairs.jsonl", {"normalise_samples": 4})):
        recipe = {"name": stage, "model": {"path": "model", "max_response_tokens": 8}}
        Path("r.yaml").write_text(yaml.safe_dump({**recipe, stage: {**fitted, **more, "data": {"path": [file]}}}))
        with pytest.raises(SystemExit) as ended:
            cli.main(["run", "r.yaml"])
        assert not ended.value.code
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is it?\n"))
    code, told = chat(capsys, "runs/sft")
    assert code == 0 and "> Where is it?\nbefore" in told and "\nafter" in told
    code, told = chat(capsys, "runs/reward")
    assert code == 2 and "only a reward model" in told and "sft, preference and ppo" in told


def test_what_is_not_there_is_told_before_torch_is_loaded(place, capsys):
    for data, reward in (("nowhere.jsonl", "fn.py:good"), ("rows.jsonl", "gone.py:score")):
        assert run(data=data, reward=reward) == 2
        streams = capsys.readouterr()
        assert "loading torch" not in streams.out and "paths start from" in streams.err.lower()


def test_a_run_whose_policy_took_no_step_says_so(place, capsys):
    assert run(reward="fn.py:good", critic={"warmup_cap": 1}) == 0
    assert "the policy learned in none of 1 updates" in capsys.readouterr().out
    shutil.rmtree("runs")
    assert run(reward="fn.py:good", critic={"warmup_cap": 0}) == 0
    assert "the policy took no step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"sft": {"data": {"path": ["said.jsonl"]}, "held_out": 4, "max_rows": 5, "batch": 8}},
            ["leave 5", "sft.max_rows"],
        ),
        (
            {"reward": {"data": {"path": ["pairs.jsonl"]}, "held_out": 4, "max_prompts": 5, "batch": 8}},
            ["reward.max_prompts"],
        ),
    ],
)
def test_a_batch_that_cannot_be_filled_is_told_before_anything_is_trained(place, capsys, section, told):
    """Case 51."""
    lines = [
        {"prompt": f"Where is lamp {i}?", "completion": "here", "chosen": "here", "rejected": "no"} for i in range(40)
    ]
    said = "".join(json.dumps({k: row[k] for k in ("prompt", "completion")}) + "\n" for row in lines)
    Path("said.jsonl").write_text(said)
    Path("pairs.jsonl").write_text(
        "".join(json.dumps({k: row[k] for k in ("prompt", "chosen", "rejected")}) + "\n" for row in lines)
    )
    sft = {"sft": {"data": {"path": ["said.jsonl"]}, "held_out": 4, "batch": 8}}
    recipe = {"name": "x", "model": {"path": "model", "max_response_tokens": 8}, **sft, **section}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "recipe.yaml"])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and not [part for part in told if part not in message], message
    assert not list(Path("runs").rglob("done.json"))
