"""The training stages: each reads what the stage before left, trains, and leaves a model folder and a result."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from keel import sandbox
from keel.config import PreferenceConfig, Recipe, RewardConfig, SftConfig
from keel.data.encode import Encoder
from keel.data.formats import ReadResult, read_preferences, read_prompts
from keel.data.spool import SEQUENCES, Each
from keel.data.stream import batch_rows, mixture_of
from keel.evaluate.judge import judge_report
from keel.models.loading import load_encoder, load_to_train
from keel.models.roles import Role, Roles
from keel.models.separate import SeparateRoles, load_headed
from keel.models.shared import SharedRoles
from keel.rewards.base import Reward
from keel.rewards.learned import LearnedReward
from keel.rewards.named import reward_named
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.folder import StageFolder
from keel.runs.log import read_lines
from keel.train import world
from keel.train.context import Run
from keel.train.encoded import encode_rows, made_of
from keel.train.inputs import Groups, Inputs, chosen, prompts_of, split_prompts, split_rows, turns_of
from keel.train.learner import Learner
from keel.train.online import train_online
from keel.train.profile import profile_of, profile_sentence
from keel.train.reward import COMPARISONS, Comparisons, accuracy, group_scores, normalise, pair_loss, rights
from keel.train.sft import conversation_loss, mean_loss, token_loss
from keel.train.supervised import Plan, fit
from keel.types import Demonstration, PreferencePair, TokenSequence

WORST, WORST_PAIRS = "worst_pairs.jsonl", 20
"""The held-out pairs whose preferred response the reward model puts furthest below the other."""
NORMALISE_STEP = 1 << 41
"""Sampling step of the replies over which the reward model is normalised."""


def save_tokenizer(encoder: Encoder, folder: Path) -> None:
    """Writes the tokenizer beside a trained model, with the chat template that it was trained with."""
    if encoder.chat_template:
        encoder.tokenizer.chat_template = encoder.chat_template
    encoder.tokenizer.save_pretrained(folder)


def sft_stage(
    run: Run, stage: StageFolder, start: Path | str, read: ReadResult[Demonstration], data: Path
) -> dict[str, Any]:
    """Supervised fine-tuning; leaves the SFT model (adapters merged) as a plain folder."""
    recipe, sft = run.recipe, run.recipe.sft
    assert sft and sft.learning_rate
    encoder = load_encoder(start, recipe.model)
    train_rows, held_rows = split_rows(len(read.records), sft.held_out, recipe.seed, sft.max_rows)
    order = train_rows + held_rows
    used = chosen(read.records, order)
    made = made_of(read.sha256, sft.data, order, loss_on=sft.loss_on)
    encoded = encode_rows(
        run, "sft", encoder, SEQUENCES, len(used), lambda i: demonstrated(encoder, used[i], sft), made
    )
    held = [s for some in encoded[len(train_rows) :] for s in some]
    _tell_turns(run, encoder, sft, used, encoded)
    roles = build_policy(run, start, sft.tuning == "lora")
    plan = Plan.of(sft, len(train_rows))
    numbers = fit(
        run,
        stage,
        "sft",
        roles,
        "policy",
        prompts_of(chosen(read.records, train_rows)),
        plan,
        conversation_loss(roles, "policy", encoded, encoder.pad_id, sft.micro_tokens),
        lambda: mean_loss(roles, "policy", held, encoder.pad_id, sft.micro_tokens),
    )
    roles.export("policy", stage.model)
    save_tokenizer(encoder, stage.model)
    lengths = array("d", (sum(sum(s.spoken) for s in e) / turns_of(d, sft) for d, e in zip(used, encoded, strict=True)))
    if recipe.sandbox:
        lengths = _good_half(lengths, used, data)
    return {
        **numbers,
        "rows": read.counts,
        "cut": dict(encoder.counts),
        "steps": plan.steps,
        "template": encoder.template_name,
        "length_demonstrations": float(np.mean(lengths)),
    }


def demonstrated(encoder: Encoder, demonstration: Demonstration, sft: SftConfig) -> list[TokenSequence]:
    """The sequences of a demonstration, as `sft.loss_on` says which turns are learned."""
    encode = encoder.turns if sft.loss_on == "every" else lambda *turn: [encoder.sequence(*turn)]
    return encode(demonstration.prompt, demonstration.response)


def _tell_turns(
    run: Run,
    encoder: Encoder,
    sft: SftConfig,
    used: Sequence[Demonstration],
    encoded: Sequence[Sequence[TokenSequence]],
) -> None:
    """With the loss on every turn: how many there are, and why some conversations are more than one sequence."""
    if sft.loss_on == "last":
        return
    turns, sequences = sum(turns_of(d, sft) for d in used), sum(map(len, encoded))
    run.console.line(f"{turns} turns of {len(used)} conversations are learned, in {sequences} sequences")
    if sequences > len(used) and (drift := encoder.drift()):
        run.console.line(
            f"the template writes earlier turns otherwise than they were trained ({drift}); the turn after such a one "
            "begins a sequence of its own, which is right and takes longer. A template that leaves earlier turns as "
            "they are, and ends each with the end token, makes one sequence of a conversation",
            "yellow",
        )


def _good_half(lengths: Sequence[float], demonstrations: Sequence[Demonstration], data: Path) -> list[float]:
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
        prompts = list(read_prompts(data / world.PROMPTS).records)
        engine = LocalEngine(roles, encoder, "reference")
        read = read_preferences(world.collect_preferences(run, stage, engine, prompts, settings))
    train, held = split_prompts(read.records, settings, recipe.seed, "reward")
    groups = compared(run, settings, encoder, read.sha256, train, held)
    held_groups = groups[len(train) :]
    plan = Plan.of(settings, len(train))
    roles.rest()  # the reference may have sampled, and does so again after training

    def score_held_out() -> list[Tensor]:
        return group_scores(roles, held_groups, encoder.pad_id, settings.micro_tokens)

    step = pair_loss(
        roles,
        groups,
        encoder.pad_id,
        settings.micro_tokens,
        weighting=settings.weighting,
        margin=settings.margin,
        centring=settings.centring,
    )
    fit(
        run,
        stage,
        "reward model",
        roles,
        "reward",
        train.prompts,
        plan,
        step,
        lambda: {"heldout_accuracy": accuracy(held_groups, score_held_out())[0]},
        array("q", (groups[i].longest for i in range(len(train)))),
    )
    scores = score_held_out()  # raw, as the loss sees them
    share, interval = accuracy(held_groups, scores)
    asked = [train.prompts[i % len(train)] for i in range(settings.normalise_samples)]
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
        "accuracy": share,
        "accuracy_interval": interval,
        "report": judge(stage, held, held_groups, scores),
        "pairs": len(train.rows),
        "prompts": len(train),
        "heldout_pairs": len(held.rows),
        "rows": read.counts,
        "cut": dict(encoder.counts),
        "steps": plan.steps,
        "raw_mean": mean,
        "raw_sd": sd,
    }
    if recipe.sandbox:
        right = [x for group, scores_K in zip(held_groups, scores, strict=True) for x in rights(group, scores_K)]
        reached = sandbox.pairwise_accuracy(gold_gaps(held), right, recipe.sandbox.annotator_temperature)
        ceiling = accuracy_ceiling(recipe, held)["accuracy_ceiling"]
        result |= {"accuracy_ceiling": ceiling, "accuracy_of_ceiling": reached / ceiling}
    return result


def judge(
    stage: StageFolder,
    held: Sequence[Sequence[PreferencePair]],
    groups: Sequence[Comparisons],
    scores: Sequence[Tensor],
) -> dict[str, Any]:
    """What held-out pairs tell of a reward model (`evaluate.judge`); writes those it has most wrong into a file."""
    raw = [scores_K.tolist() for scores_K in scores]
    margins = [own[a] - own[b] for own, group in zip(raw, groups, strict=True) for a, b in group.pairs]
    pairs = [pair for some in held for pair in some]
    wrong = sorted((i for i, margin in enumerate(margins) if margin < 0), key=lambda i: margins[i])
    world.write_lines(
        stage.path / WORST,
        (
            {
                "margin": margins[i],
                "prompt": list(pairs[i].prompt.messages),
                "preferred": pairs[i].chosen,
                "other": pairs[i].rejected,
            }
            for i in wrong[:WORST_PAIRS]
        ),
    )
    lengths = [[len(s.response_ids) for s in group.sequences] for group in groups]
    return judge_report(raw, lengths, [group.pairs for group in groups])


def gold_gaps(held: Sequence[Sequence[PreferencePair]]) -> list[float]:
    """By how much gold is higher for the preferred reply of each pair."""
    gaps: list[float] = []
    for pairs in held:
        golds = pairs[0].prompt.columns[world.GOLDS]
        gaps += [golds[p.chosen] - golds[p.rejected] for p in pairs]
    return gaps


def accuracy_ceiling(recipe: Recipe, held: Sequence[Sequence[PreferencePair]]) -> dict[str, float]:
    """In the sandbox the best accuracy that any judge could expect on these pairs; nothing elsewhere."""
    if not recipe.sandbox:
        return {}
    return {"accuracy_ceiling": sandbox.pairwise_ceiling(gold_gaps(held), recipe.sandbox.annotator_temperature)}


def compare(encoder: Encoder, pairs: Sequence[PreferencePair]) -> Comparisons:
    """The pairs of one prompt, each response encoded once."""
    texts = list(dict.fromkeys(text for p in pairs for text in (p.chosen, p.rejected)))
    found = dict(zip(texts, encoder.sequences(pairs[0].prompt, texts), strict=True))
    return Comparisons.of([(found[p.chosen], found[p.rejected]) for p in pairs], [p.margin for p in pairs])


def compared(
    run: Run,
    settings: RewardConfig | PreferenceConfig,
    encoder: Encoder,
    sha256: str,
    train: Groups[PreferencePair],
    held: Groups[PreferencePair],
) -> Sequence[Comparisons]:
    """`compare` for all groups to train on, then for all that are held out. sha256: of the data."""
    rewards = isinstance(settings, RewardConfig)
    numbers = train.rows + held.rows + train.sizes + held.sizes
    made = made_of(sha256, settings.data, numbers, margin=rewards and settings.margin is not None)
    return encode_rows(
        run,
        "reward" if rewards else "preference",
        encoder,
        COMPARISONS,
        len(train) + len(held),
        lambda i: compare(encoder, train[i] if i < len(train) else held[i - len(train)]),
        made,
    )


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
    source: Reward = LearnedReward(roles, encoder.pad_id, ppo.micro_tokens) if reward_folder else reward_named(ppo)
    gold = world.gold_reward().score if recipe.sandbox else None
    learner = Learner(
        roles,
        encoder.pad_id,
        recipe.model.max_response_tokens,
        ppo,
        recipe.seed,
        _ptx(run, roles, encoder, rows.ptx) if rows.ptx else None,
    )
    train_online(run, stage, learner, encoder, rows.train_prompts, source, gold)
    after = {role: roles.fingerprint(role) for role in frozen}
    assert before == after, "a frozen role has changed during online training"
    roles.export("policy", stage.model)
    save_tokenizer(encoder, stage.model)
    _tell_warm_up(run, sum(bool(line.get("warming")) for line in read_lines(stage.metrics)))
    profile = profile_of(stage, recipe.model.dtype)
    if not recipe.eval:  # it else stands in the summary
        run.console.line(f"profile: {profile_sentence(profile)}")
    return {"frozen": after, "cut": dict(encoder.counts), "encoder": encoder.fingerprint(), "profile": profile}


def _tell_warm_up(run: Run, warming: int) -> None:
    """Says so where the policy had less than half of the updates to learn in."""
    ppo = run.recipe.ppo
    assert ppo
    if 2 * warming > ppo.updates:
        run.console.line(
            f"the policy learned in {ppo.updates - warming or 'none'} of {ppo.updates} updates: in the others the "
            f"critic was warming up; lower ppo.critic.warmup_cap ({ppo.critic.warmup_cap}), or raise ppo.updates",
            "yellow",
        )


def _ptx(run: Run, roles: Roles, encoder: Encoder, read: ReadResult[Demonstration]) -> Callable[[int], float]:
    """Language modelling for the n-th minibatch of the run: adds its weighted gradient, returns its loss."""
    recipe, said = run.recipe, read.records
    assert recipe.ppo and recipe.ppo.ptx
    ppo, ptx = recipe.ppo, recipe.ppo.ptx
    encoded = encode_rows(
        run,
        "ptx",
        encoder,
        SEQUENCES,
        len(said),
        lambda i: [encoder.sequence(said[i].prompt, said[i].response)],
        made_of(read.sha256, ptx.data, range(len(said))),
    )
    sequences = Each(len(encoded), lambda i: encoded[i][0])
    step = token_loss(roles, "policy", sequences, encoder.pad_id, ppo.micro_tokens, ptx.coefficient)
    mixture = mixture_of(ptx.data, prompts_of(said))
    return lambda n: step(batch_rows(len(sequences), ptx.batch, n, recipe.seed, mixture=mixture))["loss"]


def build_frozen(run: Run, start: Path | str, reward_folder: Path | None) -> Roles:
    """The reference and, where there is one, the reward model, for looking only."""
    return _with_reference(run, start, ["reward"] if reward_folder else [], reward_folder)


def build_policy(run: Run, start: Path | str, adapters: bool) -> Roles:
    """The policy alone, for training; until its first step it is the model that it starts from."""
    if not adapters:
        return _separate(run, start, ["policy"], None)
    return _shared(run.recipe, load_to_train(start, run.recipe.model, run.device), ["policy"], ["policy"])


def _with_reference(run: Run, start: Path | str, wanted: list[Role], reward_folder: Path | None) -> Roles:
    if run.recipe.model.backbone == "separate":
        return _separate(run, start, [*wanted, "reference"], reward_folder)
    model = load_to_train(start, run.recipe.model, run.device)
    trainable: list[Role] = [r for r in wanted if r in ("policy", "critic") or reward_folder is None]
    roles = _shared(run.recipe, model, [*wanted, "reference"], trainable)
    if reward_folder:
        roles.load_headed(reward_folder, [r for r in wanted if r in ("critic", "reward")])
    return roles


def _separate(run: Run, start: Path | str, wanted: list[Role], reward_folder: Path | None) -> Roles:
    reward = (
        load_headed(load_to_train(reward_folder, run.recipe.model, run.device), reward_folder)
        if reward_folder
        else None
    )
    trainable: list[Role] = [
        r for r in wanted if r in ("policy", "critic") or (r == "reward" and reward_folder is None)
    ]
    rest_in = run.folder.path if run.recipe.model.rest_frozen else None
    return SeparateRoles.build(
        load_to_train(start, run.recipe.model, run.device), wanted, trainable, run.recipe.seed, reward, rest_in
    )


def _shared(recipe: Recipe, model: Any, wanted: list[Role], trainable: list[Role]) -> SharedRoles:
    rank, alpha = recipe.model.lora_rank, recipe.model.lora_alpha
    assert rank and alpha
    return SharedRoles(model, wanted, trainable, rank, alpha, recipe.seed)
