"""The preference stage: its losses and gradients, what it starts from, that it learns, that it can be broken off."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from keel.config import PreferenceConfig, Recipe
from keel.data.formats import ReadResult, read_preferences, read_thumbs
from keel.errors import DataError, Interrupted
from keel.metrics import TIMED
from keel.models.roles import logprobs_BT
from keel.models.separate import SeparateRoles
from keel.models.shared import SharedRoles
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import read_lines
from keel.train import preference
from keel.train.context import Run
from keel.train.preference import (
    REFERENCE_FREE,
    Judged,
    Pairs,
    Thumbs,
    chance_above,
    in_a_row,
    judged,
    measured_B,
    pair_pass,
    preference_stage,
    require_prompts,
    thumb_pass,
)
from keel.train.reward import Comparisons
from keel.types import PreferencePair, Prompt, Thumb
from tests.tiny import backbone, comparisons, encoder_of, load, prompts

BACKBONES = ["shared", "separate"]
PAIRED = ["dpo", "cdpo", "robust", "ipo", "simpo", "orpo"]


def settings_of(loss: str, **changed: Any) -> PreferenceConfig:
    preference = {"loss": loss, "data": {"path": ["unused"]}, **changed}
    resolved = Recipe.model_validate({"name": "x", "model": {"path": "x"}, "preference": preference}).resolved()
    assert resolved.preference
    return resolved.preference


def pairs_of(roles, groups: list[Comparisons], settings: PreferenceConfig) -> Pairs:
    flat = [s for group in groups for s in group.sequences]
    return Pairs.of(groups, None if settings.loss in REFERENCE_FREE else measured_B(roles, flat, 0, 4000))


def gradient_of(roles) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in roles.parameters("policy").values() if p.grad is not None])


def answers(count: int) -> list[tuple[Prompt, str, str]]:
    """Prompts, each with a reply that is to be preferred and one that is not."""
    return [(p, f"good {i % 3}", f"bad thing {i % 5}") for i, p in enumerate(prompts(count))]


def read_of(loss: str, count: int = 24) -> ReadResult[Any]:
    rows = answers(count)
    records = (
        [t for p, good, bad in rows for t in (Thumb(p, good, True), Thumb(p, bad, False))]
        if loss == "kto"
        else [PreferencePair(p, good, bad) for p, good, bad in rows]
    )
    return ReadResult(records, {"read": count, "kept": count, "dropped": {}, "repaired": {}}, "")


def judged_of(encoder, groups: list[list[Thumb]]) -> Sequence[Judged]:
    thumbs = [thumb for group in groups for thumb in group]
    sequences = [encoder.sequence(thumb.prompt, thumb.response) for thumb in thumbs]
    return judged(sequences, [thumb.desirable for thumb in thumbs], [len(group) for group in groups])


def run_stage(folder: Path, kind: str, model: Path, loss: str, read=None, stop_at: int | None = None, **changed: Any):
    """The stage in `folder`; stop_at asks it to stop once so many steps are logged."""
    preference = {
        "loss": loss,
        "data": {"path": ["unused"]},
        "batch": 8,
        "epochs": 4,
        "held_out": 8,
        "learning_rate": 1e-2 if kind == "shared" else 3e-3,
        "checkpoint_every": 3,
        **changed,
    }
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "threads": 1,
            "model": {"path": str(model), "backbone": kind, "max_response_tokens": 24},
            "preference": preference,
        }
    ).resolved()
    with RunFolder.open(folder, "test") as run_folder:
        stage = run_folder.stage("preference")
        stage.path.mkdir(exist_ok=True)
        interrupt: Any = Interrupt() if stop_at is None else StopAfter(stage.metrics, stop_at)
        run = Run(recipe, run_folder, Console(), interrupt, torch.device("cpu"), "keel run x")
        result = preference_stage(run, stage, model, read or read_of(loss), folder, None)
    return stage, result


class StopAfter:
    """In an Interrupt's place: asks to stop once so many steps are logged."""

    number = signal.SIGINT

    def __init__(self, log: Path, steps: int):
        self.log, self.steps = log, steps

    @property
    def requested(self) -> bool:
        return self.log.exists() and len(list(read_lines(self.log))) >= self.steps


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("loss", PAIRED)
def test_a_pair_loss_is_the_mean_over_pairs_however_it_is_split(kind, loss, tiny_model):
    """Case 48."""
    groups, gradients, numbers = comparisons(4), [], {}
    for tokens in (10_000, 70):
        settings = settings_of(loss, micro_tokens=tokens, **({} if loss == "orpo" else {"likelihood": 0.5}))
        roles = backbone(kind, tiny_model, ("policy",), ("policy",))
        pairs = pairs_of(roles, groups, settings)
        with torch.no_grad():  # away from the reference, so that no margin is zero
            for parameter in roles.parameters("policy").values():
                parameter.mul_(1.1)
        numbers = pair_pass(roles, pairs, [2, 0, 3], settings, 0)
        gradients.append(gradient_of(roles))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-3)
    assert gradients[0].abs().max() > 1e-4
    assert numbers["margin"] == pytest.approx(numbers["reward_chosen"] - numbers["reward_rejected"], abs=1e-5)


