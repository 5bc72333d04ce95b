"""Writing, reading and hashing weights: safetensors only."""

import hashlib
import json
from collections.abc import Iterable, Mapping
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
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU; nothing is copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def export_causal_lm(
    like: PreTrainedModel, state: Mapping[str, Tensor], folder: Path, changed: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Writes `state` as a Hugging Face folder of the same architecture and dtype as `like`. Asserts that every weight
    is there and none is left over.

    changed: names and weights that take the place of those in `state`, in its dtype. Each is asked for when the one
    before it has been written, so that they are never all in memory: that would be a second model.
    """
    with torch.device("meta"):  # holds the state's own tensors: no second copy of the weights
        fresh = AutoModelForCausalLM.from_config(like.config, dtype=like.dtype)
    fresh.load_state_dict(dict(state), strict=True, assign=True)
    fresh.generation_config = like.generation_config
    fresh.save_pretrained(folder)
    places = {name: place for file in sorted(folder.glob("*.safetensors")) for name, place in _places(file).items()}
    for name, weight in changed:
        file, start, size = places[name]
        content = bytes_of(weight.cpu().contiguous())
        assert weight.dtype == like.dtype and len(content) == size, name
        with open(file, "r+b") as stream:
            stream.seek(start)
            stream.write(content)


def _places(file: Path) -> dict[str, tuple[Path, int, int]]:
    """Where each weight lies in a safetensors file: the file, its first byte there and the number of its bytes. The
    library does not tell; the file begins with the length of a header in JSON, that counts from its own end."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (file, 8 + length + start, end - start) for name, (start, end) in spans.items()}


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
