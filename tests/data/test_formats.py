"""Every shape and every bad input by hand, then the real files beside the repository with their exact counts."""

import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs, thumbs_of
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb

Write = Callable[..., str]
READERS = [read_demonstrations, read_preferences, read_prompts, read_thumbs]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (JSONL or JSON by the name) or bytes, packed where the name says so, and gives the path."""

    def writer(content: list[Any] | bytes, name: str = "rows.jsonl") -> str:
        if isinstance(content, list):
            text = json.dumps(content) if ".jsonl" not in name else "".join(json.dumps(row) + "\n" for row in content)
            content = text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return writer


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


U, R = turn("user", "ask"), turn("assistant", "reply")
EARLIER = [turn("system", "be kind"), turn("user", "hi"), turn("assistant", "hello"), U]


def prompt(*turns: dict[str, str], source: str, **columns: Any) -> Prompt:
    return Prompt(turns, columns, source)


class TestDemonstrations:
    @pytest.mark.parametrize(
        ("row", "turns"),
        [
            ({"prompt": "ask", "completion": "reply"}, [U]),
            ({"prompt": "ask", "response": "reply", "extra": 3}, [U]),
            ({"prompt": EARLIER, "completion": [R]}, EARLIER),
            ({"prompt": [U], "completion": R, "response": None}, [U]),
            ({"messages": [*EARLIER, R], "label": True}, EARLIER),
            ({"instruction": "ask", "output": "reply"}, [U]),
            ({"instruction": "ask", "input": "", "output": "reply"}, [U]),
            ({"instruction": "ask", "input": None, "output": "reply"}, [U]),
            ({"instruction": "ask", "input": "this", "output": "reply"}, [turn("user", "ask\n\nthis")]),
        ],
    )
    def test_shapes(self, write: Write, row, turns):
        path = write([row])
        others = {name: row[name] for name in ("extra", "label") if name in row}
        if row.get("response", "") is None:
            others["response"] = None
        assert read_demonstrations(path).records == [
            Demonstration(prompt(*turns, source=f"{path}:1", **others), "reply")
        ]

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"prompt": "ask", "completion": " \n"}, "empty response"),
            ({"prompt": " ", "completion": "reply"}, "empty prompt"),
            ({"messages": [R]}, "empty prompt"),
            ({"messages": [U]}, "last turn is not the assistant's"),
            ({"messages": []}, "last turn is not the assistant's"),
            ({"messages": [U, R, R]}, "prompt ends with the assistant's turn"),
            ({"instruction": [], "input": "this", "output": "reply"}, "empty prompt"),
        ],
    )
    def test_dropped_and_counted(self, write: Write, row, reason):
        result = read_demonstrations(write([row, {"prompt": "ask", "completion": "reply"}, row]))
        assert len(result.records) == 1
        assert result.counts == {"read": 3, "kept": 1, "dropped": {reason: 2}, "repaired": {}}

    def test_blanks_of_texts_stay(self, write: Write):
        (record,) = read_demonstrations(write([{"prompt": " ask:\n", "completion": " reply \r\n"}])).records
        assert (record.prompt.text, record.response) == (" ask:\n", " reply \r\n")


class TestPreferences:
    @pytest.mark.parametrize(
        ("row", "turns"),
        [
            ({"prompt": "ask", "chosen": "good", "rejected": "bad"}, [U]),
            ({"prompt": EARLIER, "chosen": turn("assistant", "good"), "rejected": [turn("assistant", "bad")]}, EARLIER),
            (
                {
                    "conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "ask"}],
                    "chosen": {"from": "gpt", "value": "good"},
                    "rejected": {"from": "gpt", "value": "bad"},
                },
                [turn("system", "be kind"), U],
            ),
            (
                {"chosen": [*EARLIER, turn("assistant", "good")], "rejected": [*EARLIER, turn("assistant", "bad")]},
                EARLIER,
            ),
            (  # UltraFeedback: the prompt stands in both transcripts as well
                {"prompt": "ask", "chosen": [U, turn("assistant", "good")], "rejected": [U, turn("assistant", "bad")]},
                [U],
            ),
            (
                {
                    "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman:  ask \n\nAssistant: good",
                    "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman:  ask \n\nAssistant: bad\n",
                },
                EARLIER[1:],
            ),
            (
                {"instruction": "ask", "input": "it", "output_1": "good", "output_2": "bad", "preference": 1},
                [turn("user", "ask\n\nit")],
            ),
        ],
    )
    def test_shapes(self, write: Write, row, turns):
        path = write([row])
        assert read_preferences(path).records == [PreferencePair(prompt(*turns, source=f"{path}:1"), "good", "bad")]

    @pytest.mark.parametrize("replies", [["a", "b", "a ", "c"], [{"role": "assistant", "content": t} for t in "abac"]])
    def test_a_ranking_is_every_two_of_its_replies(self, write: Write, replies):
        path = write([{"prompt": "ask", "ranking": replies, "golds": {"a": 1}}])
        read = read_preferences(path)
        pairs = [(record.chosen.strip(), record.rejected.strip()) for record in read.records]
        assert pairs == [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("a", "c")]  # the two alike are no pair
        assert read.records[0].prompt == prompt(U, golds={"a": 1}, source=f"{path}:1")
        assert read.counts["kept"] == 1  # a row, whatever the number of its pairs

    def test_an_empty_reply_of_a_ranking_is_left_out(self, write: Write):
        read = read_preferences(write([{"prompt": "ask", "ranking": ["a", " ", "b"]}]))
        assert [(record.chosen, record.rejected) for record in read.records] == [("a", "b")]
        assert read.counts["repaired"] == {"empty reply of a ranking left out": 1}

    @pytest.mark.parametrize("value", ["a", ["a", 1], [{"role": "user", "content": "a"}], {"a": 1}])
    def test_a_ranking_that_is_none(self, write: Write, value):
        path = write([{"prompt": "ask", "ranking": value}])
        with pytest.raises(DataError) as caught:
            read_preferences(path)
        assert caught.value.where == f"{path}:1" and caught.value.remedy

    @pytest.mark.parametrize("value", [["a"], ["a", "a\n"], ["a", " "], [" "], []])
    def test_a_ranking_that_says_nothing_is_dropped(self, write: Write, value):
        rows = [{"prompt": "ask", "ranking": value}, {"prompt": "ask", "ranking": ["good", "bad"]}]
        read = read_preferences(write(rows))
        assert len(read.records) == 1 and sum(read.counts["dropped"].values()) == 1

    @pytest.mark.parametrize(
        ("value", "chosen"), [(1, "x"), (1.0, "x"), ("1", "x"), ("1.0", "x"), (2, "y"), (2.0, "y"), (" 2.0 ", "y")]
    )
    def test_preference_of_any_type(self, write: Write, value, chosen):
        path = write([{"instruction": "ask", "output_1": "x", "output_2": "y", "preference": value}])
        (record,) = read_preferences(path).records
        assert (record.chosen, record.rejected) == (chosen, "xy".replace(chosen, ""))

    @pytest.mark.parametrize("value", [3, -1, 1.5, "first", True, [1], "nan", 10**400])
    def test_a_preference_that_is_none(self, write: Write, value):
        path = write([{"instruction": "ask", "output_1": "x", "output_2": "y", "preference": value}])
        with pytest.raises(DataError, match="preference is") as caught:
            read_preferences(path)
        assert caught.value.where == f"{path}:1" and "0 for a tie" in caught.value.remedy

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"prompt": "ask", "chosen": "same", "rejected": " same\n"}, "identical pair"),
            ({"prompt": "ask", "chosen": "", "rejected": "bad"}, "empty response"),
            ({"prompt": "ask", "chosen": "good", "rejected": " "}, "empty response"),
            *(
                ({"instruction": "ask", "output_1": "x", "output_2": "y", "preference": tie}, "tie")
                for tie in (0, 0.0, "0", "0.0")
            ),
            ({"chosen": [U, R], "rejected": [turn("user", "other"), R]}, "transcripts differ before the last turn"),
            ({"chosen": [U, R], "rejected": [U]}, "last turn is not the assistant's"),
            ({"chosen": [], "rejected": [U, R]}, "last turn is not the assistant's"),
            (
                {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a"},
                "last turn is not the assistant's",
            ),
        ],
    )
    def test_dropped_and_counted(self, write: Write, row, reason):
        result = read_preferences(write([row, {"prompt": "ask", "chosen": "good", "rejected": "bad"}]))
        assert result.counts == {"read": 2, "kept": 1, "dropped": {reason: 1}, "repaired": {}}

    def test_turns_of_one_speaker_are_joined_before_the_last(self, write: Write):
        start = "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c\n\nHuman: d\n\nAssistant:"
        result = read_preferences(write([{"chosen": f"{start} good", "rejected": f"{start} bad"}]))
        assert [each["content"] for each in result.records[0].prompt.messages] == ["a", "b\n\nc", "d"]
        assert result.counts["repaired"] == {"turns of one speaker joined": 1}

    def test_replies_without_a_prompt(self, write: Write):
        path = write([{"question": "ask", "chosen": "good", "rejected": "bad"}])
        with pytest.raises(DataError, match="no transcript and there is no prompt") as caught:
            read_preferences(path)
        assert caught.value.remedy.endswith("columns: {prompt: question}")


class TestPrompts:
    @pytest.mark.parametrize(
        ("row", "turns", "columns"),
        [
            ({"prompt": "ask", "answer": [1, None], "none": None}, [U], {"answer": [1, None], "none": None}),
            ({"prompt": EARLIER}, EARLIER, {}),
            ({"prompt": "ask", "input": "not Alpaca's"}, [U], {"input": "not Alpaca's"}),
            ({"instruction": "ask", "input": "it", "output": "x"}, [turn("user", "ask\n\nit")], {"output": "x"}),
            ({"question": "ask", "answer": "#### 7"}, [U], {"answer": "#### 7"}),
            ({"messages": [*EARLIER, R], "id": 7}, EARLIER, {"id": 7}),
            ({"messages": EARLIER}, EARLIER, {}),
            ({"conversations": [U], "chosen": R, "rejected": R}, [U], {"chosen": R, "rejected": R}),
            ({"chosen": [*EARLIER, R], "rejected": [*EARLIER, U | R]}, EARLIER, {}),
            ({"chosen": "\n\nHuman: ask\n\nAssistant: a", "rejected": "\n\nHuman: ask\n\nAssistant: b"}, [U], {}),
        ],
    )
    def test_shapes(self, write: Write, row, turns, columns):
        path = write([row])
        assert read_prompts(path).records == [prompt(*turns, source=f"{path}:1", **columns)]

    @pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.gz", "rows.csv", "rows.tsv"])
    def test_json_under_another_name_is_told(self, write: Write, name):
        path = write(b'{"prompt": "ask", "id": 7}\n{"prompt": "more"}\n', name)
        with pytest.raises(DataError, match="The first line is JSON") as caught:
            read_prompts(path)
        assert caught.value.where == path and "name it .jsonl" in caught.value.remedy

    def test_lines_of_text(self, write: Write):
        path = write(b"one two three \n\n  \r\nfour five\r\nsix", "lines.pos")
        result = read_prompts(path)
        assert [(each.text, each.source) for each in result.records] == [
            ("one two three", f"{path}:1"),
            ("four five", f"{path}:4"),
            ("six", f"{path}:5"),
        ]
        assert result.counts == {"read": 3, "kept": 3, "dropped": {}, "repaired": {}}

    def test_lines_that_are_not_utf8(self, write: Write):
        result = read_prompts(write("caf\u00e9 — ol\u00e9\n".encode() + b"caf\xe9 noir\nplain\n", "lines.txt"))
        assert [each.text for each in result.records] == ["café — olé", "café noir", "plain"]
        assert result.counts == {"read": 3, "kept": 3, "dropped": {}, "repaired": {"latin-1 line": 1}}

    def test_first_words(self, write: Write):
        result = read_prompts(write(b"one  two three\nfour\nfive six\n", "lines"), first_words=2)
        assert [each.text for each in result.records] == ["one two", "five six"]
        assert result.counts == {"read": 3, "kept": 2, "dropped": {"fewer than 2 words": 1}, "repaired": {}}

    def test_first_words_of_messages_cut_the_last(self, write: Write):
        (record,) = read_prompts(
            write([{"prompt": [turn("system", "be kind"), turn("user", "a b c")]}]), first_words=2
        ).records
        assert record.messages == (turn("system", "be kind"), turn("user", "a b"))

    def test_first_words_of_none(self, write: Write):
        with pytest.raises(DataError, match="first_words is 0"):
            read_prompts(write(b"one", "lines"), first_words=0)


class TestMargins:
    ROW = {"prompt": "ask", "chosen": "good", "rejected": "bad"}  # noqa: RUF012

    @pytest.mark.parametrize(("value", "margin"), [(0, 0.0), (1.5, 1.5), ("0.5", 0.5)])
    def test_read_where_asked_for(self, write: Write, value, margin):
        path = write([{**self.ROW, "margin": value}])
        (asked,), (not_asked,) = read_preferences(path, margin=True).records, read_preferences(path).records
        assert (asked.margin, asked.prompt.columns) == (margin, {})
        assert (not_asked.margin, not_asked.prompt.columns) == (0.0, {"margin": value})

    def test_transcripts_and_other_names(self, write: Write):
        path = write([{"chosen": [U, turn("assistant", "good")], "rejected": [U, turn("assistant", "bad")], "gap": 2}])
        want = PreferencePair(prompt(U, source=f"{path}:1"), "good", "bad", 2.0)
        assert read_preferences(path, {"margin": "gap"}, margin=True).records == [want]

    @pytest.mark.parametrize("value", [-1, "wide", True, float("inf"), [1]])
    def test_a_margin_that_is_none(self, write: Write, value):
        with pytest.raises(DataError, match="margin is"):
            read_preferences(write([{**self.ROW, "margin": value}]), margin=True)

    def test_a_row_without_one(self, write: Write):
        with pytest.raises(DataError, match=r"has prompt \+ chosen \+ rejected \+ margin") as caught:
            read_preferences(write([{**self.ROW, "score_gap": 2}]), margin=True)
        assert "margin: score_gap" in caught.value.remedy


class TestThumbs:
    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "ask", "completion": "reply"},
            {"prompt": "ask", "response": "reply"},
            {"messages": [U, R]},
            {"instruction": "ask", "input": "", "output": "reply"},
        ],
    )
    def test_shapes(self, write: Write, row):
        path = write([{**row, "label": True, "id": 7}, {**row, "label": False, "id": 8}])
        assert read_thumbs(path).records == [
            Thumb(prompt(U, source=f"{path}:1", id=7), "reply", True),
            Thumb(prompt(U, source=f"{path}:2", id=8), "reply", False),
        ]

    @pytest.mark.parametrize(
        ("value", "up"), [(1, True), (1.0, True), ("True", True), ("1", True), (0, False), ("false", False)]
    )
    def test_labels_of_any_type(self, write: Write, value, up):
        (record,) = read_thumbs(write([{"prompt": "ask", "completion": "reply", "label": value}])).records
        assert record.desirable is up

    @pytest.mark.parametrize("value", [2, "good", [True], -1])
    def test_a_label_that_is_none(self, write: Write, value):
        path = write([{"prompt": "ask", "completion": "reply", "label": value}])
        with pytest.raises(DataError, match="label is") as caught:
            read_thumbs(path)
        assert caught.value.where == f"{path}:1" and "true or false" in caught.value.remedy

    def test_pairs_are_two_thumbs(self, write: Write):
        path = write([{"prompt": "ask", "chosen": "good", "rejected": "bad"}])
        want = [Thumb(prompt(U, source=f"{path}:1"), text, up) for text, up in (("good", True), ("bad", False))]
        assert read_thumbs(path).records == want

    def test_a_ranking_is_cut_in_the_middle(self):
        """Five replies, best first, in all pairs: two up, two down, the third says nothing; other prompts apart."""
        ask, other = Prompt((U,)), Prompt((turn("user", "other"),))
        pairs = [PreferencePair(ask, a, b) for a, b in itertools.combinations("abcde", 2)]
        got = thumbs_of([*pairs, PreferencePair(other, "e", "a")])
        assert [(t.prompt, t.response, t.desirable) for t in got] == [
            *((ask, text, up) for text, up in (("a", True), ("b", True), ("d", False), ("e", False))),
            *((other, text, up) for text, up in (("e", True), ("a", False))),
        ]

    def test_without_a_label(self, write: Write):
        with pytest.raises(DataError, match="A thumb has prompt") as caught:
            read_thumbs(write([{"prompt": "ask", "completion": "reply", "kto_tag": True}]))
        assert "label: kto_tag" in caught.value.remedy


class TestColumns:
    def test_other_names(self, write: Write):
        path = write([{"query": "ask", "response": "good", "rejected_response": "bad"}])
        columns = {"prompt": "query", "chosen": "response", "rejected": "rejected_response"}
        assert read_preferences(path, columns).records == [PreferencePair(prompt(U, source=f"{path}:1"), "good", "bad")]

    def test_swapped_names(self, write: Write):
        path = write([{"prompt": "ask", "chosen": "worse", "rejected": "better"}])
        (record,) = read_preferences(path, {"chosen": "rejected", "rejected": "chosen"}).records
        assert (record.chosen, record.rejected) == ("better", "worse")

    def test_a_column_with_our_name_that_is_not_used_stays(self, write: Write):
        path = write([{"query": "ask", "prompt": "theirs"}])
        assert read_prompts(path, {"prompt": "query"}).records == [prompt(U, source=f"{path}:1", prompt="theirs")]

    @pytest.mark.parametrize(
        ("read", "row", "found", "mapping"),
        [
            (
                read_preferences,
                {"id": 1, "query": "q", "response": "a", "rejected_response": "b"},
                "found id (number), query (text), response (text), rejected_response (text)",
                "{prompt: query, chosen: response, rejected: rejected_response}",
            ),
            (
                read_demonstrations,
                {"question": "q", "answer": "a"},
                "found question (text), answer (text)",
                "{prompt: question, completion: answer}",
            ),
            (
                read_preferences,
                {"response": "a", "score": 1, "user query": "q", "2nd answer": "b", "worse": "c"},
                "found response (text), score (number), user query (text), 2nd answer (text), worse (text)",
                "{prompt: user query, chosen: response, rejected: worse}",
            ),
            (
                read_demonstrations,
                {"2nd answer": "a", "1: query": "q"},
                "found 2nd answer (text), 1: query (text)",
                '{prompt: "1: query", completion: "2nd answer"}',
            ),
            (read_demonstrations, {"prompt": "q"}, "found prompt (text)", "{completion: YOUR_COLUMN}"),
            (read_prompts, {"text": "q"}, "found text (text)", "{prompt: text}"),
            (read_prompts, {}, "found no field", "{prompt: YOUR_COLUMN}"),
        ],
    )
    def test_missing_fields_show_found_expected_and_the_mapping(self, write: Write, read, row, found, mapping):
        path = write([row])
        with pytest.raises(DataError) as caught:
            read(path)
        assert found in caught.value.what and " has prompt" in caught.value.what
        assert caught.value.where == f"{path}:1"
        assert caught.value.remedy.endswith(f"columns: {mapping}")

    def test_a_field_that_is_null_needs_a_value_and_no_mapping(self, write: Write):
        with pytest.raises(DataError, match=r"completion \(null\)") as caught:
            read_demonstrations(write([{"prompt": "q", "completion": None}]))
        assert "'completion' is null here" in caught.value.remedy and "columns" not in caught.value.remedy

    def test_a_row_of_another_kind_says_which(self, write: Write):
        with pytest.raises(DataError, match=r"the row is a thumb, which preference\.data with loss kto takes"):
            read_preferences(write([{"messages": [U, R], "label": True}]))
        with pytest.raises(DataError, match="the row is a preference pair"):
            read_demonstrations(write([{"chosen": [U, R], "rejected": [U, R]}]))

    def test_of_many_columns_the_first_are_shown(self, write: Write):
        with pytest.raises(DataError, match=r"c11 \(number\) and 28 more\."):
            read_prompts(write([{f"c{number}": number for number in range(40)}]))

    def test_a_column_that_is_not_there(self, write: Write):
        path = write([{"query": "ask", "reply": "yes"}])
        with pytest.raises(DataError, match="no column 'qeury', which `columns` names") as caught:
            read_demonstrations(path, {"prompt": "qeury", "completion": "reply"})
        assert caught.value.remedy.endswith("columns: {prompt: query, completion: reply}")

    def test_a_name_that_is_not_ours(self, write: Write):
        with pytest.raises(DataError, match="columns names 'promt'") as caught:
            read_prompts(write([{"query": "ask"}]), {"promt": "query"})
        assert caught.value.where == "columns.promt" and "prompt" in caught.value.remedy


class TestFiles:
    JSONL = b'{"prompt": "ask"}\n\n{"prompt": "more"}\r\n'
    JSON = b'[{"prompt": "ask"}, {"prompt": "more"}]'

    @pytest.mark.parametrize(
        ("name", "content", "second"),
        [
            ("a.jsonl", JSONL, ":3"),
            ("a.JSONL", JSONL, ":3"),
            ("a.jsonl.gz", JSONL, ":3"),
            ("a.json", JSON, ":row 2"),
            ("a.json.gz", JSON, ":row 2"),
            ("a.txt", b"ask\n\nmore", ":3"),
            ("a.txt.gz", b"ask\n\nmore\n", ":3"),
        ],
    )
    def test_kinds(self, write: Write, name, content, second):
        path = write(content, name)
        result = read_prompts(path)
        assert [each.text for each in result.records] == ["ask", "more"]
        assert result.records[1].source == path + second
        assert result.sha256 == hashlib.sha256(content).hexdigest()

    def test_several_files(self, write: Write):
        one, two = write([{"prompt": "ask"}], "one.jsonl"), write(b"more", "two.txt")
        result = read_prompts([one, Path(two)])
        assert [each.source for each in result.records] == [f"{one}:1", f"{two}:1"]
        assert result.counts["read"] == 2
        assert len({read_prompts(paths).sha256 for paths in ([one, two], [two, one], [one, one], one)}) == 4
        assert read_prompts([one]).sha256 == read_prompts(one).sha256

    @pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSONL), ("a.json", JSON), ("a.txt", b"ask\nmore")])
    def test_a_byte_order_mark_is_taken_off_and_counted(self, write: Write, name, content):
        result = read_prompts(write(b"\xef\xbb\xbf" + content, name))
        assert [each.text for each in result.records] == ["ask", "more"]
        assert result.counts["repaired"] == {"byte order mark": 1}

    def test_half_a_character_is_replaced_and_counted(self, write: Write):
        result = read_prompts(write(b'{"prompt": "so \\ud83d, \\ud83d\\ude00"}\n'))
        assert result.records[0].text == "so \ufffd, 😀"
        assert result.counts["repaired"] == {"half a surrogate pair": 1}

    @pytest.mark.parametrize(
        ("name", "content", "what", "where"),
        [
            ("a.jsonl", b"", "is empty", ""),
            ("a.jsonl", b"\n \n", "is empty", ""),
            ("a.json", b"", "is empty", ""),
            ("a.json", b" []", "is empty", ""),
            ("a.txt", b"\n", "is empty", ""),
            ("a.jsonl.gz", b"", "is empty", ""),
            ("a.jsonl", JSONL + b'{"prompt": "caf\xe9"}\n', "Not UTF-8: byte 0xe9", ":4, byte 54"),
            ("a.jsonl", b"\xef\xbb\xbf" + JSONL + b'"\xe9"', "Not UTF-8: byte 0xe9", ":4, byte 43"),
            ("a.jsonl", '{"é": 1, "prompt": "a"}\n{"é": oops}\n'.encode(), "Not JSON", ":2, byte 32"),
            ("a.jsonl", b'{"prompt": "cut', "Not JSON", ":1, byte 11"),
            ("a.jsonl", b"[1]\n", "not an object", ":1"),
            ("a.jsonl", b"[" * 100_000, "Not usable JSON", ":1, byte 0"),
            ("a.jsonl", b'{"prompt": ' + b"9" * 5000 + b"}", "Not usable JSON", ":1, byte 0"),
            ("a.json", JSONL, "Not JSON: Extra data", ", byte 19"),
            ("a.json", b'[{"prompt": "\xe9"}]', "Not UTF-8", ", byte 13"),
            ("a.json", b'{"prompt": "ask"}', "no list", ""),
            ("a.json", b'[{"prompt": "ask"}, 3]', "not an object", ":row 2"),
            ("a.txt", b"\xff\xfea\0s\0k\0", "not text", ""),
            ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', "the name 'prompt' twice", ":1, byte 0"),
            ("a.jsonl", b'{"prompt": "a\rb"}', "Invalid control character", ":1, byte 13"),
            ("a.xlsx", b"PK", "'.xlsx' files are not read", ""),
            ("a.parquet", b"PAR1", "cannot be read after row 0", ""),
            ("a.arrow", b"", "cannot be read after row 0", ""),
            ("a.csv", b"prompt,n\nask\n", "1 cells, but the first row names 2", ":2"),
            ("a.csv", b"prompt,n\n\nask, me,1\n", "3 cells, but the first row names 2", ":3"),
            ("a.csv", b'prompt,n\nask,1\n"ask\nme', "Not CSV: unexpected end of data", ":3"),
            ("a.csv", b'prompt,n\nask,1\n"a"b,1', "Not CSV", ":3"),
            ("a.csv", b"prompt,prompt\na,b\n", "Two columns are called 'prompt'", ":1"),
            ("a.csv", b"prompt\ncaf\xe9\n", "Not UTF-8: byte 0xe9", ":2, byte 10"),
            ("a.csv", b"\n", "is empty", ""),
            ("a.csv", b"prompt\n", "names of columns (prompt) and no rows", ""),
            ("a.tsv.gz", b"prompt\tn\n\n", "names of columns (prompt, n) and no rows", ""),
            ("a.jsonl", b'{"prompt": 7}', "'prompt' holds number", ":1"),
            ("a.jsonl", b'{"prompt": [{"role": "owl", "content": "hu"}]}', "role 'owl'", ":1"),
            ("a.jsonl", b'{"prompt": [{"role": "user", "content": []}]}', "content of kind list", ":1"),
            ("a.jsonl", b'{"prompt": " "}', "No row of 1 can be used: 1 empty prompt", ""),
        ],
    )
    def test_bad_content(self, write: Write, name, content, what, where):
        path = write(content, name)
        with pytest.raises(DataError) as caught:
            read_prompts(path)
        assert what in caught.value.what
        assert caught.value.where == path + where
        assert caught.value.remedy

    def test_json_lines_named_json_get_their_remedy(self, write: Write):
        with pytest.raises(DataError) as caught:
            read_prompts(write(self.JSONL, "a.json"))
        assert "name it .jsonl" in caught.value.remedy

    @pytest.mark.parametrize("read", READERS)
    def test_missing_files_and_folders(self, tmp_path: Path, read):
        with pytest.raises(DataError, match="no such file") as caught:
            read(str(tmp_path / "none.jsonl"))
        assert caught.value.where.endswith("none.jsonl")
        with pytest.raises(DataError, match="No file is given"):
            read([])

    def test_a_damaged_gzip(self, tmp_path: Path):
        whole = gzip.compress(self.JSONL * 50)
        for content in (self.JSONL, whole[:-12], whole[:20] + b"\xff" * 20 + whole[40:]):
            path = tmp_path / "a.jsonl.gz"
            path.write_bytes(content)
            with pytest.raises(DataError, match="gzip file is damaged"):
                read_prompts(path)

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read every file")
    def test_a_file_without_rights(self, write: Write):
        path = write(self.JSONL)
        os.chmod(path, 0)
        with pytest.raises(DataError, match="cannot be read"):
            read_prompts(path)

    @pytest.mark.parametrize("read", [read_demonstrations, read_preferences])
    def test_text_holds_prompts_only(self, write: Write, read):
        with pytest.raises(DataError, match="prompts only"):
            read(write(b"ask", "a.txt"))

    def test_two_messages_as_a_reply(self, write: Write):
        for reply in ([R, R], [U], []):
            with pytest.raises(DataError, match="expected one, the assistant's"):
                read_demonstrations(write([{"prompt": "ask", "completion": reply}]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {}, optional={"role": inner | st.sampled_from(["user", "assistant"]), "content": inner, "from": inner}
        )
    ),
    max_leaves=4,
)
NAMES = ["prompt", "completion", "messages", "instruction", "input", "output", "chosen", "rejected", "conversations"]
NAMES += ["output_1", "output_2", "preference", "question", "label"]


@given(
    rows=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), min_size=1, max_size=4),
    read=st.sampled_from(READERS),
)
def test_any_row_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows, read):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        counts = read(path).counts
    except DataError as error:
        assert error.where.startswith(str(path)) and error.remedy
    else:
        assert counts["read"] == len(rows) == counts["kept"] + sum(counts["dropped"].values())


@given(content=st.binary(), name=st.sampled_from(["a.json", "a.jsonl", "a.txt", "a.gz"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        assert read_prompts(path).records
    except DataError as error:
        assert error.where.startswith(str(path)) and error.remedy


@pytest.mark.parametrize(
    ("read", "name", "counts"),
    [
        (read_demonstrations, "alpaca_en_demo.json", (999, 999, {}, {})),
        (read_preferences, "alpaca_eval_pairs.jsonl.gz", (4821, 4741, {"tie": 76, "empty response": 4}, {})),
        (read_preferences, "dpo_en_demo.json", (300, 300, {}, {})),
        (read_thumbs, "kto_en_demo.json", (300, 300, {}, {})),
        (
            read_preferences,
            "hh_harmless.jsonl.gz",
            (
                1500,
                1495,
                {"empty response": 4, "transcripts differ before the last turn": 1},
                {"turns of one speaker joined": 3},
            ),
        ),
        (read_prompts, "gsm8k_train_2000.jsonl.gz", (2000, 2000, {}, {})),
        (read_prompts, "alpaca_en_demo.json", (999, 999, {}, {})),
        (read_prompts, "rt-polarity.pos", (5331, 5331, {}, {})),
        (read_prompts, "rt-polarity.neg", (5331, 5331, {}, {})),
    ],
)
def test_real_files(shared: Path, read, name, counts):
    result = read(shared / "data" / name)
    assert result.counts == dict(zip(("read", "kept", "dropped", "repaired"), counts, strict=True))
    assert len(result.records) == counts[1]


class TestRealRows:
    def test_alpaca_inputs_are_joined(self, shared: Path):
        records = read_demonstrations(shared / "data" / "alpaca_en_demo.json").records
        rows = json.loads((shared / "data" / "alpaca_en_demo.json").read_bytes())
        with_input = [(row, record) for row, record in zip(rows, records, strict=True) if row["input"]]
        assert len(with_input) == 412
        assert all(record.prompt.text == f"{row['instruction']}\n\n{row['input']}" for row, record in with_input)

    def test_alpaca_eval_sides(self, shared: Path):
        path = shared / "data" / "alpaca_eval_pairs.jsonl.gz"
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        for pair in read_preferences(path).records:
            row = rows[int(pair.prompt.source.rsplit(":", 1)[1]) - 1]
            assert pair.chosen == row[f"output_{int(float(row['preference']))}"]

    def test_hh_prompts_are_what_both_transcripts_share(self, shared: Path):
        path = shared / "data" / "hh_harmless.jsonl.gz"
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        for pair in read_preferences(path).records:
            row = rows[int(pair.prompt.source.rsplit(":", 1)[1]) - 1]
            assert row["chosen"].rstrip().endswith(pair.chosen) and row["rejected"].rstrip().endswith(pair.rejected)
            speakers = [turn["role"] for turn in pair.prompt.messages]
            assert speakers == ["user", "assistant"] * (len(speakers) // 2) + ["user"]

    def test_starts_of_reviews(self, shared: Path):
        paths = [shared / "data" / f"rt-polarity.{sign}" for sign in ("pos", "neg")]
        result = read_prompts(paths, first_words=4)
        assert result.records[0].text == "the rock is destined"
        assert result.counts == {"read": 10662, "kept": 10595, "dropped": {"fewer than 4 words": 67}, "repaired": {}}

    def test_thumbs_up_and_down(self, shared: Path):
        rows = json.loads((shared / "data" / "kto_en_demo.json").read_bytes())
        thumbs = read_thumbs(shared / "data" / "kto_en_demo.json").records
        assert sum(thumb.desirable for thumb in thumbs) == 150
        for row, thumb in zip(rows, thumbs, strict=True):
            assert (thumb.desirable, thumb.response) == (row["label"], row["messages"][-1]["content"])
            assert list(thumb.prompt.messages) == row["messages"][:-1]

    def test_pairs_of_the_demo_as_thumbs(self, shared: Path):
        pairs = read_preferences(shared / "data" / "dpo_en_demo.json").records
        thumbs = read_thumbs(shared / "data" / "dpo_en_demo.json").records
        assert {(t.response, t.desirable) for t in thumbs} == {
            (text, up) for pair in pairs for text, up in ((pair.chosen, True), (pair.rejected, False))
        }

    def test_unpaired_thumbs_are_not_taken_for_preferences(self, shared: Path):
        with pytest.raises(DataError, match="A preference pair has"):
            read_preferences(shared / "data" / "kto_en_demo.json")
