"""The real files beside the repository, with their exact counts."""

import gzip
import json
from pathlib import Path

import pytest

from keel.data.formats import read_demonstrations, read_preferences, read_prompts, read_thumbs
from keel.errors import DataError


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
