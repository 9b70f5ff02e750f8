"""Files that show whether they are as they were written: SHA-256 while writing, and JSON that carries its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_DIGEST = "sha256"
_BUFFER = 2**20
"""torch.save writes some forty times per tensor, a few bytes each but for the contents."""


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hex) of a file's content."""

    bytes: int
    sha256: str


class DigestingFile:
    """A file open for writing that digests what passes through, so that nothing is read a second time.

    Only for writers that go from the beginning to the end, as ``torch.save`` does: there is no ``seek``.

    Attributes:
        error: what the system said when a write failed; some libraries report it as something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()
        self._bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            # Buffered or opened without buffer: all of it, or an error.
            view = memoryview(data).cast("B")
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        self._state.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._bytes

    def close(self) -> None:
        """Does nothing: the file is closed by the code that opened it."""

    def digest(self) -> FileDigest:
        """Of what was written so far."""
        return FileDigest(self._bytes, self._state.hexdigest())


@contextmanager
def digested_file(path: Path) -> Iterator[DigestingFile]:
    """A new file to write to, synced at the end; its digest is made on the way.

    Raises:
        OSError: it could not be written, also where the writer took that for something else.
    """
    with open(path, "wb", _BUFFER) as file:
        digesting = DigestingFile(file)
        try:
            yield digesting
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            # torch.save reports what failed as an error of its zip writer.
            if digesting.error is not None:
                raise digesting.error from error
            raise


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> FileDigest:
    """Of a file that is there already: reads it once.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        state = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), state.hexdigest())


def digest_files(directory: Path) -> dict[str, FileDigest]:
    """Of every file below ``directory``, by its path in there; OSError where one cannot be read."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}


def changed_file(directory: Path, written: Mapping[str, FileDigest]) -> str | None:
    """The first file that is not as it was written, None where all are; more files than those do no harm."""
    for name, digest in written.items():
        try:
            if digest_file(directory / name) != digest:
                return name
        except OSError:
            return name
    return None


def seal(value: Mapping[str, Any]) -> bytes:
    """``value`` as JSON text with a last key ``sha256``, the digest of the text without it."""
    if _DIGEST in value:
        raise ValueError(f"the key {_DIGEST!r} is the seal's own")
    return _text({**value, _DIGEST: hashlib.sha256(_text(value)).hexdigest()})


def unseal(data: bytes) -> dict[str, Any]:
    """What :func:`seal` was given.

    Raises:
        ValueError: ``data`` is not, byte for byte, what it returned.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON text ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__} instead of an object")
    if _DIGEST not in value:
        raise ValueError("has no digest of its own")
    digest = value.pop(_DIGEST)
    if digest != hashlib.sha256(_text(value)).hexdigest() or seal(value) != data:
        raise ValueError("does not agree with its own digest")
    return value


def _text(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode("ascii") + b"\n"
