"""The PPO step: what it starts from, what its gradients are, that it can be stopped and resumed, and that it learns."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keel.algo.moments import Moments
from keel.config import Recipe
from keel.errors import Interrupted, NumberError, RewardError
from keel.metrics import PROFILED, TIMED
from keel.models import spare
from keel.models.roles import logprobs_BT
from keel.rewards.functions import FunctionReward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import read_lines
from keel.train.context import Run
from keel.train.experience import make_experience, trained_scores
from keel.train.learner import Learner, first_state
from keel.train.online import still_warming, train_online
from keel.train.optim import make_optimizer, set_rate
from keel.train.update import accumulate, update
from keel.train.watching import rollout_metrics
from keel.types import Rollouts
from tests.tiny import backbone, encoder_of, prompts

BACKBONES = ["shared", "separate"]


def recipe_of(**ppo) -> Recipe:
    settings = {
        "data": {"path": ["unused"]},
        "reward": "unused:unused",
        "updates": 4,
        "rollouts": 12,
        "minibatches": 3,
        "checkpoint_every": 2,
        "critic": {"warmup_cap": 1, "learning_rate": 1e-3},
        "policy": {"learning_rate": 1e-3},
        **ppo,
    }
    return Recipe.model_validate(
        {"name": "test", "threads": 2, "model": {"path": "x", "max_response_tokens": 16}, "ppo": settings}
    ).resolved()


def shortness(response: str) -> float:
    return -len(response) / 20


def learner_of(roles, recipe: Recipe, ptx=None) -> Learner:
    assert recipe.ppo
    return Learner(roles, 0, 16, recipe.ppo, recipe.seed, ptx)


def experience_of(roles, recipe: Recipe, rollouts, scores, coefficient=0.05, greedy=None):
    """Experience and metrics, each row a group of its own unless the recipe samples several responses a prompt."""
    assert recipe.ppo
    state = first_state(recipe.ppo) | {"kl_coefficient": coefficient}
    groups = torch.arange(len(rollouts)) // recipe.ppo.responses_per_prompt
    scores = trained_scores(scores, rollouts, recipe.ppo, Moments())
    return make_experience(learner_of(roles, recipe), rollouts, scores, groups, state, greedy)


def run_ppo(
    folder: Path, kind: str, model: Path, recipe: Recipe, reward=shortness, stop_at: int | None = None, ptx=None
):
    """Trains in `folder`; stop_at raises the interrupt's flag once so many steps are logged."""
    assert recipe.ppo
    learners = ("policy", "critic") if recipe.ppo.has_critic else ("policy",)
    roles = backbone(kind, model, (*learners, "reference"), learners)
    with RunFolder.open(folder, "test") as run_folder, Interrupt() as interrupt:
        run = Run(recipe, run_folder, Console(), interrupt, torch.device("cpu"), "keel run x")
        stage = run_folder.stage("ppo")
        stage.path.mkdir(exist_ok=True)

        def scored(response: str) -> float:
            interrupt.requested = interrupt.requested or (stop_at is not None and _steps(stage) >= stop_at - 1)
            return reward(response)

        learner = learner_of(roles, recipe, ptx(roles) if ptx else None)
        train_online(run, stage, learner, encoder_of(model, 16), prompts(60), FunctionReward(scored, "scored"), None)
    return roles, stage


def _steps(stage) -> int:
    return len(list(read_lines(stage.metrics))) if stage.metrics.exists() else 0


