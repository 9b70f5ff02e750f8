"""One side of a measurement: a process that sets itself up, then does one repetition whenever it is asked to.

Standard library only: it is imported by every environment. The parent writes the job as one line of JSON, then
``turn`` for each repetition; the side answers with lines of JSON. Everything else that a library prints to standard
output goes to standard error. When the parent has had enough, it closes the pipe.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Turns:
    """Made first of all, before anything is imported that might print."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.job: dict[str, Any] = json.loads(sys.stdin.readline())
        self._used = 0.0

    def wait(self) -> bool:
        """Until the next repetition is wanted; False when none is."""
        return sys.stdin.readline().strip() == "turn"

    def report(self, **result: Any) -> None:
        """The first report says that the side is ready, each further one ends a turn."""
        used = tree_cpu_s()
        found = {**result, "peak_bytes": status_bytes("VmHWM"), "resident_bytes": tree_resident_bytes()}
        found["cpu_s"], self._used = used - self._used, used
        self._answers.write(json.dumps(found) + "\n")
        self._answers.flush()


def status_bytes(field: str, pid: int | str = "self") -> int:
    """``VmHWM`` (peak) or ``VmRSS`` of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def tree_resident_bytes() -> int:
    """Resident memory of this process and its descendants; pages they share count once."""
    return sum(map(_proportional, _tree()))


def tree_cpu_s() -> float:
    """Processor time of this process and its descendants since they began."""
    fields = (Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split() for pid in _tree())
    return sum(int(found[11]) + int(found[12]) for found in fields) / os.sysconf("SC_CLK_TCK")


def _tree() -> list[int]:
    pids, frontier = [os.getpid()], [os.getpid()]
    while frontier:
        frontier = [child for pid in frontier for child in _children(pid)]
        pids += frontier
    return pids


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def _proportional(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def mapping_resident_bytes(address: int) -> int:
    """Resident memory of the mapping that holds ``address``, for arrays large enough to have their own."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            inside = low <= address < high
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    return 0
