"""A few real passes of a recipe's own model at its own shapes: what online training takes in memory and time.

The roles are built as the PPO stage builds them, and its own functions run: the sampler, experience, gradients of a
micro-batch, optimizer steps of rate 0, the export. Ids are random and no file of the run is touched.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from keel.config import Recipe
from keel.data.encode import Encoder, micro_batches
from keel.models.loading import load_causal_lm, load_encoder
from keel.models.roles import Role, Roles
from keel.models.separate import SeparateRoles, new_head
from keel.models.shared import SharedRoles
from keel.rewards.learned import LearnedReward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.console import Console
from keel.runs.resources import peak_rss_bytes, restart_peak
from keel.train.forecast import Lengths, ppo_roles
from keel.train.online import Learner, accumulate, first_state, make_experience
from keel.train.optim import guarded_step, make_optimizer
from keel.train.profile import Clock
from keel.types import Prompt, Rollouts

FEW_TOKENS = 4
"""Tokens that are sampled first, to see how long more would take."""
PATIENCE = 8.0
"""Seconds that sampling may take."""
LARGEST_EXPORT = 1 << 32
"""Bytes of a model that is still written to measure the export."""


@dataclass
class Measured:
    """What was seen.

    peaks: the most that the process (on a GPU: the device) held at each moment, in bytes. sampled: tokens of the
    responses when the peak of sampling was taken; more were not waited for. seconds: of an update's parts, for all its
    tokens.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _Given(Encoder):
    """Gives the ids that stand in a prompt's columns, and knows no end token: every response has the asked length."""

    @classmethod
    def like(cls, encoder: Encoder) -> "_Given":
        """With another's tokenizer."""
        return cls(encoder.tokenizer, "plain", encoder.max_prompt_tokens, encoder.max_response_tokens, (-1,))

    @property
    def pad_id(self) -> int:
        """Any token: what is padding is told apart by its place."""
        return 0

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids."""
        return prompt.columns["ids"]


class Meter:
    """The peak of memory since the last look, on the CPU of the process, on a GPU of the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Forgets the peak so far, where the system can."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            restart_peak()

    def peak(self) -> int:
        """The peak in bytes; then starts again."""
        found = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else peak_rss_bytes()
        self.restart()
        return found


def calibrate(recipe: Recipe, start: Path | str, lengths: Lengths, device: torch.device, console: Console) -> Measured:
    """Runs the passes. Asserts that the recipe has online training."""
    ppo = recipe.ppo
    assert ppo
    meter, measured = Meter(device), Measured()
    with console.task("trying the recipe's shapes", 5, unit="part") as task:
        encoder = load_encoder(start, recipe.model)
        roles = build_roles(recipe, start, device)
        meter.peak()
        task.update(1)
        _sample(measured, LocalEngine(roles, _Given.like(encoder)), recipe, lengths, meter)
        task.update(2)
        whole = _rollouts(lengths)
        part = whole.select(_first_parts(recipe, roles, lengths, range(len(whole))))
        learner = Learner(roles, encoder.pad_id, recipe.model.max_response_tokens, ppo, recipe.seed)
        state = first_state(ppo)
        for warm in (True, False):  # the first time has what only a first time has
            clock = Clock()
            if roles.has("reward"):
                LearnedReward(roles, encoder.pad_id, ppo.micro_tokens).score(part)
                clock.lap("score")
            groups = torch.arange(len(part)) // ppo.responses_per_prompt
            greedy_B = torch.zeros(len(part)) if ppo.advantage == "remax" else None
            experience, _ = make_experience(
                learner, part, torch.arange(len(part)) % 2.0, groups, state, greedy_B, clock
            )
            if not warm:
                share = sum(lengths.sequences) / sum(len(s) for s in part.sequences())
                measured.seconds |= {n.removeprefix("seconds_"): share * s for n, s in clock.laps.items()}
        measured.peaks["experience"] = meter.peak()
        task.update(3)
        _update(measured, learner, experience, recipe, lengths, meter)
        task.update(4)
        if recipe.model.backbone == "separate" or _bytes_of(roles) < LARGEST_EXPORT:
            with TemporaryDirectory() as folder:
                roles.export("policy", Path(folder))
            measured.peaks["export"] = meter.peak()
        task.update(5)
    return measured


