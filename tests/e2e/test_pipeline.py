"""Whole runs through the command line, small enough for seconds: what they leave, skip, refuse and resume."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import keel

REPOSITORY = Path(__file__).parents[2]
RECIPE = str(REPOSITORY / "recipes" / "quickstart.yaml")
SMALL = {
    "sandbox.prompts": 160,
    "sandbox.heldout-prompts": 24,
    "sandbox.pretrain-rows": 300,
    "sandbox.pretrain-steps": 12,
    "sandbox.hidden": 32,
    "sandbox.layers": 1,
    "sandbox.heads": 2,
    "sandbox.vocabulary": 400,
    "sft.batch": 16,
    "sft.held-out": 16,
    "reward.prompts": 40,
    "reward.batch": 16,
    "reward.held-out": 30,
    "reward.normalise-samples": 32,
    "reward.checkpoint-every": 2,
    "ppo.updates": 3,
    "ppo.rollouts": 24,
    "ppo.critic.warmup-cap": 1,
    "ppo.checkpoint-every": 1,
    "eval.prompts": 24,
    "model.max-response-tokens": 24,
}
KEYS = {
    "seed",
    "seconds",
    "peak_rss_bytes",
    "gold_sft",
    "gold_sft_sd",
    "gold_final",
    "gold_best",
    "win_rate",
    "win_rate_interval",
    "kl_per_response",
    "kl_target",
    "length_sft",
    "length_final",
    "length_demonstrations",
    "eos_rate",
    "reward_model_accuracy",
    "reward_model_accuracy_ceiling",
    "reward_model_accuracy_of_ceiling",
    "reward_model_report",
}


def flags(root: Path, **changed: object) -> list[str]:
    settings = {**SMALL, **{name.replace("__", "."): value for name, value in changed.items()}}
    return ["--root", str(root), *(text for name, value in settings.items() for text in (f"--{name}", str(value)))]


@pytest.fixture(scope="module", params=["separate", "shared"])
def finished(request, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp(request.param)
    given = flags(root, model__backbone=request.param)
    assert keel("run", RECIPE, *given) == 0
    return root / "quickstart", given


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in (".lock", "manifest.json", "curves.png")
    }


def test_the_summary_has_what_it_promises(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["seed"] == 0 and 0 <= summary["win_rate"] <= 1 and summary["gold_best"] == pytest.approx(5.0)
    assert summary["kl_target"] == 6.0 and summary["peak_rss_bytes"] > 1e8


def test_the_worst_pairs_are_written_worst_first(finished):
    lines = [json.loads(line) for line in (finished[0] / "reward" / "worst_pairs.jsonl").read_text().splitlines()]
    margins = [line["margin"] for line in lines]
    assert 0 < len(lines) <= 20 and margins == sorted(margins) and max(margins) < 0
    rankings = [json.loads(line) for line in (finished[0] / "reward" / "preferences.jsonl").read_text().splitlines()]
    by_prompt = {row["prompt"]: row["ranking"] for row in rankings}
    for line in lines:
        ranking = by_prompt[line["prompt"][0]["content"]]
        assert ranking.index(line["preferred"]) < ranking.index(line["other"])


def test_the_trained_model_loads_without_keel(finished):
    model = cast(Any, AutoModelForCausalLM.from_pretrained(finished[0] / "ppo" / "model"))  # its type hides `generate`
    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "ppo" / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where is my kettle?"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**ids, max_new_tokens=5, do_sample=False).shape[1] > ids["input_ids"].shape[1]


def test_metrics_start_every_update_at_ratio_one(finished):
    lines = [json.loads(line) for line in (finished[0] / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["sampler_mismatch"] <= 1e-3 for line in lines)
    assert all(line["first_log_ratio"] <= 1e-4 for line in lines if not line["warming"])
    assert any(not line["warming"] for line in lines)


def test_a_finished_run_is_not_run_again(finished, capsys):
    folder, given = finished
    before = everything(folder / "ppo")
    assert keel("run", RECIPE, *given) == 0
    assert capsys.readouterr().out.count("already done") == 5
    assert everything(folder / "ppo") == before


def test_another_setting_is_refused_and_shown_and_nothing_is_touched(finished, capsys):
    folder, given = finished
    before = everything(folder)
    assert keel("run", RECIPE, *given, "--ppo.policy.clip", "0.1") == 2
    told = capsys.readouterr().err
    assert "ppo.policy.clip: 0.2 -> 0.1" in told and "--overwrite" in told
    assert everything(folder) == before


def test_a_setting_that_changes_no_result_is_not_another_run(finished, capsys):
    _, given = finished
    assert keel("run", RECIPE, *given, "--ppo.checkpoint-every", "7") == 0
    assert capsys.readouterr().out.count("already done") == 5


def test_chat_answers_with_both_models(finished, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is my kettle?\n\n"))
    assert keel("chat", str(finished[0]), "--temperature", "0") == 0
    out = capsys.readouterr().out
    assert "\nbefore" in out and "\nafter" in out


def test_one_stage_alone_needs_the_ones_before_it(tmp_path, capsys):
    given = flags(tmp_path)
    assert keel("ppo", RECIPE, *given) == 2
    assert "needs the stage 'sft'" in capsys.readouterr().err
    assert keel("sft", RECIPE, *given) == 0
    assert (tmp_path / "quickstart" / "sft" / "done.json").exists() and not (
        tmp_path / "quickstart" / "reward"
    ).exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_broken_off_and_run_again_is_byte_for_byte_the_unbroken_run(sent, tmp_path):
    given = ["--threads", "1", "--ppo.updates", "6"]
    whole = start(tmp_path / "whole", given)
    assert whole.wait(180) == 0, log_of(tmp_path / "whole")
    broken = start(tmp_path / "broken", given)
    wait_for(tmp_path / "broken/quickstart/ppo/checkpoints/step-2", broken)
    os.kill(broken.pid, sent)
    assert broken.wait(60) == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    if sent == signal.SIGINT:
        assert "the same command goes on from there: keel run" in log_of(tmp_path / "broken")
    again = start(tmp_path / "broken", given)
    assert again.wait(180) == 0, log_of(tmp_path / "broken")
    for name in (
        "ppo/model/model.safetensors",
        "reward/model/model.safetensors",
        "eval/samples.jsonl",
        "ppo/samples.jsonl",
    ):
        assert (tmp_path / "broken/quickstart" / name).read_bytes() == (
            tmp_path / "whole/quickstart" / name
        ).read_bytes(), name
    assert not list((tmp_path / "broken").rglob(".tmp-*"))


def start(root: Path, given: list[str]) -> subprocess.Popen:
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "keel.cli", "run", RECIPE, *flags(root), *given]
    with (root / "log").open("a") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)


def log_of(root: Path) -> str:
    return (root / "log").read_text()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert path.exists(), process.poll()
