"""A run whose ``output_dir`` is a URL: it works in a directory on this machine, and a thread uploads what is finished.

::

    owner.json            written first: the run's id, and the process that may write there
    run.json, …           as in the run's directory, each whole; run.json and summary.json after what they tell of
    checkpoints/step_…/   files first, manifest.json last; without it, or where files disagree with it, there is none

The directory here decides as long as it has the store's run and the store no newer checkpoint. Else a resumed run
brings everything from there, and what was here is set aside.

Files of a run on machines that do not see the driver's directory: they come and go through the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from quartet.cluster import ResourcePool, WorkerGroup
from quartet.cluster.dispatch import OneRank
from quartet.cluster.worker import Worker, local_path
from quartet.config import UserError
from quartet.config.strict import is_url
from quartet.extras.storage.store import CHECKPOINTS, MODELS, Store, StoreError, fetch, file_stamp
from quartet.observe.files import LOCK, replace_atomically
from quartet.train.checkpoint import (
    NAME,
    CheckpointDamage,
    CheckpointManifest,
    Shares,
    begin_checkpoint,
    checkpoint_path,
    checkpoint_step,
    final_checkpoint_path,
    list_checkpoints,
)
from quartet.trainers.run import LocalRunStorage
from quartet.trainers.run_files import MARKER, RECIPE, SUMMARY, lock_run, naming_write_errors, read_json, read_recipe

SENT = ".sent"
"""Below the run's URL: what is on its way to the driver."""


def bring_checkpoint(store: Store, run: Path, root: str, step: int, names: Collection[str]) -> None:
    """Brings a checkpoint into the directory ``root`` of a run here.

    Args:
        names: what is in the store.

    Raises:
        Damage: its files are not those that its manifest names.
    """
    draft = begin_checkpoint(run / root, step)
    final = final_checkpoint_path(draft)
    base = f"{root}/{final.name}"
    with naming_write_errors(draft):
        store.download(f"{base}/{NAME}", draft / NAME)
        manifest = CheckpointManifest.read(draft / NAME)
        for name in manifest.files:
            if f"{base}/{name}" not in names:
                raise CheckpointDamage(f"{name} is missing")
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            store.download(f"{base}/{name}", draft / name)
        manifest.check_content(draft)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)


class Machine(Worker):
    """The run's files on one machine; paths are the driver's (``local_path``)."""

    def sees(self, token: Path) -> bool:
        return local_path(token).is_dir()

    def begin(self, draft: Path) -> None:
        """Makes an empty ``draft`` in the place of former ones."""
        with naming_write_errors(here := local_path(draft)):
            for former in here.parent.glob(".draft_*"):
                shutil.rmtree(former, ignore_errors=True)
            here.mkdir(parents=True)

    def send(self, url: str, run: Path, paths: Sequence[Path]) -> list[str]:
        """Uploads files, and all in directories; returns their names in the run's directory."""
        store, here, names = Store(f"{url}/{SENT}"), local_path(run), list[str]()
        for path in map(local_path, paths):
            for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
                names.append(file.relative_to(here).as_posix())
                store.upload(file, names[-1])
        return names

    def fetch_checkpoint(self, url: str, run: Path, step: int) -> None:
        store = Store(url)
        bring_checkpoint(store, local_path(run), CHECKPOINTS, step, store.list())

    def fetch_tables(self, url: str, run: Path) -> None:
        """Brings the log-probabilities of a reference, which may not be there to compute them."""
        fetch(store := Store(url), local_path(run), [name for name in store.list() if name.startswith("reference")])


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
            with naming_write_errors(token := run / f".seen_{os.getpid()}_storage"):
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

    def receive(self, node: str, paths: Sequence[Path]) -> None:
        """Brings what is at ``paths`` on the machine to this one."""
        store = Store(f"{self._url}/{SENT}")
        names = self._group.call(Machine.send, self._url, self._run, paths, mode=OneRank(self.ranks[node]))
        for name in names:
            file = self._run / name
            with naming_write_errors(part := file.with_name(f".{file.name}.part")):
                part.parent.mkdir(parents=True, exist_ok=True)
                store.download(name, part)
                os.replace(part, file)
        store.delete(*names)

    def stop(self) -> None:
        self._group.stop()


OWNER, _STATE, _PINNED = "owner.json", ".remote.json", ".uploading"
_ADDED_TO = {"rollouts", "tensorboard"}
"""Directories that a resumed run does not need, as it does not ``MODELS``: it adds files to them."""
_EVERY_S = 60.0
"""Longest time between uploads of records."""
_AGAIN_S = 5.0
"""Between tries while the store is away."""


