"""What the process has used. No torch here."""

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
