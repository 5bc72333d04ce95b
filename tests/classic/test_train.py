"""Runs from start to end: learning, the trust region, same bytes, interruption, refusals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keel import cli
from keel.classic.config import ClassicConfig
from keel.classic.train import Learner, train_classic
from keel.errors import ConfigError, Interrupted, RunError
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.log import read_lines
from tests.classic import tasks

assert tasks

SHORT: dict[str, Any] = {"env": "CartPole-v1", "steps": 1024, "environments": 2, "rollout": 128}


def train(overwrite: bool = False, **settings: Any) -> dict[str, Any]:
    config = ClassicConfig.model_validate(settings)
    with RunFolder.open(config.root, config.run_name) as folder:
        return train_classic(config, folder, Console(), "keel classic", overwrite)


def learner(**settings: Any) -> Learner:
    return Learner(ClassicConfig(**settings).resolved("discrete"))


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1e-3, "environments": 8},
        {"algorithm": "trpo", "rollout": 256},
        {"algorithm": "reinforce", "learning_rate": 2e-2},
    ],
    ids=["ppo", "trpo", "reinforce"],
)
def test_cartpole_is_learnt(place: Path, settings: dict[str, Any]):
    # A policy that does not learn stays near 20.
    result = train(env="CartPole-v1", steps=30_000, seed=1, **settings)
    assert result["episode_return"] > 150, result


def test_continuous_actions_are_learnt(place: Path):
    settings: dict[str, Any] = {"environments": 4, "rollout": 500, "learning_rate": 2e-3, "gamma": 0.9}
    result = train(env="Pendulum-v1", steps=60_000, minibatches=8, **settings)
    assert result["episode_return"] > -900, result  # a random policy has -1200


def test_the_first_ratio_of_an_update_is_one(place: Path):
    made = learner(**SHORT, normalise_observations=True, normalise_rewards=True)
    for _ in range(3):
        metrics = made.update()
        assert metrics["first_log_ratio"] < 1e-5 and metrics["update_kl"] > 0


def test_trpo_stays_inside_the_trust_region(place: Path):
    made = learner(**(SHORT | {"steps": 10_000}), algorithm="trpo", max_kl=0.003, cg_damping=1e-3)
    seen = [made.update() for _ in range(6)]
    assert all(metrics["step_fraction"] > 0 for metrics in seen)
    assert all(0 < metrics["update_kl"] <= 0.003 for metrics in seen)
    # Where the quadratic model holds, a full step uses most of what it may.
    assert max(metrics["update_kl"] for metrics in seen if metrics["step_fraction"] == 1.0) > 0.002


def test_a_refused_trpo_step_leaves_the_policy(place: Path, monkeypatch: pytest.MonkeyPatch):
    made = learner(**SHORT, algorithm="trpo")
    before = {name: tensor.clone() for name, tensor in made.network.state_dict().items() if "policy" in name}

    def refuse(measure: Callable[[float], tuple[float, float]], *_: float) -> tuple[None, int]:
        assert measure(1.0) != (0.0, 0.0)  # the weights have moved by now
        return None, 10

    monkeypatch.setattr("keel.classic.updates.line_search", refuse)
    metrics = made.update()
    assert metrics["step_fraction"] == 0.0 and metrics["update_kl"] == 0.0
    after = made.network.state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_steps_count_and_the_rate_falls(place: Path):
    result = train(**SHORT, name="run")
    lines = list(read_lines(Path("runs/run/classic/metrics.jsonl")))
    assert [line["environment_steps"] for line in lines] == [256, 512, 768, 1024]
    assert [line["learning_rate"] for line in lines] == pytest.approx([2.5e-4 * k / 4 for k in (4, 3, 2, 1)])
    assert (result["steps"], result["updates"], result["episodes"]) == (1024, 4, lines[-1]["episodes"])


@pytest.mark.parametrize("algorithm", ["ppo", "trpo", "reinforce"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_same_seed_same_bytes(place: Path, algorithm: str, env: str):
    settings: dict[str, Any] = {**SHORT, "env": env, "algorithm": algorithm}
    if algorithm == "ppo":
        settings |= {"epochs": 2, "minibatches": 4}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(**settings, name=name, seed=seed)

    def content(name: str) -> tuple[bytes, list[dict[str, Any]]]:
        stage = Path("runs") / name / "classic"
        lines = [
            {key: value for key, value in line.items() if not key.startswith("seconds")}
            for line in read_lines(stage / "metrics.jsonl")
        ]
        return (stage / "model" / "model.safetensors").read_bytes(), lines

    assert content("a") == content("b")
    assert content("a")[0] != content("c")[0] and content("a")[1] != content("c")[1]


def test_a_finished_run_gives_its_summary_and_other_settings_are_refused(place: Path):
    first = train(**SHORT, name="run")
    assert train(**SHORT, name="run") == first
    with pytest.raises(RunError, match=r"gamma: 0\.99 -> 0\.5"):
        train(**SHORT, name="run", gamma=0.5)
    assert train(**SHORT, name="run", gamma=0.5, overwrite=True)["steps"] == 1024


def test_an_interrupt_keeps_what_is_logged(place: Path, monkeypatch: pytest.MonkeyPatch):
    real = Learner.update

    def update(self: Learner) -> dict[str, float]:
        if self.updates == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(Interrupted, match="after 512 steps"):
        train(**SHORT, name="run")
    monkeypatch.setattr(Learner, "update", real)
    stage = Path("runs/run/classic")
    assert len(list(read_lines(stage / "metrics.jsonl"))) == 2 and not (stage / "done.json").exists()
    with pytest.raises(RunError, match="no checkpoints"):
        train(**SHORT, name="run")
    assert len(list(read_lines(stage / "metrics.jsonl"))) == 2
    assert train(**SHORT, name="run", overwrite=True)["updates"] == 4
    assert len(list(read_lines(stage / "metrics.jsonl"))) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_stops_at_once(place: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def update(self: Learner) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
        raise AssertionError("not reached")

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(Interrupted, match="after 0 steps") as stopped:
        train(**SHORT, name="run")
    assert stopped.value.exit_code == 128 + number


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"algorithm": "trpo", "clip": 0.1}, "clip does nothing with algorithm trpo: no ratio is clipped"),
        ({"algorithm": "trpo", "learning_rate": 0.1}, "follows from max_kl"),
        ({"algorithm": "trpo", "entropy": 0.01}, "entropy does nothing with algorithm trpo"),
        ({"algorithm": "reinforce", "lam": 0.9}, "which is lambda 1"),
        ({"algorithm": "reinforce", "epochs": 4}, "epochs does nothing with algorithm reinforce"),
        ({"algorithm": "reinforce", "baseline": "none", "critic_epochs": 4}, "there is no critic"),
        ({"algorithm": "ppo", "max_kl": 0.01}, "max_kl does nothing with algorithm ppo"),
        ({"algorithm": "ppo", "baseline": "none"}, "baseline does nothing with algorithm ppo"),
        ({"algorithm": "ppo", "critic_batch": 32}, "critic_batch does nothing with algorithm ppo"),
        ({"trunk": "shared", "algorithm": "trpo"}, "trunk does nothing with algorithm trpo"),
        ({"clp": 0.1}, "Extra inputs"),
        ({"env": ""}, "id of a gymnasium environment"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        ClassicConfig.model_validate({"env": "CartPole-v1"} | settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 100}, "steps 100 are fewer than one rollout takes: environments 4 x rollout 128 = 512"),
        ({"environments": 1, "rollout": 2}, "minibatches 4 is more than the 2 steps"),
        ({"env": "CartPol-v1"}, "gymnasium does not make 'CartPol-v1'"),
        ({"env": "KeelPair-v0"}, "the actions of KeelPair-v0 are MultiDiscrete"),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused(place: Path, settings: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        train(**{"env": "CartPole-v1", **settings})
    assert not Path("runs").exists()


@pytest.mark.parametrize("algorithm", ["ppo", "trpo", "reinforce"])
def test_resolving_fills_in_what_the_algorithm_reads_and_no_more(algorithm: str):
    # A resolved config passes its own checks: nothing in it does nothing.
    full = ClassicConfig.model_validate({"env": "x", "algorithm": algorithm}).resolved("continuous")
    assert ClassicConfig.model_validate(full.model_dump()) == full
    assert full.environments == 1 and full.normalise_rewards
    assert ("clip" in full.model_dump(exclude_none=True)) == (algorithm == "ppo")


def test_no_baseline_trains_no_critic(place: Path):
    made = learner(**SHORT, algorithm="reinforce", baseline="none")
    assert made.network.value_parameters() == [] and list(made.optimizers) == ["policy"]
    assert "value_loss" not in made.update()


def test_it_makes_at_least_the_steps_that_are_asked_for(place: Path):
    """Rollouts of 256: 1000 steps take four of them, 1024 as many."""
    short: dict[str, Any] = SHORT | {"steps": 1000}
    assert train(**short, name="a")["steps"] == 1024
    assert train(**SHORT, name="b")["steps"] == 1024


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["classic", "CartPole-v1", "--steps", "1024", "--seed", "1", "--trunk", "shared", "--hidden", "16", "16"]
    with pytest.raises(SystemExit) as ended:
        cli.main(flags)
    assert ended.value.code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("CartPole-v1, ppo, seed 1: mean return of the last")
    assert "after 1024 steps" in last and last.endswith("steps per second; in runs/CartPole-v1-ppo-seed1")
    manifest = json.loads(Path("runs/CartPole-v1-ppo-seed1/manifest.json").read_text())
    assert manifest["classic"]["hidden"] == [16, 16] and manifest["classic"]["clip"] == 0.2
    assert manifest["command"] == "keel " + " ".join(flags)

    with pytest.raises(SystemExit) as ended:
        cli.main(["classic"])
    assert ended.value.code == 2 and "keel classic CartPole-v1" in capsys.readouterr().err


def test_a_missing_gymnasium_is_told():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from keel import cli; cli.main(['classic', 'CartPole-v1', '--steps', '1024'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "gymnasium is not installed" in done.stderr and "keel-rl[classic]" in done.stderr
