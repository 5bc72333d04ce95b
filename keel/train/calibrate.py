"""A few real passes of a recipe's own model at its own shapes: what online training takes in memory and time.

The roles are built as the PPO stage builds them, and its own functions run: experience, gradients of a micro-batch,
optimizer steps of rate 0, the sampler, the export. Ids are random and no file of the run is touched.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.optim import Optimizer

from keel.config import PpoConfig, Recipe
from keel.data.encode import Encoder, micro_batches
from keel.models import spare
from keel.models.flops import products_of
from keel.models.loading import load_encoder, load_to_train
from keel.models.roles import Role, Roles
from keel.models.separate import SeparateRoles, new_head
from keel.models.shared import SharedRoles
from keel.models.size import BYTES, Size
from keel.rewards.learned import LearnedReward
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.console import Console
from keel.runs.resources import peak_rss_bytes, restart_peak
from keel.train.experience import make_experience
from keel.train.forecast import Lengths, micro_tokens, ppo_roles
from keel.train.learner import Learner, first_state
from keel.train.optim import guarded_step, make_optimizer
from keel.train.profile import Clock, product_rate
from keel.train.update import accumulate
from keel.types import Experience, Prompt, Rollouts

FEW_TOKENS = 4
"""Tokens that are sampled first, to see how long more would take."""
PATIENCE = 8.0
"""Seconds that sampling may take, and about as many each pass for gradients."""
LIKELY_UTILISATION = 0.3
"""Of the machine's matrix product in a pass for gradients; only to guess how many tokens are a matter of seconds."""
CYCLES = 5
"""Steps that are tried at most."""
LARGEST_EXPORT = 1 << 32
"""Bytes of a model that is still written to measure the export."""


@dataclass
class Measured:
    """What was seen.

    peaks: the most that the process (on a GPU: the device) held at each moment, in bytes. sampled: tokens of the
    responses when the peak of sampling was taken; more were not waited for. shares: of the tokens that a run has in
    memory at once, those that the measured passes had, where a whole micro-batch would take too long. seconds: of an
    update's parts, for all its tokens.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    shares: dict[str, float] = field(default_factory=dict)
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


def calibrate(
    recipe: Recipe, start: Path | str, size: Size, lengths: Lengths, device: torch.device, console: Console
) -> Measured:
    """Runs the passes. Asserts that the recipe has online training.

    They are run again while that is a matter of seconds, with the lengths dealt anew: a process keeps some of what it
    has freed, and its peaks rise over the first updates.
    """
    with console.task("trying the recipe's shapes", 3, unit="part") as task:
        rehearsal = _Rehearsal(recipe, start, size, device)
        task.update(1)
        began = time.monotonic()
        for number in range(CYCLES):
            dealt = replace(lengths, responses=lengths.responses[number:] + lengths.responses[:number])
            rehearsal.cycle(dealt)
            if time.monotonic() - began > PATIENCE:
                break
        task.update(2)
        rehearsal.export()
        task.update(3)
    return rehearsal.measured


class _Rehearsal:
    """A step of online training on part of the tokens, with what it takes."""

    def __init__(self, recipe: Recipe, start: Path | str, size: Size, device: torch.device):
        assert recipe.ppo
        self.recipe, self.ppo, self.size = recipe, recipe.ppo, size
        self.measured, self.meter = Measured(), Meter(device)
        self.encoder = load_encoder(start, recipe.model)
        self.roles = build_roles(recipe, start, device)
        self.learner = Learner(self.roles, self.encoder.pad_id, recipe.model.max_response_tokens, self.ppo, recipe.seed)
        self.learners: list[Role] = ["policy", "critic"] if self.ppo.has_critic else ["policy"]
        self.optimizers: dict[str, Optimizer] = {
            role: make_optimizer(self.roles.parameters(role).values()) for role in self.learners
        }
        self.meter.restart()

    def cycle(self, lengths: Lengths) -> None:
        """Experience, gradients, sampling; in this order: optimizer state is there when sampling is measured."""
        experience = self._experience(lengths)
        self.roles.rest()
        self._looked("experience")
        self._update(experience, lengths)
        self._looked("update")
        self._sample(lengths)
        self._looked("generate")

    def export(self) -> None:
        """Writes the policy aside, unless that takes a file of gigabytes for what is known from shapes."""
        self.optimizers.clear()
        if self.size.parameters * BYTES[self.recipe.model.dtype] < LARGEST_EXPORT:
            with TemporaryDirectory() as folder:
                self.roles.export("policy", Path(folder))
            self._looked("export")

    def _looked(self, moment: str) -> None:
        self.measured.peaks[moment] = max(self.measured.peaks.get(moment, 0), self.meter.peak())

    def _experience(self, lengths: Lengths) -> Experience:
        at_once = _first_parts(self.ppo, self.roles, lengths)
        rows = _affordable(self.roles, self.learners, lengths, at_once)
        part, clock = _rollouts(lengths, self._prompt_ids(lengths)).select(rows), Clock()
        taken = sum(lengths.sequences[i] for i in rows)
        self.measured.shares["experience"] = taken / sum(lengths.sequences[i] for i in at_once)
        if self.roles.has("reward"):
            LearnedReward(self.roles, self.encoder.pad_id, self.ppo.micro_tokens).score(part)
            clock.lap("score")
        scores_B, groups_B = torch.arange(len(part)) % 2.0, torch.arange(len(part)) // self.ppo.responses_per_prompt
        greedy_B = torch.zeros(len(part)) if self.ppo.advantage == "remax" else None
        state = first_state(self.ppo)
        experience, _ = make_experience(self.learner, part, scores_B, groups_B, state, greedy_B, clock)
        share = sum(lengths.sequences) / taken
        self.measured.seconds |= {name.removeprefix("seconds_"): share * s for name, s in clock.laps.items()}
        return experience

    @spare.kept()
    def _update(self, experience: Experience, lengths: Lengths) -> None:
        """Gradients of as much of a minibatch as is in memory at once, twice: optimizer state is there then."""
        ppo, sequences = self.ppo, experience.rollouts.sequences()
        rows = list(range(min(len(sequences), -(-len(lengths.prompts) // ppo.minibatches))))
        bounds = {"policy": ppo.policy.max_grad_norm, "critic": ppo.critic.max_grad_norm}
        for _ in range(1 if self.optimizers["policy"].state else 2):
            began = time.monotonic()
            accumulate(self.learner, experience, rows, first_state(ppo), self.learners, "calibration")
            passed, began = time.monotonic() - began, time.monotonic()
            guarded_step(self.optimizers, bounds, "calibration")
            step = time.monotonic() - began
        taken = sum(len(sequences[i]) for i in rows)
        self.measured.shares["update"] = min(1.0, taken / micro_tokens(self.recipe, self.size, lengths))
        share = sum(lengths.sequences) / taken
        self.measured.seconds["update"] = ppo.epochs * (share * passed + ppo.minibatches * step)

    def _prompt_ids(self, lengths: Lengths) -> list[tuple[int, ...]]:
        """Each prompt with a first token of its own: those that are alike would pass through the model once."""
        each, tokens = self.ppo.responses_per_prompt, self.size.vocabulary - 1
        return [(i // each % tokens + 1, *([0] * (n - 1))) for i, n in enumerate(lengths.prompts)]

    def _sample(self, lengths: Lengths) -> None:
        """Sampling at the batch's size; the whole of it only where that is a matter of seconds."""
        engine = LocalEngine(self.roles, _Given.like(self.encoder))
        prompts = [Prompt(({"role": "user", "content": ""},), {"ids": row}) for row in self._prompt_ids(lengths)]
        whole = sum(lengths.responses)
        longest = max(lengths.responses)
        tokens = min(FEW_TOKENS, longest)
        while True:
            began = time.monotonic()
            rollouts = engine.generate(prompts, Sampling(self.ppo.temperature, tokens), seed=0, step=0)
            spent = time.monotonic() - began
            if tokens == longest or spent * longest / tokens > PATIENCE:
                break
            tokens = longest  # all rows to the end: the cache is made for the longest, whoever ends before
        self.measured.sampled = int(rollouts.lengths_B.sum())
        twice = 2 if self.ppo.advantage == "remax" else 1
        self.measured.seconds["generate"] = twice * spent * whole / self.measured.sampled


