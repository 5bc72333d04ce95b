"""Every row that a recipe trains on, read and split before anything is trained."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from keel.config import PreferenceConfig, Recipe, RewardConfig, SftConfig, SourceConfig
from keel.data import records
from keel.data.formats import ReadResult, read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.data.spool import Each, digest_of, numbered
from keel.data.stream import mixture_of
from keel.errors import DataError
from keel.inspect.survey import counts_of
from keel.runs.console import Console
from keel.train import world
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Preference = TypeVar("Preference", PreferencePair, Thumb)
T = TypeVar("T")


def split_rows(
    count: int, held_out: int, seed: int, most: int | None = None, where: str = "sft", field: str = "sft.held_out"
) -> tuple["array[int]", "array[int]"]:
    """Row numbers to train on (at most `most`) and to keep back, by seed. Raises DataError where none would be left to
    train on. where, field: the section, and the setting that says how many are held out, for errors."""
    if held_out >= count:
        raise DataError(
            f"{field} is {held_out}, but there are only {count} rows",
            where=where,
            remedy=f"give more data, or lower {field}",
        )
    order = _shuffled(count, seed, count)
    return _numbers(np.sort(order[held_out:][:most])), _numbers(np.sort(order[:held_out]))


def _numbers(found: np.ndarray) -> "array[int]":
    return array("q", found.astype(np.int64).tobytes())


def _shuffled(count: int, *seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(count)


def chosen(records: Sequence[T], rows: Sequence[int]) -> Each[T]:
    """The records of these numbers."""
    return Each(len(rows), lambda at: records[rows[at]])


def prompts_of(records: Sequence[Demonstration] | Sequence[PreferencePair] | Sequence[Thumb]) -> Each[Prompt]:
    """The prompt of each record."""
    return Each(len(records), lambda at: records[at].prompt)


class Groups(Each[list[Preference]], Generic[Preference]):
    """Records in groups, each of one prompt.

    rows: numbers of records, group after group. starts: where each group begins in `rows`, and where the last one ends.

    Attributes:
        rows: those of these groups. sizes: how many each group has. prompts: of each group.
    """

    def __init__(self, records: Sequence[Preference], rows: "array[int]", starts: "array[int]"):
        super().__init__(len(starts) - 1, lambda at: [records[row] for row in rows[starts[at] : starts[at + 1]]])
        self.rows, self.sizes = rows[starts[0] : starts[-1]], _numbers(np.diff(starts))
        self.prompts: Sequence[Prompt] = Each(len(starts) - 1, lambda at: records[rows[starts[at]]].prompt)


@dataclass(frozen=True)
class Inputs:
    """Every row that the recipe trains on. Fields of stages that it lacks are None or empty; the sandbox's preferences
    (pairs of the reward stage; pairs, or thumbs for kto, of the preference stage) are None too, as they are collected
    from the SFT model later."""

    demonstrations: ReadResult[Demonstration] | None
    pairs: ReadResult[PreferencePair] | None
    preferences: ReadResult[PreferencePair] | ReadResult[Thumb] | None
    prompts: ReadResult[Prompt] | None
    ptx: ReadResult[Demonstration] | None
    train_prompts: Sequence[Prompt]
    heldout_prompts: list[Prompt]

    def counts(self) -> dict[str, Any]:
        """What `keel inspect` counts, for the manifest: by section, of all rows that were read."""
        judged: Sequence[Any] = self.preferences.records if self.preferences else []
        kinds = {
            "sft": (self.demonstrations, records.demonstrations()),
            "reward": (self.pairs, records.preferences()),
            "preference": (
                self.preferences,
                records.thumbs() if judged and isinstance(judged[0], Thumb) else records.preferences(),
            ),
            "ppo": (self.prompts, records.prompts()),
            "ppo.ptx": (self.ptx, records.demonstrations()),
        }
        return {
            name: {"kind": kind.name, "rows": read.counts} | counts_of(read.records, kind)
            for name, (read, kind) in kinds.items()
            if read
        }


def read_inputs(recipe: Recipe, data: Path, console: Console, folder: Path) -> Inputs:
    """Reads all files of the recipe, or those that the sandbox left in `data`, before anything is trained, so that a
    mistake in the last one shows at once; says how many rows each has, and what was dropped or repaired.

    folder: where rows that are too many for memory lie (`keel.data.spool`).
    Raises DataError with file and row, RunError where the disk is full.
    """
    sft, reward, preference, ppo = recipe.sft, recipe.reward, recipe.preference, recipe.ppo
    demonstrations, pairs, preferences, prompts, ptx = None, None, None, None, None
    train: Sequence[Prompt] = []
    held: list[Prompt] = []
    count = recipe.eval.prompts if recipe.eval else 0
    if sft:
        source = sft.data or SourceConfig(path=[str(data / world.DEMONSTRATIONS)])
        demonstrations = read_demonstrations(source.path, source.columns, folder=folder)
        _tell(console, "sft", "demonstrations", demonstrations)
        train_rows = _check_demonstrations(demonstrations.records, sft, recipe.seed)
        _mix(console, "sft", sft.data, prompts_of(chosen(demonstrations.records, train_rows)))
    if reward and reward.data:
        pairs = read_preferences(reward.data.path, reward.data.columns, margin=reward.margin is not None, folder=folder)
        _tell(console, "reward", "preference pairs", pairs)
        # raises before SFT has trained for nothing
        train_groups, _ = split_prompts(pairs.records, reward, recipe.seed, "reward")
        _mix(console, "reward", reward.data, train_groups.prompts)
    if preference and preference.data:
        preferences = read_judgements(preference.data, preference, folder)
        _tell(console, "preference", "thumbs" if preference.loss == "kto" else "preference pairs", preferences)
        rows: Sequence[Any] = preferences.records
        judged, _ = split_prompts(rows, preference, recipe.seed, "preference")
        units = prompts_of(chosen(rows, judged.rows)) if preference.loss == "kto" else judged.prompts
        _mix(console, "preference", preference.data, units)
    if ppo:
        source = ppo.data or SourceConfig(path=[str(data / world.PROMPTS)])
        prompts = read_prompts(source.path, source.columns, first_words=source.first_words, folder=folder)
        _tell(console, "ppo", "prompts", prompts)
        train = prompts.records
        if ppo.data:
            train_rows, held_rows = split_rows(len(train), count, recipe.seed, where="ppo.data", field="eval.prompts")
            train, held = chosen(train, train_rows), list(chosen(train, held_rows))
            _mix(console, "ppo", ppo.data, train)
        elif count:
            held = list(read_prompts(data / world.HELD_OUT).records[:count])
        if len(train) < ppo.rollouts // ppo.responses_per_prompt:
            raise DataError(
                f"an update takes {ppo.rollouts // ppo.responses_per_prompt} prompts, but there are only {len(train)}",
                where="ppo.data",
                remedy="give more prompts, or lower ppo.rollouts or eval.prompts",
            )
        if ppo.ptx:
            source = ppo.ptx.data or SourceConfig(path=[str(data / world.DEMONSTRATIONS)])
            ptx = read_demonstrations(source.path, source.columns, folder=folder)
            _tell(console, "ppo.ptx", "demonstrations", ptx)
            _mix(console, "ppo.ptx", ppo.ptx.data, prompts_of(ptx.records))
    elif count and recipe.sandbox:
        held = list(read_prompts(data / world.HELD_OUT).records[:count])
    elif count and (preference or reward):
        held = _heldout_prompts(recipe, count, preferences or pairs)
    return Inputs(demonstrations, pairs, preferences, prompts, ptx, train, held)


def turns_of(demonstration: Demonstration, sft: SftConfig) -> int:
    """How many turns of the assistant are learned (`Encoder.turns`)."""
    before = demonstration.prompt.messages[1:] if sft.loss_on == "every" else ()
    return 1 + sum(message["role"] == "assistant" and bool(message["content"].strip()) for message in before)


def _check_demonstrations(rows: Sequence[Demonstration], sft: SftConfig, seed: int) -> "array[int]":
    """The rows to train on."""
    train = split_rows(len(rows), sft.held_out, seed, sft.max_rows)[0]
    left = len(train)
    if sft.loss_on == "every" and all(turns_of(demonstration, sft) == 1 for demonstration in rows):
        raise DataError(
            "sft.loss_on every does nothing: no demonstration has an earlier turn of the assistant",
            where="sft.loss_on",
            remedy="remove it",
        )
    if left < sft.batch:
        raise DataError(
            f"{len(rows)} demonstrations leave {left} to train on once {sft.held_out} are held out, less than a "
            f"batch of {sft.batch}",
            where="sft",
            remedy="give more, or lower sft.batch or sft.held_out"
            + (", or raise sft.max_rows" if sft.max_rows else ""),
        )
    return train


def read_judgements(
    source: SourceConfig, settings: PreferenceConfig, folder: Path
) -> ReadResult[PreferencePair] | ReadResult[Thumb]:
    """What the preference stage's loss learns from: thumbs for kto, else pairs. folder: as for `read_inputs`."""
    read = read_thumbs if settings.loss == "kto" else read_preferences
    return read(source.path, source.columns, folder=folder)