def test_dpo_of_a_batch_by_hand(tiny_model):
    """Some prompts out of order, against log-probabilities of whole rows and a reference model of its own."""
    groups, settings = comparisons(4), settings_of("dpo", beta=0.3, likelihood=0.5, micro_tokens=70)
    roles = backbone("separate", tiny_model, ("policy", "reference"), ("policy",))
    flat = [s for group in groups for s in group.sequences]
    sums = {role: logprobs_BT(roles, role, flat, 1.0, 0, 4000)[0].sum(1) for role in ("policy", "reference")}
    got = pair_pass(roles, Pairs.of(groups, sums["reference"]), [3, 1], settings, 0)
    chosen, rejected = torch.tensor([(3 * g + a, 3 * g + b) for g in (3, 1) for a, b in groups[g].pairs]).T
    ratio = sums["policy"] - sums["reference"]
    assert ratio.abs().min() > 1e-3
    nll = -sums["policy"] / torch.tensor([len(s.response_ids) for s in flat])
    want = (-logsigmoid(0.3 * (ratio[chosen] - ratio[rejected])) + 0.5 * nll[chosen]).mean()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-4)
    assert got["reward_chosen"] == pytest.approx(0.3 * ratio[chosen].mean().item(), rel=1e-3, abs=1e-5)


def test_kto_of_a_batch_by_hand(tiny_model):
    """The same for thumbs, each with a reference of its own."""
    encoder, batch = encoder_of(tiny_model), [7, 2, 5]
    rows = judged_of(encoder, [[Thumb(p, good, True), Thumb(p, bad, False)] for p, good, bad in answers(6)])
    roles = backbone("separate", tiny_model, ("policy",), ("policy",))
    own, other = (
        measured_B(roles, [getattr(r, n) for r in rows], encoder.pad_id, 4000) for n in ("sequence", "mismatched")
    )
    settings = settings_of("kto", undesirable_weight=1.5, likelihood=0.5, micro_tokens=70)
    thumbs = Thumbs(rows, own - torch.arange(12.0), other - torch.arange(12.0) / 4)
    got = thumb_pass(roles, thumbs, batch, settings, encoder.pad_id)
    z = (7 + 2 + 5) / 4 / 3
    # Row 2 is a thumb up with log-ratio 2, rows 7 and 5 are down with 7 and 5
    losses = torch.sigmoid(0.1 * torch.tensor([z - 2.0, 7.0 - z, 5.0 - z])) * torch.tensor([1.0, 1.5, 1.5])
    nll = -own[2] / len(rows[2].sequence.response_ids)
    assert got["loss"] == pytest.approx((losses.mean() + 0.5 * nll).item(), rel=1e-4)
    assert got["kto_baseline"] == pytest.approx(z, rel=1e-4) and got["reward_chosen"] == pytest.approx(0.2, rel=1e-3)
    assert got["reward_rejected"] == pytest.approx(0.6, rel=1e-3) and got["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", BACKBONES)
