"""Peak memory: bytes, and of this process alone; how threads wait on an idle machine and beside others."""

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


def test_the_idle_share_by_hand():
    #             user nice system idle iowait irq softirq steal guest guest_nice
    before = "cpu  10   0    10     100  20     0   0       0     7     0\ncpu0 5 0 5 50 10 0 0 0 0 0\n"
    after = "cpu  30   0    20     110  40     4   3       3     9     0\ncpu0 9 0 9 60 20 0 0 0 0 0\n"
    assert resources.idle_share(before, after) == 30 / 70
    assert resources.idle_share(after, after) == 1


def test_threads_sleep_where_others_have_the_cores(monkeypatch):
    def told(idle: float, threads: int) -> tuple[float | None, dict[str, str]]:
        with monkeypatch.context() as here:
            here.setattr(resources, "idle_cores", lambda: idle)
            here.setattr(os, "environ", own := {"HOME": "/"})
            return resources.let_threads_wait(threads), own

    assert told(2.0, 2) == told(1.6, 2) == told(6.0, 2) == (None, {"HOME": "/", "GOMP_SPINCOUNT": "10000"})
    asleep = {"HOME": "/", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    assert told(1.5, 2) == (1.5, asleep)
    assert told(0.0, 1) == (0.0, asleep)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setattr(os, "environ", {name: "the user's"})
        assert resources.let_threads_wait(2) is None
        assert os.environ == {name: "the user's"}


def test_a_busy_machine_has_no_idle_core(monkeypatch):
    """Measured for real: as many busy processes as there are cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert resources.idle_cores(0.3) < 0.5 * (os.cpu_count() or 1)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    monkeypatch.setattr(Path, "read_text", lambda path: path.with_name("no such file").open().read())
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 9.0, 9.0))
    assert resources.idle_cores() == (os.cpu_count() or 1) - 0.25