def rolled_out(kind, model, recipe, count=12):
    roles = backbone(kind, model)
    rollouts = LocalEngine(roles, encoder_of(model, 16)).generate(
        prompts(count), Sampling(recipe.ppo.temperature, 16), seed=0, step=0
    )
    return roles, rollouts


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one_on_the_first_minibatch(kind, temperature, tiny_model):
    recipe = recipe_of(temperature=temperature)
    assert recipe.ppo
    roles, rollouts = rolled_out(kind, tiny_model, recipe)
    experience, metrics = experience_of(roles, recipe, rollouts, torch.randn(12))
    optimizers = {role: make_optimizer(roles.parameters(role).values()) for role in ("policy", "critic")}
    for optimizer in optimizers.values():
        set_rate(optimizer, 1e-2)
    out = update(learner_of(roles, recipe), experience, 0, first_state(recipe.ppo), optimizers)
    assert out["first_log_ratio"] <= 1e-4
    assert metrics["sampler_mismatch"] <= 1e-4
    moved, _ = logprobs_BT(roles, "policy", rollouts.sequences(), temperature, 0, 4000)
    assert (moved - experience.policy_logprobs_BT).abs().max() > 1e-3  # and then it moves


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_update_of_a_run_starts_at_ratio_one(kind, tiny_model, tmp_path):
    _, stage = run_ppo(tmp_path, kind, tiny_model, recipe_of(epochs=2))
    lines = list(read_lines(stage.metrics))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "first_log_ratio" not in lines[0]
    assert all(line["first_log_ratio"] <= 1e-4 for line in lines[1:])
    assert lines[0]["warming"] == 1 and lines[1]["warming"] == 0
    assert all(line["kl_per_response"] != 0 for line in lines)
    assert all(line.keys() >= {f"seconds_{name}" for name in PROFILED} | {"utilisation"} for line in lines)
    assert len({line["product_rate"] for line in lines}) == 1 and lines[0]["product_rate"] > 1e6
    assert [("seconds_save" in line) for line in lines] == [False, False, True, False]  # saved after 2 and 4


@pytest.mark.parametrize("kind", BACKBONES)
def test_micro_batches_and_cores_change_no_gradient(kind, tiny_model, monkeypatch):
    """Case 48. Whole, in pieces, and with as many cores as roles (each then takes a role)."""
    gradients = []
    for tokens, cores in ((10_000, 1), (60, 1), (10_000, 2), (60, 3)):
        monkeypatch.setattr("keel.models.separate.workers_for", lambda model, device, cores=cores: cores)
        recipe = recipe_of(micro_tokens=tokens)
        assert recipe.ppo
        roles, rollouts = rolled_out(kind, tiny_model, recipe)
        experience, _ = experience_of(roles, recipe, rollouts, torch.arange(12.0))
        learner = learner_of(roles, recipe)
        accumulate(learner, experience, [7, 2, 9, 4, 0], first_state(learner.ppo), ["policy", "critic"], "here")
        gradients.append(
            {
                f"{r}.{n}": p.grad
                for r in ("policy", "critic")
                for n, p in roles.parameters(r).items()
                if p.grad is not None
            }
        )
    whole, *others = gradients
    assert len(whole) > 10
    for other in others:
        assert whole.keys() == other.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("cores", [1, 2])
def test_gradients_in_memory_that_is_used_again_change_no_byte(cores, tiny_model, monkeypatch):
    monkeypatch.setattr("keel.models.separate.workers_for", lambda model, device: cores)
    taken: list[int] = []
    own = spare._taken

    def told(*where):
        place = own(*where)
        taken.append(place is not None)
        return place

    monkeypatch.setattr(spare, "_taken", told)
    weights = []
    for large in (1 << 60, 0):
        monkeypatch.setattr(spare, "LARGE", large)
        recipe = recipe_of(micro_tokens=120, epochs=2)
        assert recipe.ppo
        roles, rollouts = rolled_out("separate", tiny_model, recipe)
        experience, _ = experience_of(roles, recipe, rollouts, torch.arange(12.0))
        optimizers = {role: make_optimizer(roles.parameters(role).values()) for role in ("policy", "critic")}
        for optimizer in optimizers.values():
            set_rate(optimizer, 1e-2)
        taken.clear()
        update(learner_of(roles, recipe), experience, 0, first_state(recipe.ppo), optimizers)
        weights.append([roles.fingerprint("policy"), roles.fingerprint("critic")])
    assert sum(taken) > 100, "nothing was used again"
    assert weights[0] == weights[1]


