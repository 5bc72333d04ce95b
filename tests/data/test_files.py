"""The same rows out of every kind of file, of a folder and of a data set; then what is refused, and why."""

import datetime
import gzip
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from huggingface_hub import HfApi, constants
from pyarrow import ipc, parquet

from keel.data.files import RowStream
from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.data.rows import Row
from keel.errors import DataError

ROWS = [{"prompt": "ask", "completion": 'a "reply",\nof two lines'}, {"prompt": "more; \té", "completion": "yes"}]
TABLE = pa.Table.from_pylist(ROWS)
CSV = 'prompt,completion\nask,"a ""reply"",\nof two lines"\n\nmore; \té,yes\n'


def content(name: str) -> bytes:
    """The bytes of a file of ROWS."""
    sink = pa.BufferOutputStream()
    if name.startswith("a.parquet"):
        parquet.write_table(TABLE, sink)
    elif name.startswith("stream.arrow"):
        with ipc.new_stream(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    elif name.startswith("file.arrow"):
        with ipc.new_file(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    else:
        text = {"a.csv": CSV, "semicolon.csv": CSV.replace(",", ";").replace("more;", '"more;').replace("é", 'é"')}
        text["a.tsv"] = CSV.replace(",", "\t").replace("more; \t", '"more; \t').replace("é", 'é"')
        text["comma.csv"] = CSV.replace("\n\n", "\r\n").replace("completion\n", "completion\r\n")
        text = {
            name: body.replace('"reply""\t', '"reply"",').replace('"reply"";', '"reply"",')
            for name, body in text.items()
        }
        return text[name.removesuffix(".gz")].encode()
    return sink.getvalue().to_pybytes()


def save(path: Path) -> str:
    made = content(path.name)
    path.write_bytes(gzip.compress(made) if path.name.endswith(".gz") else made)
    return str(path)


def rows_of(path: str | Path) -> list[Row]:
    rows = list(RowStream(str(path), None))
    assert all(isinstance(row, Row) for row in rows), rows
    return rows  # pyright: ignore[reportReturnType]


class TestTables:
    @pytest.mark.parametrize(
        ("name", "second"),
        [
            ("a.csv", ":5"),
            ("comma.csv", ":4"),
            ("semicolon.csv", ":5"),
            ("a.tsv", ":5"),
            ("a.csv.gz", ":5"),
            ("a.parquet", ":row 2"),
            ("a.parquet.gz", ":row 2"),
            ("stream.arrow", ":row 2"),
            ("file.arrow", ":row 2"),
        ],
    )
    def test_the_same_rows(self, tmp_path: Path, name, second):
        path = save(tmp_path / name)
        read = read_demonstrations(path)
        assert [(record.prompt.text, record.response) for record in read.records] == [
            tuple(row.values()) for row in ROWS
        ]
        assert read.records[1].prompt.source == path + second
        unpacked = tmp_path / name.removesuffix(".gz")
        save(unpacked)
        assert read.sha256 == read_demonstrations(unpacked).sha256

    def test_a_csv_from_a_spreadsheet_program(self, tmp_path: Path):
        """A byte order mark, semicolons, CR LF, an unnamed column of row numbers."""
        path = tmp_path / "a.csv"
        path.write_bytes(b"\xef\xbb\xbf;prompt;completion\r\n0;ask;reply\r\n")
        read = read_demonstrations(path)
        assert (read.records[0].prompt.text, read.records[0].prompt.columns) == ("ask", {"": "0"})
        assert read.counts["repaired"] == {"byte order mark": 1}

    def test_long_cells_and_bare_returns_in_quotes(self, tmp_path: Path):
        text = "long " * 50_000 + "a\rb"
        (tmp_path / "a.csv").write_bytes(f'prompt\n"{text}"\n'.encode())
        assert read_prompts(tmp_path / "a.csv").records[0].text == text

    def test_numbers_and_thumbs_of_a_csv_are_texts(self, tmp_path: Path):
        path = tmp_path / "a.csv"
        path.write_text("prompt,completion,label\nask,good,True\nask,bad,False\n")
        assert [thumb.desirable for thumb in read_thumbs(path).records] == [True, False]
        assert read_demonstrations(path).counts["dropped"] == {"label is false": 1}
        path.write_text("instruction,output_1,output_2,preference\nask,x,y,2.0\nask,x,y,0\n")
        read = read_preferences(path)
        assert (read.records[0].chosen, read.counts["dropped"]) == ("y", {"tie": 1})

    def test_messages_as_json_in_a_cell(self, tmp_path: Path):
        path = tmp_path / "a.csv"
        turns = '[{""role"": ""user"", ""content"": ""ask""}, {""role"": ""assistant"", ""content"": ""reply""}]'
        path.write_text(f'messages\n"{turns}"\n')
        (record,) = read_demonstrations(path).records
        assert (record.prompt.text, record.response) == ("ask", "reply")
        path.write_text(f'messages\n"{turns}"\n"{turns.replace(chr(34) * 2, chr(39))}"\n')
        with pytest.raises(DataError, match="begins as a list and is no JSON") as caught:
            read_demonstrations(path)
        assert caught.value.where == f"{path}:3" and "double" in caught.value.remedy

    def test_what_was_absent_stays_absent(self, tmp_path: Path):
        """A table gives every object of a column the names of all; the nulls of the others are taken out again."""
        tools = [{"a": 1, "sub": {"x": 1}}, {"b": "two", "sub": {"y": None}}]
        rows: list[dict[str, Any]] = [
            {"prompt": [{"role": "user", "content": "ask"}], "tool": tools[0], "n": 1},
            {"prompt": [{"role": "user", "content": "ask", "name": "me"}], "tool": tools[1], "n": None},
        ]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        columns = [record.columns for record in read_prompts(tmp_path / "a.parquet").records]
        assert columns == [{"tool": tools[0], "n": 1}, {"tool": {"b": "two", "sub": {}}, "n": None}]

    def test_lines_keep_their_own_keys(self, tmp_path: Path):
        path = tmp_path / "a.jsonl"
        path.write_text('{"prompt": "a", "tool": {"x": 1}}\n{"prompt": "b", "tool": {"y": null}}\n')
        assert [record.columns["tool"] for record in read_prompts(path).records] == [{"x": 1}, {"y": None}]

    def test_values_of_a_table_reach_rewards_as_they_are(self, tmp_path: Path):
        row = {"prompt": "ask", "day": datetime.date(2026, 1, 2), "raw": b"\xff", "many": [1.5, None]}
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        (record,) = read_prompts(tmp_path / "a.parquet").records
        assert record.columns == {name: value for name, value in row.items() if name != "prompt"}
        with pytest.raises(DataError, match="'prompt' holds bytes"):
            read_prompts(tmp_path / "a.parquet", {"prompt": "raw"})

    @pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.csv", "a.tsv"])
    def test_a_table_of_names_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
        monkeypatch.setitem(globals(), "TABLE", TABLE.slice(0, 0))
        monkeypatch.setitem(globals(), "CSV", "prompt,completion\n")
        path = save(tmp_path / name)
        with pytest.raises(DataError, match=r"names of columns \(prompt, completion\) and no rows") as caught:
            read_prompts(path)
        assert caught.value.where == path

    def test_many_batches(self, tmp_path: Path):
        parquet.write_table(pa.table({"prompt": [str(n) for n in range(2500)]}), tmp_path / "a.parquet")
        assert [record.text for record in read_prompts(tmp_path / "a.parquet").records] == [str(n) for n in range(2500)]

    def test_a_table_with_two_columns_of_a_name(self, tmp_path: Path):
        table = pa.table([["a"], ["b"]], names=["prompt", "prompt"])
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match="Two columns are called 'prompt'"):
            read_prompts(tmp_path / "a.parquet")


class TestLines:
    def test_a_bad_line_does_not_end_the_stream(self, tmp_path: Path):
        path = tmp_path / "a.jsonl"
        path.write_text('{"n": 1}\noops\n[]\n{"n": 2}\n')
        got = [row.cells if isinstance(row, Row) else (row.where, row.what) for row in RowStream(path, None)]
        assert got == [
            {"n": 1},
            (f"{path}:2, byte 9", "Not JSON: Expecting value."),
            (f"{path}:3", "The line is not an object."),
            {"n": 2},
        ]

    def test_bytes_read_end_at_the_size(self, tmp_path: Path):
        for name in ("a.csv", "a.csv.gz", "a.parquet"):
            save(tmp_path / name)
        stream = RowStream([tmp_path / name for name in ("a.csv", "a.csv.gz", "a.parquet")], None)
        assert len(list(stream)) == 6
        assert stream.bytes_read == sum(path.stat().st_size for path in tmp_path.iterdir())


class TestFolders:
    def test_every_data_file_sorted(self, tmp_path: Path):
        for name in ("b", "a", "c"):
            (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
        (tmp_path / "README.md").write_text("what this is")
        (tmp_path / ".hidden.json").write_text("no JSON")
        (tmp_path / "sub.jsonl").mkdir()
        read = read_prompts(tmp_path)
        files = [tmp_path / f"{name}.jsonl" for name in "abc"]
        assert [record.text for record in read.records] == ["a", "b", "c"]
        assert read.sha256 == read_prompts(files).sha256

    def test_what_datasets_saved(self, tmp_path: Path):
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        assert [row.cells for row in rows_of(tmp_path / "saved")] == ROWS

    def test_a_folder_of_texts_is_one_of_prompts(self, tmp_path: Path):
        for name in ("b.txt", "a.txt"):
            (tmp_path / name).write_text(name)
        assert [record.text for record in read_prompts(tmp_path).records] == ["a.txt", "b.txt"]
        with pytest.raises(DataError, match="no data file in this folder"):
            read_demonstrations(tmp_path)

    @pytest.mark.parametrize(
        ("names", "what"),
        [
            ([], "no data file in this folder. It holds nothing"),
            (["sub/a.jsonl", "notes.md"], "no data file in this folder. It holds notes.md, sub"),
            (["a.jsonl", "b.csv"], "files of several kinds: .csv, .jsonl"),
            (["train-0.parquet", "test-0.parquet"], "several splits: test, train"),
        ],
    )
    def test_refused(self, tmp_path: Path, names, what):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        with pytest.raises(DataError) as caught:
            read_demonstrations(tmp_path)
        assert what in caught.value.what and caught.value.where == str(tmp_path) and caught.value.remedy


class TestHub:
    def test_rows_come_from_datasets(self, monkeypatch: pytest.MonkeyPatch):
        asked = []

        def load(*names: str, split: str) -> datasets.Dataset:
            asked.append((*names, split))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(HfApi, "dataset_info", lambda self, name, timeout: None)
        monkeypatch.setattr(datasets, "load_dataset", load)
        read = read_demonstrations("owner/some.name")
        assert [record.response for record in read.records] == [row["completion"] for row in ROWS]
        assert read.records[1].prompt.source == "owner/some.name:row 2"
        assert len(read.sha256) == 64 != read_demonstrations(["owner/some.name"] * 2).sha256
        read_demonstrations("owner/name/config:test_prefs")
        assert asked == [("owner/some.name", "train")] * 3 + [("owner/name", "config", "test_prefs")]

    def test_a_set_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch):
        def ask(self: HfApi, name: str, timeout: float):
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub\nmore")

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(HfApi, "dataset_info", ask)
        with pytest.raises(
            DataError, match="no such data set came from the Hugging Face Hub: ConnectionError"
        ) as caught:
            read_demonstrations("owner/name")
        assert caught.value.where == "owner/name"
        assert "network" in caught.value.remedy and "check the name" in caught.value.remedy

    @pytest.mark.parametrize(
        "path", ["data/rows.jsonl", "/a/b", "./a/b", "name", "a/b/c/d", "https://host/name", "a/b.txt"]
    )
    def test_what_is_no_id_is_a_missing_file(self, path: str):
        with pytest.raises(DataError, match="no such file"):
            read_demonstrations(path)


@pytest.mark.skipif(os.name == "nt", reason="no named pipes")
def test_a_pipe_is_refused_and_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="a device or a pipe"):
        read_prompts(tmp_path / "a.jsonl")


