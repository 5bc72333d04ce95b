"""A small recipe of every trainer, with four steps each, for the drill that kills each of them in the middle."""

import json
from pathlib import Path
from typing import Any

MODEL: dict[str, Any] = {"path": "model", "max_prompt_tokens": 64, "max_response_tokens": 6}
SEPARATE, SHARED = {**MODEL, "backbone": "separate"}, {**MODEL, "backbone": "shared", "lora_rank": 2}
FITTED = {"batch": 5, "held_out": 4, "learning_rate": 1e-3, "checkpoint_every": 1}
RANKED = {**FITTED, "data": {"path": ["pairs.jsonl"]}}
ONLINE = {
    "data": {"path": ["rows.jsonl"]},
    "reward": "fn.py:score",
    "updates": 4,
    "rollouts": 6,
    "minibatches": 2,
    "checkpoint_every": 1,
    "policy": {"learning_rate": 1e-3},
}
CRITIC = {"normalise_scores": True, "critic": {"warmup_cap": 1, "popart": True}, "keep_best": "score"}
STEERED = {"kl": {"controller": "adaptive", "target": 1.0, "horizon": 50}}
PENALTY = {"loss": "kl_penalty", "learning_rate": 1e-3, "target_kl": 0.01}

TRAINERS: dict[str, dict[str, Any]] = {
    "sft-full": {"model": MODEL, "sft": {**FITTED, "data": {"path": ["demonstrations.jsonl"]}}},
    "sft-lora": {
        "model": {**MODEL, "lora_rank": 2},
        "sft": {**FITTED, "data": {"path": ["demonstrations.jsonl"]}, "tuning": "lora", "keep_best": "heldout_loss"},
    },
    "reward-separate": {"model": SEPARATE, "reward": {**RANKED, "normalise_samples": 4}},
    "reward-shared": {
        "model": SHARED,
        "reward": {**RANKED, "normalise_samples": 4, "keep_best": "heldout_accuracy"},
    },
    "dpo-separate": {"model": SEPARATE, "preference": RANKED},
    "orpo-shared": {"model": SHARED, "preference": {**RANKED, "loss": "orpo"}},
    "kto-shared": {
        "model": SHARED,
        "preference": {**RANKED, "loss": "kto", "data": {"path": ["thumbs.jsonl"]}, "keep_best": "heldout_accuracy"},
    },
    "ppo-shared": {"model": SHARED, "ppo": {**ONLINE, **CRITIC, **STEERED}},
    "grpo-separate": {
        "model": {**SEPARATE, "rest_frozen": True},
        "ppo": {**ONLINE, **STEERED, "advantage": "grpo", "responses_per_prompt": 3, "policy": PENALTY},
    },
}


def write_data(count: int = 24) -> None:
    """The files that the recipes name, into the current folder."""
    asked = [f"Where is lamp {i}?" for i in range(count)]
    good, bad = [f"On shelf {i % 5}." for i in range(count)], [f"Who knows, {i % 3}?" for i in range(count)]
    rows: dict[str, list[dict[str, Any]]] = {
        "rows": [{"prompt": p} for p in asked],
        "demonstrations": [{"prompt": p, "completion": g} for p, g in zip(asked, good, strict=True)],
        "pairs": [{"prompt": p, "chosen": g, "rejected": b} for p, g, b in zip(asked, good, bad, strict=True)],
        "thumbs": [
            {"prompt": p, "completion": (g, b)[i % 2], "label": i % 2 == 0}
            for i, (p, g, b) in enumerate(zip(asked, good, bad, strict=True))
        ],
    }
    for name, some in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
