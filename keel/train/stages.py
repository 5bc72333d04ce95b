"""The training stages: each reads what the stage before left, trains, and leaves a model folder and a result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keel import sandbox
from keel.config import PreferenceConfig, Recipe, RewardConfig, SourceConfig
from keel.data.encode import Encoder
from keel.data.formats import ReadResult, read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.data.stream import batch_rows, steps_for
from keel.errors import DataError
from keel.models.loading import load_causal_lm, load_encoder
from keel.models.roles import Role, Roles
from keel.models.separate import SeparateRoles, load_headed
from keel.models.shared import SharedRoles
from keel.rewards.base import Reward
from keel.rewards.functions import FunctionReward
from keel.rewards.learned import LearnedReward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.console import Console
from keel.runs.folder import StageFolder
from keel.train import world
from keel.train.context import Run
from keel.train.online import Learner, train_online
from keel.train.reward import Comparisons, accuracy, normalise, pair_loss
from keel.train.sft import mean_loss, token_loss
from keel.train.supervised import Plan, fit
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Preference = TypeVar("Preference", PreferencePair, Thumb)

NORMALISE_STEP = 1 << 41
"""Sampling step of the replies over which the reward model is normalised."""


def save_tokenizer(encoder: Encoder, folder: Path) -> None:
    """Writes the tokenizer beside a trained model, with the chat template that it was trained with."""
    if encoder.chat_template:
        encoder.tokenizer.chat_template = encoder.chat_template
    encoder.tokenizer.save_pretrained(folder)


def split_rows(count: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to keep back, by seed. Raises DataError where nothing would be left to train on."""
    if held_out >= count:
        raise DataError(
            f"{held_out} rows are to be held out, but there are only {count}",
            remedy="give more data, or lower held_out (eval.prompts for prompts)",
        )
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, count]))).permutation(count).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])


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
    train_prompts: list[Prompt]
    heldout_prompts: list[Prompt]


def read_inputs(recipe: Recipe, data: Path, console: Console) -> Inputs:
    """Reads all files of the recipe, or those that the sandbox left in `data`, before anything is trained, so that a
    mistake in the last one shows at once; says how many rows each has, and what was dropped or repaired.

    Raises DataError with file and row.
    """
    sft, reward, preference, ppo = recipe.sft, recipe.reward, recipe.preference, recipe.ppo
    demonstrations, pairs, preferences, prompts, ptx = None, None, None, None, None
    train: list[Prompt] = []
    held: list[Prompt] = []
    count = recipe.eval.prompts if recipe.eval else 0
    if sft:
        source = sft.data or SourceConfig(path=[str(data / world.DEMONSTRATIONS)])
        demonstrations = read_demonstrations(source.path, source.columns)
        _tell(console, "sft", "demonstrations", demonstrations)
    if reward and reward.data:
        pairs = read_preferences(reward.data.path, reward.data.columns, margin=reward.margin is not None)
        _tell(console, "reward", "preference pairs", pairs)
    if preference and preference.data:
        preferences = read_judgements(preference.data, preference)
        _tell(console, "preference", "thumbs" if preference.loss == "kto" else "preference pairs", preferences)
    if ppo:
        source = ppo.data or SourceConfig(path=[str(data / world.PROMPTS)])
        prompts = read_prompts(source.path, source.columns, first_words=source.first_words)
        _tell(console, "ppo", "prompts", prompts)
        train = prompts.records
        if ppo.data:
            train_rows, held_rows = split_rows(len(train), count, recipe.seed)
            train, held = [train[i] for i in train_rows], [train[i] for i in held_rows]
        elif count:
            held = read_prompts(data / world.HELD_OUT).records[:count]
        if len(train) < ppo.rollouts // ppo.responses_per_prompt:
            raise DataError(
                f"an update takes {ppo.rollouts // ppo.responses_per_prompt} prompts, but there are only {len(train)}",
                where="ppo.data",
                remedy="give more prompts, or lower ppo.rollouts or eval.prompts",
            )
        if ppo.ptx:
            source = ppo.ptx.data or SourceConfig(path=[str(data / world.DEMONSTRATIONS)])
            ptx = read_demonstrations(source.path, source.columns)
            _tell(console, "ppo.ptx", "demonstrations", ptx)
    elif count and recipe.sandbox:
        held = read_prompts(data / world.HELD_OUT).records[:count]
    elif count and (preference or reward):
        held = _heldout_prompts(recipe, count, preferences or pairs)
    return Inputs(demonstrations, pairs, preferences, prompts, ptx, train, held)


