"""How much memory the stages of a recipe need, by part, and what to change where it is too much.

Weights, gradients, optimizer state and cache are counted exactly from shapes. Activations and logits are estimates,
which `keel.train.calibrate` replaces by what real passes take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.algo.logprobs import AT_ONCE
from keel.config import Recipe
from keel.data.encode import micro_batches
from keel.models.side_by_side import SMALL_PARAMETERS
from keel.models.size import BYTES, Size
from keel.rollout.engine import Sampling

PARTS = ("weights", "gradients", "optimizer", "cache", "activations", "logits", "checkpoint")
PASSING = ("gradients", "cache", "activations", "logits")
"""What is gone at the end of an update, when a checkpoint is made."""
MOMENTS = ("generate", "experience", "update", "export")
"""The moments of a PPO step that differ in what is in memory, and the writing of the model at the end."""
MIB = 2**20


@dataclass(frozen=True)
class Lengths:
    """What a batch of rollouts looks like, in tokens: of each prompt and each response. source: where that is from."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    source: str

    @property
    def sequences(self) -> list[int]:
        """Tokens of prompt and response."""
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]

    def resized(self, rollouts: int, limit: int) -> "Lengths":
        """The same kind of batch with another number of rows and another limit of a response."""
        rows = [i % len(self.prompts) for i in range(rollouts)]
        responses = tuple(min(limit, self.responses[i]) for i in rows)
        return replace(self, prompts=tuple(self.prompts[i] for i in rows), responses=responses)


Memory = dict[str, int]
"""Bytes by part."""


def weights_of(recipe: Recipe, size: Size, trained: Sequence[str], frozen: Sequence[str]) -> tuple[int, int]:
    """(bytes of all weights, bytes of the trained ones among them). Heads of one number a token are left out."""
    model = recipe.model
    if model.backbone == "separate":
        one = size.parameters * BYTES[model.dtype]
        return one * len([*trained, *frozen]), one * len(trained)
    assert model.lora_rank
    adapter = size.adapter * model.lora_rank * BYTES["float32"]
    adapters = [role for role in (*trained, *frozen) if role != "reference"]
    return size.parameters * BYTES[model.dtype] + adapter * len(adapters), adapter * len(trained)


def ppo_roles(recipe: Recipe) -> tuple[list[str], list[str]]:
    """(trained roles, frozen roles) of online training."""
    ppo = recipe.ppo
    assert ppo
    reference = recipe.model.backbone == "shared" or ppo.kl.coefficient > 0
    frozen = [*(["reference"] if reference else []), *(["reward"] if ppo.reward == "model" else [])]
    return ["policy", *(["critic"] if ppo.has_critic else [])], frozen


def ppo_memory(recipe: Recipe, size: Size, lengths: Lengths) -> dict[str, Memory]:
    """Bytes by moment and part of online training; the interpreter and libraries are not among them."""
    ppo, dtype = recipe.ppo, recipe.model.dtype
    assert ppo
    trained, frozen = ppo_roles(recipe)
    weights, own = weights_of(recipe, size, trained, frozen)
    looking = weights  # while there are passes through frozen roles
    if recipe.model.rest_frozen:
        one = (weights - own) // len(frozen)
        exact = ppo.kl.place == "loss" and ppo.kl.estimator == "exact"  # needs the reference in the update too
        weights, looking = own + one * exact, own + one * (1 + exact)
    always = {"weights": weights, "optimizer": 2 * own}
    workers = _workers(recipe, size)
    rows = min(len(lengths.prompts), Sampling().rows * workers)
    longest = max(lengths.responses)
    cached = sum(sorted(lengths.prompts, reverse=True)[:rows]) + rows * longest  # made for the longest at the start
    tokens = micro_tokens(recipe, size, lengths)
    passes = {"logits": 3 * 4 * min(tokens * size.vocabulary, workers * AT_ONCE)}
    kept = size.activations(tokens, dtype, recipe.model.activation_checkpointing)
    return {
        "generate": {
            **always,
            "cache": size.cache(cached, dtype),
            "logits": rows * size.vocabulary * (BYTES[dtype] + 16),  # as they come, two in float32, one in float64
        },
        "experience": {
            **always,
            **passes,
            "weights": looking,
            "activations": size.activations(tokens, dtype) // size.layers,
        },
        "update": {**always, **passes, "gradients": own, "activations": kept},
        "export": {"weights": weights},
    }


def copied(recipe: Recipe, size: Size) -> int:
    """Bytes that a checkpoint of online training copies, to be written beside it: weights that learn, with their two
    moments. The last checkpoint is not copied; 0 where there is no other."""
    assert recipe.ppo
    _, own = weights_of(recipe, size, *ppo_roles(recipe))
    return 3 * own if recipe.ppo.updates > recipe.ppo.checkpoint_every else 0


def with_copy(moments: Mapping[str, Memory], copy: int, limit: int) -> dict[str, Memory]:
    """The moments with the copy of a checkpoint beside them, which stays from the first one on. Where there is no room
    for it and as much again, none is made (`runs.saver`)."""
    held = max(sum(n for part, n in parts.items() if part not in PASSING) for parts in moments.values())
    if 2 * copy > limit - held:
        return dict(moments)
    return {name: parts if name == "export" else parts | {"checkpoint": copy} for name, parts in moments.items()}


