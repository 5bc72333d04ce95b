"""Logs: a line an object, cut back to a step, nothing half written kept."""

import os
import resource
from pathlib import Path

import pytest

from keel.errors import NumberError, RunError
from keel.runs.log import JsonLines, read_lines


def test_append_and_read(tmp_path: Path):
    path = tmp_path / "sft" / "metrics.jsonl"
    with JsonLines(path) as log:
        log.append({"step": 1, "loss": 0.5})
        log.append({"step": 2, "text": "a\u2028b\nc"})
        # Seen at once, not at the end.
        assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "text": "a\u2028b\\nc"}\n'
    with JsonLines(path) as log:
        log.append({"step": 3})
    assert [r["step"] for r in read_lines(path)] == [1, 2, 3]


def test_cut_drops_later_steps_and_keeps_what_has_none(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as log:
        for record in ({"step": 1}, {"event": "restart"}, {"step": 2}, {"step": 3}, {"step": 2, "late": True}):
            log.append(record)
        log.cut(2)
        log.append({"step": 3, "again": True})
    assert path.read_text() == (
        '{"step": 1}\n{"event": "restart"}\n{"step": 2}\n{"step": 2, "late": true}\n{"step": 3, "again": true}\n'
    )
    with JsonLines(path) as log:
        log.cut(0)
    assert path.read_text() == '{"event": "restart"}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("half", [b'{"step"', b'{"step": 1}', b"\0" * 100, b"\xff"])
def test_a_half_written_last_line_goes(tmp_path: Path, half: bytes):
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + half)
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    assert path.read_bytes() == whole + half
    with JsonLines(path) as log:
        log.cut(1)
        log.append({"step": 2})
    assert path.read_bytes() == whole
    path.write_bytes(whole + half)
    with JsonLines(path) as log:  # without a cut too: nothing is glued to it
        log.append({"step": 3})
    assert path.read_bytes() == whole + b'{"step": 3}\n'


@pytest.mark.parametrize("bad", ["nonsense", "[]", '{"step": "1"}', '{"a": NaN}', "[" * 100_000])
def test_a_damaged_line_is_named_and_the_log_left_alone(tmp_path: Path, bad: str):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with JsonLines(path) as log, pytest.raises(RunError) as caught:
        log.cut(5)
    assert caught.value.where == f"{path}:2"
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_with_its_key(tmp_path: Path, value: float):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as log:
        log.append({"step": 1})
        with pytest.raises(NumberError, match=r"kl\.mean") as caught:
            log.append({"step": 2, "kl": {"mean": value}})
        assert caught.value.where == str(path) and caught.value.exit_code == 3
        log.append({"step": 3})
    assert [r["step"] for r in read_lines(path)] == [1, 3]


def test_a_full_disk_is_told_and_the_next_start_is_clean(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path) as log:
        log.append({"step": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            with pytest.raises(RunError, match="cannot be used"):
                log.append({"step": 2, "text": "x" * 200_000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with JsonLines(path) as log:
        log.append({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_log_that_cannot_be_opened(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used"):
        JsonLines(tmp_path / "file" / "m.jsonl")
    with pytest.raises(RunError, match="cannot be used"):
        list(read_lines(tmp_path / "gone.jsonl"))


def test_a_pipe_in_the_place_of_a_log_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="no plain file"):
        JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="no plain file"):
        list(read_lines(tmp_path / "metrics.jsonl"))
