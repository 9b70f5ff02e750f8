"""Whether a run that says that it is running really is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCK = ".lock"
ENDED = "ended without a word (killed?)"
"""Status of a run whose process is gone and could not say so."""


def true_status(run_dir: Path, info: Mapping[str, Any]) -> Any:
    """What ``run.json`` says; ``ENDED`` where that is ``running`` and no process holds the run's lock."""
    status = info.get("status")
    return ENDED if status == "running" and not _may_be_held(run_dir / LOCK) else status


def _may_be_held(lock: Path) -> bool:
    """False where it is certain that no process holds it."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True  # none, or not ours to look at
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
