"""Peak memory: bytes, and of this process alone."""

import os
import subprocess
import sys
from pathlib import Path

import keel
from keel.runs import resources
from keel.runs.resources import peak_rss_bytes

HERE = {**os.environ, "PYTHONPATH": str(Path(keel.__file__).parents[1])}
CODE = "import sys; from keel.runs.resources import peak_rss_bytes; sys.stdout.write(str(peak_rss_bytes()))"


def test_peak_grows_with_what_is_touched_and_stays():
    before = peak_rss_bytes()
    block = bytearray(b"x") * (before + 2**26)
    size = len(block)
    assert peak_rss_bytes() >= size
    del block
    # The kernel counts in batches, so the last pages may come and go.
    assert peak_rss_bytes() >= 0.99 * size


def test_a_small_child_of_a_large_parent_is_small():
    block = bytearray(b"x") * 2**28
    child = int(subprocess.run([sys.executable, "-c", CODE], env=HERE, check=True, capture_output=True).stdout)
    assert 2**21 < child < len(block) // 2


def test_what_is_free_is_bounded_by_the_limit_less_what_is_held(monkeypatch):
    monkeypatch.setattr(resources, "memory_bytes", lambda: 100)
    monkeypatch.setattr(resources, "resident_bytes", lambda: 60)
    assert resources.free_bytes() == 40
    monkeypatch.setattr(resources, "memory_bytes", lambda: 1 << 60)  # then what the machine has left counts
    assert 0 < resources.free_bytes() < 1 << 50
