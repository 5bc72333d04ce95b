"""Whole stages on files as people have them: each of ../shared/data, paths with weights, conversations with tools."""

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.data.formats import read_demonstrations
from keel.data.stream import Mixture, batch_rows
from keel.inspect import report, survey
from keel.models.loading import load_tokenizer
from keel.train import online, stages, supervised
from keel.train.inputs import split_rows
from tests.e2e.command import keel

FEW = {"sft": "max_rows", "reward": "max_prompts", "preference": "max_prompts"}
"""What keeps a stage to a few steps, though the whole file is read."""

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write(name: str, limits: tuple[int, int] = (96, 24), **sections: Any) -> str:
    """A recipe of small batches, trained full, whose stages end after a few steps."""
    for stage in sections.keys() & {"sft", "reward", "preference"}:
        small = {"batch": 4, "held_out": 8, "learning_rate": 1e-3, "micro_tokens": 2048}
        sections[stage] = {**small, **sections[stage]}
    if "reward" in sections:
        sections["reward"].setdefault("normalise_samples", 4)
    model = {"path": "model", "backbone": "separate"}
    model |= dict(zip(("max_prompt_tokens", "max_response_tokens"), limits, strict=True))
    Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "threads": 1, "model": model, **sections}))
    return f"{name}.yaml"


def done(run: str, stage: str) -> dict[str, Any]:
    return json.loads(Path("runs", run, stage, "done.json").read_text())["result"]


def manifest(run: str) -> dict[str, Any]:
    return json.loads(Path("runs", run, "manifest.json").read_text())


def steps(run: str, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", run, stage, "metrics.jsonl").read_text().splitlines()]


SHARED_FILES = {
    "alpaca_en_demo.json": {"sft": {}},
    "gsm8k_train_2000.jsonl.gz": {"sft": {"columns": {"prompt": "question", "completion": "answer"}}, "ppo": {}},
    "alpaca_eval_pairs.jsonl.gz": {"reward": {}, "preference": {}},
    "dpo_en_demo.json": {"reward": {}, "preference": {}},
    "hh_harmless.jsonl.gz": {"reward": {}, "preference": {}},
    "kto_en_demo.json": {"sft": {}, "preference": {"loss": "kto"}},
    "rt-polarity.neg": {"ppo": {"first_words": 4}},
    "rt-polarity.pos": {"ppo": {"first_words": 4}},
}


def stages_on(path: Path, few: bool) -> dict[str, Any]:
    """The sections of a recipe that trains on the file every stage that it is for."""
    sections: dict[str, Any] = {}
    for stage, settings in SHARED_FILES[path.name].items():
        source = {"path": [str(path)], **{k: v for k, v in settings.items() if k in ("columns", "first_words")}}
        sections[stage] = {"data": source, **{k: v for k, v in settings.items() if k not in source}}
        if stage == "ppo":
            sections[stage] |= {"reward": "score.py:short", "updates": 2, "rollouts": 4, "minibatches": 1}
        elif few:
            sections[stage][FEW[stage]] = 8
    return sections


def check_stages(path: Path, few: bool) -> None:
    sections = stages_on(path, few)
    assert keel("run", write("run", **sections)) == 0
    for stage in sections:
        lines = steps("run", stage)
        assert len(lines) >= 2 and all(abs(line.get("loss", 0.0)) < 20 for line in lines)
        assert Path("runs/run", stage, "model").is_dir()


@pytest.mark.parametrize("name", SHARED_FILES)
def test_stages_on_each_file_of_the_shared_folder_for_a_few_steps(name: str, place: Path, shared: Path):
    """The whole file is read, two steps or more are trained by each stage that it is for."""
    check_stages(shared / "data" / name, few=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, stages in SHARED_FILES.items() if stages.keys() - {"ppo"}])
def test_stages_on_the_whole_of_each_file_of_the_shared_folder(name: str, place: Path, shared: Path):
    """Every row is encoded and trained on once."""
    check_stages(shared / "data" / name, few=False)


