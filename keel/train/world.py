"""The sandbox's part of a run: its files, its base model, and annotators' preferences among the SFT model's samples."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keel import sandbox
from keel.config import PreferenceConfig, Recipe, RewardConfig
from keel.data.records import RANKING
from keel.models.separate import SeparateRoles
from keel.rewards.functions import FunctionReward
from keel.rollout.engine import Engine, Sampling
from keel.runs.files import replacing
from keel.runs.folder import StageFolder
from keel.train.context import Run
from keel.train.sft import mean_loss, token_loss
from keel.train.supervised import Plan, fit
from keel.types import Prompt, TokenSequence

DEMONSTRATIONS, PROMPTS, HELD_OUT, PREFERENCES = (
    "demonstrations.jsonl",
    "prompts.jsonl",
    "heldout.jsonl",
    "preferences.jsonl",
)
GOLD = "keel.sandbox.gold:gold"
GOLDS = "golds"
"""Column of a ranking: its replies with their gold."""
PRETRAIN_MICRO_TOKENS = 8192
PRETRAIN_HELD_OUT = 64
COLLECT_STEP = 1 << 40
"""Sampling step of the replies that annotators rank; far from PPO's own steps, so that no noise is shared."""


def gold_reward() -> FunctionReward:
    """The exact reward of the sandbox, as a reward function."""
    return FunctionReward(sandbox.gold, GOLD)


def build_base(run: Run, stage: StageFolder) -> dict[str, Any]:
    """Writes the world's files, then trains its tokenizer and its base model from scratch on all tokens of transcripts.

    Transcripts are of mixed quality, as the demonstrations are; held-out combinations are in neither.
    """
    recipe, world = run.recipe, run.recipe.sandbox
    assert world is not None
    with run.console.task("writing the sandbox", 3, unit="part") as task:
        train = sandbox.requests(recipe.seed, max(world.prompts, world.pretrain_rows), "train")
        prompts, held_out = train[: world.prompts], sandbox.requests(recipe.seed, world.heldout_prompts, "heldout")
        rng = random.Random(f"demonstrations|{recipe.seed}")
        replies = [sandbox.demonstration(request, rng) for request in train]
        task.update(1)
        write_lines(
            stage.path / DEMONSTRATIONS,
            ({"prompt": r.text, "completion": reply} for r, reply in zip(prompts, replies, strict=False)),
        )
        for name, some in ((PROMPTS, prompts), (HELD_OUT, held_out)):
            write_lines(stage.path / name, ({"prompt": r.text, **r.columns()} for r in some))
        task.update(2)
        texts = [sandbox.transcript(r, reply, rng) for r, reply in zip(train, replies, strict=True)][
            : world.pretrain_rows
        ]
        tokenizer = sandbox.train_tokenizer(texts, world.vocabulary)
        task.update(3)
    model = untrained(recipe, tokenizer).to(run.device)  # pyright: ignore[reportArgumentType]  # transformers' wrapper of `to` hides its signature
    rows = [_ids(tokenizer, text) for text in texts]
    held, rows = rows[:PRETRAIN_HELD_OUT], rows[PRETRAIN_HELD_OUT:]
    pad = model.config.pad_token_id
    roles = SeparateRoles({"policy": model}, {}, ["policy"])
    steps = world.pretrain_steps
    plan = Plan(steps, world.pretrain_batch, world.pretrain_learning_rate, 0.03, 1.0, checkpoint_every=100, hold=0.4)
    numbers = fit(
        run,
        stage,
        "pretraining the base model",
        roles,
        "policy",
        [Prompt(({"role": "user", "content": text},), {}, "a transcript") for text in texts[PRETRAIN_HELD_OUT:]],
        plan,
        token_loss(roles, "policy", rows, pad, PRETRAIN_MICRO_TOKENS),
        lambda: mean_loss(roles, "policy", held, pad, PRETRAIN_MICRO_TOKENS),
        [len(row) for row in rows],
    )
    roles.export("policy", stage.model)
    tokenizer.save_pretrained(stage.model)
    ideal = [sandbox.gold_score(r, sandbox.ideal_reply(r, rng)).total for r in held_out]
    return {
        **numbers,
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "gold_best": float(np.mean(ideal)),
    }


def untrained(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The sandbox's model with random weights. Asserts that the recipe has a sandbox."""
    world, bos, eos, pad = recipe.sandbox, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert world and isinstance(bos, int) and isinstance(eos, int) and isinstance(pad, int)
    return sandbox.build_model(
        vocab_size=len(tokenizer),
        hidden=world.hidden,
        layers=world.layers,
        heads=world.heads,
        intermediate=2 * world.hidden,
        seed=recipe.seed,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenSequence:
    """Everything after the first token carries loss."""
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return TokenSequence(ids[:1], ids[1:])


def collect_preferences(
    run: Run, stage: StageFolder, engine: Engine, prompts: list[Prompt], settings: RewardConfig | PreferenceConfig
) -> Path:
    """Samples K replies per prompt from the SFT model, has annotators rank them, and writes the rankings.

    Rows carry the gold of the replies, for measuring the ceiling; training never sees it.

    engine: of the SFT model. The same settings give the same file, whichever stage asks for it.
    """
    recipe = run.recipe
    assert recipe.sandbox and settings.prompts and settings.responses_per_prompt
    file, each = stage.path / PREFERENCES, settings.responses_per_prompt
    if file.exists():
        return file
    asked = [prompt for prompt in prompts[: settings.prompts] for _ in range(each)]
    with run.console.task("sampling replies for the annotators", len(asked), unit="reply") as task:
        rollouts = engine.generate(
            asked,
            Sampling(1.0, recipe.model.max_response_tokens),
            seed=recipe.seed,
            step=COLLECT_STEP,
            progress=run.watch(task),
        )
    golds = gold_reward().score(rollouts).tolist()
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([recipe.seed, COLLECT_STEP])))
    rows: list[dict[str, Any]] = []
    for start in range(0, len(asked), each):
        order = sandbox.rank(golds[start : start + each], recipe.sandbox.annotator_temperature, rng)
        texts = [rollouts.texts[start + i] for i in order]
        found = {text: golds[start + i] for text, i in zip(texts, order, strict=True)}
        row = {"prompt": asked[start].text, RANKING: texts, GOLDS: found}
        rows += [row] if len(set(texts)) > 1 else []
    write_lines(file, rows)
    return file


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line, all at once or not at all."""
    with replacing(file) as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