def test_thumbs_are_judged_against_the_baseline_of_the_whole_batch_however_it_is_split(kind, tiny_model):
    encoder = encoder_of(tiny_model)
    rows = judged_of(encoder, [[Thumb(p, good, True), Thumb(p, bad, False)] for p, good, bad in answers(6)])
    gradients, numbers = [], []
    for tokens in (10_000, 70):
        settings = settings_of("kto", micro_tokens=tokens, undesirable_weight=1.5, likelihood=0.1)
        roles = backbone(kind, tiny_model, ("policy",), ("policy",))
        zeros = torch.full((len(rows),), -40.0)
        numbers.append(thumb_pass(roles, Thumbs(rows, zeros, zeros - 100), [1, 4, 6, 3, 9], settings, encoder.pad_id))
        gradients.append(gradient_of(roles))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-3)
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    assert numbers[0]["kto_baseline"] > 0
    mismatched = measured_B(roles, [rows[i].mismatched for i in (1, 4, 6, 3, 9)], encoder.pad_id, 4000)
    assert numbers[0]["kto_baseline"] == pytest.approx(max(0.0, (mismatched + 140).mean().item()), rel=1e-4)


def test_mismatched_responses_are_of_another_prompt(tiny_model):
    encoder = encoder_of(tiny_model)
    groups = [[Thumb(p, f"reply {i} {k}", True) for k in range(1 + i % 3)] for i, p in enumerate(prompts(5))]
    rows = judged_of(encoder, groups)
    own = {row.sequence.response_ids: row.sequence.prompt_ids for row in rows}
    assert len(rows) == sum(map(len, groups))
    for row in rows:
        assert row.mismatched.prompt_ids == row.sequence.prompt_ids
        assert own[row.mismatched.response_ids] != row.sequence.prompt_ids
    with pytest.raises(DataError, match="at least two prompts"):
        require_prompts(1)


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_policy_before_its_first_step_is_the_reference(kind, tiny_model):
    """Case 53. So its log-probabilities then are the reference's, and every margin starts at exactly 0."""
    fresh = (
        SharedRoles(load(tiny_model), ["policy", "reference"], ["policy"], 4, 8.0, 0)
        if kind == "shared"
        else SeparateRoles.build(load(tiny_model), ["policy", "reference"], ["policy"], 0)
    )
    groups, settings = comparisons(4), settings_of("dpo")
    flat = [s for group in groups for s in group.sequences]
    reference = logprobs_BT(fresh, "reference", flat, 1.0, 0, 4000)[0].sum(1)
    torch.testing.assert_close(measured_B(fresh, flat, 0, 4000), reference, atol=1e-4, rtol=1e-6)
    numbers = pair_pass(fresh, pairs_of(fresh, groups, settings), range(4), settings, 0)
    assert numbers["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert numbers["margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("loss", [*PAIRED, "kto"])
def test_the_margin_rises(kind, loss, tiny_model, tmp_path):
    stage, result = run_stage(tmp_path, kind, tiny_model, loss)
    lines = list(read_lines(stage.metrics))
    assert lines[-1]["margin"] > lines[0]["margin"] + 0.02
    assert result["heldout_accuracy"] > 0.9 and lines[-1]["heldout_accuracy"] == result["heldout_accuracy"]
    if loss not in REFERENCE_FREE:
        assert lines[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert load(stage.model).num_parameters() == load(tiny_model).num_parameters()


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_stopped_and_resumed_is_byte_for_byte_the_unbroken_run(kind, loss, tiny_model, tmp_path):
    whole, _ = run_stage(tmp_path / "whole", kind, tiny_model, loss, epochs=2, likelihood=0.1)
    with pytest.raises(Interrupted):
        run_stage(tmp_path / "broken", kind, tiny_model, loss, stop_at=2, epochs=2, likelihood=0.1)
    assert len(list(read_lines(tmp_path / "broken" / "test" / "preference" / "metrics.jsonl"))) == 2
    stage, _ = run_stage(tmp_path / "broken", kind, tiny_model, loss, epochs=2, likelihood=0.1)
    for name in ("model/model.safetensors", "model/config.json"):
        assert (stage.path / name).read_bytes() == (whole.path / name).read_bytes()

    def timeless(path: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k not in TIMED} for line in read_lines(path)]

    assert timeless(stage.metrics) == timeless(whole.metrics)


def test_where_both_fall_it_is_said_and_a_likelihood_term_keeps_the_preferred_up(tiny_model, tmp_path, capsys):
    """Replies that differ in one word: pushing the other down drags the preferred one along."""
    rows = [
        PreferencePair(p, f"the pot is on shelf {i}", f"the pot is on shelf {i} !") for i, p in enumerate(prompts(16))
    ]
    read = ReadResult(rows, {"read": 16, "kept": 16, "dropped": {}, "repaired": {}}, "")
    fall = {"batch": 4, "held_out": 4, "epochs": 8, "learning_rate": 1e-2}
    _, plain = run_stage(tmp_path / "plain", "separate", tiny_model, "simpo", read, **fall)
    told = "preferred responses are less likely now"
    assert told not in capsys.readouterr().out  # without a reference nothing can be said
    _, alone = run_stage(tmp_path / "alone", "separate", tiny_model, "dpo", read, **fall)
    assert (alone["heldout_reward_chosen"] < 0) == (told in capsys.readouterr().out)
    _, kept = run_stage(tmp_path / "kept", "separate", tiny_model, "dpo", read, likelihood=1.0, **fall)
    assert kept["heldout_reward_chosen"] > max(0.0, alone["heldout_reward_chosen"])
    assert plain["heldout_accuracy"] >= 0.5


def test_thumbs_of_one_kind_are_refused(tiny_model, tmp_path):
    read = ReadResult([Thumb(p, "reply", True) for p in prompts(24)], read_of("kto").counts, "")
    with pytest.raises(DataError, match="thumbs of both kinds; of 16 to train on 16 are up"):
        run_stage(tmp_path, "separate", tiny_model, "kto", read)


def test_chance_above_by_hand():
    assert chance_above(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 1.0, 2.0])) == pytest.approx((3 + 1.5) / 6)