def lines(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def demonstrations(word: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Where is {word} {i}?", "completion": f"here {i}"} for i in range(count)]


@dataclass
class Watched:
    """Stands in for `batch_rows`: keeps what it gave, and asks the run to stop in a step."""

    stop_at: int | None = None
    seen: list[int] = field(default_factory=list)
    mixture: Mixture | None = None

    def __call__(
        self, rows: int, batch: int, step: int, seed: int, lengths: Any = None, mixture: Mixture | None = None
    ) -> list[int]:
        if step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.mixture = mixture
        found = batch_rows(rows, batch, step, seed, lengths, mixture)
        self.seen += found
        return found


def test_paths_with_weights_are_mixed_in_exact_shares_and_go_on_in_the_middle_of_an_epoch(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """24 and 12 rows, of which 4 are held out, 1 : 3. Stopped in the third of 16 steps and resumed: the same rows, the
    same weights."""
    files = [lines("a.jsonl", demonstrations("a", 24)), lines("b.jsonl", demonstrations("b", 12))]
    settings = {"data": {"path": files, "weights": [1, 3]}, "epochs": 2, "held_out": 4}
    whole, stopped, rest = Watched(), Watched(stop_at=2), Watched()
    monkeypatch.setattr(supervised, "batch_rows", whole)
    assert keel("run", write("whole", sft=settings)) == 0
    told = capsys.readouterr().out
    assert "an epoch takes 8 of 32 from a.jsonl" in told and "an epoch takes 24 of 32 from b.jsonl" in told
    assert whole.mixture and len(whole.seen) == 64
    assert [sum(row in whole.mixture.rows[1] for row in whole.seen[at : at + 32]) for at in (0, 32)] == [24, 24]
    monkeypatch.setattr(supervised, "batch_rows", stopped)
    assert keel("run", write("cut", sft=settings)) == 143
    monkeypatch.setattr(supervised, "batch_rows", rest)
    assert keel("resume", "runs/cut") == 0
    assert len(stopped.seen) == 12 and stopped.seen + rest.seen == whole.seen
    models = [Path("runs", name, "sft/model/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]
    assert keel("run", "cut.yaml", "--sft.data.weights", "1", "1") == 2
    assert "sft.data.weights" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["reward", "dpo", "kto", "ppo", "ptx"])
def test_weights_work_in_every_stage(stage: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    """16 and 8 rows, nothing of one path held out by its prompts: 1 : 1 gives as many places to each."""
    asked = {name: [f"Where is {name} {i}?" for i in range(count)] for name, count in (("a", 16), ("b", 8))}
    pairs = {n: [{"prompt": p, "chosen": "here", "rejected": "no"} for p in some] for n, some in asked.items()}
    said = {n: [{"prompt": p, "completion": "here"} for p in some] for n, some in asked.items()}
    rows = said if stage in ("ppo", "ptx") else pairs
    data = {"path": [lines(f"{name}.jsonl", some) for name, some in rows.items()], "weights": [1, 1]}
    ppo: dict[str, Any] = {"data": data, "reward": "score.py:short", "updates": 2, "rollouts": 4, "minibatches": 1}
    if stage == "ptx":
        ppo = {**ppo, "data": {"path": data["path"]}, "ptx": {"data": data, "batch": 4}}
    section: dict[str, Any] = {
        "reward": {"reward": {"data": data}},
        "dpo": {"preference": {"data": data}},
        "kto": {"preference": {"data": data, "loss": "kto", "held_out": 4}},
        "ppo": {"ppo": ppo},
        "ptx": {"ppo": {**ppo, "critic": {"warmup_cap": 0}}},
    }[stage]
    watched = Watched()
    module = {"ppo": online, "ptx": stages}.get(stage, supervised)
    monkeypatch.setattr(module, "batch_rows", watched)
    assert keel("run", write("x", **section)) == 0
    mixture = watched.mixture
    assert mixture and abs(mixture.counts[0] - mixture.counts[1]) <= 1
    assert len(mixture.rows[0]) > len(mixture.rows[1]) and sum(mixture.counts) == sum(map(len, mixture.rows))
    assert sum(mixture.counts) == {"reward": 16, "dpo": 16, "kto": 44, "ppo": 24, "ptx": 24}[stage]


def test_a_path_whose_rows_are_all_held_out_is_told_before_training(place: Path, capsys: pytest.CaptureFixture[str]):
    files = [lines("a.jsonl", demonstrations("a", 24)), lines("b.jsonl", demonstrations("b", 1))]
    settings = {"data": {"path": files, "weights": [1, 1]}, "held_out": 20}
    assert keel("run", write("x", sft=settings)) == 2
    assert "no row that is trained on" in capsys.readouterr().err and not Path("runs/x/sft/done.json").exists()


def conversations(count: int) -> list[dict[str, Any]]:
    """Asked, a tool called, its answer read, and replied to: two turns of the assistant, nine words of others."""
    said = [("user", "Where is lamp {}?"), ("assistant", "look {}"), ("tool", "shelf {}"), ("assistant", "on shelf {}")]
    return [{"messages": [{"role": r, "content": text.format(i)} for r, text in said]} for i in range(count)]


@pytest.mark.parametrize("ended", [True, False])
def test_loss_on_every_turn_leaves_gaps_for_the_tool(ended: bool, place: Path, capsys: pytest.CaptureFixture[str]):
    """The tokens that are learned, counted by the tokenizer itself. With a template that does not end turns with the
    end token each turn is a sequence, and the same tokens are learned."""
    end = "{{ eos_token if m.role == 'assistant' }}"
    Path("model/chat_template.jinja").write_text(CHATML if ended else CHATML.replace(end, ""))
    data = {"path": [lines("said.jsonl", conversations(20))]}
    for loss_on in ("last", "every"):
        assert keel("run", write(loss_on, sft={"data": data, "loss_on": loss_on, "held_out": 4, "batch": 16})) == 0
    told = capsys.readouterr().out
    assert f"40 turns of 20 conversations are learned, in {20 if ended else 40} sequences" in told
    assert ("the template writes earlier turns otherwise" in told) == (not ended)
    tokenizer = load_tokenizer("model")
    rows = read_demonstrations("said.jsonl").records
    train, _ = split_rows(20, 4, 0)
    answers = {"last": [], "every": []}
    for row in train:
        turns = [m["content"] for m in rows[row].prompt.messages if m["role"] == "assistant"] + [rows[row].response]
        tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in turns]
        answers["every"].append(sum(tokens))
        answers["last"].append(tokens[-1])
    for loss_on, each in answers.items():
        assert [line["tokens"] for line in steps(loss_on, "sft")] == [sum(each)]


def test_loss_on_every_turn_where_there_is_one_is_refused(place: Path, capsys: pytest.CaptureFixture[str]):
    data = {"path": [lines("a.jsonl", demonstrations("a", 24))]}
    assert keel("run", write("x", sft={"data": data, "loss_on": "every"})) == 2
    assert "sft.loss_on every does nothing" in capsys.readouterr().err


def test_the_manifest_has_the_counts_of_keel_inspect(place: Path):
    """Rows, reasons, prompts, lengths and what stands out, read with the data; what was cut when it was encoded."""
    said = demonstrations("a", 30) + demonstrations("a", 3) + [{"prompt": "x", "completion": " "}]
    asked = [{"prompt": f"Where is lamp {i}?", "chosen": "word " * 30, "rejected": "no"} for i in range(30)]
    pairs = [*asked, {"prompt": "x", "chosen": "a", "rejected": "a"}]
    files = {"sft": lines("said.jsonl", said), "reward": lines("pairs.jsonl", pairs)}
    sections: dict[str, Any] = {name: {"data": {"path": [file]}} for name, file in files.items()}
    assert keel("run", write("x", **sections)) == 0
    found = manifest("x")
    assert found["data"]["sft"]["rows"] == {"read": 34, "kept": 33, "dropped": {"empty response": 1}, "repaired": {}}
    assert found["data"]["sft"]["findings"]["repeats an earlier row"]["count"] == 3
    for name, file in files.items():
        told = report.report(survey.take(file), {}, [])
        mine = found["data"][name]
        assert (mine["kind"], mine["prompts"], mine["lengths"]) == (told["kind"], told["prompts"], told["lengths"])
        assert mine["rows"]["dropped"] == {each["reason"]: each["count"] for each in told["dropped"]}
        assert {n: (f["count"], f["of"], f["places"]) for n, f in mine["findings"].items()} == {
            f["name"]: (f["count"], f["of"], f["places"]) for f in told["findings"]
        }
    assert found["cut"]["reward"]["responses cut"] == 30 and not found["cut"]["sft"]
    assert keel("run", "x.yaml") == 0 and manifest("x")["data"] == found["data"]


@pytest.mark.parametrize("change", ["template", "tokenizer", "content", "limit"])
def test_case_16_nothing_encoded_is_kept_and_a_change_is_another_stage(change: str, place: Path, capsys):
    """Encoding is not cached on disk, so none can be stale; a stage made with other ids is refused, never reused."""
    data = {"path": [lines("a.jsonl", demonstrations("a", 24))]}
    recipe = write("x", sft={"data": data})
    assert keel("run", recipe) == 0 and keel("run", recipe) == 0
    assert "nothing was left to do" in capsys.readouterr().out
    if change == "template":
        Path("model/chat_template.jinja").write_text(CHATML)
    elif change == "tokenizer":
        settings = json.loads(Path("model/tokenizer.json").read_text())
        settings["added_tokens"][0]["lstrip"] = not settings["added_tokens"][0]["lstrip"]
        Path("model/tokenizer.json").write_text(json.dumps(settings))
    elif change == "content":
        lines("a.jsonl", demonstrations("b", 24))
    else:
        recipe = write("x", (95, 24), sft={"data": data})
    assert keel("run", recipe) == 2
    told = capsys.readouterr().err
    assert {"content": "data", "limit": "model.max_prompt_tokens: 96 -> 95"}.get(change, "stage base") in told


def test_a_data_file_that_was_moved_is_another_recipe(place: Path, capsys: pytest.CaptureFixture[str]):
    """As docs/runs.md says: path and content are both part of a stage."""
    recipe = write("x", sft={"data": {"path": [lines("a.jsonl", demonstrations("a", 24))]}})
    assert keel("run", recipe) == 0
    Path("a.jsonl").rename("b.jsonl")
    assert keel("run", recipe) == 2 and "no such file" in capsys.readouterr().err
    assert keel("run", recipe, "--sft.data.path", "b.jsonl") == 2
    assert 'sft.data.path: ["a.jsonl"] -> ["b.jsonl"]' in capsys.readouterr().err
    Path("a.jsonl").symlink_to("b.jsonl")
    assert keel("run", recipe) == 0


def test_case_17_rows_with_the_same_prompt_are_groups_of_their_own(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Three rows, two of the same text, two responses each: three groups of two, in every update."""
    rows = [{"prompt": "Where is my lamp?"}, {"prompt": "Where is my lamp?"}, {"prompt": "Where is it?"}]
    real, seen = online.make_experience, []

    def watched(learner: Any, rollouts: Any, scores_B: Any, groups_B: Any, *more: Any) -> Any:
        texts = [prompt.text for prompt in rollouts.prompts]
        seen.append((groups_B.tolist(), sorted({p.source[-1] for p in rollouts.prompts}), texts.count(texts[0])))
        return real(learner, rollouts, scores_B, groups_B, *more)

    monkeypatch.setattr(online, "make_experience", watched)
    ppo = {"data": {"path": [lines("a.jsonl", rows)]}, "reward": "score.py:short", "updates": 2, "rollouts": 6}
    ppo |= {"advantage": "grpo", "responses_per_prompt": 2, "minibatches": 1}
    assert keel("run", write("x", ppo=ppo)) == 0
    assert [one[:2] for one in seen] == [([0, 0, 1, 1, 2, 2], ["1", "2", "3"])] * 2


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_settings_is_named(name: str, place: Path, capsys: pytest.CaptureFixture[str]):
    data = {"path": [lines("a.jsonl", demonstrations("a", 24))]}
    Path("model", name).write_text('{"a": 1,\n oops}')
    assert keel("run", write("x", sft={"data": data})) == 2
    told = capsys.readouterr().err
    assert f"{name} cannot be loaded" in told and f"model/{name}:2" in told


def test_an_error_names_a_row_once(place: Path, capsys: pytest.CaptureFixture[str]):
    Path("score.py").write_text("def nan(response): return float('nan')\n")
    rows = [{"prompt": f"Where is lamp {i}?"} for i in range(6)]
    ppo = {"data": {"path": [lines("a.jsonl", rows)]}, "reward": "score.py:nan", "updates": 1, "rollouts": 4}
    assert keel("run", write("x", ppo={**ppo, "minibatches": 1, "responses_per_prompt": 2, "advantage": "rloo"})) == 2
    where = next(line for line in capsys.readouterr().err.splitlines() if "where:" in line)
    assert where.count("a.jsonl:") == 1 and "score.py:nan" in where
