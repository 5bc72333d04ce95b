"""Recipes: every shipped one parses; misspelt, inert and contradictory settings are refused with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel import recipe as recipes
from keel.config import Recipe, usable_cores
from keel.errors import ConfigError
from keel.runs.folder import RunFolder

FOLDER = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
MINIMAL = {"name": "x", "model": {"path": "somewhere"}}


def tree(**sections):
    return {**MINIMAL, **sections}


SOURCE = {"path": ["rows.jsonl"]}
PPO = {"data": SOURCE, "reward": "a:b"}
RESTING = {"model": {"path": "x", "backbone": "separate", "rest_frozen": True}}
SANDBOX = {"model": {"path": "sandbox"}, "sandbox": {}, "sft": {}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_and_has_a_schedule(path):
    recipe = recipes.load(path)
    assert recipe.name == path.stem
    assert recipes.schedule(recipe)
    assert recipes.parse(__import__("yaml").safe_load(recipes.to_yaml(recipe))).resolved() == recipe


def test_there_are_recipes():
    sandbox, real = {"quickstart", "overoptimise", "dpo", "grpo"}, {"sentiment", "preferences", "gsm8k"}
    assert {p.stem for p in SHIPPED} == sandbox | {f"smollm2-{name}" for name in real}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (tree(ppo={"data": SOURCE, "reward": "a:b", "policy": {"lerning_rate": 1}}), "did you mean learning_rate?"),
        (tree(sfd={}), "did you mean sft?"),
        (tree(ppo={"data": SOURCE, "reward": "a:b", "updates": 10**20}), "ppo.updates: it should be less than"),
        (tree(sft={"data": SOURCE}, threads=100_000), "threads: it should be less than or equal to 1024"),
        (tree(sft={"data": SOURCE}, skip_bad_steps=10**30), "skip_bad_steps: it should be less than"),
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
        (tree(model={"path": "x", "rest_frozen": True}), "rest_frozen does nothing with backbone shared"),
        (tree(**RESTING, ppo={**PPO, "kl": {"coefficient": 0}}), "model.rest_frozen does nothing: no frozen role"),
        (tree(**RESTING, ppo={**PPO, "kl": {"place": "loss", "estimator": "exact"}}), "model.rest_frozen does nothing"),
        (tree(**RESTING, preference={"data": SOURCE}, eval={}), "model.rest_frozen does nothing: no frozen role"),
        (tree(sandbox={}), "belong together"),
        (tree(model={"path": "sandbox"}, sandbox={}, sft={"data": SOURCE}), "sft.data does nothing"),
        (tree(reward={"data": SOURCE, "responses_per_prompt": 4}), "do nothing outside the sandbox"),
        (tree(preference={"data": SOURCE}, ppo={"data": SOURCE, "reward": "a:b"}), "both make the final policy"),
        (tree(preference={"data": SOURCE, "gamma": 1.0}), "gamma does nothing with loss dpo: it belongs to simpo"),
        (tree(preference={"data": SOURCE, "loss": "ipo", "label_smoothing": 0.1}), "belongs to cdpo and robust"),
        (tree(preference={"data": SOURCE, "desirable_weight": 2.0}), "desirable_weight does nothing with loss dpo"),
        (tree(preference={"data": SOURCE, "loss": "cdpo", "undesirable_weight": 2.0}), "it belongs to kto"),
        (tree(preference={"data": SOURCE, "loss": "orpo", "likelihood": 0.1}), "orpo does not do"),
        (tree(preference={"data": SOURCE, "loss": "kto", "batch": 1}), "at least 2"),
        (tree(preference={"data": SOURCE, "loss": "kto", "keep_best": "heldout_loss"}), "kto has no held-out loss"),
        (tree(preference={"data": SOURCE, "loss": "dop"}), "preference.loss"),
        (tree(preference={"data": SOURCE, "loss": "cdpo", "label_smoothing": 0.5}), "less than 0.5"),
        (tree(preference={}), "preference.data is missing"),
        (tree(preference={"data": SOURCE, "prompts": 10}), "preference.prompts and preference.responses_per_prompt do"),
        (tree(**SANDBOX, reward={}, preference={"prompts": 10}), "the pairs are those that the reward stage collects"),
        (tree(**SANDBOX, preference={"prompts": 7000}), "preference.prompts 7000 is more than sandbox.prompts 6000"),
        (tree(**SANDBOX, reward={"margin": 1.0}), "reward.margin does nothing in the sandbox"),
        (tree(**SANDBOX, reward={"weighting": "prompt", "responses_per_prompt": 2}), "a prompt has one pair"),
        (tree(**SANDBOX, eval={"best_of": 4}), "takes the best by a reward, but there is none"),
        (tree(**SANDBOX, reward={}, eval={"best_of": 1}), "eval.best_of"),
        (tree(ppo={**PPO, "advantage": "rloo", "critic": {"clip": 0.1}}), "critic does nothing: advantage rloo has no"),
        (tree(ppo={**PPO, "advantage": "remax", "lam": 0.9}), "lam 0.9 does nothing: advantage remax has no critic"),
        (tree(ppo={**PPO, "advantage": "reinforce", "whiten": "sd"}), "whiten sd does nothing"),
        (tree(ppo={**PPO, "advantage": "grpo", "responses_per_prompt": 2, "gamma": 0.9}), "gamma 0.9 does nothing"),
        (tree(ppo={**PPO, "advantage": "grpo"}), "set responses_per_prompt to 2 or more"),
        (tree(ppo={**PPO, "advantage": "remax", "truncated": "bootstrap"}), "needs a critic's value"),
        (tree(ppo={**PPO, "truncated": "drop", "missing_eos_penalty": 1.0}), "does nothing with truncated drop"),
        (
            tree(ppo={**PPO, "critic": {"warmup_cap": 0, "warmup_explained_variance": 0.5}}),
            "warmup_cap 0 is no warm-up",
        ),
        (tree(ppo={**PPO, "lam": 0.9, "lam_alpha": 0.05}), "lam does nothing with lam_alpha"),
        (tree(ppo={**PPO, "policy": {"loss": "policy_gradient", "clip": 0.1}}), "clip 0.1 does nothing"),
        (tree(ppo={**PPO, "policy": {"loss": "policy_gradient"}}), "first of the 4 optimizer steps"),
        (tree(ppo={**PPO, "policy": {"loss": "gspo", "dual_clip": 3}}), "dual_clip 3.0 does nothing"),
        (tree(ppo={**PPO, "policy": {"old_kl_target": 0.1}}), "old_kl_target 0.1 does nothing"),
        (tree(ppo={**PPO, "minibatches": 1, "policy": {"target_kl": 0.1}}), "target_kl does nothing"),
        (tree(ppo={**PPO, "kl": {"coefficient": 0, "place": "loss"}}), "place loss does nothing"),
        (
            tree(ppo={**PPO, "advantage": "reinforce_plus_plus", "normalise_scores": True}),
            "normalise_scores does nothing",
        ),
        ({"model": {"path": "x"}}, "name: this setting is needed"),
        ([1], "a recipe is a mapping"),
    ],
)
def test_what_is_refused_and_why(given, told):
    with pytest.raises(ConfigError) as error:
        recipes.parse(given, "r.yaml")
    assert told in str(error.value) and "r.yaml" in str(error.value)


@pytest.mark.parametrize("text", ["name: a\nname: b", "name: [a", "x: !!int abc", "[" * 3000, "x: !!timestamp x"])
def test_yaml_that_is_none_or_says_a_thing_twice(text, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        recipes.load(file)
    assert "r.yaml" in str(error.value) and ("no YAML" in str(error.value))


WRITTEN = """\
name: 010
model:
  path: somewhere
  max_prompt_tokens: {tokens}
