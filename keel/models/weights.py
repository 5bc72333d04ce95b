"""Writing, reading and hashing weights: safetensors only."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from keel.errors import ModelError
from keel.models.heads import ScalarHead

HEAD_FILE = "head.safetensors"


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.view(torch.uint8).numpy().data if tensor.dim() else tensor.reshape(1).view(torch.uint8).numpy().data
        )
    return digest.hexdigest()


def export_causal_lm(like: PreTrainedModel, state: Mapping[str, Tensor], folder: Path) -> None:
    """Writes `state` as a Hugging Face folder of the same architecture and dtype as `like`. Asserts that every weight
    is there and none is left over."""
    with torch.device("meta"):  # holds the state's own tensors: no second copy of the weights
        fresh = AutoModelForCausalLM.from_config(like.config, dtype=like.dtype)
    fresh.load_state_dict(dict(state), strict=True, assign=True)
    fresh.generation_config = like.generation_config
    fresh.save_pretrained(folder)


def save_head(head: ScalarHead, file: Path) -> None:
    """Writes a scalar head."""
    save_file({name: p.detach().cpu().contiguous() for name, p in head.state_dict().items()}, file)


def load_head(file: Path, hidden: int, device: torch.device) -> ScalarHead:
    """Reads a scalar head. Raises ModelError where it is missing, damaged or of another width."""
    head = ScalarHead(hidden)
    try:
        head.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"the scalar head cannot be loaded: {str(error).splitlines()[0]}",
            where=str(file),
            remedy="run the reward stage again",
        ) from None
    return head.to(device)