def _heldout_prompts(recipe: Recipe, count: int, read: Any) -> list[Prompt]:
    name, settings = ("preference", recipe.preference) if recipe.preference else ("reward", recipe.reward)
    assert settings and read
    prompts = split_prompts(read.records, settings, recipe.seed, name)[1].prompts
    if len(prompts) < count:
        raise DataError(
            f"eval.prompts is {count}, but the rows that {name} holds out have {len(prompts)} prompts",
            where=f"{name}.data",
            remedy=f"lower eval.prompts, or raise {name}.held_out",
        )
    return list(prompts[:count])


def _tell(console: Console, stage: str, what: str, read: ReadResult[Any]) -> None:
    counts = read.counts
    reasons = [f"{count} dropped: {reason}" for reason, count in counts["dropped"].items()]
    reasons += [f"{count} repaired: {reason}" for reason, count in counts["repaired"].items()]
    console.line(
        f"  {stage:<10} {len(read.records)} {what} of {counts['read']} rows" + "".join(f"; {r}" for r in reasons)
    )


def _mix(console: Console, stage: str, source: SourceConfig | None, prompts: Sequence[Prompt]) -> None:
    """Says how the paths are mixed, where they have weights. Raises DataError where they cannot be."""
    mixture = mixture_of(source, prompts)
    if source and mixture:
        for path, rows, count in zip(source.path, mixture.rows, mixture.counts, strict=True):
            console.line(f"  {stage:<10} an epoch takes {count} of {len(prompts)} from {path}, which has {len(rows)}")


