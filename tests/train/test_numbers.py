"""A number that is not finite, planted in each place in turn: the step stops before the optimizer or is left out as
told, the rows and the part are named, and no weight has changed."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keel.config import Recipe
from keel.errors import NumberError, RewardError, StepError
from keel.rewards.functions import FunctionReward
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import read_lines
from keel.train import experience, online
from keel.train.context import Run
from keel.train.learner import Learner
from keel.train.online import train_online
from keel.train.reward import pair_loss
from keel.train.supervised import Plan, fit
from tests.tiny import backbone, comparisons, encoder_of, prompts

NAN = float("nan")


def recipe_of(skip: int, **ppo) -> Recipe:
    settings = {"data": {"path": ["x"]}, "reward": "x:x", "updates": 3, "rollouts": 12, "minibatches": 1, **ppo}
    settings |= {"critic": {"warmup_cap": 0, "learning_rate": 1e-3}, "policy": {"learning_rate": 1e-3}}
    settings |= {"checkpoint_every": 1}
    tree = {"name": "t", "threads": 1, "skip_bad_steps": skip, "model": {"path": "x"}, "ppo": settings}
    return Recipe.model_validate(tree).resolved()


class Trained:
    """PPO on a tiny model; `plant` is called with the roles and the number of the update before each scoring."""

    def __init__(self, folder: Path, model: Path, skip: int, plant: Callable | None = None, **ppo):
        recipe = recipe_of(skip, **ppo)
        assert recipe.ppo
        self.roles = backbone("separate", model, ("policy", "critic", "reference"))
        self.rows = prompts(60)
        scored = 0

        def score(response: str) -> float:
            nonlocal scored
            update, row = divmod(scored, 12)
            scored += 1
            value = plant(self.roles, update, row) if plant else None
            return -len(response) / 20 if value is None else value

        with RunFolder.open(folder, "t") as run_folder, Interrupt() as interrupt:
            run = Run(recipe, run_folder, Console(), interrupt, torch.device("cpu"), "keel run x")
            self.stage = run_folder.stage("ppo")
            self.stage.path.mkdir(exist_ok=True)
            learner = Learner(self.roles, 0, 16, recipe.ppo, recipe.seed)
            self.error: StepError | None = None
            try:
                source = FunctionReward(score, "scored", None, recipe.ppo.scoring.max_failed)
                train_online(run, self.stage, learner, encoder_of(model, 16), self.rows, source, None)
            except StepError as error:
                self.error = error

    @property
    def weights(self) -> tuple[str, str]:
        return self.roles.fingerprint("policy"), self.roles.fingerprint("critic")

    @property
    def record(self) -> dict:
        (file,) = self.stage.bad.iterdir()
        return json.loads(file.read_text())

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.stage.checkpoints.iterdir())

    def skips(self) -> list[float]:
        return [line.get("skipped_steps", 0) for line in read_lines(self.stage.metrics)]


def reward_is_nan(roles, update: int, row: int) -> float | None:
    return NAN if (update, row) == (1, 3) else None


def logprob_is_nan(monkeypatch, of: str) -> Callable:
    """The trainer's log-probability of row 3 in the second update, of the policy or the reference."""
    real, calls = experience.logprobs_BT, [0]

    def planted(roles, role, *rest):
        logprobs, entropies = real(roles, role, *rest)
        calls[0] += role == of
        if role == of and calls[0] == 2:
            logprobs[3, 0] = NAN
        return logprobs, entropies

    monkeypatch.setattr(experience, "logprobs_BT", planted)
    return lambda *_: None


def value_is_nan(monkeypatch) -> Callable:
    """The critic's value of row 3 in the second update."""
    real, calls = experience.values_BT, [0]

    def planted(*given):
        values_BT, last_B = real(*given)
        calls[0] += 1
        if calls[0] == 2:
            values_BT[3, 0] = NAN
        return values_BT, last_B

    monkeypatch.setattr(experience, "values_BT", planted)
    return lambda *_: None


def gradient_is_nan(monkeypatch) -> Callable:
    """Of the policy, in the second update."""
    now = [0]

    def plant(roles, update: int, row: int) -> None:
        if (update, row) == (0, 0):
            weight = next(iter(roles.parameters("policy").values()))
            weight.register_hook(lambda gradient: gradient * NAN if now[0] == 1 else gradient)
        now[0] = update

    return plant


@pytest.mark.parametrize(
    "part", ["reward", "policy's log-probability", "reference's log-probability", "value", "gradient"]
)
@pytest.mark.parametrize("skip", [0, 1])
def test_planted_in_one_update(part, skip, tiny_model, tmp_path, monkeypatch, capsys):
    makers = {
        "reward": lambda: reward_is_nan,
        "policy's log-probability": lambda: logprob_is_nan(monkeypatch, "policy"),
        "reference's log-probability": lambda: logprob_is_nan(monkeypatch, "reference"),
        "value": lambda: value_is_nan(monkeypatch),
        "gradient": lambda: gradient_is_nan(monkeypatch),
    }
    run = Trained(tmp_path / "run", tiny_model, skip, makers[part](), updates=2)
    assert ("not a finite number" if part == "reward" else part) in run.record["what"]
    rows = list(range(12)) if part == "gradient" else [3]
    assert run.record["rows"] == sorted(row["row"] for row in run.record["batch"] if row["bad"]) == rows
    first = next(row for row in run.record["batch"] if row["bad"])
    assert first["source"].startswith("row ") and first["response_ids"] and first["prompt"]
    if skip:
        assert run.error is None and run.skips() == [0, 1] and run.steps() == [1, 2]
        assert "left out, 1 of at most 1" in capsys.readouterr().out
    else:
        assert isinstance(run.error, RewardError if part == "reward" else NumberError)
        assert "--skip-bad-steps 1" in run.error.remedy and "bad/step-2-1.json" in run.error.remedy
        assert len(re.findall(rf"{first['source']}\b", run.error.where)) == 1 and "update 2" in run.error.where
        assert run.steps() == [1]
    assert run.weights == weights_after_one(tmp_path, tiny_model)