def test_losses_and_metrics_are_means_over_the_tokens_of_the_minibatch(tiny_model):
    """The old policy was less sure of every token by 0.5: the ratio is e^0.5, clipped where A is above 0."""
    recipe = recipe_of(micro_tokens=60)
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, _ = experience_of(roles, recipe, rollouts, torch.arange(12.0))
    rows = [7, 2, 9, 4, 0]
    mask, advantages = rollouts.response_mask_BT[rows], experience.advantages_BT[rows]
    old = replace(experience, policy_logprobs_BT=experience.policy_logprobs_BT - 0.5)
    learner = learner_of(roles, recipe)
    found = accumulate(learner, old, rows, first_state(learner.ppo), ["policy", "critic"], "here")
    assert experience.values_BT is not None and experience.returns_BT is not None
    errors = (experience.values_BT - experience.returns_BT)[rows][mask]
    assert found["value_loss"] == pytest.approx(0.5 * errors.square().mean().item(), rel=1e-4)
    assert found["clip_fraction"] == pytest.approx((advantages > 0)[mask].float().mean().item(), abs=1e-6)
    bounded = torch.where(advantages > 0, advantages * 1.2, advantages * math.exp(0.5))[mask]
    assert found["policy_loss"] == pytest.approx(-bounded.mean().item(), rel=1e-4)


def test_experience_worked_by_hand(tiny_model):
    """One row: rewards are -coefficient * KL everywhere, plus the score on the last token; returns sum what follows."""
    recipe = recipe_of(lam=1.0, missing_eos_penalty=2.0)
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, _ = experience_of(roles, recipe, rollouts, torch.full((12,), 3.0), 0.5)
    assert experience.returns_BT is not None
    for b, length in enumerate(rollouts.lengths_B.tolist()):
        kl = experience.policy_logprobs_BT[b, :length] - experience.reference_logprobs_BT[b, :length]
        want = -0.5 * kl
        want[-1] += 3.0 if rollouts.finish[b] == "stop" else 1.0
        torch.testing.assert_close(experience.rewards_BT[b, :length], want)
        torch.testing.assert_close(
            experience.returns_BT[b, :length], want.flip(0).cumsum(0).flip(0), atol=1e-5, rtol=1e-5
        )
    inside = experience.advantages_BT[rollouts.response_mask_BT]
    assert abs(inside.mean()) < 1e-5 and abs(inside.std() - 1) < 1e-4
    assert (experience.advantages_BT[~rollouts.response_mask_BT] == 0).all()


def test_metrics_of_experience_are_over_exactly_the_response_tokens(tiny_model):
    recipe = recipe_of()
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, found = experience_of(roles, recipe, rollouts, torch.arange(12.0))
    mask, (_, entropy_BT) = rollouts.response_mask_BT, logprobs_BT(roles, "policy", rollouts.sequences(), 1.0, 0, 4000)
    kl_N = (experience.policy_logprobs_BT - experience.reference_logprobs_BT)[mask]
    assert not mask.all() and abs(kl_N.sum()) > 0.1
    assert found["kl_per_response"] == pytest.approx(kl_N.sum().item() / 12, rel=1e-4)
    assert found["kl_per_token"] == pytest.approx(kl_N.mean().item(), rel=1e-4)
    assert found["entropy"] == pytest.approx(entropy_BT[mask].mean().item(), rel=1e-5)
    ahead_BT = experience.rewards_BT.flip(1).cumsum(1).flip(1)
    assert found["return_mean"] == pytest.approx(ahead_BT[mask].mean().item(), rel=1e-4)