def build_roles(recipe: Recipe, start: Path | str, device: torch.device) -> Roles:
    """All roles of online training on the model in `start`, as the stage holds them; the reward model is untrained."""
    trained, frozen = ppo_roles(recipe)
    wanted: list[Role] = [r for r in ("policy", "critic", "reward", "reference") if r in (*trained, *frozen)]  # type: ignore[misc]
    trainable: list[Role] = [r for r in wanted if r in trained]
    model = load_to_train(start, recipe.model, device)
    if recipe.model.backbone == "shared":
        assert recipe.model.lora_rank and recipe.model.lora_alpha
        return SharedRoles(model, wanted, trainable, recipe.model.lora_rank, recipe.model.lora_alpha, recipe.seed)
    reward = None
    if "reward" in wanted:
        other = load_to_train(start, recipe.model, device)
        reward = other, new_head(other, "reward", recipe.seed)
    rest_in = _above(Path(recipe.root)) if recipe.model.rest_frozen else None
    return SeparateRoles.build(model, wanted, trainable, recipe.seed, reward, rest_in)


def _above(folder: Path) -> Path:
    """The folder, or what there is of its path: the disk that a run would write on."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.is_dir())


def _rollouts(lengths: Lengths, prompt_ids: list[tuple[int, ...]]) -> Rollouts:
    """Rollouts of these lengths, responses of ids that mean nothing."""
    rows = len(lengths.prompts)
    mask_BT = torch.arange(max(lengths.responses)) < torch.tensor(lengths.responses)[:, None]
    prompts = [Prompt(({"role": "user", "content": ""},))] * rows
    zeros_BT = torch.zeros(mask_BT.shape)
    return Rollouts(prompts, prompt_ids, mask_BT.long(), mask_BT, zeros_BT, ["stop"] * rows, [""] * rows, 0)


def _first_parts(ppo: PpoConfig, roles: Roles, lengths: Lengths) -> list[int]:
    """The rows of the micro-batches that are worked on first, those of the longest sequences; at least two."""
    workers = roles.workers("policy")
    parts = micro_batches(lengths.sequences, ppo.micro_tokens, workers)
    chosen = [i for part in parts[:workers] for i in part]
    return chosen if len(chosen) > 1 else list(range(min(2, len(lengths.prompts))))


def _affordable(roles: Roles, trained: list[Role], lengths: Lengths, rows: list[int]) -> list[int]:
    """As many of the rows, from the first on, as a pass for gradients does in some seconds; at least two."""
    products = products_of(roles, "policy")
    seconds = 1 / (LIKELY_UTILISATION * product_rate(roles.model("policy").dtype, roles.device))
    spent, chosen = 0.0, []
    for i in rows:
        spent += seconds * len(trained) * products.training([lengths.sequences[i]], lengths.responses[i])
        if len(chosen) > 1 and spent > PATIENCE:
            break
        chosen.append(i)
    return chosen
