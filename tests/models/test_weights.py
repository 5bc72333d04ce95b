"""Weights in, weights out: round trips, and what is refused. Nothing that a model folder holds is ever run."""

import json
import os
import pickle
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from keel.config import ModelConfig
from keel.errors import ModelError
from keel.models.loading import file_hash, load_encoder, load_size, load_tokenizer
from keel.models.roles import checkpoint_tensors, logprobs_BT, restore_tensors, scores_B
from keel.models.separate import SeparateRoles, load_headed
from keel.models.shared import SharedRoles
from keel.models.weights import export_causal_lm
from tests.tiny import backbone, load, sequences

WEIGHTS = "model.safetensors"


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6)).logits


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_folder(request, tiny_model, tmp_path) -> Path:
    """The tiny model with the output weights tied to the embedding, or of their own."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = request.param
    (folder / "config.json").write_text(json.dumps(config))
    embedding = weights["model.embed_tokens.weight"]
    weights.pop("lm_head.weight", None)
    if not request.param:
        weights["lm_head.weight"] = embedding.flip(0).contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_a_model_with_a_head_goes_round(model_folder, tmp_path):
    """Case 44."""
    roles = SeparateRoles.build(load(model_folder), ["reward"], ["reward"], 0)
    with torch.no_grad():
        roles.model("reward").get_output_embeddings().weight[3, 3] += 1  # pyright: ignore
    rows = sequences(3)
    want, plain = scores_B(roles, rows, 0, 1000), logits(roles.model("reward"))
    roles.save_headed("reward", tmp_path / "out")
    model, head = load_headed(load(tmp_path / "out"), tmp_path / "out")
    back = SeparateRoles({"reward": model}, {"reward": head}, [])
    torch.testing.assert_close(scores_B(back, rows, 0, 1000), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits(model), plain, atol=1e-6, rtol=0)
    tied = json.loads((model_folder / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in load_file(tmp_path / "out" / WEIGHTS)) == (not tied)


def test_an_adapter_with_its_head_and_the_merged_export_go_round(model_folder, tmp_path):
    roles = backbone("shared", model_folder, ("policy", "reward"), ("policy", "reward"))
    assert isinstance(roles, SharedRoles)
    rows = sequences(3)
    scores, (logprobs, _) = scores_B(roles, rows, 0, 1000), logprobs_BT(roles, "policy", rows, 1.0, 0, 1000)
    roles.save_headed("reward", tmp_path / "reward")
    fresh = SharedRoles(load(model_folder), ["reward"], [], 4, 8.0, 1)
    fresh.load_headed(tmp_path / "reward", ["reward"])
    torch.testing.assert_close(scores_B(fresh, rows, 0, 1000), scores, atol=1e-6, rtol=0)
    roles.export("policy", tmp_path / "merged")
    merged = SeparateRoles({"policy": load(tmp_path / "merged")}, {}, [])
    torch.testing.assert_close(logprobs_BT(merged, "policy", rows, 1.0, 0, 1000)[0], logprobs, atol=1e-4, rtol=0)


def test_tokens_that_were_added_go_through_training_and_export(model_folder, tmp_path):
    """Case 46."""
    tokenizer = load_tokenizer(model_folder)
    old = len(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    settings = ModelConfig(path="x")
    tokenizer.save_pretrained(model_folder)
    with pytest.raises(ModelError, match=f"tokens up to number {old + 1}, and the model has embeddings for {old}"):
        load_encoder(model_folder, settings)
    model = load(model_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(model_folder)
    load_encoder(model_folder, settings)
    roles = backbone("shared", model_folder, ("policy", "reference"), ("policy",))
    rows = sequences(2)
    rows = [type(row)(row.prompt_ids, (*row.response_ids, old, old + 1)) for row in rows]
    want, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 1000)
    roles.export("policy", tmp_path / "out")
    back = SeparateRoles({"policy": load(tmp_path / "out")}, {}, [])
    torch.testing.assert_close(logprobs_BT(back, "policy", rows, 1.0, 0, 1000)[0], want, atol=1e-4, rtol=0)


def test_changed_weights_are_written_one_at_a_time(model_folder, tmp_path):
    model = load(model_folder)
    state = {name: t.detach() for name, t in model.state_dict(keep_vars=True).items()}
    names = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    alive: list[weakref.ref[torch.Tensor]] = []

    def changed() -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(names):
            assert not [old for old in alive[:-1] if old() is not None], "more than the weight before is in memory"
            new = torch.full_like(state[name], 3.0 + number)
            alive.append(weakref.ref(new))
            yield name, new
            del new

    export_causal_lm(model, state, tmp_path / "out", changed())
    want = load_file(model_folder / WEIGHTS) | {
        names[0]: torch.full((32,), 3.0),
        names[1]: torch.full((64, 32), 4.0),
        names[2]: torch.full((64, 32), 5.0),
    }
    got = load_file(tmp_path / "out" / WEIGHTS)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not (state[names[0]] == 3).any(), "the model itself has changed"
    for wrong in (torch.ones(31), torch.ones(32, dtype=torch.bfloat16)):
        with pytest.raises(AssertionError, match=re.escape(names[0])):
            export_causal_lm(model, state, tmp_path / "wrong", [(names[0], wrong)])


def test_a_model_in_several_files_is_whole_or_refused(model_folder, tmp_path):
    model, folder = load(model_folder), tmp_path / "sharded"
    shutil.copytree(model_folder, folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    torch.testing.assert_close(logits(load(folder)), logits(model), atol=0, rtol=0)
    shards[1].unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded|are missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "told"), [("model.norm.weight", "1 weights are missing"), ("", "1 are unknown: extra")]
)
def test_a_missing_and_an_unknown_weight_are_refused(tiny_model, tmp_path, name, told):
    shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / WEIGHTS)
    if name:
        del weights[name]
    else:
        weights["extra.weight"] = torch.ones(2)
    save_file(weights, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=told):
        load(tmp_path / "model")


def test_an_adapter_of_another_base_is_refused(tiny_model, tmp_path):
    backbone("shared", tiny_model, ("reward",), ("reward",)).save_headed("reward", tmp_path / "r")  # pyright: ignore
    file = tmp_path / "r" / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(iter(whole))
    for changed in (
        {n: t for n, t in whole.items() if n != name},
        whole | {"extra": torch.ones(1)},
        whole | {name: torch.ones(3, 3)},
    ):
        save_file(changed, file)
        fresh = SharedRoles(load(tiny_model), ["reward"], [], 4, 8.0, 0)
        with pytest.raises(ModelError, match="does not fit this base"):
            fresh.load_headed(tmp_path / "r", ["reward"])


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_checkpoint_with_another_set_of_weights_is_refused_and_changes_none(kind, tiny_model):
    roles = backbone(kind, tiny_model, ("policy",), ("policy",))
    tensors = {name: tensor + 1 for name, tensor in checkpoint_tensors(roles).items()}
    before, name = roles.fingerprint("policy"), sorted(tensors)[-1]
    for changed in (
        {n: t for n, t in tensors.items() if n != name},
        tensors | {"policy/extra": torch.ones(1)},
        tensors | {name: torch.ones(3)},
        tensors | {name: tensors[name].double()},
    ):
        with pytest.raises(ModelError, match=name if name in changed and "policy/extra" not in changed else "weights"):
            restore_tensors(roles, changed)
        assert roles.fingerprint("policy") == before
    restore_tensors(roles, tensors)
    assert roles.fingerprint("policy") != before


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_nothing_in_a_model_folder_is_run(tiny_model, tmp_path):
    """Neither a pickle in the weights' place nor a module that config.json names."""
    folder, struck = tmp_path / "model", tmp_path / "struck"
    shutil.copytree(tiny_model, folder)
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(struck)))
    with pytest.raises(ModelError):
        load(folder)
    shutil.copy(tiny_model / WEIGHTS, folder)
    (folder / "evil.py").write_text(f"open({str(struck)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": code}))
    with pytest.raises(ModelError):
        load(folder)
    load_tokenizer(folder)  # by its own file
    assert not struck.exists()


def test_the_hash_of_a_folder_sees_what_is_no_file(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    seen = {file_hash(tmp_path / "model")}
    for put in (os.mkfifo, os.mkdir, lambda path: Path(path).symlink_to("nowhere"), lambda path: Path(path).touch()):
        place = tmp_path / "model" / WEIGHTS
        place.rmdir() if place.is_dir() else place.unlink()
        put(place)
        seen.add(file_hash(tmp_path / "model"))
    assert len(seen) == 2  # whole, and without its weights


@pytest.mark.parametrize("content", ['{"model_type": "nope"}', "{", "[]"])
def test_a_config_of_no_known_architecture_is_told(content, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text(content)
    for read in (load_size, lambda path: load_encoder(path, ModelConfig(path=str(path)))):
        with pytest.raises(ModelError) as caught:
            read(folder)
        assert caught.value.where and caught.value.remedy
