"""Flags: refused in the words that YAML is refused in, with the flag that was meant; and what --help lists."""

from pathlib import Path

import pytest

from keel import cli, settings
from keel.classic.config import ClassicConfig
from keel.errors import ConfigError

QUICKSTART = "recipes/quickstart.yaml"


@pytest.fixture(autouse=True)
def _repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def told(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    streams = capsys.readouterr()
    return int(ended.value.code or 0), streams.out, streams.err


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            "--ppo.kl.controller fixed",
            [
                "keel: ppo.kl: target and horizon do nothing with controller fixed",
                "  where:  recipes/quickstart.yaml, with --ppo.kl.controller fixed",
                "  remedy: set both to null, or controller to adaptive",
            ],
        ),
        (
            "--ppo.kl.controller fxied",
            [
                "keel: --ppo.kl.controller: it should be 'fixed' or 'adaptive', not fxied",
                "  where:  recipes/quickstart.yaml, with --ppo.kl.controller fxied",
                "  remedy: did you mean fixed?",
            ],
        ),
        (
            "--ppo.whiten x --seed -1",
            [
                "keel: --seed: it should be greater than or equal to 0, not -1",
                "--ppo.whiten: it should be 'mean_and_sd', 'sd' or 'off', not x",
                "  where:  recipes/quickstart.yaml, with --ppo.whiten x --seed -1",
                "  remedy: give an integer in that range; choose one of mean_and_sd, sd, off",
            ],
        ),
        (
            "--ppo.top-p 0.9",
            [
                "keel: --ppo.top-p: there is no such setting",
                "  where:  recipes/quickstart.yaml",
                "  remedy: remove --ppo.top-p: sampling is cut, but the ratio is not: the log-probabilities of "
                "training would be of another distribution",
            ],
        ),
        (
            "--preference.prompts 5",
            [
                "keel: --preference.prompts: there is no section preference, and a flag cannot add one",
                "  where:  recipes/quickstart.yaml",
                "  remedy: add `preference:` to recipes/quickstart.yaml",
            ],
        ),
        (
            "--ppo.policy.clp 0.1 --clip 2",
            [
                "keel: --ppo.policy.clp: there is no such setting",
                "--clip: there is no such setting",
                "  where:  recipes/quickstart.yaml",
                "  remedy: did you mean --ppo.policy.clip? did you mean --ppo.policy.clip or --ppo.critic.clip?",
            ],
        ),
        (
            "--runs-dir x",
            [
                "keel: --runs-dir: there is no such setting",
                "  where:  recipes/quickstart.yaml",
                "  remedy: settings there: --name, --root, --seed, --threads, --keep-checkpoints, --skip-bad-steps, "
                "--model.*, --sandbox.*, --sft.*, --reward.*, --preference.*, --ppo.*, --eval.*",
            ],
        ),
        (
            "--name",
            [
                "keel: --name: there is no value",
                "  where:  recipes/quickstart.yaml",
                "  remedy: give it a text",
            ],
        ),
        (
            "stray",
            [
                "keel: 'stray' is no flag",
                "  where:  recipes/quickstart.yaml",
                "  remedy: give settings as --name value",
            ],
        ),
        (
            "--ppo.updates 1e3",
            [
                "keel: --ppo.updates: it should be a valid integer, not 1e3",
                "  where:  recipes/quickstart.yaml, with --ppo.updates 1e3",
                "  remedy: give an integer",
            ],
        ),
    ],
)
@pytest.mark.parametrize("command", ["show", "run"])
def test_a_flag_is_refused_in_three_lines(capsys, command, flags, lines):
    code, out, err = told(capsys, command, QUICKSTART, *flags.split())
    assert (code, out) == (2, "") and err.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["classic", "CartPole-v1", "--lerning-rate", "1"],
            ["--lerning-rate: there is no such setting", "did you mean --learning-rate?"],
        ),
        (
            ["classic", "CartPole-v1", "--algorithm", "reinforce", "--clip", "0.2"],
            ["keel: clip does nothing with algorithm reinforce", "remedy: remove it"],
        ),
        (["inspect", "a.jsonl", "--knd", "x"], ["--knd: there is no such setting", "did you mean --kind?"]),
        (
            ["inspect", "a.jsonl", "--columns", "prompt"],
            ["--columns: 'prompt' is none", "give it pairs of key and value"],
        ),
        (["chat", "runs/x", "--temperature", "-1"], ["--temperature: it should be greater than or equal to 0, not -1"]),
    ],
)
def test_so_are_those_of_commands_without_a_recipe(capsys, arguments, lines):
    code, out, err = told(capsys, *arguments)
    assert (code, out) == (2, "") and not [line for line in lines if line not in err], err


