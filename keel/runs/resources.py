"""What the process has used, and what the machine has for it. No torch here."""

import os
import resource
import sys
import time
from pathlib import Path

SPINS = "10000"
"""Looks before a thread sleeps: enough for what the interpreter does between two operations."""


def peak_rss_bytes() -> int:
    """The most memory that this process has held at one time, in bytes, children apart.

    Linux: VmHWM of proc(5), since ru_maxrss starts at the peak of the process that started this one (a child of 9 MiB
    started by one of 610 MiB reads 610 MiB). Elsewhere getrusage(2), in KiB, on macOS in bytes.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes() -> int:
    """Memory of this machine, or of the control group that this process may not outgrow, in bytes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            whole = min(whole, int(Path(place).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return whole


def resident_bytes() -> int:
    """What this process holds now, in bytes; the peak where the system does not tell (proc(5) is Linux's)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else peak_rss_bytes()


def free_bytes() -> int:
    """What this process may still take of the memory of its machine or control group, in bytes."""
    free = memory_bytes() - resident_bytes()
    meminfo = Path("/proc/meminfo")  # proc(5)
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) * 1024)
    return free


def idle_cores(seconds: float = 0.1) -> float:
    """How many of the machine's cores have nothing to do, over so many seconds of waiting; where the system does not
    tell (proc(5) is Linux's), by the load of the last minute."""
    cores, stat = os.cpu_count() or 1, Path("/proc/stat")
    try:
        before = stat.read_text()
        time.sleep(seconds)
        return cores * idle_share(before, stat.read_text())
    except OSError:  # not there, or not for this user
        return max(0.0, cores - os.getloadavg()[0])


def idle_share(before: str, after: str) -> float:
    """Of the time between two readings of /proc/stat; 1 where its clock has not ticked."""
    # cpu  user nice system idle iowait irq softirq steal guest guest_nice: guests' time stands in user's too
    (idle_0, all_0), (idle_1, all_1) = (
        (ticks[3] + ticks[4], sum(ticks)) for ticks in ([int(n) for n in s.split()[1:9]] for s in (before, after))
    )
    return (idle_1 - idle_0) / (all_1 - all_0) if all_1 > all_0 else 1.0


def let_threads_wait(threads: int) -> float | None:
    """Sets how torch's threads, which look when torch is loaded, are to wait for each other; not what the user has set.

    With a core for each thread, one that waits first looks for a fraction of a millisecond whether it may go on: to be
    woken takes as long as a small operation. Beside busy processes that would take the core from the thread that is
    waited for, so there it sleeps, and the idle cores are returned (docs/decisions.md has the figures).
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return None
    idle = idle_cores()
    if idle > threads - 0.5:
        os.environ["GOMP_SPINCOUNT"] = SPINS
        return None
    os.environ |= {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    return idle


def restart_peak() -> bool:
    """Lets `peak_rss_bytes` start again from what is held now; False where the system cannot (it then only grows)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)
    except OSError:
        return False
    return True
