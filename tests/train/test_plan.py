"""`keel plan`: bytes counted by hand, parts that add up to the peak, and what it says of a recipe that does not fit."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from keel import cli
from keel.config import Recipe
from keel.models.size import Size, size_of
from keel.runs.console import Console
from keel.train.calibrate import Measured
from keel.train.forecast import (
    MIB,
    Lengths,
    advice,
    copied,
    micro_tokens,
    other_stages,
    peak,
    ppo_memory,
    ppo_roles,
    weights_of,
    with_copy,
)
from keel.train.plan import RESIDENT, corrected, forecast, show

SIZE = Size(parameters=1000, adapter=50, keys=6, layers=2, hidden=8, intermediate=16, vocabulary=10)
LENGTHS = Lengths((3, 2, 3, 2), (4, 4, 1, 1), "as given")


def recipe_of(model=None, reward=False, **ppo) -> Recipe:
    tree = {
        "name": "test",
        "threads": 1,
        "model": {"path": "x", "backbone": "separate", "max_response_tokens": 8, **(model or {})},
        "ppo": {"data": {"path": ["x"]}, "rollouts": 4, "minibatches": 2, "updates": 3, **ppo},
    }
    if reward:
        tree["reward"] = {"data": {"path": ["x"]}}
    else:
        tree["ppo"]["reward"] = "a:b"
    return Recipe.model_validate(tree).resolved()


def test_the_size_of_a_tiny_model(tiny_model):
    config = AutoConfig.from_pretrained(tiny_model)
    found = size_of(config)
    # Two layers of width 32: four projections, three feed-forward products of width 64, two norms; one norm at the end.
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert found.parameters == config.vocab_size * 32 + 2 * layer + 32  # the output is tied to the embedding
    assert found.adapter == 2 * (4 * (32 + 32) + 3 * (32 + 64))
    assert (found.keys, found.layers, found.hidden, found.intermediate) == (2 * 32, 2, 32, 64)
    assert found.cache(10, "bfloat16") == 2 * 64 * 10 * 2


def test_weights_of_separate_models_by_hand():
    recipe = recipe_of(reward=True)
    assert ppo_roles(recipe) == (["policy", "critic"], ["reference", "reward"])
    assert weights_of(recipe, SIZE, *ppo_roles(recipe)) == (4 * 1000 * 4, 2 * 1000 * 4)
    # No penalty, no reference; another advantage, no critic; a function, no reward model.
    assert ppo_roles(recipe_of(advantage="reinforce", kl={"coefficient": 0.0})) == (["policy"], [])


def test_weights_on_one_base_by_hand():
    recipe = recipe_of({"backbone": "shared", "dtype": "bfloat16", "lora_rank": 3}, reward=True)
    adapter = 50 * 3 * 4  # float32 whatever the base is
    assert weights_of(recipe, SIZE, *ppo_roles(recipe)) == (1000 * 2 + 3 * adapter, 2 * adapter)


def test_memory_of_the_moments_by_hand():
    found = ppo_memory(recipe_of(), SIZE, LENGTHS)
    own = 2 * 1000 * 4
    assert found["generate"]["cache"] == 2 * 6 * (3 + 2 + 3 + 2 + 4 * 4) * 4  # made for the longest response
    assert found["generate"]["logits"] == 4 * 10 * (4 + 16)
    assert found["update"] == {
        "weights": 3 * 1000 * 4,
        "gradients": own,
        "optimizer": 2 * own,
        "activations": 14 * 2 * (12 * 8 + 4 * 16) * 4,
        "logits": 3 * 14 * 10 * 4,
    }
    assert found["export"] == {"weights": 3 * 1000 * 4}
    shared = ppo_memory(recipe_of({"backbone": "shared", "lora_rank": 3}), SIZE, LENGTHS)
    assert shared["export"]["weights"] == shared["update"]["weights"]  # adapters are merged one weight at a time


def test_the_copy_of_a_checkpoint_by_hand():
    own = 2 * 1000 * 4  # policy and critic
    assert copied(recipe_of(checkpoint_every=2), SIZE) == 3 * own
    assert copied(recipe_of(checkpoint_every=3), SIZE) == 0  # the one at the end is not copied
    moments = {
        "update": {"weights": 10, "optimizer": 4, "gradients": 50, "activations": 70},
        "export": {"weights": 10},
    }
    assert with_copy(moments, 20, 14 + 40) == {
        "update": moments["update"] | {"checkpoint": 20},
        "export": moments["export"],
    }
    assert with_copy(moments, 20, 14 + 39) == moments  # no room for it and as much again: it is written at once


def test_memory_of_frozen_roles_that_rest_by_hand():
    """Four models of 4000 bytes: the frozen two one at a time, and only while there are passes through them."""
    recipe = recipe_of({"rest_frozen": True}, reward=True)
    found = ppo_memory(recipe, SIZE, LENGTHS)
    assert {moment: parts["weights"] for moment, parts in found.items()} == {
        "generate": 8000,
        "experience": 12000,
        "update": 8000,
        "export": 8000,
    }
    assert other_stages(recipe, SIZE)["reward"]["weights"] == 4000  # the reference rests while the reward model learns
    assert other_stages(recipe_of(reward=True), SIZE)["reward"]["weights"] == 8000
    # An exact KL in the loss passes through the reference in the update, and it stays until after the scores.
    found = ppo_memory(
        recipe_of({"rest_frozen": True}, reward=True, kl={"place": "loss", "estimator": "exact"}), SIZE, LENGTHS
    )
    assert [found[moment]["weights"] for moment in ("generate", "experience", "update")] == [12000, 16000, 12000]


@pytest.mark.parametrize(("budget", "tokens"), [(100, 14), (7, 7), (1, 7)])
def test_tokens_at_the_same_time(budget, tokens):
    # A minibatch of two rows of at most 7 and 6 tokens: padded 14, or one row at a time.
    assert micro_tokens(recipe_of(micro_tokens=budget), SIZE, LENGTHS) == tokens


def test_a_measured_peak_is_split_over_the_parts():
    counted = {
        "generate": {"weights": 100, "cache": 40, "logits": 10},
        "update": {"weights": 100, "activations": 7, "logits": 30},
        "export": {"weights": 120},
    }
    measured = Measured({"generate": 160, "update": 120}, sampled=4)
    found = corrected(counted, measured, SIZE, LENGTHS, "float32")
    # Four of sixteen response tokens were sampled: the cache of the others comes on top.
    assert found["generate"] == {"weights": 100, "cache": 40, "logits": 10, "activations": 10 + 12 * 2 * 6 * 4}
    assert found["update"] == {"weights": 100, "logits": 20, "activations": 0}
    assert found["export"] == {"weights": 120}
    # Half of the tokens of a micro-batch were measured: all of them take twice the activations.
    more = corrected(counted, Measured({"update": 150}, shares={"update": 0.5}), SIZE, LENGTHS, "float32")
    assert more["update"] == {"weights": 100, "logits": 30, "activations": 2 * 20}


def test_advice_saves_what_it_says():
    size = Size(parameters=10**8, adapter=10**5, keys=512, layers=8, hidden=512, intermediate=2048, vocabulary=50000)
    recipe, lengths = recipe_of(), Lengths((64,) * 4, (8,) * 4, "")
    found = advice(recipe, size, lengths)
    assert found[0].field == "model.backbone" and (found[0].old, found[0].new) == ("separate", "shared")
    assert [c.saves for c in found] == sorted((c.saves for c in found), reverse=True)
    shared = recipe_of({"backbone": "shared"})
    assert found[0].saves == peak(ppo_memory(recipe, size, lengths)) - peak(ppo_memory(shared, size, lengths))
    assert {"model.dtype"} <= {c.field for c in advice(shared, size, lengths)}
    assert all(c.saves > MIB for c in found)
    # Of three models the reference leaves: 10^8 numbers of 4 bytes.
    assert [c.saves for c in found if c.field == "model.rest_frozen"] == [4 * 10**8]
    assert "model.rest_frozen" not in {c.field for c in advice(recipe_of({"rest_frozen": True}), size, lengths)}
    no_reference = recipe_of(kl={"coefficient": 0.0})
    assert "model.rest_frozen" not in {c.field for c in advice(no_reference, size, lengths)}


def test_other_stages_are_counted_as_they_train():
    recipe = recipe_of({"backbone": "shared", "lora_rank": 3}, reward=True)
    found = other_stages(recipe, SIZE)
    adapter = 50 * 3 * 4
    assert found.keys() == {"reward"}
    assert found["reward"]["weights"] == 1000 * 4 + adapter  # the reference is the base
    assert (found["reward"]["gradients"], found["reward"]["optimizer"]) == (adapter, 2 * adapter)
    full = Recipe.model_validate(
        {"name": "x", "model": {"path": "x"}, "sft": {"data": {"path": ["x"]}, "tuning": "full"}}
    ).resolved()
    assert other_stages(full, SIZE)["sft"]["optimizer"] == 2 * 1000 * 4
    tree = {"name": "x", "model": {"path": "sandbox", "max_prompt_tokens": 3, "max_response_tokens": 4}, "sft": {}}
    base = other_stages(Recipe.model_validate(tree | {"sandbox": {"pretrain_batch": 5}}).resolved(), SIZE)["base"]
    assert base == {
        "weights": 1000 * 4,
        "gradients": 1000 * 4,
        "optimizer": 2 * 1000 * 4,
        "activations": SIZE.activations(5 * 7, "float32"),
        "logits": 3 * 4 * 5 * 7 * 10,
    }


@pytest.fixture
def written(tiny_model, tmp_path: Path) -> Path:
    """A recipe on the tiny model, as a file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Where is parcel {i}?"}) + "\n" for i in range(8)))
    file = tmp_path / "small.yaml"
    file.write_text(
        f"name: small\nroot: {tmp_path}\nmodel: {{path: {tiny_model}, max_response_tokens: 8}}\n"
        f"ppo: {{data: {{path: [{prompts}]}}, reward: 'a:b', rollouts: 8, minibatches: 2, updates: 3}}\n"
    )
    return file


