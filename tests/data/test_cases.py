"""Faults that people reported of other tools, by number; each test shows the right value.

Elsewhere: case 7 in test_turns.py, cases 16 and 17 through whole stages in tests/e2e/test_data_run.py.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keel.data.encode import Encoder, pad_sequences
from keel.data.formats import read_demonstrations, read_preferences, read_prompts
from keel.errors import DataError
from keel.inspect import survey
from keel.models.separate import SeparateRoles
from keel.train.sft import token_loss
from keel.train.stages import compare
from keel.types import PreferencePair
from tests.data.test_encode import BOS, BOT, EOS, USER, A, B, C, D, letters, says, words
from tests.tiny import encoder_of, load, prompts


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_case_1_the_end_token_is_learned_where_padding_has_its_id():
    """20 rows of 1 to 5 words, pad = eos: each row's mask ends on its own end token, no padding is masked in."""
    made = Encoder(words(pad="</s>"), "chat", 9, 9, (EOS,))
    sequences = [made.sequence(says("a"), " ".join("abcde"[: 1 + row % 5])) for row in range(20)]
    ids_BS, mask_BS, lengths_B = pad_sequences(sequences, made.pad_id)
    assert made.pad_id == EOS
    for ids, mask, length, row in zip(ids_BS, mask_BS, lengths_B.tolist(), range(20), strict=True):
        learned = mask.nonzero().flatten().tolist()
        assert learned == list(range(4, length)) and len(learned) == 2 + row % 5
        assert ids[learned[-1]] == EOS and (ids[length:] == EOS).all()


