"""The models and recipes that PPO is measured with: random prompts of an exact length, four roles.

python -m bench.workload MODEL FOLDER       writes a model (tiny, smollm2-float32, smollm2-bfloat16)
"""

import json
import random
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.common import HERE, Finished, keel, run
from keel.runs.log import read_lines

HIDDEN, LAYERS, HEADS, INTERMEDIATE, VOCABULARY = 128, 4, 4, 512, 2048
PROMPT, RESPONSE = 16, 32
"""Tokens of every prompt, and the limit of a response."""
WORDS = 24
"""Words of a prompt's text: more than `PROMPT` tokens in any tokenizer, so that each is cut to exactly that."""


def write_model(name: str, folder: Path) -> None:
    """A Hugging Face folder. tiny: a random Llama with a byte-level tokenizer whose padding is no end token."""
    from keel.models.loading import unpack_smollm2

    if name.startswith("smollm2-"):
        unpack_smollm2(folder, name.removeprefix("smollm2-"))
        return
    from keel import sandbox

    rng = random.Random(0)
    tokenizer = sandbox.train_tokenizer([text_of(rng, 200) for _ in range(400)], VOCABULARY)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(bos, int) and isinstance(eos, int) and isinstance(pad, int)
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    sandbox.build_model(
        vocab_size=VOCABULARY,
        hidden=HIDDEN,
        layers=LAYERS,
        heads=HEADS,
        intermediate=INTERMEDIATE,
        seed=0,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def text_of(rng: random.Random, words: int = WORDS) -> str:
    """Words of random letters."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(words))


def model_folder(name: str, root: Path) -> Path:
    """The model under `root`, made by a process of its own where it is not there yet."""
    folder = root / "models" / name
    if not (folder / "config.json").exists():
        aside = folder.with_name(f"{name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        run([sys.executable, "-m", "bench.workload", name, str(aside)], root, HERE)
        aside.rename(folder)
    return folder


def recipe(name: str, weights: Path, root: Path, threads: int, **changes: dict[str, Any]) -> Path:
    """Writes a recipe of four roles with its random prompts and pairs. changes: keys of the sections model and ppo."""
    rng = random.Random(0)
    ppo: dict[str, Any] = {
        "data": {"path": [str(root / f"{name}-prompts.jsonl")]},
        "updates": 6,
        "rollouts": 64,
        "minibatches": 4,
        "critic": {"warmup_cap": 0},  # both learn from the first update on
        "checkpoint_every": 1_000_000,  # at the end only
        **changes.get("ppo", {}),
    }
    pairs = root / f"{name}-pairs.jsonl"
    tree = {
        "name": name,
        "root": str(root / "runs"),
        "threads": threads,
        "model": {
            "path": str(weights),
            "template": "plain",
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
            **changes.get("model", {}),
        },
        "reward": {"data": {"path": [str(pairs)]}, "batch": 4, "held_out": 4, "normalise_samples": 4},
        "ppo": ppo,
    }
    _write_lines(Path(ppo["data"]["path"][0]), [{"prompt": text_of(rng)} for _ in range(max(256, ppo["rollouts"]))])
    _write_lines(pairs, [{"prompt": text_of(rng), "chosen": "yes", "rejected": "no"} for _ in range(16)])
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


def _write_lines(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(file: Path, root: Path) -> None:
    """The stages before PPO, each in a process that is not measured."""
    run(keel("reward", str(file)), root, HERE)


def measure(file: Path, root: Path, *flags: str) -> tuple[Finished, list[dict[str, Any]]]:
    """PPO from its start as a whole process, `keel ppo`; with the metrics of its updates."""
    stage = root / "runs" / file.stem / "ppo"
    shutil.rmtree(stage, ignore_errors=True)
    finished = run(keel("ppo", str(file), *flags), root, HERE)
    return finished, list(read_lines(stage / "metrics.jsonl"))


def median_update(updates: Sequence[Mapping[str, Any]], key: str) -> float:
    """A metric's median over the updates that have it, the first one left out: it has what only a start has."""
    values = [update[key] for update in updates if key in update]
    return statistics.median(values[1:] or values)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
