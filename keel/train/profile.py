"""Where the time of online training goes: seconds, tokens/s and utilisation of each part of a step.

Utilisation is model FLOP utilisation: the floating-point operations that the work needs (`keel.models.flops`), by what
the machine does in a plain matrix product, of the dtype that a pass multiplies in, in the same time.
"""

import functools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keel.algo.precision import compute_dtype
from keel.metrics import PROFILED
from keel.models.flops import Products
from keel.runs.folder import StageFolder
from keel.runs.log import read_lines
from keel.types import Rollouts

PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied to measure a device."""
PRODUCT_ROUNDS = 8


class Clock:
    """Seconds of the parts of a step, by the names that the metrics have."""

    def __init__(self) -> None:
        self.start = self.mark = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Time since the last lap is that of the part `name`, beside what it had before."""
        now = time.monotonic()
        self.laps[f"seconds_{name}"] = self.laps.get(f"seconds_{name}", 0.0) + now - self.mark
        self.mark = now

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.start


@functools.cache
def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the product of two square matrices of `PRODUCT_SIZE` with torch's threads as they are, the best of
    `PRODUCT_ROUNDS` (something else on the machine only slows). Measured once a process, on a processor in the dtype
    that passes of weights of `dtype` multiply in."""
    dtype = compute_dtype(dtype) if device.type == "cpu" else dtype
    size = PRODUCT_SIZE[device.type]
    one = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    out, best = torch.empty_like(one), float("inf")
    for _ in range(PRODUCT_ROUNDS):
        began = time.perf_counter()
        torch.mm(one, one, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


@dataclass(frozen=True)
class Work:
    """What a part did: tokens, and the floating-point operations that they need."""

    tokens: float
    flops: float


def step_work(
    products: Products,
    sampled: Sequence[Rollouts],
    trained: Rollouts | None,
    learners: Collection[str],
    passes: float,
    learned_reward: bool,
) -> dict[str, Work]:
    """The work of each part of one step.

    Tokens are those of responses for `generate`, of prompts with responses for the others; padding is none.

    A prompt of several responses is needed once, but in the update, whose minibatches part them.

    sampled: what was generated. trained: the rows that experience was made of. passes: how often the update went over
    them. learned_reward: a function passes no token through a model.
    """
    work: dict[str, Work] = {}
    flops = 0.0
    for rollouts in sampled:
        lengths = [len(s) for s in rollouts.sequences()]
        repeated = _repeated_prompt_tokens(rollouts)
        flops += products.forward(lengths, int(rollouts.lengths_B.sum()))
        flops -= products.forward(repeated, 0)
    work["generate"] = Work(sum(int(r.lengths_B.sum()) for r in sampled), flops)
    if learned_reward:
        rows = [len(s) for r in sampled for s in r.sequences()]
        work["score"] = Work(sum(rows), products.forward(rows, 0))
    if trained is None:
        return work
    lengths, unembedded = [len(s) for s in trained.sequences()], int(trained.lengths_B.sum())
    again = products.forward(_repeated_prompt_tokens(trained), 0)
    once = Work(sum(lengths), products.forward(lengths, unembedded) - again)
    work |= {"policy": once, "reference": once, "values": Work(once.tokens, products.forward(lengths, 0) - again)}
    backward = sum(products.training(lengths, unembedded if role == "policy" else 0) for role in learners)
    return work | {"update": Work(passes * once.tokens, passes * backward)}


def _repeated_prompt_tokens(rollouts: Rollouts) -> list[int]:
    """Lengths of prompts that stood right before: several responses to a prompt need it once."""
    ids = rollouts.prompt_ids
    return [len(ids[i]) for i in range(1, len(ids)) if ids[i] == ids[i - 1]]


def profile_metrics(laps: Mapping[str, float], work: Mapping[str, Work], rate: float) -> dict[str, float]:
    """Metrics of one step. laps: seconds by `seconds_NAME`. rate: FLOP/s of the machine."""
    found: dict[str, float] = {"product_rate": rate}
    done = [name for name in PROFILED if name in work and laps.get(f"seconds_{name}")]
    for name in done:
        seconds = laps[f"seconds_{name}"]
        found[f"tokens_per_second_{name}"] = work[name].tokens / seconds
        if work[name].flops:
            found[f"utilisation_{name}"] = work[name].flops / seconds / rate
    total = sum(laps.values())
    return found | {"utilisation": sum(work[name].flops for name in done) / total / rate} if total else found


def profile_of(stage: StageFolder, dtype: str) -> dict[str, Any]:
    """The profile of a whole stage from its logs: seconds in all; tokens/s and utilisation, weighted by time; the
    update's padding, of each step alike."""
    lines = list(read_lines(stage.metrics))
    parts: dict[str, dict[str, float]] = {}
    for name in (*PROFILED, "experience"):
        spent = [line for line in lines if f"seconds_{name}" in line]
        seconds = sum(line[f"seconds_{name}"] for line in spent)
        if not seconds:
            continue
        parts[name] = {"seconds": seconds}
        for kind in ("tokens_per_second", "utilisation"):
            weighted = sum(line.get(f"{kind}_{name}", 0.0) * line[f"seconds_{name}"] for line in spent)
            if weighted:
                parts[name][kind] = weighted / seconds
    saves = [event["waited"] for event in read_lines(stage.events) if "waited" in event]
    parts["save"] = {"seconds": sum(saves)}
    spent = sum(line["seconds"] for line in lines)
    padded = [line["padding_update"] for line in lines if "padding_update" in line]
    return {
        "parts": parts,
        "padding": sum(padded) / len(padded) if padded else 0.0,
        "seconds": spent + sum(saves),
        "utilisation": sum(line["utilisation"] * line["seconds"] for line in lines) / (spent or 1.0),
        "product_rate": lines[-1]["product_rate"] if lines else 0.0,
        "dtype": dtype,
    }


def profile_sentence(profile: Mapping[str, Any]) -> str:
    """One line for a person: each part's seconds, tokens/s and utilisation, then the whole's."""
    shown = []
    for name, part in profile["parts"].items():
        notes = [f"{part['tokens_per_second']:.0f} tokens/s"] if "tokens_per_second" in part else []
        notes += [f"{part['utilisation']:.0%}"] if "utilisation" in part else []
        shown.append(f"{name} {part['seconds']:.1f} s" + (f" ({', '.join(notes)})" if notes else ""))
    rate = f"{profile['product_rate'] / 1e9:.0f} GFLOP/s, a matrix product for {profile['dtype']} weights here"
    padded = f"{profile['padding']:.1%} of the update's micro-batches is padding"
    return f"{', '.join(shown)}; model FLOP utilisation {profile['utilisation']:.0%} of {rate}; {padded}"