def test_values_of_every_shape():
    def changed(*flags: str) -> ClassicConfig:
        return settings.change(ClassicConfig, {"env": "x"}, flags, "here")

    assert changed("--hidden", "16", "8").hidden == (16, 8)
    assert changed("--hidden", "[4]").hidden == (4,)
    assert changed("--learning-rate=1e-3").learning_rate == 1e-3
    assert changed("--clip", "0.3", "--seed", "4", "--clip", "0.1").clip == 0.1  # the last counts
    assert (changed("--whiten", "false").whiten, changed("--value-clip").value_clip) == (False, True)
    assert settings.change(ClassicConfig, {"env": "x", "clip": 0.1}, ["--clip", "none"], "here").clip is None
    with pytest.raises(ConfigError, match="'a b' are 2 values"):
        changed("--root", "a", "b")


def test_no_message_repeats_a_credential(capsys):
    code, _, err = told(capsys, "show", QUICKSTART, "--ppo.scoring.token-env", "s3cret-token")
    assert code == 2 and "--ppo.scoring.token-env" in err and "s3cret" not in err
    for address in ("http://user:s3cret@host:1/x", "https://host/x?key=s3cret", "https://host#s3cret"):
        code, _, err = told(capsys, "show", "recipes/smollm2-sentiment.yaml", "--ppo.reward", address)
        assert code == 2 and "--ppo.reward" in err and "://" in err and "s3cret" not in err, err


def test_what_a_list_holds_is_said(capsys):
    _, _, err = told(capsys, "show", "recipes/smollm2-sentiment.yaml", "--ppo.data.weights", "0", "1")
    assert "--ppo.data.weights.0: it should be greater than 0, not 0" in err
    assert "remedy: give one or more numbers in that range" in err


@pytest.mark.parametrize("place", ["recipes", "/dev/null"])
def test_what_is_no_recipe_has_a_remedy(capsys, place):
    code, _, err = told(capsys, "run", place)
    remedy = {"recipes": "remedy: this is a folder", "/dev/null": "remedy: give a file of lines"}[place]
    assert code == 2 and f"where:  {place}" in err and remedy in err


def test_a_remedy_of_several_faults_is_said_once(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\nmodel: {path: y}\nppo: {top_p: 0.9, reward: 'a:b', kl: {top_p: 1, coeficient: 1}}")
    _, _, err = told(capsys, "run", str(recipe))
    assert err.count("sampling is cut") == 1 and "did you mean coefficient?" in err
    assert "ppo.top_p: there is no such setting" in err and "ppo.kl.top_p: there is no such setting" in err


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "resume",
        "sft",
        "reward",
        "preference",
        "ppo",
        "eval",
        "show",
        "plan",
        "inspect",
        "chat",
        "export",
        "classic",
    ],
)
def test_every_command_has_a_help_of_its_own(capsys, command):
    code, out, _ = told(capsys, command, "--help")
    assert code == 0 and out.startswith(f"keel {command} ") and f"\n  keel {command} " in out


def test_help_lists_every_setting_with_its_value(capsys):
    code, out, _ = told(capsys, "plan", QUICKSTART, "--ppo.policy.clip", "0.1", "--help")
    assert code == 0
    assert "  --ppo.policy.clip NUMBER  (now 0.1)\n      Half width of the clip range" in out
    assert "  --ppo.kl.controller fixed|adaptive  (now adaptive)" in out
    assert "  --preference...: not there; to have it, write `preference:` into the recipe" in out
    _, out, _ = told(capsys, "classic", "CartPole-v1", "--help")
    assert "  --algorithm ppo|trpo|reinforce  (now ppo)" in out and "  --hidden INTEGER ...  (now 64 64)" in out