class RemoteRun(LocalRunStorage):
    """
    Args:
        path: the run's directory here.
        tell: shows a line to the user.
        keep: complete checkpoints that stay in the store.
        timeout_s: longest wait for uploads that make no progress, at the end.

    Raises:
        UserError: a package is missing for such URLs.
    """

    def __init__(
        self, url: str, path: Path, tell: Callable[[str], object], *, keep: int, timeout_s: float = 600.0
    ) -> None:
        self.url, self.path = url.rstrip("/"), path
        self._store, self._tell, self._keep, self._timeout_s = Store(url), tell, keep, timeout_s
        self._run, self._process = uuid4().hex, uuid4().hex
        self._processes: list[str] = []
        self._uploaded: dict[str, list[int]] = {}
        self._newest: dict[str, tuple[str, list[int]]] = {}
        self._machines: Machines | None = None
        self._pushing = threading.Lock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_due = self._is_closing = self._has_ended = False
        self._error: UserError | None = None
        self._refusal: StoreError | None = None
        self._last_progress = time.monotonic()

    # Ownership -------------------------------------------------------------------------------------------

    def check(self, resume: bool) -> dict[str, Any] | None:
        owner = self._owner()
        if owner is not None and not resume:
            raise self._taken(owner)
        if owner is None and (found := self._store.list()):
            raise UserError(
                f"output_dir {self.url} is not empty and holds no run",
                found=", ".join(list(found)[:5]),
                remedy="choose another output_dir",
            )
        if resume and self._decides_here(owner):
            return None
        with contextlib.suppress(ValueError, TypeError):
            return dict(json.loads(self._store.read(MARKER) or "{}"))
        return {}  # damaged: what reads the run says so

    def restore(self, resume: bool, *, here_only: bool = False) -> None:
        owner = self._owner()
        if (resume and self._decides_here(owner)) or (here_only and owner is None):
            run, self._processes = self._here()
            self._run = run or self._run
            return
        if owner is not None and (here_only or not resume):
            raise self._taken(owner)
        self._set_aside()
        if owner is not None:
            self._run = owner["run"]
            self._tell(f"bringing the run from {self.url} to {self.path}")
            self._bring()

    def claim(self, *, upload: bool = True) -> None:
        with naming_write_errors(self.path):
            self._processes.append(self._process)
            state = {"run": self._run, "processes": self._processes}
            replace_atomically(self.path / _STATE, json.dumps(state).encode())
        owner = {"run": self._run, "process": self._process, "host": socket.gethostname(), "pid": os.getpid()}
        owner["since"] = datetime.now().isoformat(timespec="seconds")
        self._store.write(OWNER, json.dumps(owner, indent=2).encode())
        if upload:
            self._tell(f"the run is written to {self.path} and uploaded to {self.url}")
            self._thread = threading.Thread(target=self._work, name="quartet-upload", daemon=True)
            self._thread.start()

    def _here(self) -> tuple[str, list[str]]:
        """Returns the id of the run in the directory here, empty where there is none, and who has written it here."""
        with contextlib.suppress(UserError, LookupError, TypeError):
            found = read_json(self.path / _STATE)
            return str(found["run"]), list(found["processes"])
        return "", []

    def _decides_here(self, owner: Mapping[str, Any] | None) -> bool:
        """Tells whether the directory here has the run, nobody else has written to the store since, and it has no
        newer checkpoint.
        """
        run, processes = self._here()
        if not run or owner is None:
            return bool(run)
        stored = [_step(name) for name in self._store.list(CHECKPOINTS) if name.endswith(f"/{NAME}")]
        newest = max(list_checkpoints(self.path / CHECKPOINTS), default=-1)
        if owner["run"] != run or owner["process"] not in processes:
            return False
        return (self.path / MARKER).is_file() and newest >= max(stored, default=-1)

    def _owner(self) -> dict[str, Any] | None:
        data = self._store.read(OWNER)
        if data is None:
            return None
        with contextlib.suppress(ValueError, TypeError):
            if "run" in (owner := dict(json.loads(data))):
                return owner
        raise UserError(
            f"{self.url}/{OWNER} is damaged",
            found=f"{data[:60]!r}",
            remedy="delete it, if no process uses the run",
        )

    def _taken(self, owner: Mapping[str, Any], problem: str = "already holds a run", remedy: str = "") -> UserError:
        return UserError(
            f"output_dir {self.url} {problem}",
            found=f"of {owner.get('host')}, process {owner.get('pid')}, since {owner.get('since')}",
            remedy=remedy or "add --resume to go on with it once that process has ended, or choose another output_dir",
        )

    def _set_aside(self) -> None:
        """Moves what is here aside: nothing is deleted, for it may be the only copy."""
        found = [entry for entry in self.path.iterdir() if entry.name != LOCK]
        if any(not entry.name.startswith(".") for entry in found):  # else a run was deleted here but for such files
            aside = self.path.with_name(f"{self.path.name}.aside-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
            with naming_write_errors(aside):
                aside.mkdir()
                for entry in found:
                    os.replace(entry, aside / entry.name)
            self._tell(f"{self.path} held what {self.url} does not: it is in {aside} now")

    def _bring(self) -> None:
        names = self._store.list()
        fetch(self._store, self.path, [name for name in names if name != OWNER and not _is_left_out(name)])
        steps: dict[str, list[int]] = {}
        for name in names:
            if f"{CHECKPOINTS}/step_" in name and name.endswith(f"/{NAME}"):
                steps.setdefault(name.partition("/step_")[0], []).append(_step(name))
        for root, found in steps.items():
            for step in sorted(found, reverse=True):
                try:
                    bring_checkpoint(self._store, self.path, root, step, names)
                    break
                except CheckpointDamage as damage:
                    self._tell(f"damaged checkpoint in {self.url}/{root}: step {step}: {damage}")
            else:
                remedy = "restore one of them, or choose another output_dir"
                raise UserError(f"no checkpoint in {self.url}/{root} can be used", found="see above", remedy=remedy)

    # Machines that do not see the directory here -----------------------------------------------------------

    def join(self, groups: Sequence[WorkerGroup]) -> None:
        if self._machines is not None:
            self._machines.stop()
        self._machines = None
        if groups:
            self._store.delete(*self._store.list(SENT))
            self.push()
            self._machines = Machines(self.url, self.path.absolute(), groups)
            self._tell(f"{', '.join(self._machines.ranks)}: files come from there and go there through {self.url}")

    def begin(self, draft: Path) -> Path:
        if self._machines is not None:
            self._machines.each(Machine.begin, draft)
        return draft

    def gather(self, draft: Path, shares: Shares) -> None:
        if (machines := self._machines) is not None:
            for node in machines.ranks:
                machines.receive(node, [draft])

    def give(self, checkpoint: Path) -> None:
        if self._machines is not None:
            self.push()
            self._machines.each(Machine.fetch_checkpoint, self.url, self.path.absolute(), checkpoint_step(checkpoint))

    def bring(self, node: str, paths: Sequence[Path]) -> None:
        if self._machines is not None and node in self._machines.ranks:
            self._machines.receive(node, paths)

    # Uploading -------------------------------------------------------------------------------------------

    def saved(self) -> None:
        with self._changed:
            self._is_due = True
            self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def finish(self, failure: BaseException | None) -> BaseException | None:
        if self._thread is None:
            return failure
        timeout_s = 0.0 if isinstance(failure, KeyboardInterrupt) else self._timeout_s
        with self._changed:
            self._is_due = self._is_closing = True
            self._changed.notify_all()
            self._last_progress = time.monotonic()
            while not self._has_ended and time.monotonic() - self._last_progress < timeout_s:
                self._changed.wait(0.2)
            found = self._error
            if not self._has_ended:
                found = UserError(
                    f"{self.url} lacks what the run has written last; all of it is in {self.path}",
                    found=f"{self._refusal.problem}: {self._refusal.found}" if self._refusal else "it is under way",
                    remedy=f"quartet upload {shlex.quote(str(self.path))}, once the store is there (or --resume here)",
                )
            self._has_ended = True
            self._changed.notify_all()
        if found is not None and failure is not None:
            self._tell(str(found))
        return failure or found

    def _work(self) -> None:
        while not self._has_ended:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._has_ended, _EVERY_S)
                if self._has_ended:
                    return
                closing, self._is_due = self._is_closing, False
            try:
                self.push()
                if self._refusal is not None:
                    self._tell(f"{self.url} can be written to again: everything is uploaded")
                self._refusal = None
            except StoreError as error:
                if self._refusal is None:
                    self._tell(f"not uploaded now, but tried again until it is: {error}")
                self._refusal = error
                with self._changed:
                    self._changed.wait_for(lambda: self._has_ended, _AGAIN_S)
                    self._is_due = True
                continue
            except UserError as error:
                self._error = error
            except Exception as error:  # of the disk here; a run must not go on as if it were uploaded
                remedy = "mend what the message names, then go on with --resume"
                self._error = UserError(f"{self.path} cannot be uploaded", found=repr(error), remedy=remedy)
            with self._changed:
                self._has_ended |= self._error is not None or (closing and not self._is_due)
                self._changed.notify_all()

    def push(self) -> None:
        """Uploads everything that has changed.

        Raises:
            StoreError: the store is away; another call goes on where this one stopped.
            UserError: another process has taken the run over.
        """
        with self._pushing:
            self._push()

    def _check_owner(self) -> None:
        if (owner := self._owner() or {}).get("process") != self._process:
            problem = "is another process's now" if owner else "has lost its run"
            raise self._taken(owner, problem, f"what this process has written is in {self.path}; let one of them run")

    def _push(self) -> None:
        self._check_owner()
        # First, so that the records that follow have all that these checkpoints had.
        pinned = self._pin()
        # What says that a stage or the run is done is read before what it has made is listed, and written after it.
        markers = {name: file.read_bytes() for name, file in self._records() if _is_marker(name)}
        for name, file in self._records():
            if not _is_marker(name) and self._uploaded.get(name) != (stamp := file_stamp(file)):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    self._store.upload(file, name)
                    self._uploaded[name] = stamp
                    self._last_progress = time.monotonic()
        for name in sorted(markers, key=lambda name: PurePosixPath(name).name == MARKER):
            self._store.write(name, markers[name])
        for root, checkpoint in pinned.items():
            self._push_checkpoint(root, checkpoint)
            self._newest[root] = _identity(checkpoint)
        shutil.rmtree(self.path / _PINNED, ignore_errors=True)

    def _records(self) -> Iterator[tuple[str, Path]]:
        """Yields files but those of checkpoints; links are followed, as a model that is a stage's is one."""
        for directory, below, files in os.walk(self.path, followlinks=True):
            below[:] = [name for name in below if not name.startswith(".") and name != CHECKPOINTS]
            for name in files:
                if not name.startswith("."):
                    file = Path(directory, name)
                    yield file.relative_to(self.path).as_posix(), file

    def _pin(self) -> dict[str, Path]:
        """Links to the files of the newest checkpoints of the run and of its stages, where they are not in the store:
        they may be deleted here before they are uploaded. By the directories of checkpoints.
        """
        stages = sorted(path.relative_to(self.path).as_posix() for path in self.path.glob(f"*/{CHECKPOINTS}"))
        pinned = {}
        for root in (CHECKPOINTS, *stages):
            while steps := list_checkpoints(self.path / root):
                newest = checkpoint_path(self.path / root, steps[-1])
                try:
                    if self._newest.get(root) != _identity(newest):
                        target = self.path / _PINNED / root / newest.name
                        shutil.rmtree(target.parent, ignore_errors=True)
                        pinned[root] = Path(shutil.copytree(newest, target, copy_function=_link))
                    break
                except OSError:
                    if newest.exists():
                        raise
        return pinned

    def _push_checkpoint(self, root: str, checkpoint: Path) -> None:
        base, sealed = f"{root}/{checkpoint.name}", (checkpoint / NAME).read_bytes()
        manifest = CheckpointManifest.read(checkpoint / NAME)
        if self._store.read(f"{base}/{NAME}") == sealed:
            return
        self._store.delete(f"{base}/{NAME}")
        for name in manifest.files:
            self._store.upload(checkpoint / name, f"{base}/{name}")
            self._last_progress = time.monotonic()
        self._check_owner()
        self._store.write(f"{base}/{NAME}", sealed)
        # Older ones, the manifests first.
        names = [name for name in self._store.list(root) if name.startswith(f"{root}/step_")]
        steps = sorted(s for name in names if name.endswith(f"/{NAME}") and (s := _step(name)) <= manifest.step)
        dropped = [name for name in names if _step(name) not in steps[-self._keep :]]
        self._store.delete(*sorted(dropped, key=lambda name: not name.endswith(f"/{NAME}")))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _identity(checkpoint: Path) -> tuple[str, list[int]]:
    return checkpoint.name, file_stamp(checkpoint / NAME)


