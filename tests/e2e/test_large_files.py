"""Stages on rows that are not in memory: the same bytes as in memory, and encoded rows that a later start takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.data import spool
from keel.data.encode import Encoder
from keel.data.spool import Spool
from keel.train import supervised
from tests.e2e.command import keel


@pytest.fixture
def place(place: Path) -> Path:
    """With rows of every kind."""
    said = [{"prompt": f"Where is pot {i}?", "completion": f"on shelf {i}"} for i in range(24)]
    turns = [("user", "Where is pot {}?"), ("assistant", "look {}"), ("user", "So?"), ("assistant", "on shelf {}")]
    talks = [{"messages": [{"role": r, "content": text.format(i)} for r, text in turns]} for i in range(24)]
    pairs = [  # up to three pairs of one prompt, far from each other
        {"prompt": f"Where is pot {i % 11}?", "chosen": f"on shelf {i}", "rejected": f"no {i % 5}", "margin": i / 8}
        for i in range(30)
    ]
    thumbs = [{"prompt": f"Where is cup {i % 7}?", "completion": f"there {i}", "label": i % 2 == 0} for i in range(14)]
    for name, rows in (("said", said), ("talks", talks), ("pairs", pairs), ("judged", thumbs + pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def write(name: str, **sections: Any) -> str:
    small = {"batch": 4, "held_out": 6, "learning_rate": 1e-2, "epochs": 2}
    for stage in sections.keys() & {"sft", "reward", "preference"}:
        sections[stage] = {**small, **sections[stage]}
    model = {"path": "model", "backbone": "separate", "max_prompt_tokens": 24, "max_response_tokens": 5}
    Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "threads": 1, "model": model, **sections}))
    return f"{name}.yaml"


def data(*names: str, **more: Any) -> dict[str, Any]:
    return {"data": {"path": [f"{name}.jsonl" for name in names], **more}}


PPO = {"reward": "score.py:short", "updates": 2, "rollouts": 6, "minibatches": 1, "critic": {"warmup_cap": 0}}
SECTIONS: dict[str, dict[str, Any]] = {
    "sft": {"sft": data("said")},
    "sft, weights": {"sft": data("said", "talks", weights=[1, 3])},
    "sft, every turn": {"sft": {**data("talks"), "loss_on": "every"}},
    "reward": {"reward": {**data("pairs"), "margin": 0.5, "normalise_samples": 40, "max_prompts": 7}},
    "dpo": {"preference": data("pairs")},
    "simpo": {"preference": {**data("pairs"), "loss": "simpo"}},
    "kto": {"preference": {**data("judged"), "loss": "kto"}},
    "ppo and ptx": {"ppo": {**PPO, **data("pairs"), "ptx": {**data("said"), "batch": 4}}, "eval": {"prompts": 3}},
}


def outcome(name: str) -> tuple[dict[str, bytes], dict[str, Any], Any]:
    """The weights of every stage, its result, and what the manifest says of the data."""
    run = Path("runs", name)
    weights = {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("*/model/*.safetensors"))}
    results = {path.parent.name: json.loads(path.read_text())["result"] for path in sorted(run.glob("*/done.json"))}
    for result in results.values():
        for timed in ("seconds", "profile"):
            result.pop(timed, None)
    return weights, results, json.loads((run / "manifest.json").read_text())["data"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Spool[Any]]:
    """Nothing may be in memory; all spools that are used."""
    made: list[Spool[Any]] = []

    class Watched(Spool[Any]):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(spool, "HELD", 0)
    for module in ("keel.data.formats", "keel.train.encoded"):
        monkeypatch.setattr(f"{module}.Spool", Watched)
    return made


@pytest.mark.parametrize("case", SECTIONS)
def test_a_stage_gives_the_same_bytes_with_all_rows_on_disk(case: str, place: Path, request: pytest.FixtureRequest):
    assert keel("run", write("inside", **SECTIONS[case])) == 0
    assert not Path("runs/inside/encoded").exists()
    opened = request.getfixturevalue("opened")
    assert keel("run", write("outside", **SECTIONS[case])) == 0
    assert len(opened) >= 2 and all(rows.on_disk for rows in opened)
    assert outcome("outside") == outcome("inside") and outcome("inside")[0]
    stages = ["ptx"] if "ppo" in SECTIONS[case] else list(SECTIONS[case])
    assert sorted(p.name for p in Path("runs/outside/encoded").iterdir()) == sorted(
        f"{stage}.{kind}" for stage in stages for kind in ("json", "rows")
    )


def test_a_run_stopped_within_an_epoch_goes_on_from_the_encoded_rows(
    place: Path, opened: list[Spool[Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Stopped in the third of nine steps; after that no row may be encoded, and the bytes are those of a whole run."""
    section = SECTIONS["sft"]
    assert keel("run", write("whole", **section)) == 0
    first = supervised.batch_rows

    def stopping(rows: int, batch: int, step: int, *rest: Any) -> list[int]:
        if step == 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return first(rows, batch, step, *rest)

    monkeypatch.setattr(supervised, "batch_rows", stopping)
    assert keel("run", write("cut", **section)) == 143
    assert "the encoded rows of sft are kept in" in capsys.readouterr().out
    monkeypatch.setattr(supervised, "batch_rows", first)
    with monkeypatch.context() as without:
        without.setattr(Encoder, "_ids", None)
        assert keel("run", "cut.yaml") == 0
    assert "the encoded rows of sft are taken from" in capsys.readouterr().out
    assert outcome("cut") == outcome("whole")
    assert outcome("cut")[1]["sft"]["cut"]["responses cut"] == 24