def read_judgements(source: SourceConfig, settings: PreferenceConfig) -> ReadResult[PreferencePair] | ReadResult[Thumb]:
    """What the preference stage's loss learns from: thumbs for kto, else pairs."""
    read = read_thumbs if settings.loss == "kto" else read_preferences
    return read(source.path, source.columns)


def _heldout_prompts(recipe: Recipe, count: int, read: Any) -> list[Prompt]:
    name, settings = ("preference", recipe.preference) if recipe.preference else ("reward", recipe.reward)
    assert settings and read
    prompts = [group[0].prompt for group in split_prompts(read.records, settings, recipe.seed, name)[1]]
    if len(prompts) < count:
        raise DataError(
            f"eval.prompts is {count}, but the rows that {name} holds out have {len(prompts)} prompts",
            where=f"{name}.data",
            remedy=f"lower eval.prompts, or raise {name}.held_out",
        )
    return prompts[:count]


def _tell(console: Console, stage: str, what: str, read: ReadResult[Any]) -> None:
    counts = read.counts
    reasons = [f"{count} dropped: {reason}" for reason, count in counts["dropped"].items()]
    reasons += [f"{count} repaired: {reason}" for reason, count in counts["repaired"].items()]
    console.line(f"  {stage:<10} {counts['kept']} {what} of {counts['read']} rows" + "".join(f"; {r}" for r in reasons))


def sft_stage(
    run: Run, stage: StageFolder, start: Path | str, read: ReadResult[Demonstration], data: Path
) -> dict[str, Any]:
    """Supervised fine-tuning; leaves the SFT model (adapters merged) as a plain folder."""
    recipe, sft = run.recipe, run.recipe.sft
    assert sft and sft.learning_rate
    encoder = load_encoder(start, recipe.model)
    train_rows, held_rows = split_rows(len(read.records), sft.held_out, recipe.seed)
    sequences = [encoder.sequence(d.prompt, d.response) for d in read.records]
    train, held = [sequences[i] for i in train_rows], [sequences[i] for i in held_rows]
    model = load_causal_lm(start, recipe.model.dtype, run.device)
    roles: Roles = (
        SeparateRoles({"policy": model}, {}, ["policy"])
        if sft.tuning == "full"
        else _shared(recipe, model, ["policy"], ["policy"])
    )
    plan = Plan(
        steps_for(len(train), sft.batch, sft.epochs),
        sft.batch,
        sft.learning_rate,
        sft.warmup,
        sft.max_grad_norm,
        sft.checkpoint_every,
    )
    numbers = fit(
        run,
        stage,
        "sft",
        roles,
        "policy",
        [len(sequence) for sequence in train],
        plan,
        token_loss(roles, "policy", train, encoder.pad_id, sft.micro_tokens),
        lambda: mean_loss(roles, "policy", held, encoder.pad_id, sft.micro_tokens),
    )
    roles.export("policy", stage.model)
    save_tokenizer(encoder, stage.model)
    lengths = [len(s.response_ids) for s in sequences]
    if recipe.sandbox:
        lengths = _good_half(lengths, read.records, data)
    return {
        **numbers,
        "rows": read.counts,
        "cut": dict(encoder.counts),
        "steps": plan.steps,
        "template": encoder.template_name,
        "length_demonstrations": float(np.mean(lengths)),
    }


def _good_half(lengths: list[int], demonstrations: list[Demonstration], data: Path) -> list[int]:
    """Lengths of the demonstrations whose gold is at or above the median."""
    asked = {p.text: p.columns for p in read_prompts(data / world.PROMPTS).records}
    golds = [
        sandbox.gold(prompt=d.prompt.text, response=d.response, finish_reason="stop", **asked[d.prompt.text])
        for d in demonstrations
    ]
    middle = float(np.median(golds))
    return [n for n, gold in zip(lengths, golds, strict=True) if gold >= middle]