def test_an_update_that_ends_early_tells_means_over_the_steps_it_took(tiny_model):
    """The first of three minibatches alone, as the policy then has moved too far; what it tells is that one's."""
    recipe = recipe_of(policy={"learning_rate": 1e-2, "target_kl": 1e-6})
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, _ = experience_of(roles, recipe, rollouts, torch.arange(12.0))
    learner = learner_of(roles, recipe)
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([recipe.seed, 0, 0]))).permutation(12)
    first = accumulate(learner, experience, order[:4].tolist(), first_state(recipe.ppo), ["policy", "critic"], "here")
    optimizers = {role: make_optimizer(roles.parameters(role).values()) for role in ("policy", "critic")}
    for optimizer in optimizers.values():
        set_rate(optimizer, 1e-2)
        optimizer.zero_grad()
    found = update(learner, experience, 0, first_state(recipe.ppo), optimizers)
    assert found["steps_taken"] == pytest.approx(1 / 3)
    assert found["value_loss"] == pytest.approx(first["value_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_padding_of_experience_and_update_by_hand(kind, tiny_model):
    """Sequences of 4, 2, 3 and 3 tokens; a micro-batch holds at most two of them."""
    recipe = recipe_of(micro_tokens=8, rollouts=4, minibatches=2)
    assert recipe.ppo
    mask = torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None]
    ids = [(5,), (6,), (7,), (8,)]
    rollouts = Rollouts(prompts(4), ids, mask.long(), mask, torch.zeros(4, 3), ["stop"] * 4, ["a"] * 4, 0)
    roles = backbone(kind, tiny_model)
    experience, metrics = experience_of(roles, recipe, rollouts, torch.zeros(4))
    assert metrics["padding_experience"] == pytest.approx(1 - 12 / 14)  # 4 with 3, then 3 with 2
    found = accumulate(learner_of(roles, recipe), experience, [0, 1], first_state(recipe.ppo), ["policy"], "here")
    assert found["padding_update"] == pytest.approx(1 - 6 / 8)  # 4 with 2


def test_metrics_of_rollouts_by_hand():
    """Rows of 3, 1, 2 and 2 tokens, the second cut, the third without a score, the last two alike."""
    asked = prompts(2)
    rollouts = Rollouts(
        [asked[0], asked[0], asked[1], asked[1]],
        [(5,)] * 4,
        torch.zeros(4, 3, dtype=torch.long),
        torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None],
        torch.zeros(4, 3),
        ["stop", "length", "stop", "stop"],
        ["a", "b", "c", "c"],
        0,
    )
    gold = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = rollout_metrics(rollouts, torch.tensor([4.0, 4.0, math.nan, 7.0]), lambda _: gold, 2)
    assert found == {
        "score": 5.0,
        "score_sd": pytest.approx(math.sqrt(2)),
        "length": 2.0,
        "eos_rate": 0.75,
        "distinct": 0.75,
        "equal_groups": 1.0,  # of the one group that has two scores
        "gold": 3.0,
    }


def test_the_warm_up_ends_when_the_critic_explains_enough_or_at_its_cap():
    ppo = recipe_of(critic={"warmup_explained_variance": 0.3, "warmup_cap": 5, "learning_rate": 1e-3}).ppo
    assert ppo

    def warming(explained: float, step: int, before: bool = True) -> bool:
        return still_warming(ppo, {"warming": before}, {"explained_variance": explained}, step)

    assert warming(0.29, 4) and not warming(0.3, 0) and not warming(-1.0, 5)
    assert not warming(-1.0, 0, before=False)  # once over, it does not come again


def test_truncated_rows_are_bootstrapped_or_terminal(tiny_model):
    roles, rollouts = rolled_out("separate", tiny_model, recipe_of())
    assert "length" in rollouts.finish
    ends = {}
    for how in ("terminal", "bootstrap"):
        experience, _ = experience_of(roles, recipe_of(truncated=how, lam=1.0), rollouts, torch.zeros(12), 0.0)
        assert experience.returns_BT is not None
        last = rollouts.lengths_B - 1
        ends[how] = experience.returns_BT[torch.arange(12), last]
    cut = torch.tensor([finish == "length" for finish in rollouts.finish])
    assert (ends["terminal"] == 0).all()
    assert (ends["bootstrap"][cut] != 0).all() and (ends["bootstrap"][~cut] == 0).all()


