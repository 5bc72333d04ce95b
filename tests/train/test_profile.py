"""The profile of a run: operations counted by hand, and what stands in metrics and summary."""

from pathlib import Path

import pytest
import torch

from keel.metrics import PROFILED, REGISTRY
from keel.models.flops import Products, products_of
from keel.runs.folder import RunFolder
from keel.runs.log import JsonLines
from keel.train.profile import Clock, Work, product_rate, profile_metrics, profile_of, profile_sentence, step_work
from keel.types import Prompt, Rollouts
from tests.tiny import backbone

FULL = Products(linear=10, unembedding=6, adapter=0, attention=4)
LORA = Products(linear=10, unembedding=6, adapter=1, attention=4)


def rollouts_of(prompts: list[tuple[int, ...]], lengths: list[int]) -> Rollouts:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    asked = [Prompt(({"role": "user", "content": "x"},)) for _ in prompts]
    return Rollouts(asked, prompts, mask.long(), mask, mask.float(), ["stop"] * len(prompts), ["x"] * len(prompts), 0)


def test_operations_by_hand():
    # One sequence of 3 tokens, 2 of them unembedded; keys looked at: 1 + 2 + 3.
    assert FULL.forward([3], 2) == 2 * 10 * 3 + 2 * 6 * 2 + 4 * 4 * 6
    assert FULL.training([3], 2) == 3 * FULL.forward([3], 2)
    assert LORA.forward([3], 2) == 2 * 11 * 3 + 2 * 6 * 2 + 4 * 4 * 6
    assert LORA.training([3], 2) == 4 * 10 * 3 + 6 * 1 * 3 + 4 * 6 * 2 + 12 * 4 * 6


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_products_of_a_tiny_model(kind, tiny_model):
    roles = backbone(kind, tiny_model)
    found = products_of(roles, "policy")
    # Two layers of width 32 with a feed-forward width of 64: four projections, three feed-forward products.
    assert found.linear == 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert found.adapter == (0 if kind == "separate" else 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64)))
    assert found.unembedding == roles.model("policy").config.vocab_size * 32
    assert found.attention == 2 * 32


def test_work_of_a_step():
    rollouts = rollouts_of([(5, 6), (5, 6), (7,)], [3, 1, 2])
    trained = rollouts.select([0, 2])
    work = step_work(FULL, [rollouts], trained, ["policy", "critic"], passes=2.0, learned_reward=True)
    # The second response shares its prompt with the first, which is passed through the model once.
    assert work["generate"] == Work(6, FULL.forward([5, 3, 3], 6) - FULL.forward([2], 0))
    assert work["score"] == Work(11, FULL.forward([5, 3, 3], 0))
    assert work["policy"] == work["reference"] == Work(8, FULL.forward([5, 3], 5))
    assert work["values"] == Work(8, FULL.forward([5, 3], 0))
    assert work["update"] == Work(16, 2 * (FULL.training([5, 3], 5) + FULL.training([5, 3], 0)))
    whole = step_work(FULL, [rollouts], rollouts, ["policy"], passes=1.0, learned_reward=True)
    assert whole["policy"] == Work(11, FULL.forward([5, 3, 3], 6) - FULL.forward([2], 0))
    assert whole["update"] == Work(11, FULL.training([5, 3, 3], 6))  # minibatches part responses to one prompt
    function = step_work(FULL, [rollouts], None, [], passes=0.0, learned_reward=False)
    assert function.keys() == {"generate"}


def test_speeds_are_work_by_time():
    work = {"generate": Work(60, 300.0), "score": Work(10, 0.0), "policy": Work(10, 100.0)}
    found = profile_metrics({"seconds_generate": 2.0, "seconds_score": 1.0, "seconds_experience": 1.0}, work, 1000.0)
    assert found == {
        "product_rate": 1000.0,
        "tokens_per_second_generate": 30.0,
        "utilisation_generate": 0.15,
        "tokens_per_second_score": 10.0,
        "utilisation": 0.075,  # of all four seconds; the policy had no lap
    }
    assert all(REGISTRY[name].timed for name in found)


def test_profile_of_a_stage_weighs_by_time(tmp_path: Path):
    with RunFolder.open(tmp_path, "x") as folder:
        stage = folder.stage("ppo")
        stage.path.mkdir()
        with JsonLines(stage.metrics) as log:
            for step, (seconds, speed, share) in enumerate([(1.0, 10.0, 0.5), (3.0, 30.0, 0.1)], 1):
                part = {"seconds_update": seconds, "tokens_per_second_update": speed, "utilisation_update": share}
                part["padding_update"] = share / 10
                log.append({"step": step, "seconds": seconds, "product_rate": 2e9, "utilisation": share, **part})
            # A step in which no row was left to train on.
            log.append({"step": 3, "seconds": 0.0, "product_rate": 2e9, "utilisation": 0.0})
        with JsonLines(stage.events) as log:
            log.append({"step": 2, "event": "checkpoint", "seconds": 2.0, "waited": 0.5})
        found = profile_of(stage, "float32")
    assert found["parts"]["update"] == {"seconds": 4.0, "tokens_per_second": 25.0, "utilisation": pytest.approx(0.2)}
    assert found["parts"]["save"] == {"seconds": 0.5}
    assert found["padding"] == pytest.approx(0.03)  # of the two steps that have an update
    assert found["seconds"] == 4.5 and found["utilisation"] == pytest.approx(0.2)
    assert profile_sentence(found) == (
        "update 4.0 s (25 tokens/s, 20%), save 0.5 s; model FLOP utilisation 20% of 2 GFLOP/s, a matrix product "
        "for float32 weights here; 3.0% of the update's micro-batches is padding"
    )


def test_a_lap_adds_to_what_the_part_had():
    clock = Clock()
    for name in ("policy", "values", "policy"):
        clock.lap(name)
    assert list(clock.laps) == ["seconds_policy", "seconds_values"]
    assert sum(clock.laps.values()) == pytest.approx(clock.mark - clock.start)


def test_every_part_has_its_metrics():
    kinds = ("seconds", "tokens_per_second", "utilisation")
    assert {f"{kind}_{name}" for kind in kinds for name in PROFILED} <= REGISTRY.keys()


def test_the_rate_is_measured_once():
    rate = product_rate(torch.float32, torch.device("cpu"))
    assert rate > 0 and product_rate(torch.float32, torch.device("cpu")) == rate