def test_case_1_the_loss_teaches_the_end_token(tiny_model: Path):
    """The gradient of the loss at the position before the end token raises the end token's logit, with pad = eos."""
    made = encoder_of(tiny_model)
    made.tokenizer.pad_token = made.tokenizer.eos_token
    assert made.pad_id == made.eos_id
    roles = SeparateRoles({"policy": load(tiny_model)}, {}, ["policy"])
    rows = [made.sequence(prompt, "yes") for prompt in prompts(20)]
    before = end_logprobs(roles, rows)
    step = token_loss(roles, "policy", rows, made.pad_id, 4096)
    optimizer = torch.optim.SGD(list(roles.parameters("policy").values()), lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        step(list(range(20)))
        optimizer.step()
    assert end_logprobs(roles, rows) > before + 1


def end_logprobs(roles: SeparateRoles, rows: list[Any]) -> float:
    """Mean log-probability of each row's last token."""
    with torch.no_grad():
        ids = [torch.tensor([s.prompt_ids + s.response_ids]) for s in rows]
        logits = [roles.model("policy")(input_ids=one).logits[0, -2].log_softmax(-1)[one[0, -1]] for one in ids]
    return torch.stack(logits).mean().item()


def test_case_2_one_begin_token_where_template_and_tokenizer_both_write_it():
    made = Encoder(words(adds_bos=True), "chat", 9, 9, (EOS,))
    text = made.render(says("a"))
    assert made.tokenizer(text)["input_ids"][:2] == [BOS, BOS]  # what others train on
    assert made.prompt_ids(says("a")) == (BOS, USER, A, BOT)


@pytest.mark.parametrize("response", ["a b", "a b </s>", "a b </s> </s>"])
def test_case_3_one_end_token_however_many_are_written(response: str):
    made = Encoder(words(), "chat", 9, 9, (EOS,))
    assert made.sequence(says("a"), response).response_ids == (A, B, EOS)
    pair = compare(made, [PreferencePair(says("a"), response, "c")])
    assert [s.response_ids for s in pair.sequences] == [(A, B, EOS), (C, EOS)]


def test_case_5_the_cue_at_the_end_of_a_prompt_stays_and_the_response_has_its_own_limit():
    """Limit 4: of "a b c a b Summary :" the last tokens stay, BOS too; the response loses nothing for the prompt."""
    made = Encoder(words(), "plain", 4, 4, (EOS,))
    sequence = made.sequence(says("a b c a b d ."), "a b c")
    assert sequence.prompt_ids == (BOS, B, D, 13) and sequence.response_ids == (A, B, C, EOS)
    assert made.counts == {"prompts cut": 1}
    made.sequence(says("a"), "a b c d")
    assert made.counts == {"prompts cut": 1, "responses cut": 1}


def merging() -> Encoder:
    """A tokenizer in which ":" and "y" become one token when they meet."""
    vocabulary = {token: at for at, token in enumerate(["</s>", "a", ":", "y", "e", "s", ":y"])}
    raw = Tokenizer(models.BPE(vocabulary, [(":", "y")]))
    raw.pre_tokenizer = pre_tokenizers.Split("~", "removed")
    raw.decoder = decoders.Fuse()
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"), "plain", 9, 9, (0,))


def test_case_6_the_boundary_is_the_samplers_in_every_stage():
    """Encoded together "a:yes" is a :y e s; the sampler, which is asked "a:", can never say ":y"."""
    made = merging()
    assert made.tokenizer("a:yes")["input_ids"] == [1, 6, 4, 5]
    demonstration = made.sequence(says("a:"), "yes")
    assert demonstration.prompt_ids == made.prompt_ids(says("a:")) == (1, 2)
    assert demonstration.response_ids == (3, 4, 5, 0)
    group = compare(made, [PreferencePair(says("a:"), "yes", "es")])
    assert group.sequences[0] == demonstration and group.sequences[1].prompt_ids == (1, 2)


def test_case_8_a_template_without_marks_of_the_response_still_has_its_mask(tmp_path: Path):
    """A two-message row: what is learned follows from the prompt's length. Rows without a reply are dropped and
    counted, and a file of such rows alone stops."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = "{% for m in messages %} {{ m.content }} {% endfor %}"
    read = read_demonstrations(lines(tmp_path, {"messages": said}, {"messages": said[:1]}))
    assert read.counts["dropped"] == {"last turn is not the assistant's": 1}
    sequence = Encoder(words(template=template), "chat", 9, 9, (EOS,)).sequence(read.records[0].prompt, "b")
    _, mask_BS, _ = pad_sequences([sequence], 0)
    assert (sequence.prompt_ids, sequence.response_ids) == ((A,), (B, EOS)) and mask_BS.tolist() == [
        [False, True, True]
    ]
    with pytest.raises(DataError, match="No row of 1 can be used: 1 last turn is not the assistant's"):
        read_demonstrations(lines(tmp_path, {"messages": said[:1]}))


def test_case_9_two_tool_schemas_keep_their_own_keys(tmp_path: Path):
    """In lines as in a table, which fills each object up with nulls for the keys of the other."""
    schemas = [{"name": "add", "args": {"x": 1}}, {"name": "say", "args": {"text": "hi", "loud": True}}]
    rows = [{"prompt": "a", "tool": schema} for schema in schemas]
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist()[0]["tool"]["args"] == {"x": 1, "text": None, "loud": None}
    parquet.write_table(table, tmp_path / "rows.parquet")
    for path in (lines(tmp_path, *rows), tmp_path / "rows.parquet"):
        assert [prompt.columns["tool"] for prompt in read_prompts(path).records] == schemas


def test_case_10_other_peoples_names_are_told_with_the_mapping_that_works(tmp_path: Path):
    path = lines(tmp_path, {"query": "a", "response": "b", "rejected_response": "c"})
    with pytest.raises(DataError) as caught:
        read_preferences(path)
    assert "found query (text), response (text), rejected_response (text)" in caught.value.what
    assert "prompt + chosen + rejected" in caught.value.what and caught.value.where.endswith("rows.jsonl:1")
    assert "columns: {prompt: query, chosen: response, rejected: rejected_response}" in caught.value.remedy
    mapping = {"prompt": "query", "chosen": "response", "rejected": "rejected_response"}
    (pair,) = read_preferences(path, mapping).records
    assert (pair.prompt.text, pair.chosen, pair.rejected) == ("a", "b", "c")


def test_case_11_an_identical_pair_is_dropped_counted_and_named(tmp_path: Path):
    path = lines(
        tmp_path,
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b "},
    )
    read = read_preferences(path)
    assert len(read.records) == 1 and read.counts["dropped"] == {"identical pair": 1}
    assert survey.take(path).dropped["identical pair"].places == [f"{path}:2"]


def test_case_13_bytes_that_are_not_utf8_marks_and_bare_returns_are_told_by_place(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    first = b'{"prompt": "caf\xc3\xa9"}\n'
    path.write_bytes(first + b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="Not UTF-8: byte 0xe9") as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}:2, byte {len(first) + 15}" and path.read_bytes()[len(first) + 15] == 0xE9
    path.write_bytes(b"\xef\xbb\xbf" + first)
    assert read_prompts(path).records[0].text == "café"
    assert read_prompts(path).counts["repaired"] == {"byte order mark": 1}
    path.write_bytes(b'{"prompt": "a\\rb"}\n{"prompt": "c"}\n')  # an escaped one is text, and no line break
    assert [prompt.text for prompt in read_prompts(path).records] == ["a\rb", "c"]
    path.write_bytes(b'{"prompt": "c"}\n{"prompt": "a\rb"}\n')
    with pytest.raises(DataError, match="Invalid control character") as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}:2, byte 29"


def test_case_13_a_table_named_jsonl_is_told_as_one(tmp_path: Path):
    for name, told in (("rows.jsonl", "name the file .csv"), ("rows.json", "name the file .csv")):
        path = tmp_path / name
        path.write_text("prompt,completion\na,b\n")
        with pytest.raises(DataError, match="Not JSON") as caught:
            read_demonstrations(path)
        assert told in caught.value.remedy
    path.write_text("prompt,\n")
    assert "name the file .csv" not in refused(path) and "name it .jsonl" in refused(path)


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_demonstrations(path)
    return caught.value.remedy


def test_case_15_a_prompt_over_the_limit_is_cut_once_after_templating_and_counted(tmp_path: Path):
    """558 words and 3 tokens of the template, limit 512: BOS and the last 511 tokens."""
    from keel.inspect.tokens import Lengths

    made = Encoder(words(), "chat", 512, 9, (EOS,))
    prompt = says(" ".join("abc"[i % 3] for i in range(558)))
    ids = made.prompt_ids(prompt)
    assert len(ids) == 512 and ids[0] == BOS and ids[-1] == BOT and made.counts == {"prompts cut": 1}
    assert ids[1:-1] == tuple(A + i % 3 for i in range(48, 558))
    path = lines(tmp_path, {"prompt": prompt.text})
    found = survey.take(path, measure=Lengths(made), unit="token")
    assert found.found["prompt is cut"].places == [f"{path}:1"] and list(found.lengths["prompt"]) == [561]


def test_case_16_tokenizer_template_and_limits_are_in_the_fingerprint():
    """Prepared with one, trained with another: never the same fingerprint (the stages: tests/e2e/test_data_run.py)."""
    makers = [
        Encoder(words(), "chat", 9, 9, (EOS,)),
        Encoder(words(template="{{ messages[0].content }}"), "chat", 9, 9, (EOS,)),
        Encoder(letters(adds_bos=False), "chat", 9, 9, (0,)),
        Encoder(words(), "chat", 10, 9, (EOS,)),
    ]
    assert len({made.fingerprint() for made in makers}) == 4
    assert Encoder(words(), "chat", 9, 9, (EOS,)).fingerprint() == makers[0].fingerprint()


def test_case_17_equal_prompts_of_two_rows_stay_two_prompts(tmp_path: Path):
    """Read as two records, each with its own columns and place; as groups: tests/e2e/test_data_run.py."""
    read = read_prompts(lines(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}))
    assert [(p.text, p.columns["answer"], p.source[-1]) for p in read.records] == [("a", 1, "1"), ("a", 2, "2")]


def test_case_18b_a_preference_is_read_by_value_and_ties_are_counted(tmp_path: Path):
    written = ["1.0", 2, 0, 1.0, "0", " 2 "]
    rows = [{"instruction": "a", "output_1": "b", "output_2": "c", "preference": value} for value in written]
    read = read_preferences(lines(tmp_path, *rows))
    assert [pair.chosen for pair in read.records] == ["b", "c", "b", "c"]
    assert read.counts == {"read": 6, "kept": 4, "dropped": {"tie": 2}, "repaired": {}}


def test_case_18b_in_the_file_that_has_them(shared: Path):
    read = read_preferences(shared / "data" / "alpaca_eval_pairs.jsonl.gz")
    assert read.counts["dropped"] == {"tie": 76, "empty response": 4} and read.counts["kept"] == 4741