def reward_stage(
    run: Run, stage: StageFolder, start: Path | str, read: ReadResult[PreferencePair] | None, data: Path
) -> dict[str, Any]:
    """Trains the reward model and normalises it over samples of the SFT model; leaves weights with a head."""
    recipe, settings = run.recipe, run.recipe.reward
    assert settings and settings.learning_rate
    encoder = load_encoder(start, recipe.model)
    roles = _with_reference(run, start, ["reward"], None)
    if read is None:
        prompts = read_prompts(data / world.PROMPTS).records
        engine = LocalEngine(roles, encoder, "reference")
        read = read_preferences(world.collect_preferences(run, stage, engine, prompts, settings))
    train, held = split_prompts(read.records, settings, recipe.seed, "reward")
    groups, held_groups = ([compare(encoder, pairs) for pairs in some] for some in (train, held))
    plan = Plan(
        steps_for(len(train), settings.batch, settings.epochs),
        settings.batch,
        settings.learning_rate,
        settings.warmup,
        settings.max_grad_norm,
        settings.checkpoint_every,
    )

    found: dict[str, tuple[float, float]] = {}

    def measure() -> dict[str, float]:
        share, found["accuracy_interval"] = accuracy(roles, held_groups, encoder.pad_id, settings.micro_tokens)
        return {"heldout_accuracy": share}

    step = pair_loss(
        roles,
        groups,
        encoder.pad_id,
        settings.micro_tokens,
        weighting=settings.weighting,
        margin=settings.margin,
        centring=settings.centring,
    )
    numbers = fit(run, stage, "reward model", roles, "reward", [g.longest for g in groups], plan, step, measure)
    asked = [train[i % len(train)][0].prompt for i in range(settings.normalise_samples)]
    with run.console.task("normalising the score over SFT samples", len(asked), unit="reply") as task:
        samples = LocalEngine(roles, encoder, "reference").generate(
            asked,
            Sampling(1.0, recipe.model.max_response_tokens),
            seed=recipe.seed,
            step=NORMALISE_STEP,
            progress=run.watch(task),
        )
    mean, sd = normalise(roles, samples.sequences(), encoder.pad_id, settings.micro_tokens)
    assert isinstance(roles, SharedRoles | SeparateRoles)
    roles.save_headed("reward", stage.model)
    save_tokenizer(encoder, stage.model)
    result: dict[str, Any] = {
        "accuracy": numbers["heldout_accuracy"],
        **found,
        "pairs": sum(map(len, train)),
        "prompts": len(train),
        "heldout_pairs": sum(map(len, held)),
        "rows": read.counts,
        "cut": dict(encoder.counts),
        "steps": plan.steps,
        "raw_mean": mean,
        "raw_sd": sd,
    }
    return result | accuracy_ceiling(recipe, held)


def accuracy_ceiling(recipe: Recipe, held: Sequence[Sequence[PreferencePair]]) -> dict[str, float]:
    """In the sandbox the best accuracy that any judge could expect on these pairs; nothing elsewhere."""
    if not recipe.sandbox:
        return {}
    gaps = [p.prompt.columns["gold_chosen"] - p.prompt.columns["gold_rejected"] for pairs in held for p in pairs]
    return {"accuracy_ceiling": sandbox.pairwise_ceiling(gaps, recipe.sandbox.annotator_temperature)}


def compare(encoder: Encoder, pairs: Sequence[PreferencePair]) -> Comparisons:
    """The pairs of one prompt, each response encoded once."""
    texts = list(dict.fromkeys(text for p in pairs for text in (p.chosen, p.rejected)))
    found = dict(zip(texts, encoder.sequences(pairs[0].prompt, texts), strict=True))
    return Comparisons.of([(found[p.chosen], found[p.rejected]) for p in pairs], [p.margin for p in pairs])


def split_prompts(
    rows: Sequence[Preference], settings: RewardConfig | PreferenceConfig, seed: int, where: str
) -> tuple[list[list[Preference]], list[list[Preference]]]:
    """Preferences to train on and to keep back, by prompt; no prompt is in both. where: the section, for errors.

    Raises DataError where too few are left.
    """
    groups: dict[tuple[str, ...], list[Preference]] = {}
    for row in rows:
        groups.setdefault(tuple(m["content"] for m in row.prompt.messages), []).append(row)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(rows)])))
    train: list[list[Preference]] = []
    held: list[list[Preference]] = []
    keys = list(groups)
    for k in rng.permutation(len(keys)).tolist():
        (held if sum(map(len, held)) < settings.held_out else train).append(groups[keys[k]])
    train = train[: settings.max_prompts] if settings.max_prompts else train
    thumbs = bool(rows) and isinstance(rows[0], Thumb)
    left = sum(map(len, train)) if thumbs else len(train)
    if left < settings.batch:
        raise DataError(
            f"{len(rows)} {'thumbs' if thumbs else 'preference pairs'} leave {left} "
            f"{'of them' if thumbs else 'prompts'} to train on, less than a batch of {settings.batch}",
            where=where,
            remedy=f"give more, or lower {where}.held_out or {where}.batch",
        )
    return train, held


