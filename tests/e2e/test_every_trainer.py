"""N + M steps of every trainer are N, kill -9, M: the same weights, checkpoints, metrics and samples, no file more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.trainers import TRAINERS

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What became of each trainer: one process imports torch and forks for each run."""
    command = [sys.executable, "-m", "tests.drills.drill", "trainers", str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line["trainer"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_kill_9_and_going_on_gives_the_bytes_of_the_unbroken_run(killed, trainer):
    """Case 40."""
    found = killed[trainer]
    assert (found["killed"], found["resumed"], found["steps"]) == (-9, 0, 4)
    assert found["from"] == ["2"] and found["differ"] == []
