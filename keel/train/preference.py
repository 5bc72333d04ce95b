"""DPO and its relatives: the policy straight from preferences, without a reward model and without sampling.

The reference is the SFT model, and the policy before its first step is that model, weight for weight, on either
backbone. So the reference's log-probabilities are computed by the policy itself, once for each response before
training, and kept (4 bytes a response): no second model is ever held, and no pass over the data needs a second forward.
simpo and orpo have no reference and compute none.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.algo.preference import Metrics, dpo, ipo, kto, kto_baseline, mean_nll, orpo, robust_dpo, simpo
from keel.config import PreferenceConfig, SourceConfig
from keel.data.encode import Encoder, micro_batches, pad_sequences
from keel.data.formats import ReadResult, read_prompts
from keel.data.spool import SEQUENCES, Each
from keel.errors import DataError
from keel.evaluate.intervals import wilson
from keel.models.loading import load_encoder
from keel.models.roles import Roles, lengths_with_kin, micro_logprobs
from keel.models.side_by_side import add_gradients
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.train import world
from keel.train.context import Run
from keel.train.encoded import encode_rows, made_of
from keel.train.inputs import chosen, prompts_of, read_judgements, split_prompts
from keel.train.reward import Comparisons, micro_groups, pair_places
from keel.train.stages import accuracy_ceiling, build_policy, compared, save_tokenizer
from keel.train.supervised import Plan, fit
from keel.types import PreferencePair, Prompt, Thumb, TokenSequence

MEASURED_TOGETHER = 4096
"""Responses among which those of similar length share a micro-batch where many are measured."""
REFERENCE_FREE = ("simpo", "orpo")
"""Losses that ask for no reference."""


def sums_B(roles: Roles, sequences: Sequence[TokenSequence], pad_id: int) -> Tensor:
    """Log-probability of each response under the policy, summed over its tokens (nats): [B], with gradient."""
    ids_BS, mask_BS, _ = pad_sequences(sequences, pad_id)
    logprobs_N, _ = micro_logprobs(roles, "policy", ids_BS.to(roles.device), mask_BS.to(roles.device), 1.0)
    return torch.stack([own.sum() for own in logprobs_N.split([len(s.response_ids) for s in sequences])])


@torch.no_grad()
def measured_B(
    roles: Roles,
    sequences: Sequence[TokenSequence],
    pad_id: int,
    micro_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """`sums_B` without gradient, over any number of sequences: [B] on the CPU. `progress` is told how many are done."""
    out_B, done = torch.zeros(len(sequences)), 0
    for start in range(0, len(sequences), MEASURED_TOGETHER):
        some, part_B = sequences[start : start + MEASURED_TOGETHER], out_B[start : start + MEASURED_TOGETHER]
        for rows in micro_batches(lengths_with_kin(some), micro_tokens):
            part_B[rows] = sums_B(roles, [some[i] for i in rows], pad_id).cpu()
            done += len(rows)
            progress(done)
    return out_B


@dataclass(frozen=True)
class Pairs:
    """Prompts with their responses and pairs, and log pi_ref of each response (zeros where the loss asks for none)."""

    groups: Sequence[Comparisons]
    references: Sequence[Tensor]

    @classmethod
    def of(cls, groups: Sequence[Comparisons], reference_B: Tensor | None) -> "Pairs":
        """reference_B: of all sequences of the groups in a row; None: the loss asks for none."""
        starts = starts_of(len(group.sequences) for group in groups)
        whole_B = torch.zeros(starts[-1]) if reference_B is None else reference_B
        return cls(groups, Each(len(groups), lambda i: whole_B[starts[i] : starts[i + 1]]))


def starts_of(sizes: Iterable[int]) -> "array[int]":
    """Where each part begins when all stand in a row, and where the last one ends."""
    return array("q", accumulate(sizes, initial=0))


def in_a_row(groups: Sequence[Comparisons]) -> Each[TokenSequence]:
    """All sequences of the groups."""
    starts = starts_of(len(group.sequences) for group in groups)

    def at(place: int) -> TokenSequence:
        group = bisect_right(starts, place) - 1
        return groups[group].sequences[place - starts[group]]

    return Each(starts[-1], at)


def pair_pass(
    roles: Roles, pairs: Pairs, rows: Sequence[int], settings: PreferenceConfig, pad_id: int
) -> dict[str, float]:
    """Loss and metrics over all pairs of these prompts; adds the gradient of the loss where gradients are on.

    A response is passed once, whatever the number of its pairs. The denominator is the number of pairs of the whole
    batch, so that the split into micro-batches changes nothing.
    """
    count = sum(len(pairs.groups[i].pairs) for i in rows)

    def loss_of(part: list[int]) -> tuple[Tensor, Metrics]:
        some = [pairs.groups[rows[i]] for i in part]
        sequences = [s for group in some for s in group.sequences]
        policy_B = sums_B(roles, sequences, pad_id)
        reference_B = torch.cat([pairs.references[rows[i]] for i in part]).to(policy_B.device)
        lengths_B = torch.tensor([len(s.response_ids) for s in sequences], device=policy_B.device)
        places = pair_places(some).to(policy_B.device)
        return pair_loss(settings, policy_B[places], reference_B[places], lengths_B[places], count)

    workers = roles.workers("policy")
    return _totals(roles, loss_of, micro_groups([pairs.groups[i] for i in rows], settings.micro_tokens, workers))


def pair_loss(
    settings: PreferenceConfig, policy: Tensor, reference: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Metrics]:
    """The chosen loss with its likelihood term; policy, reference and lengths are [2, B], chosen above rejected."""
    beta = settings.beta
    assert beta is not None
    four = (policy[0], policy[1], reference[0], reference[1])
    free = (policy[0], policy[1], lengths[0], lengths[1])
    match settings.loss:
        case "dpo" | "cdpo":
            loss, metrics = dpo(*four, beta, count, settings.label_smoothing or 0.0)
        case "robust":
            assert settings.label_smoothing is not None
            loss, metrics = robust_dpo(*four, beta, count, settings.label_smoothing)
        case "ipo":
            loss, metrics = ipo(*four, beta, count)
        case "simpo":
            assert settings.gamma is not None
            loss, metrics = simpo(*free, beta, settings.gamma, count)
        case "orpo":
            loss, metrics = orpo(*free, beta, count)
        case "kto":
            raise AssertionError("kto takes thumbs, not pairs")
    if settings.likelihood:
        loss = loss + settings.likelihood * mean_nll(policy[0], lengths[0], count)
    return loss, metrics


@dataclass(frozen=True)
class Judged:
    """A response with its thumb, and a response to another prompt set after this prompt, for KTO's baseline."""

    sequence: TokenSequence
    mismatched: TokenSequence
    up: bool


