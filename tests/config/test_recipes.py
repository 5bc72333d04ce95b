"""Recipes: every shipped one parses; misspelt, inert and contradictory settings are refused with the reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from keel import recipe as recipes
from keel.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
MINIMAL = {"name": "x", "model": {"path": "somewhere"}}


def tree(**sections):
    return {**MINIMAL, **sections}


SOURCE = {"path": ["rows.jsonl"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_and_has_a_schedule(path):
    recipe = recipes.load(path)
    assert recipe.name == path.stem
    assert recipes.schedule(recipe)
    assert recipes.parse(__import__("yaml").safe_load(recipes.to_yaml(recipe))).resolved() == recipe


def test_there_are_recipes():
    assert {"quickstart", "overoptimise", "smollm2-sentiment", "smollm2-preferences"} <= {p.stem for p in SHIPPED}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (tree(ppo={"data": SOURCE, "reward": "a:b", "policy": {"lerning_rate": 1}}), "did you mean learning_rate?"),
        (tree(sfd={}), "did you mean sft?"),
        (tree(ppo={"data": SOURCE, "reward": "a:b", "top_p": 0.9}), "sampling is cut, but the ratio is not"),
        (
            tree(ppo={"data": SOURCE, "reward": "a:b", "kl": {"target": 6}}),
            "target and horizon do nothing with controller fixed",
        ),
        (tree(ppo={"data": SOURCE, "reward": "a:b", "kl": {"controller": "adaptive", "coefficient": 0}}), "stays 0"),
        (
            tree(ppo={"data": SOURCE, "reward": "a:b", "rollouts": 2, "minibatches": 4}),
            "minibatches 4 is more than rollouts 2",
        ),
        (tree(ppo={"data": SOURCE, "reward": "a:b", "rollouts": 7, "responses_per_prompt": 2}), "no multiple"),
        (tree(ppo={"data": SOURCE, "reward": "wrong"}), "file.py:function"),
        (tree(ppo={"data": SOURCE}), "there is no reward stage"),
        (tree(ppo={"data": SOURCE, "reward": "a:b"}, reward={"data": SOURCE}), "the reward stage does nothing"),
        (tree(ppo={"reward": "a:b"}), "ppo.data is missing"),
        (tree(eval={}), "no ppo stage"),
        (tree(sft={"data": SOURCE, "tuning": "full"}, model={"path": "x", "dtype": "bfloat16"}), "lose steps"),
        (tree(model={"path": "x", "backbone": "separate", "dtype": "bfloat16"}), "would be lost"),
        (tree(model={"path": "x", "backbone": "separate", "lora_rank": 4}), "do nothing"),
        (tree(sandbox={}), "belong together"),
        (tree(model={"path": "sandbox"}, sandbox={}, sft={"data": SOURCE}), "sft.data does nothing"),
        (tree(reward={"data": SOURCE, "responses_per_prompt": 4}), "do nothing outside the sandbox"),
        ({"model": {"path": "x"}}, "name: this setting is needed"),
        ([1], "a recipe is a mapping"),
    ],
)
def test_what_is_refused_and_why(given, told):
    with pytest.raises(ConfigError) as error:
        recipes.parse(given, "r.yaml")
    assert told in str(error.value) and "r.yaml" in str(error.value)


def test_nulls_that_stand_for_a_default_are_filled_in():
    recipe = recipes.parse(tree(ppo={"data": SOURCE, "reward": "a:b", "kl": {"controller": "adaptive"}})).resolved()
    assert recipe.ppo and (recipe.ppo.kl.target, recipe.ppo.kl.horizon) == (6.0, 10_000)
    assert (recipe.model.lora_rank, recipe.model.lora_alpha) == (16, 32.0)
    separate = recipes.parse(tree(model={"path": "x", "backbone": "separate"})).resolved()
    assert separate.model.lora_rank is None


def test_any_setting_is_a_flag():
    recipe = recipes.load(FOLDER / "quickstart.yaml", ["--ppo.policy.clip", "0.1", "--name", "other"])
    assert recipe.ppo and recipe.ppo.policy.clip == 0.1 and recipe.name == "other"


def keel(*arguments: str) -> subprocess.CompletedProcess:
    code = (
        "import sys; from keel.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=FOLDER.parent, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["show", "recipes/quickstart.yaml"],
        ["rnu"],
        ["run", "nowhere.yaml"],
        ["run", "recipes/quickstart.yaml", "--ppo.policy.clp", "0.1"],
        ["run", "recipes/quickstart.yaml", "--ppo.kl.coefficient", "-1"],
    ],
)
def test_help_and_refusals_come_before_torch(arguments):
    done = keel(*arguments)
    assert done.returncode == (0 if arguments[0] in ("--help", "show") else 2)
    assert done.stderr.strip().endswith("False") and "Traceback" not in done.stderr
    if "--ppo.policy.clp" in arguments:
        assert "--ppo.policy.clip" in done.stdout + done.stderr