def micro_tokens(recipe: Recipe, size: Size, lengths: Lengths) -> int:
    """Padded tokens that are in a training pass at the same time."""
    assert recipe.ppo
    rows = -(-len(lengths.prompts) // recipe.ppo.minibatches)
    sequences, workers = sorted(lengths.sequences, reverse=True)[:rows], _workers(recipe, size)
    parts = micro_batches(sequences, recipe.ppo.micro_tokens, workers)
    return sum(sorted((len(part) * max(sequences[i] for i in part) for part in parts), reverse=True)[:workers])


def _workers(recipe: Recipe, size: Size) -> int:
    small = recipe.model.backbone == "separate" and size.parameters <= SMALL_PARAMETERS
    return (recipe.threads or 1) if small else 1


def peak(moments: Mapping[str, Memory]) -> int:
    """Bytes of the largest moment."""
    return max(sum(parts.values()) for parts in moments.values())


def other_stages(recipe: Recipe, size: Size) -> dict[str, Memory]:
    """Bytes by part of the stages beside online training, counted with a micro-batch that is full; for `eval` a batch
    that is sampled, with the models before and after training. `base` is the sandbox's pretraining."""
    found: dict[str, Memory] = {}
    model, dtype = recipe.model, recipe.model.dtype
    sequence = model.max_prompt_tokens + model.max_response_tokens
    if recipe.sandbox:
        one = size.parameters * BYTES["float32"]
        tokens = recipe.sandbox.pretrain_batch * sequence
        found["base"] = {
            "weights": one,
            "gradients": one,
            "optimizer": 2 * one,
            "activations": size.activations(tokens, "float32"),
            "logits": 3 * 4 * min(tokens * size.vocabulary, AT_ONCE),
        }
    for name, settings in (("sft", recipe.sft), ("reward", recipe.reward), ("preference", recipe.preference)):
        if settings is None:
            continue
        frozen = ["reference"] if name == "reward" and not model.rest_frozen else []
        tuned = recipe.sft.tuning if name == "sft" and recipe.sft else None
        kind = "separate" if tuned == "full" else "shared" if tuned == "lora" else model.backbone
        as_if = recipe.model_copy(update={"model": model.model_copy(update={"backbone": kind})})
        weights, own = weights_of(as_if, size, ["policy"], frozen)
        tokens = min(settings.micro_tokens, settings.batch * sequence * (1 if name == "sft" else 2))
        logits = 0 if name == "reward" else 3 * 4 * min(tokens * size.vocabulary, AT_ONCE)
        found[name] = {
            "weights": weights,
            "gradients": own,
            "optimizer": 2 * own,
            "activations": size.activations(tokens, dtype, model.activation_checkpointing),
            "logits": logits,
        }
    if recipe.eval:
        weights, _ = weights_of(recipe, size, ["reward"] if recipe.reward else [], ["reference"])
        rows = min(recipe.eval.prompts, Sampling().rows)
        found["eval"] = {
            "weights": weights + size.parameters * BYTES[dtype],
            "cache": size.cache(rows * sequence, dtype),
            "logits": rows * size.vocabulary * (BYTES[dtype] + 16),
        }
    return found


@dataclass(frozen=True)
class Change:
    """One way to need less: field, from and to, and the bytes that it saves of the peak."""

    field: str
    old: Any
    new: Any
    saves: int


def advice(recipe: Recipe, size: Size, lengths: Lengths) -> list[Change]:
    """What would lower the peak of online training, the largest saving first."""
    now = peak(ppo_memory(recipe, size, lengths))
    found: list[Change] = []
    for field, new in _candidates(recipe):
        changed = _with(recipe, field, new)
        assert changed.ppo
        rows = lengths.resized(changed.ppo.rollouts, changed.model.max_response_tokens)
        saves = now - peak(ppo_memory(changed, size, rows))
        if saves > MIB:
            found.append(Change(field, _get(recipe, field), new, saves))
    return sorted(found, key=lambda change: -change.saves)


def _candidates(recipe: Recipe) -> list[tuple[str, Any]]:
    model, ppo = recipe.model, recipe.ppo
    assert ppo
    each = ppo.responses_per_prompt
    found: list[tuple[str, Any]] = []
    if model.backbone == "separate":
        found.append(("model.backbone", "shared"))
        found += [] if model.rest_frozen or not ppo_roles(recipe)[1] else [("model.rest_frozen", True)]
    elif model.dtype == "float32":
        found.append(("model.dtype", "bfloat16"))
    if model.lora_rank and model.lora_rank > 1:
        found.append(("model.lora_rank", max(1, model.lora_rank // 4)))
    if not model.activation_checkpointing:
        found.append(("model.activation_checkpointing", True))
    found.append(("ppo.micro_tokens", max(1, ppo.micro_tokens // 4)))
    if ppo.rollouts // 4 >= max(each, ppo.minibatches) and ppo.rollouts // 4 % each == 0:
        found.append(("ppo.rollouts", ppo.rollouts // 4))
    if model.max_response_tokens > 1:
        found.append(("model.max_response_tokens", model.max_response_tokens // 2))
    return found


def _get(recipe: Recipe, field: str) -> Any:
    section, name = field.split(".")
    return getattr(getattr(recipe, section), name)


def _with(recipe: Recipe, field: str, value: Any) -> Recipe:
    section, name = field.split(".")
    part = getattr(recipe, section).model_copy(update={name: value})
    return recipe.model_copy(update={section: part}).resolved()
