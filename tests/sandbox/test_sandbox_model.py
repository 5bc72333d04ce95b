"""The tokenizer and the untrained model."""

import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.errors import ConfigError
from keel.sandbox import build_model, demonstration, requests, train_tokenizer, transcript
from keel.sandbox.templates import FACT_WORDS
from keel.sandbox.tokenizer import SPECIAL_TOKENS


def texts(count: int = 2500) -> list[str]:
    rng = random.Random(0)
    return [text for request in requests(0, count, "train") for text in (request.text, demonstration(request, rng))]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(), 1200)


def test_special_tokens_are_distinct_and_first(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_the_vocabulary_is_filled_until_every_word_is_one_token(tokenizer) -> None:
    assert len(train_tokenizer(texts(), 500)) == 500
    assert 500 < len(tokenizer) < 1200
    words = {word for text in texts() for word in re.findall(r" [A-Za-z]+", text)}
    assert [word for word in words if len(tokenizer(word).input_ids) > 1] == []


def test_marks_in_the_texts_are_not_learnt_as_text() -> None:
    rng, asked = random.Random(0), requests(0, 300, "train")
    learnt = train_tokenizer([transcript(r, demonstration(r, rng), rng) for r in asked], 1200)
    tokens = set(learnt.get_vocab()) - set(SPECIAL_TOKENS)
    assert {token for token in tokens if "<" in token or ">" in token} == {"<", ">"}
    assert [word for word in ("curt", "evasive", "worried") if len(learnt(" " + word).input_ids) > 1] == []


def test_facts_are_single_tokens(tokenizer) -> None:
    assert [word for word in FACT_WORDS if len(tokenizer(" " + word).input_ids) > 1] == []


def test_any_text_survives_encoding(tokenizer) -> None:
    for text in (*texts(20), "naïve façade 🙂\n\tx  y", " leading and trailing ", "a , b ."):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_marks_turns_and_ends_replies(tokenizer) -> None:
    turns = [{"role": "user", "content": "Is it here?"}, {"role": "assistant", "content": "Yes."}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<bos><user>Is it here?<assistant>Yes.<eos>"
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<bos><user>Is it here?<assistant>"
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert ids[:2] == [1, 3] and ids.count(1) == 1 and ids[-1] == 2 and ids.count(2) == 1 and ids.count(4) == 1


def test_the_same_texts_give_the_same_bytes_and_load_again(tokenizer, tmp_path) -> None:
    train_tokenizer(texts(), 1200).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = texts(1)[0]
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token, loaded.eos_token) == ("<pad>", "<eos>")
    assert loaded.decode([1, 3, *loaded("Hi.").input_ids, 4, 2], skip_special_tokens=True) == "Hi."


def test_a_vocabulary_without_room_is_a_user_error() -> None:
    with pytest.raises(ConfigError, match="100"):
        train_tokenizer(["a"], 100)


SHAPE = {
    "vocab_size": 300,
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "intermediate": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def test_the_model_depends_on_its_seed_only() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = build_model(**SHAPE, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    second, third = build_model(**SHAPE, seed=3), build_model(**SHAPE, seed=4)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.model.embed_tokens.weight, third.model.embed_tokens.weight)


def test_the_model_is_a_stock_llama_that_loads_by_itself(tmp_path) -> None:
    model = build_model(**SHAPE, seed=0)
    assert not model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert model.model.embed_tokens.weight is model.lm_head.weight
    # embeddings + layers * (attention + gated MLP + two norms) + last norm
    expected = 300 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert sum(p.numel() for p in model.parameters()) == expected
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 3, 50, 60]])
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (2, 0)


def test_attention_starts_by_copying_what_it_looks_at() -> None:
    model = build_model(**SHAPE, seed=0)
    weights = dict(model.named_parameters())
    for place in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        assert torch.equal(weights[f"{place}.o_proj.weight"], weights[f"{place}.v_proj.weight"].T)
    spread = {name: p.std().item() * 32**0.5 for name, p in model.named_parameters() if p.ndim == 2}
    assert all(abs(s - (0.3 if "down_proj" in name else 1.0)) < 0.1 for name, s in spread.items()), spread


def test_heads_that_do_not_fit_are_a_user_error() -> None:
    with pytest.raises(ConfigError, match="33"):
        build_model(**{**SHAPE, "hidden": 33}, seed=0)
