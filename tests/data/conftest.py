"""Files of rows for all tests of data."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (JSONL or JSON by the name) or bytes, packed where the name says so, and gives the path."""

    def writer(content: list[Any] | bytes, name: str = "rows.jsonl") -> str:
        if isinstance(content, list):
            text = json.dumps(content) if ".jsonl" not in name else "".join(json.dumps(row) + "\n" for row in content)
            content = text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return writer