def test_truncated_rows_are_dropped(tiny_model, tmp_path):
    _, stage = run_ppo(tmp_path, "separate", tiny_model, recipe_of(truncated="drop", updates=2))
    lines = list(read_lines(stage.metrics))
    assert all(line["dropped"] == round(12 * (1 - line["eos_rate"])) for line in lines)
    assert any(line["dropped"] > 0 for line in lines)


@pytest.mark.parametrize("kind", BACKBONES)
def test_stopped_and_resumed_is_byte_for_byte_the_unbroken_run(kind, tiny_model, tmp_path):
    recipe = recipe_of(kl={"controller": "adaptive", "target": 1.0, "horizon": 50})
    whole, whole_stage = run_ppo(tmp_path / "whole", kind, tiny_model, recipe)
    with pytest.raises(Interrupted) as stopped:
        run_ppo(tmp_path / "broken", kind, tiny_model, recipe, stop_at=3)
    assert "keel run x" in str(stopped.value)
    resumed, stage = run_ppo(tmp_path / "broken", kind, tiny_model, recipe)
    for role in ("policy", "critic"):
        assert resumed.fingerprint(role) == whole.fingerprint(role)

    def timeless(path):
        return [{k: v for k, v in line.items() if k not in TIMED} for line in read_lines(path)]

    assert timeless(stage.metrics) == timeless(whole_stage.metrics)
    assert timeless(stage.samples) == timeless(whole_stage.samples)
    assert (
        len({line["kl_coefficient"] for line in timeless(stage.metrics)}) == 3
    )  # it stands still while the critic warms up


@pytest.mark.parametrize("value", [float("nan"), None, float("inf"), "good"])
def test_a_reward_that_is_no_number_stops_before_any_weight_moves(value, tiny_model, tmp_path):
    before = backbone("separate", tiny_model, ("policy", "reference", "critic")).fingerprint("policy")
    with pytest.raises(RewardError) as error:
        run_ppo(tmp_path, "separate", tiny_model, recipe_of(critic={"warmup_cap": 0}), reward=lambda response: value)
    assert "scored" in str(error.value)
    again = backbone("separate", tiny_model, ("policy", "reference", "critic")).fingerprint("policy")
    assert again == before


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_reward_rises(kind, tiny_model, tmp_path):
    """A random model learns within seconds to stop early, when only that is rewarded."""
    recipe = recipe_of(
        updates=40 if kind == "shared" else 25,  # adapters of rank 4 learn slower
        rollouts=48,
        minibatches=4,
        kl={"coefficient": 0.0},
        checkpoint_every=100,
        policy={"learning_rate": 3e-2 if kind == "shared" else 1e-2},
        critic={"warmup_cap": 1, "learning_rate": 1e-2},
    )
    _, stage = run_ppo(tmp_path, kind, tiny_model, recipe)
    lengths = [line["length"] for line in read_lines(stage.metrics)]
    assert sum(lengths[-5:]) / 5 < 0.7 * sum(lengths[:3]) / 3


def test_a_loss_that_is_not_finite_names_its_minibatch(tiny_model):
    recipe = recipe_of()
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, _ = experience_of(roles, recipe, rollouts, torch.arange(12.0))
    experience.advantages_BT[rollouts.response_mask_BT] = float("nan")
    learner = learner_of(roles, recipe)
    with pytest.raises(NumberError, match="policy's loss is nan") as caught:
        update(
            learner,
            experience,
            4,
            first_state(learner.ppo),
            {"policy": torch.optim.SGD(roles.parameters("policy").values())},
        )
    assert caught.value.where == "ppo, update 5, epoch 1, minibatch 1"