def judged(sequences: Sequence[TokenSequence], up: Sequence[int], sizes: Sequence[int]) -> Each[Judged]:
    """Thumbs of several prompts, those of one prompt together; mismatched responses are those of the next prompt.

    sequences, up: of all thumbs in a row. sizes: how many each prompt has.
    """
    starts = starts_of(sizes)

    def at(row: int) -> Judged:
        group = bisect_right(starts, row) - 1
        then = (group + 1) % len(sizes)
        own, other = sequences[row], sequences[starts[then] + (row - starts[group]) % sizes[then]]
        return Judged(own, TokenSequence(own.prompt_ids, other.response_ids), bool(up[row]))

    return Each(starts[-1], at)


def require_prompts(count: int) -> None:
    """Raises DataError where there is one prompt alone."""
    if count < 2:
        raise DataError(
            "loss kto needs responses to at least two prompts: its baseline is measured on those of others",
            where="preference.data",
            remedy="give more data, or lower preference.held_out",
        )


@dataclass(frozen=True)
class Thumbs:
    """Judged responses with log pi_ref of each and of its mismatched one, [B] each."""

    rows: Sequence[Judged]
    reference_B: Tensor
    mismatched_reference_B: Tensor


def thumb_pass(
    roles: Roles, thumbs: Thumbs, rows: Sequence[int], settings: PreferenceConfig, pad_id: int
) -> dict[str, float]:
    """KTO's loss and metrics over these responses; adds the gradient of the loss where gradients are on.

    The baseline is measured first, over the whole batch and without gradient; the denominators are of the whole batch.
    """
    beta, up_weight, down_weight = settings.beta, settings.desirable_weight, settings.undesirable_weight
    assert beta is not None and up_weight is not None and down_weight is not None
    some = [thumbs.rows[i] for i in rows]
    ups = sum(row.up for row in some)
    mismatched_B = measured_B(roles, [row.mismatched for row in some], pad_id, settings.micro_tokens)
    baseline = kto_baseline(mismatched_B, thumbs.mismatched_reference_B[list(rows)]).to(roles.device)

    def loss_of(part: list[int]) -> tuple[Tensor, Metrics]:
        policy_B = sums_B(roles, [some[i].sequence for i in part], pad_id)
        reference_B = thumbs.reference_B[[rows[i] for i in part]].to(policy_B.device)
        up_B = torch.tensor([some[i].up for i in part], device=policy_B.device)
        loss, metrics = kto(
            policy_B, reference_B, up_B, baseline, beta, (up_weight, down_weight), (ups, len(some) - ups)
        )
        if settings.likelihood:
            lengths_B = torch.tensor([len(some[i].sequence.response_ids) for i in part], device=policy_B.device)
            loss = loss + settings.likelihood * mean_nll(policy_B[up_B], lengths_B[up_B], max(1, ups))
        return loss, metrics

    lengths = [len(row.sequence) for row in some]
    parts = micro_batches(lengths, settings.micro_tokens, roles.workers("policy"))
    return {"kto_baseline": baseline.item()} | _totals(roles, loss_of, parts)


