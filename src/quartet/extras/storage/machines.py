"""Files of a run on machines that do not see the driver's directory: they come and go through the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.cluster import ResourcePool, WorkerGroup
from quartet.cluster.dispatch import OneRank
from quartet.cluster.worker import Worker, local_path
from quartet.config import UserError
from quartet.extras.storage.store import CHECKPOINTS, Entry, Store, fetch
from quartet.observe.digests import FileDigest, digest_file
from quartet.train.checkpoint import NAME, CheckpointManifest, Damage, begin_checkpoint, path_of_draft
from quartet.trainers.run_files import writing

SENT = ".sent"
"""Below the run's URL: what is on its way to the driver."""


def bring_checkpoint(store: Store, run: Path, root: str, step: int, names: Mapping[str, Entry]) -> None:
    """Brings a checkpoint into the directory ``root`` of a run here.

    Args:
        names: what is in the store.

    Raises:
        Damage: its files are not those that its manifest names.
    """
    draft = begin_checkpoint(run / root, step)
    final = path_of_draft(draft)
    base = f"{root}/{final.name}"
    with writing(draft):
        store.download(f"{base}/{NAME}", draft / NAME)
        manifest = CheckpointManifest.read(draft / NAME)
        check_sizes(names, base, manifest)
        for name in manifest.files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            store.download(f"{base}/{name}", draft / name)
        manifest.check_content(draft)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)


def check_sizes(names: Mapping[str, Entry], base: str, manifest: CheckpointManifest) -> None:
    """Raises ``Damage`` where objects are missing below ``base``, or are of other sizes than the manifest says."""
    for name, digest in manifest.files.items():
        if (entry := names.get(f"{base}/{name}")) is None or entry.size != digest.bytes:
            raise Damage(f"{name} is missing or cut off")


class Machine(Worker):
    """The run's files on one machine; paths are the driver's (``local_path``)."""

    def sees(self, token: Path) -> bool:
        return local_path(token).is_dir()

    def begin(self, draft: Path) -> None:
        """Makes an empty ``draft`` in the place of former ones."""
        with writing(here := local_path(draft)):
            for former in here.parent.glob(".draft_*"):
                shutil.rmtree(former, ignore_errors=True)
            here.mkdir(parents=True)

    def send(self, url: str, run: Path, paths: Sequence[Path]) -> dict[str, FileDigest]:
        """Uploads files, and all in directories; returns their digests by their names in the run's directory."""
        store, here, digests = Store(f"{url}/{SENT}"), local_path(run), dict[str, FileDigest]()
        for file in _files(map(local_path, paths)):
            name = file.relative_to(here).as_posix()
            store.upload(file, name)
            digests[name] = digest_file(file)
        return digests

    def fetch_checkpoint(self, url: str, run: Path, step: int) -> None:
        store = Store(url)
        bring_checkpoint(store, local_path(run), CHECKPOINTS, step, store.list())

    def fetch_tables(self, url: str, run: Path) -> None:
        """Brings the log-probabilities of a reference, which may not be there to compute them."""
        fetch(store := Store(url), local_path(run), [name for name in store.list() if name.startswith("reference")])


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file())


class Machines:
    """Those of a run's workers that do not see its directory, by their nodes in ``ranks``.

    Args:
        groups: of the workers; a worker of its own stands on each machine.
    """

    def __init__(self, url: str, run: Path, groups: Sequence[WorkerGroup]) -> None:
        self._url, self._run, backend = url, run, groups[0].backend
        (own,) = (node.key for node in backend.nodes() if node.is_own)
        nodes = list(dict.fromkeys([own, *(info.node for group in groups for info in group.processes)]))
        pool = ResourcePool([1] * len(nodes), cpus=0, nodes=nodes)
        self._group = WorkerGroup(pool, Machine, name="storage", backend=backend)
        try:
            with writing(token := run / f".seen_{os.getpid()}_storage"):
                token.mkdir(exist_ok=True)
            try:
                seen = self._group.call(Machine.sees, token)
            finally:
                token.rmdir()
            self.ranks = {node: rank for rank, node in enumerate(nodes) if not seen[rank]}
            self.each(Machine.fetch_tables, url, run)
        except BaseException:
            self.stop()
            raise

    def each(self, method: Any, *args: Any) -> None:
        for rank in self.ranks.values():
            self._group.call(method, *args, mode=OneRank(rank))

    def receive(self, node: str, paths: Sequence[Path]) -> dict[str, FileDigest]:
        """Brings what is at ``paths`` on the machine to this one; returns digests by names in the run's directory.

        Raises:
            UserError: a file does not arrive as it is there.
        """
        mode, store = OneRank(self.ranks[node]), Store(f"{self._url}/{SENT}")
        sent: dict[str, FileDigest] = self._group.call(Machine.send, self._url, self._run, paths, mode=mode)
        for name, digest in sent.items():
            file = self._run / name
            with writing(part := file.with_name(f".{file.name}.part")):
                part.parent.mkdir(parents=True, exist_ok=True)
                store.download(name, part)
                if digest_file(part) != digest:
                    part.unlink()
                    remedy = "look at the network and the disks, then go on with --resume"
                    raise UserError(f"{file} did not arrive as it was written", found=f"from {node}", remedy=remedy)
                os.replace(part, file)
        store.delete(*sent)
        return sent

    def stop(self) -> None:
        self._group.stop()