@pytest.mark.parametrize(
    "flags", [("--model.backbone", "separate"), ("--model.backbone", "separate", "--model.rest_frozen", "true"), ()]
)
def test_a_forecast_of_real_passes(written, flags, capsys):
    from keel.recipe import load

    recipe = load(written, flags)
    found = forecast(recipe, Console())
    assert found.measured and found.fits
    assert found.seconds.keys() == {"generate", "policy", "reference", "values", "experience", "update"}
    assert all(parts[RESIDENT] > 0 and min(parts.values()) >= 0 for parts in found.moments.values())
    assert found.peak == max(sum(parts.values()) for parts in found.moments.values())
    assert found.lengths and found.lengths.responses == (8,) * 8
    show(recipe, found, Console())
    out = capsys.readouterr().out
    assert "it fits" in out and "time per update" in out
    assert not (written.parent / "small").exists()  # nothing of the run is made


def test_what_does_not_fit_is_said_with_advice(written, tiny_model, tmp_path, capsys):
    from keel.recipe import load

    large = tmp_path / "large"  # a model of 1.1 billion parameters, of which only the shape is there
    shutil.copytree(tiny_model, large)
    (large / "model.safetensors").unlink()
    shape = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 1024}
    config = json.loads((large / "config.json").read_text()) | shape
    (large / "config.json").write_text(json.dumps(config))
    recipe = load(written, ["--model.path", str(large), "--model.backbone", "separate"])
    found = forecast(recipe, Console(), limit=8 << 30)
    assert not found.measured and not found.fits and not found.seconds
    assert found.moments["update"]["optimizer"] == 2 * found.moments["update"]["gradients"]  # of policy and critic
    show(recipe, found, Console())
    out = capsys.readouterr().out
    assert "it does not fit" in out and "nothing was loaded" in out
    advised = next(line for line in out.splitlines() if "model.backbone" in line)
    assert "separate" in advised and "shared" in advised and "GiB" in advised