def _totals(
    roles: Roles, loss_of: Callable[[list[int]], tuple[Tensor, Metrics]], parts: Sequence[list[int]]
) -> dict[str, float]:
    """Sums of loss and metrics over the parts; adds the gradient of the loss where gradients are on."""

    def numbers(part: list[int]) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = loss_of(part)
        return loss, {name: value.item() for name, value in {"loss": loss, **metrics}.items()}

    if torch.is_grad_enabled():
        found = add_gradients(numbers, parts, list(roles.parameters("policy").values()), roles.workers("policy"))
    else:
        found = [numbers(part)[1] for part in parts]
    totals: Counter[str] = Counter()
    for values in found:
        totals.update(values)
    return dict(totals)


def chance_above(up_B: Tensor, down_B: Tensor) -> float:
    """The chance that a reward of the first kind is above one of the second, ties half (area under the ROC curve)."""
    above = up_B[:, None] - down_B[None, :]
    return ((above > 0).double() + 0.5 * (above == 0).double()).mean().item()


Judgements = ReadResult[PreferencePair] | ReadResult[Thumb]
Work = tuple[
    Sequence[Prompt],
    Sequence[int],
    Callable[[list[int]], dict[str, float]],
    Callable[[], dict[str, float]],
    dict[str, Any],
]
"""Prompts and lengths of the rows to train on, a step over some of them, the held-out numbers, and what was found in
the data."""


def preference_stage(
    run: Run, stage: StageFolder, start: Path | str, read: Judgements | None, data: Path, ranked: Path | None
) -> dict[str, Any]:
    """Trains the policy on preferences and leaves it as a plain folder.

    read: None in the sandbox; then the pairs are those in `ranked` (of the reward stage), or collected here where that
    is None too, from the prompts in `data`.
    """
    recipe, settings = run.recipe, run.recipe.preference
    assert settings and settings.learning_rate
    encoder = load_encoder(start, recipe.model)
    roles = build_policy(run, start, recipe.model.backbone == "shared")
    if read is None:
        if ranked is None:
            prompts = list(read_prompts(data / world.PROMPTS).records)
            ranked = world.collect_preferences(run, stage, LocalEngine(roles, encoder), prompts, settings)
        read = read_judgements(SourceConfig(path=[str(ranked)]), settings, run.folder.path)
    asked, lengths, step, measure, found = (_thumbs if settings.loss == "kto" else _pairs)(run, roles, encoder, read)
    plan = Plan.of(settings, len(lengths))
    numbers = fit(run, stage, settings.loss, roles, "policy", asked, plan, step, measure, lengths)
    if settings.loss not in (*REFERENCE_FREE, "kto") and numbers["heldout_reward_chosen"] < 0:
        run.console.line(
            "preferred responses are less likely now than under the SFT model, the others by still more: the loss sees "
            "their difference alone. preference.likelihood keeps the preferred ones up."
        )
    roles.export("policy", stage.model)
    save_tokenizer(encoder, stage.model)
    return {**numbers, **found, "rows": read.counts, "cut": dict(encoder.counts), "steps": plan.steps} | (
        # Pairs of one prompt are alike: prompts are counted, which is exact for one pair a prompt and wide for more.
        {"accuracy_interval": wilson(numbers["heldout_accuracy"], found["heldout_prompts"])} if "pairs" in found else {}
    )


