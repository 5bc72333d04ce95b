"""What the process has used. No torch here."""

import os
import resource
import sys
from pathlib import Path


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


def restart_peak() -> bool:
    """Lets `peak_rss_bytes` start again from what is held now; False where the system cannot (it then only grows)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)
    except OSError:
        return False
    return True
