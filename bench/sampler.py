"""Sampling responses beside transformers' own `generate`: tokens per second, in one process, in turns.

    python -m bench.sampler                              SmolLM2, bfloat16 and float32 (needs `make smollm2`)
    python -m bench.sampler --model tiny                 hidden 128, 4 layers, vocabulary 2048, 256 rows
    python -m bench.sampler --prompts 4 --dtype float32  8 responses to each of 4 prompts

Standard output gets one JSON object a measurement, as bench/common.py describes them; standard error the progress.
Both sample at temperature 1 from the whole vocabulary, from the same left-padded prompts of 16 to 32 tokens, and
neither knows an end token. The fastest of each one's rounds counts, since whatever else runs on a machine only slows.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.common import Bounds, line, write
from bench.workload import write_model
from keel.models.loading import load_causal_lm, quiet_transformers
from keel.models.separate import SeparateRoles
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.types import Prompt

BOUNDS = {"smollm2": Bounds("ratio >=", 2.5, 4.0)}
PAD = 2


def measure(model: Any, rows: int, prompts: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, ours and transformers'."""
    generator = torch.Generator().manual_seed(0)
    high = model.config.vocab_size
    lengths = torch.randint(16, 33, (prompts,), generator=generator).tolist()
    distinct = [tuple(torch.randint(3, high, (n,), generator=generator).tolist()) for n in lengths]
    asked = [distinct[i * prompts // rows] for i in range(rows)]
    width = max(lengths)
    ids_BS = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in asked])
    seen_BS = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked])
    encoder = SimpleNamespace(prompt_ids=asked.__getitem__, eos_ids=(-1,), pad_id=PAD, decode=lambda ids: "")
    roles = SeparateRoles.build(model, ["policy"], ["policy"], 0)
    engine = LocalEngine(roles, cast(Any, encoder))
    model.generation_config.eos_token_id = None
    ours, theirs = [], []
    for number in range(rounds + 1):
        start = time.perf_counter()
        numbers = cast(list[Prompt], list(range(rows)))  # the encoder above reads prompts by number
        engine.generate(numbers, Sampling(1.0, tokens), seed=0, step=number)
        middle = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids_BS,
                attention_mask=seen_BS,
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                pad_token_id=PAD,
            )
        assert made.shape[1] == width + tokens
        if number:  # the first round warms both up
            ours.append(rows * tokens / (middle - start))
            theirs.append(rows * tokens / (time.perf_counter() - middle))
            sys.stderr.write(f"round {number}: {ours[-1]:.0f} tokens/s, transformers {theirs[-1]:.0f}\n")
    return ours, theirs


def _load(name: str, dtype: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_model(name if name == "tiny" else f"{name}-{dtype}", Path(folder))
        return load_causal_lm(folder, dtype, torch.device("cpu"))


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, help="responses; 32, with tiny 256")
    parser.add_argument("--prompts", type=int, help="distinct prompts among them; as many as rows")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    quiet_transformers()
    rows = chosen.rows or (256 if chosen.model == "tiny" else 32)
    prompts = chosen.prompts or rows
    for dtype in chosen.dtype:
        ours, theirs = measure(_load(chosen.model, dtype), rows, prompts, chosen.tokens, chosen.rounds)
        bounds = BOUNDS.get(chosen.model) if dtype == "bfloat16" and prompts == rows else None
        name = f"sampler/{chosen.model}/{dtype}/{prompts}x{rows // prompts}x{chosen.tokens}"
        detail = {"ours": ours, "peer": theirs, "threads": torch.get_num_threads()}
        write(line(name, "tokens/s", max(ours), max(theirs), bounds, detail))


if __name__ == "__main__":
    main()
