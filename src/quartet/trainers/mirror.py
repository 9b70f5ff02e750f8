"""Copies of a run's files on machines whose storage the driver does not share.

One worker per storage reads and writes there. Files go from worker to worker in chunks, through the cluster's object
store: the driver passes references on and holds no content. The driver's own storage is rank 0. What it has decides;
every other storage gets each checkpoint whole before the driver's own counts, and drops those that it drops.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from quartet.cluster import ResourcePool, WorkerDied, WorkerGroup
from quartet.cluster.dispatch import OneRank
from quartet.cluster.worker import Worker, local_path
from quartet.config import UserError
from quartet.config.file_errors import read_error
from quartet.observe.digests import FileDigest, digest_file, sync_directory
from quartet.train.checkpoint import Shares, path_of_draft
from quartet.train.manifest import NAME, CheckpointManifest
from quartet.trainers.run_files import MARKER, read_json, writing

CHUNK = 32 * 2**20
"""Bytes that travel at a time; the object store holds two such pieces of a file."""
Files = Mapping[Path, FileDigest]
"""By the path that the driver knows."""


class Storage(Worker):
    """The run's files on one machine; paths are the driver's (``local_path``)."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, int, int], FileDigest] = {}

    def _here(self, path: Path) -> Path:
        return local_path(path)

    def mark(self, token: Path) -> None:
        """Makes the directory ``token``, by which another worker recognises this storage."""
        with _writing(path := self._here(token)):
            path.mkdir(parents=True, exist_ok=True)

    def sees(self, token: Path) -> bool:
        return self._here(token).is_dir()

    def unmark(self, token: Path) -> None:
        self._here(token).rmdir()

    def check_same_run(self, run: Path, created: str) -> None:
        """
        Args:
            created: what the driver's ``run.json`` says.

        Raises:
            UserError: the directory holds something else here, which this run would delete.
        """
        here = self._here(run)
        if not any(not entry.name.startswith(".") for entry in here.iterdir()):
            return
        try:
            found = read_json(here / MARKER)["created"]
        except (UserError, ValueError, LookupError, TypeError):
            found = "files that are no run"
        if found != created:
            raise UserError(
                f"{here} on {socket.gethostname()} holds another run than the driver's",
                found=f"created {found} there, {created} on the driver's machine",
                remedy="delete it or move it away there, or choose another output_dir",
            )

    def begin(self, draft: Path) -> None:
        """Makes an empty ``draft`` in the place of former ones."""
        with _writing(path := self._here(draft)):
            path.parent.mkdir(parents=True, exist_ok=True)
            for former in path.parent.glob(".draft_*"):
                shutil.rmtree(former, ignore_errors=True)
            path.mkdir()

    def digests(self, paths: Sequence[Path]) -> dict[Path, FileDigest]:
        """Of the files among ``paths``, and of those in directories among them; what is not there is left out."""
        found = {}
        for path in paths:
            top = self._here(path)
            for file in [top] if top.is_file() else sorted(top.rglob("*")):
                if file.is_file():
                    with _writing(file):
                        found[path / file.relative_to(top)] = digest_file(file)
        return found

    def lacking(self, files: Files) -> set[Path]:
        """Those that are not here as they should be. A file that has not changed since is not read again."""
        return {path for path, digest in files.items() if self._digest(self._here(path)) != digest}

    def _digest(self, path: Path) -> FileDigest | None:
        try:
            status = path.stat()
            key = (path, status.st_size, status.st_mtime_ns)
            if key not in self._read:
                self._read[key] = digest_file(path)
        except OSError:
            return None
        return self._read[key]

    def read(self, path: Path, offset: int, num: int) -> bytes:
        here = self._here(path)
        try:
            with here.open("rb") as file:
                file.seek(offset)
                return file.read(num)
        except OSError as error:
            raise read_error(here, error) from error

    def write(self, path: Path, offset: int, data: bytes) -> None:
        """Adds ``data`` to what is to be ``path`` once ``finish`` has looked at it."""
        with _writing(here := self._here(path)):
            here.parent.mkdir(parents=True, exist_ok=True)
            with _part(here).open("wb" if offset == 0 else "ab") as file:
                file.write(data)

    def finish(self, path: Path, digest: FileDigest | None) -> None:
        """
        Raises:
            UserError: what was written is not what ``digest`` says.
        """
        here = self._here(path)
        with _writing(here):
            with _part(here).open("rb") as file:
                os.fsync(file.fileno())
            if digest is not None and (found := digest_file(_part(here))) != digest:
                _part(here).unlink()
                raise UserError(
                    f"{here} did not arrive as it was written",
                    found=f"{found.bytes:,} bytes, SHA-256 {found.sha256[:16]}…, on {socket.gethostname()}",
                    remedy="look at the disks and the memory of both machines, then go on with --resume",
                )
            os.replace(_part(here), here)
            sync_directory(here.parent)

    def commit(self, draft: Path, names: Sequence[str]) -> None:
        """Makes ``draft``, of which ``names`` are the files, the checkpoint whose draft it is."""
        here = self._here(draft)
        final = path_of_draft(here)
        with _writing(final):
            _drop_all_but(here, names)
            if os.path.lexists(final):
                os.replace(final, here.with_name(f"{here.name}_former"))
            os.replace(here, final)
            sync_directory(final.parent)

    def tidy(self, checkpoint: Path, names: Sequence[str]) -> None:
        """Leaves of a checkpoint's directory only the files that are in it."""
        with _writing(here := self._here(checkpoint)):
            _drop_all_but(here, names)

    def keep(self, root: Path, names: Sequence[str]) -> None:
        """Deletes every checkpoint and draft in ``root`` but those."""
        self._read.clear()
        here = self._here(root)
        for entry in here.iterdir() if here.is_dir() else ():
            if entry.name not in names:
                # Under another name first: one half deleted would look damaged.
                with suppress(OSError):
                    aside = entry.with_name(f".draft_discarded_{entry.name.lstrip('.')}")
                    os.replace(entry, aside)
                    shutil.rmtree(aside, ignore_errors=True)


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(path, what=f"on {socket.gethostname()}: ")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _drop_all_but(directory: Path, names: Sequence[str]) -> None:
    for path in list(directory.rglob("*")):
        if path.is_file() and path.relative_to(directory).as_posix() not in names:
            path.unlink()


