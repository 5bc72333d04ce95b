"""The command `keel` in the process of the tests."""

import pytest

from keel import cli


def keel(*arguments: str) -> int:
    """Runs it; its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)