def test_every_file_of_the_shared_folder_reads_as_it_is(shared: Path):
    """By one of the readers; how many rows of each is in test_real_files.py."""
    readers = {
        "alpaca_en_demo.json": read_demonstrations,
        "alpaca_eval_pairs.jsonl.gz": read_preferences,
        "dpo_en_demo.json": read_preferences,
        "gsm8k_train_2000.jsonl.gz": read_prompts,
        "hh_harmless.jsonl.gz": read_preferences,
        "kto_en_demo.json": read_thumbs,
        "rt-polarity.neg": read_prompts,
        "rt-polarity.pos": read_prompts,
    }
    files = {path.name for path in (shared / "data").iterdir() if not path.name.startswith("README")}
    assert files == set(readers)
    for name, read in readers.items():
        assert read(shared / "data" / name).records


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"prompt": "a"}'.encode("utf-16"), "iconv -f utf-16"),
        (b"\x89PNG\x00\x01", "zero bytes"),
        ('{"prompt": "caf\xe9"}'.encode("latin-1"), "iconv -f latin1"),
    ],
)
def test_what_is_not_utf8_is_told_by_what_it_looks_like(content, told, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match="Not UTF-8") as caught:
        read_prompts(file)
    assert caught.value.remedy and told in caught.value.remedy
