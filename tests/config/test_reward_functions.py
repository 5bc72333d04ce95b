"""The reward functions that recipes name."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def gsm8k():
    spec = importlib.util.spec_from_file_location("gsm8k_reward", FOLDER / "gsm8k_reward.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("48/2 = 24, and 48 + 24 = 72 clips.", "so 72\n#### 72", 1.0),
        ("She earned $10.", "#### 10", 1.0),
        ("It is 1,000 dollars", "#### 1000", 1.0),
        ("#### 5 and then 7 more words", "#### 7", 1.0),  # the last number after the mark is what was said last
        ("24 clips", "#### 72", 0.0),
        ("0.5", "#### 5", 0.0),
        ("-3", "#### 3", 0.0),
        ("I do not know.", "#### 3", 0.0),
        ("", "#### 3", 0.0),
    ],
)
def test_the_final_number_decides(gsm8k, response, answer, reward):
    assert gsm8k.correct(response, answer) == reward


def test_every_worked_answer_of_the_file_is_right_by_itself(gsm8k, shared):
    with gzip.open(shared / "data" / "gsm8k_train_2000.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 2000 and all(gsm8k.correct(row["answer"], row["answer"]) == 1.0 for row in rows)
