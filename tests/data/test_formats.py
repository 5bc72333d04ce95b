"""Every shape of a row by hand, and the columns of other people."""

import itertools

import pytest

from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs, thumbs_of
from keel.errors import DataError
from keel.types import Demonstration, PreferencePair, Prompt, Thumb
from tests.data.rows import EARLIER, R, U, Write, prompt, turn


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