ppo:
  data: {{path: [2024-01-02, b], columns: {{prompt: no}}}}
  reward: a:b
  whiten: off
  rollouts: 1_024
  critic: {{clip: ~}}
  policy:
    learning_rate: {rate}
"""


def test_a_value_is_read_as_a_person_reads_it_in_yaml_and_flags_alike(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(WRITTEN.format(tokens="010", rate="1e-4"))
    recipe = recipes.load(file)
    assert (recipe.name, recipe.model.max_prompt_tokens) == ("010", 10)
    ppo = recipe.ppo
    assert ppo and ppo.data and (ppo.data.path, ppo.data.columns) == (["2024-01-02", "b"], {"prompt": "no"})
    assert (ppo.whiten, ppo.rollouts, ppo.critic.clip, ppo.policy.learning_rate) == ("off", 1024, None, 1e-4)
    flags = ["--model.max-prompt-tokens", "020", "--ppo.rollouts", "2_048", "--ppo.data.weights", "[010, 1]"]
    changed = recipes.load(file, flags)
    assert changed.ppo and changed.ppo.data
    assert (changed.model.max_prompt_tokens, changed.ppo.rollouts, changed.ppo.data.weights) == (20, 2048, [10.0, 1.0])
    assert recipes.load(write(tmp_path / "again.yaml", recipes.to_yaml(recipe))) == recipe


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize("tokens", ["0x10", "0o17", "1:30", "yes", "1e2"])
def test_a_number_that_is_no_decimal_one_is_told_with_its_line(tokens, tmp_path):
    file = write(tmp_path / "r.yaml", WRITTEN.format(tokens=tokens, rate="on"))
    with pytest.raises(ConfigError) as error:
        recipes.load(file)
    assert str(error.value).splitlines() == [
        f"model.max_prompt_tokens: it should be a valid integer, not {tokens}",
        "ppo.policy.learning_rate: it should be a valid number, not on",
        f"  where:  {file}:4, 12",
        "  remedy: give an integer; give a number",
    ]
    file.write_text(WRITTEN.format(tokens="1", rate="1"))
    with pytest.raises(ConfigError, match=f"not {tokens}"):
        recipes.load(file, ["--model.max-prompt-tokens", tokens])


def test_the_line_of_what_is_missing_is_that_of_its_section(tmp_path):
    file = write(tmp_path / "r.yaml", "name: x\nmodel:\n  dtype: float32\nlogs: [1]\n")
    with pytest.raises(ConfigError) as error:
        recipes.load(file)
    assert error.value.where == f"{file}:2, 4"


def test_a_misspelt_recipe_names_the_nearest(monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    with pytest.raises(ConfigError, match=r"did you mean recipes/quickstart.yaml\?"):
        recipes.load("recipes/quikstart.yaml")


def test_nulls_that_stand_for_a_default_are_filled_in():
    recipe = recipes.parse(tree(ppo={"data": SOURCE, "reward": "a:b", "kl": {"controller": "adaptive"}})).resolved()
    assert recipe.ppo and (recipe.ppo.kl.target, recipe.ppo.kl.horizon) == (6.0, 10_000)
    assert (recipe.model.lora_rank, recipe.model.lora_alpha) == (16, 32.0)
    separate = recipes.parse(tree(model={"path": "x", "backbone": "separate"})).resolved()
    assert separate.model.lora_rank is None


def test_an_algorithm_brings_its_own_defaults():
    def of(**ppo):
        recipe = recipes.parse(tree(ppo={**PPO, **ppo})).resolved()
        assert recipe.ppo and recipes.parse(recipe.model_dump(mode="json")).resolved() == recipe
        return recipe.ppo

    assert (of().policy.clip, of().policy.clip_high, of().policy.aggregation) == (0.2, 0.2, "token_mean")
    assert of(policy={"clip": 0.1, "clip_high": 0.3}).policy.clip_high == 0.3
    assert of(policy={"loss": "gspo"}).policy.clip == 3e-4
    assert of(policy={"loss": "gspo"}).policy.aggregation == "sequence_mean_token_mean"
    assert of(advantage="dr_grpo", responses_per_prompt=2).policy.aggregation == "constant"
    assert of(advantage="dr_grpo", responses_per_prompt=2).critic.learning_rate is None
    assert (of(lam=0.9).critic.lam, of(lam=0.9, critic={"lam": 1.0}).critic.lam) == (0.9, 1.0)


@pytest.mark.parametrize(
    ("loss", "backbone", "filled"),
    [
        ("dpo", "separate", {"beta": 0.1, "learning_rate": 1e-6, "gamma": None, "label_smoothing": None}),
        ("cdpo", "shared", {"beta": 0.1, "learning_rate": 1e-5, "label_smoothing": 0.1}),
        ("simpo", "separate", {"beta": 2.0, "gamma": 1.0}),
        ("orpo", "separate", {"beta": 0.1, "learning_rate": 8e-6}),
        ("kto", "separate", {"desirable_weight": 1.0, "undesirable_weight": 1.0}),
    ],
)
def test_a_preference_loss_gets_its_own_defaults_and_stays_valid(loss, backbone, filled):
    given = tree(model={"path": "x", "backbone": backbone}, preference={"data": SOURCE, "loss": loss})
    recipe = recipes.parse(given).resolved()
    assert recipe.preference and {name: getattr(recipe.preference, name) for name in filled} == filled
    assert recipes.parse(recipe.model_dump(mode="json")).resolved() == recipe


def test_the_sandbox_collects_pairs_once():
    alone = recipes.parse(tree(**SANDBOX, preference={})).resolved()
    both = recipes.parse(tree(**SANDBOX, reward={}, preference={})).resolved()
    assert alone.preference and (alone.preference.prompts, alone.preference.responses_per_prompt) == (1500, 4)
    assert both.reward and both.preference and (both.reward.prompts, both.preference.prompts) == (1500, None)
    sentences = [sentence for stage, sentence in recipes.schedule(alone) if stage == "preference"]
    assert sentences[0] == "1500 prompts x 4 replies ranked: up to 9000 pairs"


def test_the_schedule_says_how_many_demonstrations_are_used():
    flags = ["--sft.max-rows", "100"]
    said = dict(recipes.schedule(recipes.load(FOLDER / "quickstart.yaml", flags)))["sft"]
    assert said == "1 pass(es) over up to 100 demonstrations (64 held out), 32 a step = 4 optimizer steps"
    said = dict(recipes.schedule(recipes.load(FOLDER / "smollm2-preferences.yaml", flags)))["sft"]
    assert said == "1 pass(es) over at most 100 demonstrations, after 64 are held out, 16 a step"


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
        assert "did you mean --ppo.policy.clip?" in done.stderr


@pytest.mark.parametrize("arguments", [["run", "recipes/quickstart.yaml"], ["classic", "CartPole-v1"]])
def test_a_busy_folder_is_refused_before_torch_and_left_as_it_is(arguments, tmp_path):
    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    with RunFolder.open(tmp_path, "busy"):
        before = there()
        done = keel(*arguments, "--root", str(tmp_path), "--name", "busy")
        assert there() == before
    assert done.returncode == 2 and f"keel: the run is in use by process {os.getpid()} on" in done.stderr
    assert done.stderr.strip().endswith("False") and "loading" not in done.stdout


def test_threads_are_the_cores_that_the_process_may_use(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("keel.config.recipe.CPU_QUOTA", quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert usable_cores() == 12  # no control group
    for text, cores in (("max 100000", 12), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        quota.write_text(text + "\n")
        assert usable_cores() == cores, text
    quota.write_text("9900000 100000\n")
    tree = {"name": "x", "model": {"path": "x"}, "sft": {"data": {"path": ["x"]}}}
    assert Recipe.model_validate(tree).resolved().threads == 12
    assert Recipe.model_validate(tree | {"threads": 3}).resolved().threads == 3