def weights_after_one(tmp_path: Path, model: Path) -> tuple[str, str]:
    """Of the unbroken run of two updates, stopped by its second reward."""
    stopped = Trained(tmp_path / "stopped", model, 0, lambda roles, update, row: "no" if update else None, updates=2)
    assert stopped.error and stopped.steps() == [1]
    return stopped.weights


@pytest.mark.parametrize("skip", [0, 5])
def test_planted_in_a_weight_stops_whatever_the_recipe_says_and_the_run_goes_on_from_before(skip, tiny_model, tmp_path):
    def plant(roles, update: int, row: int) -> None:
        if (update, row) == (1, 5):
            with torch.no_grad():
                roles.model("policy").model.layers[1].mlp.up_proj.weight[2, 2] = NAN

    broken = Trained(tmp_path / "broken", tiny_model, skip, plant)
    assert broken.error and "model.layers.1.mlp.up_proj.weight is not finite" in broken.error.what
    assert broken.steps() == [1] and "--skip-bad-steps" not in broken.error.remedy
    whole = Trained(tmp_path / "whole", tiny_model, 0)
    again = Trained(tmp_path / "broken", tiny_model, 0)
    assert again.error is None and again.weights == whole.weights
    assert not [line for line in read_lines(again.stage.events) if line["event"] == "bad_step"]


def test_more_bad_steps_than_the_recipe_lets_stop_the_run(tiny_model, tmp_path):
    run = Trained(tmp_path, tiny_model, 2, lambda roles, update, row: NAN if row == 0 else None, updates=4)
    assert run.error and "--skip-bad-steps 3" in run.error.remedy
    assert run.skips() == [1, 1] and run.steps() == [1, 2]
    again = Trained(tmp_path, tiny_model, 2, lambda roles, update, row: NAN if row == 0 else None, updates=4)
    assert again.error  # what was left out before counts
    assert Trained(tmp_path, tiny_model, 4, updates=4).skips() == [1, 1, 0, 0]


def test_only_the_row_that_is_at_fault_is_named_of_a_minibatch(tiny_model, tmp_path, monkeypatch):
    real = online.make_experience

    def planted(*given):
        experience, metrics = real(*given)
        experience.advantages_BT[7] = NAN
        return experience, metrics

    monkeypatch.setattr(online, "make_experience", planted)
    run = Trained(tmp_path, tiny_model, 0, updates=1, minibatches=2)
    assert run.error and "policy's loss is nan" in run.error.what and "minibatch" in run.error.where
    assert run.record["rows"] == [7] and len(run.record["batch"]) == 6 and "row 7 (" in run.error.where


def test_rows_whose_reward_fails_are_left_out_of_the_update(tiny_model, tmp_path, capsys):
    def plant(roles, update: int, row: int) -> float | None:
        return NAN if row in (3, 7) else None

    run = Trained(tmp_path, tiny_model, 0, plant, updates=1, scoring={"max_failed": 0.2})
    (line,) = read_lines(run.stage.metrics)
    assert run.error is None and line["unscored"] == line["dropped"] == 2 and line["steps_taken"] == 1
    event = next(event for event in read_lines(run.stage.events) if event["event"] == "unscored")
    assert event["count"] == 2 and "nan, which is not a finite number" in event["errors"][0]["what"]
    assert len(list(read_lines(run.stage.samples))) == 4 and "2 without a score" in capsys.readouterr().out


@pytest.mark.parametrize("skip", [0, 1])
def test_planted_in_one_data_row_of_a_supervised_stage(skip, tiny_model, tmp_path):
    """A margin beyond float32 makes the pair's loss infinite, with a finite gradient."""
    groups = comparisons(8)
    groups[5] = type(groups[5])(groups[5].sequences, groups[5].pairs, (1e39, 0.0, 0.0))
    tree = {"name": "t", "skip_bad_steps": skip, "model": {"path": "x"}}
    plan = Plan(2, 4, 1e-3, 0.0, 1.0, checkpoint_every=1)
    roles = backbone("separate", tiny_model, ("reward",), ("reward",))
    states: list[str] = [roles.fingerprint("reward")]
    step = pair_loss(roles, groups, 0, 4000, margin=1.0)

    def seen(rows: list[int]) -> dict[str, float]:
        states.append(roles.fingerprint("reward"))
        return step(rows)

    with RunFolder.open(tmp_path, "t") as folder, Interrupt() as interrupt:
        run = Run(Recipe.model_validate(tree), folder, Console(), interrupt, torch.device("cpu"), "keel run x")
        stage = folder.stage("reward")

        def train() -> None:
            fit(run, stage, "reward", roles, "reward", prompts(8), plan, seen, dict)

        if skip:
            train()
            assert sum(line.get("skipped_steps", 0) for line in read_lines(stage.metrics)) == 1
            assert roles.fingerprint("reward") != states[0]  # the other step was taken
        else:
            with pytest.raises(NumberError, match=r"loss \(inf\) is not finite") as caught:
                train()
            assert "row 5 (row 5)" in caught.value.where and roles.fingerprint("reward") == states[-1]
        (file,) = stage.bad.iterdir()
        assert json.loads(file.read_text())["rows"] == [5]