def ppo_stage(
    run: Run, stage: StageFolder, start: Path | str, reward_folder: Path | None, rows: Inputs
) -> dict[str, Any]:
    """Online training; leaves the policy as a plain folder. Asserts that reference and reward model are byte for byte
    as before."""
    recipe, ppo = run.recipe, run.recipe.ppo
    assert ppo is not None
    encoder = load_encoder(start, recipe.model)
    wanted: list[Role] = [
        "policy",
        *(["critic"] if ppo.has_critic else []),
        *(["reward"] if reward_folder else []),
    ]
    roles = (
        _with_reference(run, start, wanted, reward_folder)
        if recipe.model.backbone == "shared" or ppo.kl.coefficient > 0
        else _separate(run, start, wanted, reward_folder)
    )
    frozen: list[Role] = [r for r in ("reference", "reward") if roles.has(r)]
    before = {role: roles.fingerprint(role) for role in frozen}
    source: Reward = (
        LearnedReward(roles, encoder.pad_id, ppo.micro_tokens) if reward_folder else FunctionReward.named(ppo.reward)
    )
    gold = world.gold_reward().score if recipe.sandbox else None
    learner = Learner(
        roles,
        encoder.pad_id,
        recipe.model.max_response_tokens,
        ppo,
        recipe.seed,
        _ptx(recipe, roles, encoder, rows.ptx.records) if rows.ptx else None,
    )
    train_online(run, stage, learner, encoder, rows.train_prompts, source, gold)
    after = {role: roles.fingerprint(role) for role in frozen}
    assert before == after, "a frozen role has changed during online training"
    roles.export("policy", stage.model)
    save_tokenizer(encoder, stage.model)
    return {"frozen": after, "cut": dict(encoder.counts), "encoder": encoder.fingerprint()}


def _ptx(recipe: Recipe, roles: Roles, encoder: Encoder, rows: Sequence[Demonstration]) -> Callable[[int], float]:
    """Language modelling for the n-th minibatch of the run: adds its weighted gradient, returns its loss."""
    assert recipe.ppo and recipe.ppo.ptx
    ppo, ptx = recipe.ppo, recipe.ppo.ptx
    sequences = [encoder.sequence(d.prompt, d.response) for d in rows]
    step = token_loss(roles, "policy", sequences, encoder.pad_id, ppo.micro_tokens, ptx.coefficient)
    return lambda n: step(batch_rows(len(sequences), ptx.batch, n, recipe.seed))["loss"]


def build_frozen(run: Run, start: Path | str, reward_folder: Path | None) -> Roles:
    """The reference and, where there is one, the reward model, for looking only."""
    return _with_reference(run, start, ["reward"] if reward_folder else [], reward_folder)


def build_policy(run: Run, start: Path | str) -> Roles:
    """The policy alone, for training; until its first step it is the model that it starts from."""
    if run.recipe.model.backbone == "separate":
        return _separate(run, start, ["policy"], None)
    return _shared(run.recipe, load_causal_lm(start, run.recipe.model.dtype, run.device), ["policy"], ["policy"])


def _with_reference(run: Run, start: Path | str, wanted: list[Role], reward_folder: Path | None) -> Roles:
    if run.recipe.model.backbone == "separate":
        return _separate(run, start, [*wanted, "reference"], reward_folder)
    model = load_causal_lm(start, run.recipe.model.dtype, run.device)
    trainable: list[Role] = [r for r in wanted if r in ("policy", "critic") or reward_folder is None]
    roles = _shared(run.recipe, model, [*wanted, "reference"], trainable)
    if reward_folder:
        roles.load_headed(reward_folder, [r for r in wanted if r in ("critic", "reward")])
    return roles


def _separate(run: Run, start: Path | str, wanted: list[Role], reward_folder: Path | None) -> Roles:
    dtype = run.recipe.model.dtype
    reward = load_headed(load_causal_lm(reward_folder, dtype, run.device), reward_folder) if reward_folder else None
    trainable: list[Role] = [
        r for r in wanted if r in ("policy", "critic") or (r == "reward" and reward_folder is None)
    ]
    return SeparateRoles.build(load_causal_lm(start, dtype, run.device), wanted, trainable, run.recipe.seed, reward)


def _shared(recipe: Recipe, model: Any, wanted: list[Role], trainable: list[Role]) -> SharedRoles:
    rank, alpha = recipe.model.lora_rank, recipe.model.lora_alpha
    assert rank and alpha
    return SharedRoles(model, wanted, trainable, rank, alpha, recipe.seed)
