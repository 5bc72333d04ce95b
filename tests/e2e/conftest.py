import shutil
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a tiny `model` and a reward function `score.py:short`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    Path("score.py").write_text("def short(response): return -len(response) / 10\n")
    return tmp_path
