"""Folders that go with their process however it ends: what one that was killed left behind, the next one removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import uuid
from contextlib import suppress
from pathlib import Path

_OWNER = ".owner"


class OwnedFolder:
    """A new folder, and no left ones of the same kind beside it any more.

    Args:
        parent: made where there is none.
        kind: first part of its name.
        mode: of the folder; the umask takes from it.
    """

    def __init__(self, parent: Path, kind: str, mode: int = 0o777) -> None:
        remove_left(parent, kind)
        self.path = parent / f"{kind}{uuid.uuid4().hex[:12]}"
        parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=mode)
        unnamed = self.path / f"{_OWNER}.new"
        self._lock: int | None = os.open(unnamed, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.write(self._lock, _machine())
        with suppress(OSError):  # a file system without locks: nobody can tell, and nobody removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # ends with this process
            unnamed.rename(self.path / _OWNER)

    def remove(self) -> None:
        """Removing twice is allowed."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_left(parent: Path, kind: str) -> None:
    """Removes this user's folders whose process, on this machine, is gone."""
    for file in parent.glob(f"{kind}*/{_OWNER}"):
        try:
            lock = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locks of other machines are not seen on every file system.
            if os.fstat(lock).st_uid == os.geteuid() and os.read(lock, 256) == _machine():
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:
            continue  # its process lives
        finally:
            os.close(lock)


def _machine() -> bytes:
    return socket.gethostname().encode()
