"""The drills, which take minutes: `make drills`. KEEL_STRIKES (60) says how many, KEEL_DRILL_SEED where they fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.drill
@pytest.mark.parametrize("mode", ["kills", "damage", "disk", "fuzz"])
def test_whatever_strikes_the_run_comes_to_the_same_bytes(mode: str, tmp_path: Path):
    command = [sys.executable, "-m", "tests.drills.drill", mode, str(tmp_path), os.environ.get("KEEL_STRIKES", "60")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
