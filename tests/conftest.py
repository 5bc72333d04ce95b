"""What all tests share: fixed seeds, two threads unless told otherwise, and where the folder of outside data is."""

import os
import random
from pathlib import Path

import pytest
import torch

from tests.tiny import write_model

SHARED = Path(__file__).resolve().parents[2] / "shared"

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of runs in processes of their own: several work at once here
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peer-numbers",
        type=Path,
        default=SHARED / "peer_numbers",
        metavar="FOLDER",
        help="numbers computed by other libraries, for tests/golden (default: ../shared/peer_numbers)",
    )


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of outside data beside the repository; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no folder ../shared beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the sandbox's architecture with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")
