"""Objects at URLs that fsspec knows (s3://, gs://, az://, https://, file://, …), and copies of them on this machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from quartet.config.errors import UserError, write_error

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FETCHED = ".fetched.json"
MARKER, CHECKPOINTS = "run.json", "checkpoints"
MODELS = ("model", "critic", "adapter", "reward_model", "exports")
"""Directories of a run."""


class StoreError(UserError):
    """A store did not do what it was asked for; it may at another time."""


@dataclass(frozen=True)
class Entry:
    """Of one object: bytes (None where the store does not say), and what changes with its content."""

    size: int | None
    mark: str


class Store:
    """The objects below ``url`` by their names from there on; where ``url`` is one object, that one by its own name.

    Attributes:
        is_object: whether ``url`` is one object, once ``list`` was called.

    Raises:
        UserError: a package is missing, or nothing knows such URLs.
        StoreError: every method, where the store refuses or is not there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.is_object = False
        # Listings are read each time: other machines write there, too.
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.url.startswith("file:"):
            options["auto_mkdir"] = True
        with self._asking():
            self._fs, self._root = fsspec.url_to_fs(self.url, **options)

    def list(self, below: str = "") -> dict[str, Entry]:
        """Lists all objects below a name; none where there are none."""
        found: dict[str, Any] = {}
        with self._asking(), contextlib.suppress(FileNotFoundError):
            if self._fs.protocol and "http" in self._fs.protocol:
                found = {self._root: self._fs.info(self._root)}
            else:
                self._fs.invalidate_cache()
                found = self._fs.find(f"{self._root}/{below}" if below else self._root, detail=True)
        if self._root in found and not below:
            self.is_object = True
            return {PurePosixPath(self._root).name: _entry(found[self._root])}
        names = {path[len(self._root) :].lstrip("/"): _entry(info) for path, info in sorted(found.items())}
        if out := [name for name in names if {"", ".", ".."} & set(name.split("/")) or "\0" in name]:
            raise UserError(f"{self.url} has a name that is no path", found=out[0], remedy="rename that object")
        return names

    def read(self, name: str) -> bytes | None:
        """Reads an object; None where there is no such one."""
        data: bytes | None = None
        with self._asking(name), contextlib.suppress(FileNotFoundError):
            data = self._fs.cat_file(self._path(name))
        return data

    def write(self, name: str, data: bytes) -> None:
        with self._asking(name):
            self._fs.pipe_file(self._path(name), data)

    def upload(self, file: Path, name: str) -> None:
        """Raises FileNotFoundError where there is no such file here."""
        file.stat()
        with self._asking(name):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Raises OSError where the disk here is full; nothing of the file is left then."""
        try:
            with self._asking(name):
                self._fs.get_file(self._path(name), str(file))
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def delete(self, *names: str) -> None:
        """Deletes objects in this order; what is not there does no harm."""
        for name in names:
            with self._asking(name), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    # As ``quartet.config.plugins.Storage`` -------------------------------------------------------------------

    def local_copy(self) -> Path:
        """Raises UserError where there is nothing or a run, and as ``fetch``."""
        url, target, there = self.url, cache_path("downloads", self.url), self.list()
        if not there:
            raise UserError(
                f"there is nothing at {url}", found="no object of that name or below it", remedy="correct it"
            )
        if MARKER in there and "config.json" not in there:
            remedy = f"name {url}/model, or another folder that the run has written"
            raise UserError(f"{url} is a run, no model or data", found=MARKER, remedy=remedy)
        fetch(self, target, there)
        return target / next(iter(there)) if self.is_object else target

    def records(self, names: Collection[str] | None = None) -> Path:
        """Raises UserError where all records are asked for and there is no run, and as ``fetch``."""
        target, there = cache_path("views", self.url), self.list()
        if names is None and MARKER not in there:
            raise UserError(f"{self.url} holds no run", found=f"no {MARKER}", remedy="name the output_dir of a run")
        wanted = names if names is not None else [n for n in there if not _is_model(n)]
        fetch(self, target, [name for name in there if name in wanted])
        return target

    def work_dir(self) -> Path:
        return cache_path("runs", self.url)

    def remote_run(self, path: Path, tell: Callable[[str], object], *, keep: int, timeout_s: float) -> Any:
        from quartet.extras.storage.remote_run import RemoteRun  # with torch

        return RemoteRun(self.url, path, tell, keep=keep, timeout_s=timeout_s)

    def _path(self, name: str) -> str:
        return self._root if self.is_object else f"{self._root}/{name}"

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        # Every store's package has exceptions of its own.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise _refused(f"{self.url}/{name}".rstrip("/"), error) from error


def _entry(info: dict[str, Any]) -> Entry:
    return Entry(info.get("size"), hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest()[:16])


def _is_model(name: str) -> bool:
    """Tells whether an object belongs to a model or a checkpoint of a run."""
    parts = name.split("/")
    return CHECKPOINTS in parts or parts[0] in MODELS


def _refused(url: str, error: Exception) -> UserError:
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        remedy = "pip install what that names (for s3: 'quartet-rl[storage]')"
        return UserError(f"{url} needs a package that is missing", found=said, remedy=remedy)
    problem = "is not there" if isinstance(error, FileNotFoundError) else "cannot be used"
    return StoreError(
        f"{url} {problem}",
        found=f"{type(error).__name__}: {said}",
        remedy="look at the credentials (docs/storage.md), at the name and the address of the store (for S3: "
        "AWS_ENDPOINT_URL, AWS_REGION), and at the network; make the bucket where there is none",
    )


# Copies on this machine ----------------------------------------------------------------------------------------


def cache_path(kind: str, url: str) -> Path:
    """Returns where this machine keeps what belongs to ``url``, below ``$XDG_CACHE_HOME/quartet``
    (``~/.cache/quartet``).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quartet"
    url = url.rstrip("/")
    return base / kind / hashlib.sha256(url.encode()).hexdigest()[:12] / PurePosixPath(url).name


def fetch(store: Store, target: Path, names: Collection[str]) -> None:
    """Brings objects into a directory: those that have changed since, each whole under its name or not there.

    What was brought before and is no longer in the store goes. Processes of this machine take turns.

    Raises:
        UserError: the store cannot be used, has names that lead out of the directory, or the disk is full.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _fetch(store, target, names)
    except OSError as error:
        raise write_error(target, error, what=f"a copy of {store.url} in ") from error


def _fetch(store: Store, target: Path, names: Collection[str]) -> None:
    record = target / _FETCHED
    try:
        known: dict[str, Any] = json.loads(record.read_bytes())
    except (OSError, ValueError):
        known = {}
    entries = store.list()
    try:
        for name in (name for name in names if name in entries):
            file, entry = target / name, entries[name]
            if known.get(name) == [*file_stamp(file), entry.mark]:
                continue
            part = file.with_name(f".{file.name}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            store.download(name, part)
            if entry.size not in (None, size := part.stat().st_size):
                raise StoreError(
                    f"{store.url}/{name} did not arrive whole", found=f"{size:,} bytes", remedy="try again"
                )
            os.replace(part, file)
            known[name] = [*file_stamp(file), entry.mark]
        for name in known.keys() - entries.keys():
            del known[name]
            (target / name).unlink(missing_ok=True)
    finally:
        record.write_text(json.dumps(known), encoding="utf-8")


def file_stamp(file: Path) -> list[int]:
    """Changes when a file is written to; empty where there is none."""
    try:
        status = file.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]
