"""Golden ids and masks: one small row of each kind through tokenizers of several families, made here from fixed
vocabularies (nothing is trained, so the ids are the same on every machine)."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from keel.data.encode import Encoder, pad_sequences
from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.types import TokenSequence

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GOLDEN = Path(__file__).with_name("encoding.json")
WORDS = ["ask", "me", "yes", "no", "be", "kind", "user", "assistant", "system"]


def byte_level(adds_bos: bool = False) -> Encoder:
    """GPT-2's family: byte-level BPE, no BOS, padding = end token = the only special one; Keel's default template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["as", "ask", "me", "ye", "yes", "no", "Ġno", "Ġme"]
    vocabulary = {token: at for at, token in enumerate(["<|endoftext|>", *alphabet, *merged])}
    merges = [("a", "s"), ("as", "k"), ("m", "e"), ("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "no"), ("Ġ", "me")]
    raw = Tokenizer(models.BPE(vocabulary, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    names = {"eos_token": end, "pad_token": end} | ({"bos_token": end} if adds_bos else {})
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=raw, **names), "chat", 99, 9, (0,))


def byte_level_bos() -> Encoder:
    """The same where one token begins a text, ends it and pads it, as in OPT's and Pythia's relatives."""
    return byte_level(adds_bos=True)


def unigram(bos: bool = True) -> Encoder:
    """Llama's family: Unigram with metaspaces, a BOS that tokenizer and template both write, two end tokens."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *(f"▁{word}" for word in WORDS), *WORDS, "▁", "\n", "?"]
    raw = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "eos_token": "</s>" if bos else "<|im_end|>"} | ({"bos_token": "<s>"} if bos else {})
    made = PreTrainedTokenizerFast(tokenizer_object=raw, **names, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    made.chat_template = ("{{ bos_token }}" if bos else "") + CHATML
    return Encoder(made, "chat", 99, 9, (2, 4) if bos else (4, 2))


def unigram_no_bos() -> Encoder:
    """Qwen's manner: no BOS, and the template ends turns with the tokenizer's own end token, the first of two."""
    return unigram(bos=False)


def word_piece() -> Encoder:
    """BERT's family: WordPiece in lower case, [CLS] and [SEP] around a text, a padding token of its own."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "##s", "##t", "?", ":", "#"]
    raw = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]"}
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=raw, **names), "plain", 99, 9, (3,))


FAMILIES = {
    "byte_level": byte_level,
    "byte_level_bos": byte_level_bos,
    "unigram": unigram,
    "unigram_no_bos": unigram_no_bos,
    "word_piece": word_piece,
}
TURNS = [{"from": "human", "value": "ask me"}, {"from": "gpt", "value": "yes"}, {"from": "human", "value": "no?"}]
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "demonstration": (read_demonstrations, {"prompt": "ask me", "completion": "yes no"}),
    "alpaca": (read_demonstrations, {"instruction": "ask", "input": "me", "output": "yes"}),
    "preference": (read_preferences, {"prompt": "ask", "chosen": "yes", "rejected": "no no"}),
    "index": (read_preferences, {"instruction": "ask", "output_1": "no", "output_2": "yes", "preference": "2.0"}),
    "ranking": (read_preferences, {"prompt": "ask", "ranking": ["yes", "no"]}),
    "thumb": (read_thumbs, {"prompt": "ask me", "completion": "no", "label": "0"}),
    "prompt": (read_prompts, {"question": "ask me?", "answer": "yes"}),
    "messages": (
        read_demonstrations,
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "ask"},
                {"role": "assistant", "content": "yes"},
            ]
        },
    ),
    "sharegpt": (
        read_preferences,
        {"conversations": TURNS, "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
    ),
    "hh": (
        read_preferences,
        {
            "chosen": "\n\nHuman: ask\n\nAssistant: yes\n\nHuman: me\n\nAssistant: no",
            "rejected": "\n\nHuman: ask\n\nAssistant: yes\n\nHuman: me\n\nAssistant: yes yes",
        },
    ),
}
TOLD = [("user", "ask"), ("assistant", "me"), ("tool", "no"), ("assistant", "yes")]
ROWS["tool"] = (read_demonstrations, {"messages": [{"role": role, "content": text} for role, text in TOLD]})
SEVERAL_TURNS = ("messages", "sharegpt", "hh", "tool")
EVERY_TURN = ("tool",)
"""Of these every turn of the assistant is learned."""