def test_a_recipe_without_online_training_is_counted(tiny_model, capsys):
    tree = {"name": "x", "model": {"path": str(tiny_model)}, "sft": {"data": {"path": ["x"]}}}
    recipe = Recipe.model_validate(tree).resolved()
    found = forecast(recipe, Console())
    sft = found.stages["sft"]
    assert sft["checkpoint"] == 3 * sft["gradients"] > 0
    room = sft[RESIDENT] + sft["weights"] + sft["optimizer"] + 2 * sft["checkpoint"]
    # Of this process a little more is resident by then.
    assert "checkpoint" not in forecast(recipe, Console(), limit=room - 1).stages["sft"]
    assert found.stages.keys() == {"sft"} and not found.moments and found.fits and found.peak == found.largest
    show(recipe, found, Console())
    assert "counted from shapes" in capsys.readouterr().out


def test_the_command(written, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(written), "--ppo.rollouts", "4"])
    assert ended.value.code == 0 and "peak of ppo" in capsys.readouterr().out
    for arguments, told in (
        (["plan"], "needs a recipe"),
        (["plan", str(written.with_name("none.yaml"))], "no such recipe"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere/at/all", "there is no such model folder"),
        ("empty", "config.json is missing"),
        ("t5", "cannot be used"),
    ],
)
def test_a_model_that_is_none_is_refused(written, tmp_path, path, told, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(written), "--model.path", str(tmp_path / path)])
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_run_of_another_model_is_not_mistaken_for_this_recipes(written, tiny_model, tmp_path, capsys):
    done = tmp_path / "small" / "sft"
    shutil.copytree(tiny_model, done / "model")
    (done / "done.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(written), "--model.path", str(tmp_path / "nowhere")])
    assert ended.value.code == 2 and "there is no such model folder" in capsys.readouterr().err


def test_the_sandbox_model_of_a_run_is_taken_where_it_has_the_shape(tmp_path):
    from keel.train.plan import _same_shape

    tree = {"name": "x", "model": {"path": "sandbox"}, "sandbox": {"hidden": 64}, "sft": {}}
    recipe = Recipe.model_validate(tree).resolved()
    assert recipe.sandbox and not _same_shape(tmp_path, recipe)
    parts = {"model.path": "sandbox", **{f"sandbox.{k}": v for k, v in recipe.sandbox.model_dump().items()}}
    (tmp_path / "base").mkdir()
    inputs = tmp_path / "base" / "inputs.json"
    inputs.write_text(json.dumps({"parts": parts}))
    assert _same_shape(tmp_path, recipe)
    inputs.write_text(json.dumps({"parts": {**parts, "sandbox.hidden": 128}}))
    assert not _same_shape(tmp_path, recipe)