def split_prompts(
    rows: Sequence[Preference], settings: RewardConfig | PreferenceConfig, seed: int, where: str
) -> tuple[Groups[Preference], Groups[Preference]]:
    """Preferences to train on and to keep back, by prompt; no prompt is in both. where: the section, for errors.

    Raises DataError where too few are left.
    """
    keys = bytearray()
    for row in rows:
        keys += digest_of(*(m["content"] for m in row.prompt.messages))
    group, first = numbered(keys)
    order = _shuffled(len(first), seed, len(rows))
    starts = _numbers(np.concatenate([[0], np.cumsum(np.bincount(group)[order])]))
    by_group = _numbers(np.argsort(np.argsort(order)[group], kind="stable"))  # row numbers, groups in their new order
    held_out = int(np.searchsorted(starts[:-1], settings.held_out))  # groups, until they have so many rows
    end = held_out + settings.max_prompts if settings.max_prompts else len(first)
    held = Groups(rows, by_group, starts[: held_out + 1])
    train = Groups(rows, by_group, starts[held_out : end + 1])
    thumbs = bool(rows) and isinstance(rows[0], Thumb)
    left = len(train.rows) if thumbs else len(train)
    if left < settings.batch:
        raise DataError(
            f"{len(rows)} {'thumbs' if thumbs else 'preference pairs'} leave {left} "
            f"{'of them' if thumbs else 'prompts'} to train on once {settings.held_out} are held out, less than a "
            f"batch of {settings.batch}",
            where=where,
            remedy=f"give more, or lower {where}.held_out or {where}.batch"
            + (f", or raise {where}.max_prompts" if settings.max_prompts else ""),
        )
    return train, held