def encoded(encoder: Encoder, kind: str, folder: Path) -> dict[str, Any]:
    """Every sequence of a row: ids, and the mask of what is supervised."""
    read, row = ROWS[kind]
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row))
    (record,) = read(path).records
    replies = [getattr(record, name) for name in ("response", "chosen", "rejected") if hasattr(record, name)]
    sequences = encoder.sequences(record.prompt, replies) if replies else []
    if kind in EVERY_TURN:
        sequences = encoder.turns(record.prompt, record.response)
    if not sequences:  # a prompt: nothing is supervised
        sequences = [TokenSequence(encoder.prompt_ids(record), ())]
    ids_BS, mask_BS, lengths_B = pad_sequences(sequences, encoder.pad_id)
    return {"ids": ids_BS.tolist(), "supervised": mask_BS.int().tolist(), "lengths": lengths_B.tolist()}


CASES = [
    (family, kind) for family in FAMILIES for kind in ROWS if not (family == "word_piece" and kind in SEVERAL_TURNS)
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_ids_and_masks(family: str, kind: str, tmp_path: Path):
    """Equal to encoding.json, which was written by this function once and read through by hand."""
    golden = json.loads(GOLDEN.read_text())
    assert encoded(FAMILIES[family](), kind, tmp_path) == golden[family][kind]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_tokenizer_that_pads_and_cuts_on_the_left_gives_the_same(family: str, kind: str, tmp_path: Path):
    """As tokenizers made for sampling are saved, and as one is left behind that padded a batch or cut a text."""
    encoder = FAMILIES[family]()
    tokenizer = encoder.tokenizer
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer(["ask me", "no"], padding="max_length", truncation=True, max_length=4)
    golden = json.loads(GOLDEN.read_text())[family][kind]
    pad, made = encoder.pad_id, encoded(encoder, kind, tmp_path)
    for row, (ids, length) in enumerate(zip(made["ids"], made["lengths"], strict=True)):
        assert ids[:length] == golden["ids"][row][:length] and ids[length:] == [pad] * (len(ids) - length)
    assert (made["supervised"], made["lengths"]) == (golden["supervised"], golden["lengths"])


def test_a_tool_is_a_gap_by_hand():
    """Worked by hand. Where the template ends a turn with the end token, one sequence with a gap from the end of the
    call to the reply; else a sequence for each turn, learned at its end."""
    golden = json.loads(GOLDEN.read_text())
    (ids,), (mask,) = golden["unigram_no_bos"]["tool"]["ids"], golden["unigram_no_bos"]["tool"]["supervised"]
    pieces = unigram_no_bos().tokenizer.convert_ids_to_tokens(ids)
    learned = [piece for piece, on in zip(pieces, mask, strict=True) if on]
    assert learned == ["me", "<|im_end|>", "yes", "<|im_end|>"]
    assert pieces[pieces.index("me") + 1 : pieces.index("yes")].count("no") == 1
    for family in ("byte_level", "byte_level_bos", "unigram"):
        row = golden[family]["tool"]
        assert len(row["ids"]) == 2 and [sum(mask) for mask in row["supervised"]] == [2, 2]


def test_either_of_two_end_tokens_ends_a_response():
    """Written in a reply it ends the sequence there; the tokenizer's own is appended where neither is written."""
    encoder = unigram()
    assert encoder.responses(["yes", "yes<|im_end|>", "yes</s>", "yes<|im_end|>no"]) == [
        (16, 2),
        (16, 4),
        (16, 2),
        (16, 4),
    ]
    assert encoder.counts == {"responses with an end token inside": 1}


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_the_golden_ids_must_be(family: str, kind: str):
    """Told of the numbers alone: one BOS at most, one end token at the end of what is supervised, never padding."""
    encoder, golden = FAMILIES[family](), json.loads(GOLDEN.read_text())[family][kind]
    for ids, mask, length in zip(golden["ids"], golden["supervised"], golden["lengths"], strict=True):
        supervised = [token for token, on in zip(ids, mask, strict=True) if on]
        if kind not in EVERY_TURN:
            assert mask == sorted(mask[:length]) + [0] * (len(ids) - length)
            assert [token in encoder.eos_ids for token in supervised] == [False] * (len(supervised) - 1) + [
                True
            ] * bool(supervised)
        assert not supervised or supervised[-1] in encoder.eos_ids
        bos = encoder.tokenizer.bos_token_id
        unless = 1 if bos in encoder.eos_ids and supervised else 0  # one token is both
        assert bos is None or (ids[:length].count(bos) == 1 + unless and ids[0] == bos)
        assert set(ids[length:]) <= {encoder.pad_id}