def test_a_rerun_with_another_rate_takes_them_and_one_with_another_limit_does_not(
    place: Path, opened: list[Spool[Any]], capsys: pytest.CaptureFixture[str]
):
    """Whatever decides a row makes it anew: data, columns, split, template, limits, which turns are learned."""
    recipe = write("x", sft=data("talks"))
    assert keel("run", recipe) == 0
    capsys.readouterr()
    assert keel("run", recipe, "--overwrite", "--sft.learning-rate", "0.001") == 0
    assert "are taken from" in capsys.readouterr().out
    others = [
        ("--model.max-response-tokens", "4"),
        ("--sft.held-out", "5"),
        ("--seed", "1"),
        ("--sft.loss-on", "every"),
        ("--sft.data.path", "said.jsonl"),
    ]
    for flags in others:
        assert keel("run", recipe, "--overwrite") == 0
        capsys.readouterr()
        assert keel("run", recipe, "--overwrite", *flags) == 0
        told = capsys.readouterr().out
        assert "encoded anew: it is of other data, or of another tokenizer" in told and "are kept in" in told, flags
        fresh = write("y", sft=data("talks"))
        assert keel("run", fresh, *flags, "--name", f"fresh{flags[1]}".replace(".", "")) == 0
        assert outcome("x") == outcome(f"fresh{flags[1]}".replace(".", "")), flags
        capsys.readouterr()


DAMAGE = {
    "a byte of the rows": lambda rows, manifest: rows.write_bytes(b"\x05" + rows.read_bytes()[1:]),
    "rows cut short": lambda rows, manifest: rows.write_bytes(rows.read_bytes()[:-1]),
    "no rows": lambda rows, manifest: rows.unlink(),
    "no manifest": lambda rows, manifest: manifest.unlink(),
    "half a manifest": lambda rows, manifest: manifest.write_bytes(manifest.read_bytes()[:40]),
    "another count of cuts": lambda rows, manifest: manifest.write_text(manifest.read_text().replace("24", "23")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_rows_are_told_and_made_anew(
    how: str, place: Path, opened: list[Spool[Any]], capsys: pytest.CaptureFixture[str]
):
    recipe = write("x", sft=data("said"))
    assert keel("run", recipe) == 0
    before = outcome("x")
    assert before[1]["sft"]["cut"]["responses cut"] == 24
    DAMAGE[how](Path("runs/x/encoded/sft.rows"), Path("runs/x/encoded/sft.json"))
    shutil.rmtree("runs/x/sft")
    capsys.readouterr()
    assert keel("run", recipe) == 0
    told = capsys.readouterr().out
    assert "sft.rows is not used, its rows are encoded anew: " in told and "are kept in" in told
    assert outcome("x") == before


def test_rows_that_cannot_be_kept_are_told_and_trained_on(
    place: Path, opened: list[Spool[Any]], capsys: pytest.CaptureFixture[str]
):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/encoded").write_text("")
    assert keel("run", write("x", sft=data("said"))) == 0
    assert "are not kept for a later start: " in capsys.readouterr().out
    assert Path("runs/x/sft/model").is_dir() and Path("runs/x/encoded").read_text() == ""


def full(dir: Path, buffering: int) -> Any:
    """Stands in for a new file: the disk is full."""
    return open("/dev/full", "wb", buffering)


def test_a_full_disk_while_reading_is_told_before_anything_is_trained(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spool, "HELD", 0)
    monkeypatch.setattr(spool.tempfile, "TemporaryFile", full)
    assert keel("run", write("x", sft=data("said"))) == 2
    told = capsys.readouterr().err
    assert "could not be put on disk: No space left on device" in told and "make room there" in told
    assert not Path("runs/x/sft").exists()