class SharedStorage:
    """What a run does for other machines where all see its directory: nothing."""

    def begin(self, draft: Path) -> Path:
        """Makes the driver's ``draft`` of a checkpoint on every machine, and returns it."""
        return draft

    def gather(self, draft: Path, shares: Shares) -> None:
        """Brings what workers have written into ``draft`` to the driver's machine."""

    def commit(self, draft: Path, manifest: CheckpointManifest) -> bool:
        """Makes the complete ``draft`` a checkpoint on all machines but the driver's; False where one is gone."""
        return True

    def give(self, checkpoint: Path) -> None:
        """Gives the checkpoint to machines that do not have it whole."""

    def keep(self, root: Path) -> None:
        """Has the same checkpoints on all machines as on the driver's."""

    def bring(self, node: str, paths: Sequence[Path]) -> None:
        """Brings finished files and directories from a worker's machine to the driver's."""

    def stop(self) -> None:
        """Ends its workers."""


class Mirror(SharedStorage):
    """Machines with storage of their own.

    Args:
        path: the run's directory.
        group: of ``Storage``, the driver's machine first.
        nodes: the machine of each.

    Raises:
        UserError: the directory cannot be written there, or holds another run.
        WorkerDied: a machine is gone; so all methods but ``commit`` and ``keep``.
    """

    def __init__(self, path: Path, group: WorkerGroup, nodes: Sequence[str]) -> None:
        self._path, self._group = path, group
        self._home: dict[str, int] = {}
        for rank, node in enumerate(nodes):  # the first of several machines that share their storage speaks for them
            if node not in self._home:
                token = path / f".seen_{os.getpid()}_{rank}"
                self._on(rank, Storage.mark, token)
                seen = group.call(Storage.sees, token)
                self._on(rank, Storage.unmark, token)
                self._home |= {n: rank for n, sees in zip(nodes, seen, strict=True) if sees and n not in self._home}
        self.others = sorted(set(self._home.values()) - {0})
        for rank in self.others:
            self._on(rank, Storage.check_same_run, path, read_json(path / MARKER)["created"])
        self._send_records()
        self._send(self._on(0, Storage.digests, [path / "reference"]), self.others)

    @classmethod
    def of(cls, path: Path, groups: Sequence[WorkerGroup]) -> Mirror:
        """Of the driver's machine and those of the groups, with a worker of its own on each."""
        backend = groups[0].backend
        (own,) = (node.key for node in backend.nodes() if node.is_own)
        nodes = list(dict.fromkeys([own, *(info.node for group in groups for info in group.processes)]))
        pool = ResourcePool([1] * len(nodes), cpus=0, nodes=nodes)
        group = WorkerGroup(pool, Storage, name="storage", backend=backend)
        try:
            return cls(path, group, nodes)
        except BaseException:
            group.stop()
            raise

    def begin(self, draft: Path) -> Path:
        for rank in self.others:
            self._on(rank, Storage.begin, draft)
        return draft

    def gather(self, draft: Path, shares: Shares) -> None:
        files = {draft / role / name: digest for role, share in shares.items() for name, digest in share.items()}
        self._send(files, [0])

    def commit(self, draft: Path, manifest: CheckpointManifest) -> bool:
        try:
            self._send_records()
            self._send(_files(draft, manifest), self.others)
            for rank in self.others:
                self._on(rank, Storage.commit, draft, [*manifest.files, NAME])
        except WorkerDied:  # which the run meets by itself
            return False
        return True

    def give(self, checkpoint: Path) -> None:
        manifest = CheckpointManifest.read(checkpoint / NAME)
        self._send(_files(checkpoint.absolute(), manifest), self.others)
        for rank in self.others:
            self._on(rank, Storage.tidy, checkpoint.absolute(), [*manifest.files, NAME])

    def keep(self, root: Path) -> None:
        names = [entry.name for entry in root.iterdir() if entry.name.startswith("step_")] if root.is_dir() else []
        with suppress(WorkerDied):  # which the run meets by itself, and ``begin``
            for rank in self.others:
                self._on(rank, Storage.keep, root.absolute(), names)

    def bring(self, node: str, paths: Sequence[Path]) -> None:
        if rank := self._home[node]:
            self._send(self._on(rank, Storage.digests, paths), [0])

    def stop(self) -> None:
        self._group.stop()

    def _on(self, rank: int, method: Any, *args: Any) -> Any:
        return self._group.call(method, *args, mode=OneRank(rank))

    def _send_records(self) -> None:
        """The files in the run's directory, so that another machine can go on with it; they grow meanwhile. First the
        one by which the run is known again."""
        for path in sorted(self._path.iterdir(), key=lambda path: (path.name != MARKER, path.name)):
            if path.is_file() and not path.name.startswith("."):
                self._copy(path, path.stat().st_size, None, 0, self.others)

    def _send(self, files: Files, targets: Sequence[int]) -> None:
        """Copies each file to those of ``targets`` that lack it, from the first storage that has it.

        Raises:
            UserError: none has it, or it does not arrive as it is.
        """
        lacking = self._group.call(Storage.lacking, dict(files))
        for path, digest in files.items():
            if to := [rank for rank in targets if path in lacking[rank]]:
                holders = (rank for rank in chain([0], self.others) if path not in lacking[rank])
                if (source := next(holders, None)) is None:
                    raise UserError(
                        f"{path} is on no machine as it was written",
                        found=f"its {digest.bytes:,} bytes were not found on {len(self.others) + 1} machines",
                        remedy="look at the machines' disks, and go on from the checkpoint before with --resume",
                    )
                self._copy(path, digest.bytes, digest, source, to)

    def _copy(self, path: Path, size: int, digest: FileDigest | None, source: int, targets: Sequence[int]) -> None:
        under_way: list[Any] = []
        for offset in range(0, max(size, 1), CHUNK):
            num, mode = min(CHUNK, size - offset), OneRank(source)
            piece = self._group.call(Storage.read, path, offset, num, mode=mode, blocking=False)
            for written in under_way:
                written.wait()
            under_way = [
                self._group.call(Storage.write, path, offset, piece, mode=OneRank(rank), blocking=False)
                for rank in targets
            ]
        for written in under_way:
            written.wait()
        for rank in targets:
            self._on(rank, Storage.finish, path, digest)


def _files(directory: Path, manifest: CheckpointManifest) -> dict[Path, FileDigest]:
    """All files of a checkpoint; the manifest last, without which it counts as none."""
    return {directory / name: digest for name, digest in manifest.files.items()} | {
        directory / NAME: digest_file(directory / NAME)
    }
