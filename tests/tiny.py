"""A tiny sandbox model and helpers that several tests share."""

from collections.abc import Collection
from pathlib import Path

import torch

from keel import sandbox
from keel.data.encode import Encoder, eos_ids_of
from keel.models.loading import load_causal_lm, load_tokenizer
from keel.models.roles import Role
from keel.models.separate import SeparateRoles
from keel.models.shared import SharedRoles
from keel.train.reward import Comparisons
from keel.types import Prompt, TokenSequence


def write_model(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A random sandbox model with its tokenizer, as a Hugging Face folder."""
    asked = sandbox.requests(0, 200, "train")
    tokenizer = sandbox.train_tokenizer([r.text for r in asked], 400)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(bos, int) and isinstance(eos, int) and isinstance(pad, int)
    model = sandbox.build_model(
        vocab_size=len(tokenizer),
        hidden=32,
        layers=layers,
        heads=2,
        intermediate=64,
        seed=seed,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def encoder_of(folder: Path, max_response_tokens: int = 24) -> Encoder:
    tokenizer = load_tokenizer(folder)
    return Encoder(tokenizer, "chat", 64, max_response_tokens, eos_ids_of(tokenizer))


def prompts(count: int, seed: int = 1) -> list[Prompt]:
    """Sandbox requests of different lengths."""
    return [
        Prompt(({"role": "user", "content": r.text},), r.columns(), f"row {i}")
        for i, r in enumerate(sandbox.requests(seed, count, "train"))
    ]


def load(folder: Path, dtype: str = "float32"):
    return load_causal_lm(folder, dtype, torch.device("cpu"))


def backbone(
    kind: str,
    folder: Path,
    roles: Collection[Role] = ("policy", "reference", "critic", "reward"),
    trainable: Collection[Role] = ("policy", "critic"),
) -> SeparateRoles | SharedRoles:
    """Roles on either backbone; adapters are moved off zero so that no two roles are the same."""
    if kind == "separate":
        built = SeparateRoles.build(load(folder), roles, trainable, 0)
    else:
        built = SharedRoles(load(folder), roles, trainable, 4, 8.0, 0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for role in sorted(set(roles) - {"reference"}):
            for _, parameter in sorted(built.parameters(role).items()):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return built


def sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    """Random ids, prompts of 3 to 9 tokens, responses of 1 to 12."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return [
        TokenSequence(tuple(draw(5, 300) for _ in range(draw(3, 9))), tuple(draw(5, 300) for _ in range(draw(1, 12))))
        for _ in range(count)
    ]


def comparisons(count: int) -> list[Comparisons]:
    """Prompts with three responses each and all their pairs, the first the best."""
    flat = sequences(3 * count, seed=3)
    flat = [TokenSequence(flat[i - i % 3].prompt_ids, s.response_ids) for i, s in enumerate(flat)]
    return [Comparisons.of([(a, b), (a, c), (b, c)]) for a, b, c in zip(flat[::3], flat[1::3], flat[2::3], strict=True)]