def _pairs(run: Run, roles: Roles, encoder: Encoder, read: ReadResult[Any]) -> Work:
    settings, pad_id = run.recipe.preference, encoder.pad_id
    assert settings
    train, held = split_prompts(read.records, settings, run.recipe.seed, "preference")
    groups = compared(run, settings, encoder, read.sha256, train, held)
    pairs = Pairs.of(groups, _reference(run, roles, encoder, in_a_row(groups), settings))

    def measure() -> dict[str, float]:
        with torch.no_grad():
            numbers = pair_pass(roles, pairs, range(len(train), len(groups)), settings, pad_id)
        return {f"heldout_{name}": numbers[name] for name in ("loss", "accuracy", "reward_chosen")}

    found = {"pairs": len(train.rows), "prompts": len(train), "heldout_pairs": len(held.rows)}
    found["heldout_prompts"] = len(held)
    return (
        train.prompts,
        array("q", (groups[i].longest for i in range(len(train)))),
        lambda rows: pair_pass(roles, pairs, rows, settings, pad_id),
        measure,
        found | accuracy_ceiling(run.recipe, held),
    )


def _thumbs(run: Run, roles: Roles, encoder: Encoder, read: ReadResult[Any]) -> Work:
    """Raises DataError where one kind of thumb is missing on either side."""
    settings, pad_id = run.recipe.preference, encoder.pad_id
    assert settings
    train, held = split_prompts(read.records, settings, run.recipe.seed, "preference")
    require_prompts(len(train))
    numbers = train.rows + held.rows
    given: Sequence[Thumb] = chosen(read.records, numbers)
    encoded = encode_rows(
        run,
        "preference",
        encoder,
        SEQUENCES,
        len(given),
        lambda i: [encoder.sequence(given[i].prompt, given[i].response)],
        made_of(read.sha256, settings.data, numbers, thumbs=True),
    )
    sequences = Each(len(given), lambda i: encoded[i][0])
    up = bytearray(thumb.desirable for thumb in given)
    rows = judged(sequences, up, train.sizes)
    kept = range(len(rows), len(given))
    ups, downs = ([sequences[i] for i in kept if up[i] == kind] for kind in (True, False))
    found = {"thumbs_up": sum(up[: len(rows)]), "thumbs": len(rows), "heldout_thumbs": len(kept)}
    if not ups or not downs or found["thumbs_up"] in (0, len(rows)):
        raise DataError(
            f"loss kto needs thumbs of both kinds; of {len(rows)} to train on {found['thumbs_up']} are up, of "
            f"{len(kept)} held out {len(ups)}",
            where="preference",
            remedy="give thumbs of both kinds, or raise preference.held_out",
        )
    both = Each(2 * len(rows), lambda i: rows[i // 2].mismatched if i % 2 else sequences[i // 2])
    either = [*ups, *downs]
    every = Each(len(both) + len(either), lambda i: both[i] if i < len(both) else either[i - len(both)])
    reference_B = _reference(run, roles, encoder, every, settings)
    assert reference_B is not None and settings.beta is not None
    both_B, ups_B, downs_B = reference_B.split([len(both), len(ups), len(downs)])
    thumbs, beta = Thumbs(rows, both_B[::2], both_B[1::2]), settings.beta

    def measure() -> dict[str, float]:
        up_B, down_B = (
            beta * (measured_B(roles, some, pad_id, settings.micro_tokens) - before_B)
            for some, before_B in ((ups, ups_B), (downs, downs_B))
        )
        return {"heldout_accuracy": chance_above(up_B, down_B), "heldout_reward_chosen": up_B.mean().item()}

    lengths = array("q", (len(sequences[i]) for i in range(len(rows))))
    asked = prompts_of(chosen(read.records, train.rows))
    return asked, lengths, lambda some: thumb_pass(roles, thumbs, some, settings, pad_id), measure, found


def _reference(
    run: Run, roles: Roles, encoder: Encoder, sequences: Sequence[TokenSequence], settings: PreferenceConfig
) -> Tensor | None:
    """log pi_ref of each response, by the policy before its first step; None where the loss asks for none."""
    if settings.loss in REFERENCE_FREE:
        return None
    with run.console.task("log-probabilities of the reference", len(sequences), unit="response") as task:
        return measured_B(roles, sequences, encoder.pad_id, settings.micro_tokens, run.watch(task))
