"""One file of peers' numbers a test (README of the folder of --peer-numbers)."""

from pathlib import Path

import pytest

from tests.golden.cases import CASES, Case


@pytest.fixture(scope="module", params=range(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    folder = Path(request.config.getoption("--peer-numbers") or "")
    if not folder.is_dir():
        pytest.skip(f"no folder of peer numbers at {folder} (--peer-numbers FOLDER, by default in ../shared)")
    return Case(folder / f"case_{request.param:03d}.npz")
