"""Files of every kind and every bad content by hand; then anything at all is read or refused."""

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.formats import read_demonstrations, read_preferences, read_prompts
from keel.errors import DataError
from tests.data.rows import READERS, R, U, Write


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
