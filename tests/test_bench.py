"""The bench harness: the form of a result, its bounds, the table, and a process whose memory is counted."""

import io
import json
import sys
from pathlib import Path

import pytest
import rich.console

from bench import report
from bench.algorithms import line_of
from bench.common import Bounds, line, met, run
from bench.data import write_pairs
from bench.ppo import CASES
from bench.workload import PROMPT, median_update, recipe
from keel.inspect import survey
from keel.recipe import load
from keel.runs.console import Console


def test_a_result_has_the_ratio_and_its_bounds():
    fast = line("a", "samples/s", 8.0, 2.0, Bounds("ratio >=", 4.0, 6.0))
    assert fast["ratio"] == 4.0 and met(fast, "at_least") and not met(fast, "goal")
    small = line("b", "GiB", 1.0, 4.0, Bounds("ratio <=", 0.4, 0.25))
    assert met(small, "at_least") and met(small, "goal")
    alone = line("c", "samples/s", 8.0, None, Bounds("ratio >=", 4.0))
    assert alone["ratio"] is None and met(alone, "at_least") is None and alone["goal"] is None
    returns = line("d", "return", -80.0, -86.4, Bounds("ours >=", -86.0))
    assert returns["ratio"] is None and met(returns, "at_least")
    assert {"name", "ours", "peer", "ratio", "unit", "at_least", "goal", "machine", "versions"} <= fast.keys()


def test_best_of_n_is_judged_by_its_best_responses():
    summary = {
        "seconds_by_stage": {"base": 50, "reward": 60, "eval": 5},
        "peak_rss_bytes": 7,
        "gold_sft": 2.0,
        "gold_best": 5.0,
        "length_sft": 28.0,
        "kl_per_response": 0.0,
        "best_of": {
            "gold": {"after": 4.5, "win_rate": 0.9},
            "kl_per_response": 1.8,
            "length": 33.0,
            "kl_bound": 1.84,
        },
    }
    found = line_of("best_of_16", 0, summary)
    assert (found["gold"], found["win_rate"], found["kl"], found["length"], found["seconds"]) == (
        4.5,
        0.9,
        1.8,
        33.0,
        5,
    )
    trained = {k: v for k, v in summary.items() if k != "best_of"}
    trained |= {"gold_final": 4.0, "win_rate": 0.8, "length_final": 31.0, "kl_per_response": 3.0}
    trained["seconds_by_stage"] = {"base": 50, "ppo": 70, "eval": 5}
    found = line_of("ppo", 0, trained)
    assert (found["gold"], found["win_rate"], found["kl"], found["length"], found["seconds"]) == (
        4.0,
        0.8,
        3.0,
        31.0,
        75,
    )


def test_the_report_replaces_results_by_name(tmp_path, monkeypatch):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, place in (("RESULTS", tmp_path / "results.json"), ("PAGE", page), ("PICTURE", tmp_path / "p.svg")):
        monkeypatch.setattr(report, name, place)
    report.report()
    assert "Nothing has been measured yet." in page.read_text()
    for ours in (4.0, 8.0):
        report.keep(line("ppo/x/speed", "samples/s", ours, 2.0, Bounds("ratio >=", 3.0, 5.0)))
    report.keep(line("ppo/x/memory", "GiB", 1.0, 2.0, Bounds("ratio <=", 0.4, 0.25)))
    assert [r["name"] for r in json.loads((tmp_path / "results.json").read_text())] == ["ppo/x/memory", "ppo/x/speed"]
    report.report()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `ppo/x/speed` | samples/s | 8 | 2 | 4 | 3 | 5 | met |" in text
    assert "| `ppo/x/memory` | GiB | 1 | 2 | 0.5 | ≤ 0.4 | ≤ 0.25 | missed |" in text
    first = (tmp_path / "p.svg").read_bytes()
    report.report()
    assert page.read_text() == text and (tmp_path / "p.svg").read_bytes() == first


def test_the_pairs_of_a_large_file_are_all_different(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = write_pairs(path, 100_000, Console(rich.console.Console(file=io.StringIO())))
    pairs = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(pairs) == rows == len({pair["prompt"] for pair in pairs}) > 200
    assert 100_000 <= path.stat().st_size < 102_000
    taken = survey.take(path)
    assert taken.kind.name == "preference pair" and taken.read == rows and not taken.refused
    assert set(taken.dropped) <= {"identical pair"} and not taken.found.keys() & {"repeats an earlier row"}


def test_a_process_is_counted_alone(tmp_path):
    finished = run([sys.executable, "-c", "x = bytearray(b'x') * 2**26; print('done')"], tmp_path)
    assert finished.output == "done\n" and finished.peak_bytes >= 2**26
    with pytest.raises(SystemExit, match="of no use"):
        run([sys.executable, "-c", "raise ValueError('of no use')"], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_recipes_of_the_bench_are_checked_recipes(name, tmp_path):
    case = CASES[name]
    model = {"backbone": "shared" if case.lora_rank else "separate", "dtype": case.dtype}
    found = load(recipe(name, tmp_path / "m", tmp_path, 2, model=model, ppo={"rollouts": case.batch}))
    assert found.ppo and found.ppo.rollouts == case.batch and found.ppo.epochs * found.ppo.minibatches == 4
    assert found.model.max_prompt_tokens == PROMPT and found.ppo.critic.warmup_cap == 0
    prompts = Path(found.ppo.data.path[0]).read_text().splitlines() if found.ppo.data else []
    assert len({*prompts}) >= case.batch and all(len(json.loads(p)["prompt"].split()) > PROMPT for p in prompts)


def test_the_first_update_does_not_count():
    assert median_update([{"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 3.0}, {}], "seconds") == 2.0
    assert median_update([{"seconds": 9.0}], "seconds") == 9.0


def test_a_process_is_asked_to_stop_once_it_has_done_enough(tmp_path: Path):
    """One that ends with 143 when it is asked to, as Keel does; one that fails before is a failure all the same."""
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); open('done', 'w').close(); signal.pause()"
    found = run([sys.executable, "-c", code], tmp_path, enough=(tmp_path / "done").exists)
    assert found.peak_bytes > 0
    with pytest.raises(SystemExit, match="failed with 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, enough=lambda: False)
