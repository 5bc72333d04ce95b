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


def byte_level() -> Encoder:
    """GPT-2's family: byte-level BPE, no BOS, padding = end token = the only special one; Keel's default template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["as", "ask", "me", "ye", "yes", "no", "Ġno", "Ġme"]
    vocabulary = {token: at for at, token in enumerate(["<|endoftext|>", *alphabet, *merged])}
    merges = [("a", "s"), ("as", "k"), ("m", "e"), ("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "no"), ("Ġ", "me")]
    raw = Tokenizer(models.BPE(vocabulary, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end, pad_token=end), "chat", 99, 9, (0,))


def unigram() -> Encoder:
    """Llama's family: Unigram with metaspaces, a BOS that tokenizer and template both write, two end tokens."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *(f"▁{word}" for word in WORDS), *WORDS, "▁", "\n", "?"]
    raw = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, **names, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    made.chat_template = "{{ bos_token }}" + CHATML
    return Encoder(made, "chat", 99, 9, (2, 4))


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


FAMILIES = {"byte_level": byte_level, "unigram": unigram, "word_piece": word_piece}
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
SEVERAL_TURNS = ("messages", "sharegpt", "hh")


def encoded(encoder: Encoder, kind: str, folder: Path) -> dict[str, Any]:
    """Every sequence of a row: ids, and the mask of what is supervised."""
    read, row = ROWS[kind]
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row))
    (record,) = read(path).records
    replies = [getattr(record, name) for name in ("response", "chosen", "rejected") if hasattr(record, name)]
    sequences = encoder.sequences(record.prompt, replies) if replies else []
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
def test_what_the_golden_ids_must_be(family: str, kind: str):
    """Told of the numbers alone: one BOS at most, one end token at the end of what is supervised, never padding."""
    encoder, golden = FAMILIES[family](), json.loads(GOLDEN.read_text())[family][kind]
    for ids, mask, length in zip(golden["ids"], golden["supervised"], golden["lengths"], strict=True):
        assert mask == sorted(mask[:length]) + [0] * (len(ids) - length)
        supervised = [token for token, on in zip(ids, mask, strict=True) if on]
        assert [token in encoder.eos_ids for token in supervised] == [False] * (len(supervised) - 1) + [True] * bool(
            supervised
        )
        bos = encoder.tokenizer.bos_token_id
        assert bos is None or (ids[:length].count(bos) == 1 and ids[0] == bos)
        assert set(ids[length:]) <= {encoder.pad_id}