def _is_marker(name: str) -> bool:
    return PurePosixPath(name).name in (MARKER, SUMMARY)


def _is_left_out(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return parts[0] == SENT or CHECKPOINTS in parts or parts[0] in MODELS or bool(_ADDED_TO & set(parts))


def _step(name: str) -> int:
    digits = name.partition("step_")[2].partition("/")[0]
    return int(digits) if digits.isdecimal() else -1


# Commands ------------------------------------------------------------------------------------------------------


def upload_run(path: Path, url: str | None, tell: Callable[[str], object]) -> str:
    """Uploads a run's directory, what is there already excepted; returns the URL.

    Raises:
        UserError: the run is in use, nothing says where to, the URL holds another run, or one that has gone on since.
        StoreError: the store cannot be used.
    """
    if not (path / MARKER).is_file():
        raise UserError(f"{path} holds no run", found=f"no {MARKER}", remedy="name the directory of a run")
    recipe = read_recipe(path / RECIPE)
    url = url or recipe.get("output_dir")
    if not is_url(url):
        raise UserError("nothing says where to upload to", found=f"{path}, url {url}", remedy="name the URL after it")
    with lock_run(path / LOCK):
        remote = RemoteRun(str(url), path, tell, keep=int(recipe.get("checkpoint", {}).get("keep", 2)))
        remote.restore(resume=True, here_only=True)
        remote.claim(upload=False)
        remote.push()
    return remote.url