@pytest.mark.parametrize(("loss", "read", "name"), [("dpo", read_preferences, "dpo"), ("kto", read_thumbs, "kto")])
def test_a_step_on_real_rows(loss, read, name, shared, tiny_model, tmp_path):
    result = read(shared / "data" / f"{name}_en_demo.json")
    few = ReadResult(result.records[:40], result.counts, result.sha256)
    stage, found = run_stage(tmp_path, "separate", tiny_model, loss, few, epochs=1)
    assert all(line["loss"] > 0 for line in read_lines(stage.metrics))
    assert found["cut"]["responses cut"] > 0 and 0 <= found["heldout_accuracy"] <= 1


def test_many_responses_are_measured_part_by_part(tiny_model, monkeypatch):
    """Four at a time, as they are all at once; and a group's responses stand where its sequences do."""
    roles = backbone("separate", tiny_model, ("policy",), ("policy",))
    groups = comparisons(5)
    flat = [s for group in groups for s in group.sequences]
    assert list(in_a_row(groups)) == flat
    whole, told = measured_B(roles, flat, 0, 4000), []
    monkeypatch.setattr(preference, "MEASURED_TOGETHER", 4)
    torch.testing.assert_close(measured_B(roles, in_a_row(groups), 0, 4000, told.append), whole, atol=1e-5, rtol=1e-5)
    assert told[-1] == 15 and len(told) >= 4 and told == sorted(told)
    pairs = Pairs.of(groups, whole)
    assert torch.equal(torch.cat(list(pairs.references)), whole) and torch.equal(pairs.references[2], whole[6:9])