def build_roles(recipe: Recipe, start: Path | str, device: torch.device) -> Roles:
    """All roles of online training on the model in `start`, as the stage holds them; the reward model is untrained."""
    trained, frozen = ppo_roles(recipe)
    wanted: list[Role] = [r for r in ("policy", "critic", "reward", "reference") if r in (*trained, *frozen)]  # type: ignore[misc]
    trainable: list[Role] = [r for r in wanted if r in trained]
    model = load_causal_lm(start, recipe.model.dtype, device)
    if recipe.model.backbone == "shared":
        assert recipe.model.lora_rank and recipe.model.lora_alpha
        return SharedRoles(model, wanted, trainable, recipe.model.lora_rank, recipe.model.lora_alpha, recipe.seed)
    reward = None
    if "reward" in wanted:
        other = load_causal_lm(start, recipe.model.dtype, device)
        reward = other, new_head(other, "reward", recipe.seed)
    return SeparateRoles.build(model, wanted, trainable, recipe.seed, reward)


def _sample(measured: Measured, engine: LocalEngine, recipe: Recipe, lengths: Lengths, meter: Meter) -> None:
    """Sampling at the batch's size; the whole of it only where that is a matter of seconds."""
    assert recipe.ppo
    each = recipe.ppo.responses_per_prompt
    # A first token of its own: prompts that are alike would be passed through the model once.
    ids = [(i // each % 100 + 1, *([0] * (n - 1))) for i, n in enumerate(lengths.prompts)]
    prompts = [Prompt(({"role": "user", "content": ""},), {"ids": row}) for row in ids]
    mean = max(1, round(sum(lengths.responses) / len(lengths.responses)))
    tokens = min(FEW_TOKENS, mean)
    while True:
        began = time.monotonic()
        rollouts = engine.generate(prompts, Sampling(recipe.ppo.temperature, tokens), seed=recipe.seed, step=0)
        spent = time.monotonic() - began
        if tokens == mean or spent * mean / tokens > PATIENCE:
            break
        tokens = mean
    made = max(1, int(rollouts.lengths_B.sum()))
    measured.sampled = made
    measured.seconds["generate"] = spent * sum(lengths.responses) / made * (2 if recipe.ppo.advantage == "remax" else 1)
    measured.peaks["generate"] = meter.peak()


def _rollouts(lengths: Lengths) -> Rollouts:
    """Rollouts of these lengths with ids that mean nothing."""
    rows = len(lengths.prompts)
    mask_BT = torch.arange(max(lengths.responses)) < torch.tensor(lengths.responses)[:, None]
    prompts = [Prompt(({"role": "user", "content": ""},))] * rows
    ids = [tuple([0] * n) for n in lengths.prompts]
    zeros_BT = torch.zeros(mask_BT.shape)
    return Rollouts(prompts, ids, mask_BT.long(), mask_BT, zeros_BT, ["stop"] * rows, [""] * rows, 0)


def _first_parts(recipe: Recipe, roles: Roles, lengths: Lengths, rows: Sequence[int]) -> list[int]:
    """The rows of the micro-batches that are worked on first, at least two: those of the longest sequences."""
    assert recipe.ppo
    workers = roles.workers("policy")
    parts = micro_batches([lengths.sequences[i] for i in rows], recipe.ppo.micro_tokens, workers)
    chosen = [rows[i] for part in parts[:workers] for i in part]
    return chosen if len(chosen) > 1 else list(rows[:2])


def _update(measured: Measured, learner: Learner, experience, recipe: Recipe, lengths: Lengths, meter: Meter) -> None:
    """Gradients of as much of a minibatch as is in memory at once, twice: optimizer state is there the second time."""
    ppo, roles = learner.ppo, learner.roles
    learners: list[Role] = ["policy", *(["critic"] if ppo.has_critic else [])]  # type: ignore[list-item]
    optimizers = {role: make_optimizer(roles.parameters(role).values()) for role in learners}
    rows = list(range(min(len(experience.rollouts), -(-len(lengths.prompts) // ppo.minibatches))))
    state = {**first_state(ppo), "warming": False}
    bounds = {"policy": ppo.policy.max_grad_norm, "critic": ppo.critic.max_grad_norm}
    passed = step = 0.0
    for _ in range(2):
        began = time.monotonic()
        accumulate(learner, experience, rows, state, learners)
        passed, began = time.monotonic() - began, time.monotonic()
        guarded_step(optimizers, bounds, "calibration")  # type: ignore[arg-type]
        step = time.monotonic() - began
    sequences = experience.rollouts.sequences()
    share = sum(lengths.sequences) / sum(len(sequences[i]) for i in rows)
    measured.seconds["update"] = ppo.epochs * (share * passed + ppo.minibatches * step)
    measured.peaks["update"] = meter.peak()


def _bytes_of(roles: Roles) -> int:
    return sum(p.numel() * p.element_size() for p in roles.model("policy").parameters())
