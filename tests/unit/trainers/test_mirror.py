"""Files of a run on machines whose storage is not shared: chunks, digests, a machine that is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quartet.cluster import OneRank, WorkerDied
from quartet.cluster.errors import Death
from quartet.cluster.worker import PATHS, local_path
from quartet.config import UserError
from quartet.observe.digests import FileDigest, digest_files
from quartet.train.checkpoint import begin_checkpoint, checkpoint_path, complete_checkpoint, newest_checkpoint, prune
from quartet.train.checkpoint_shares import write_share
from quartet.train.state import REST
from quartet.trainers import mirror as mirrors
from quartet.trainers.mirror import Mirror, Storage

NODES = ["driver", "far", "farther", "beside farther"]


class Elsewhere(Storage):
    """The machine of each rank has the driver's paths below a directory of its own; the last two share theirs."""

    root: Path
    spoils = False

    def _here(self, path: Path) -> Path:
        where = self.root / NODES[min(self.rank, 2)]
        return where / path.relative_to(self.root / NODES[0]) if self.rank else path

    def read(self, path: Path, offset: int, num: int) -> bytes:
        data = super().read(path, offset, num)
        return bytes([data[0] ^ 1]) + data[1:] if self.spoils and data else data


class Sent:
    """A call's result, which is there as soon as it is called."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> None:
        if isinstance(self.value, Exception):
            raise self.value


class Machines:
    """The group of four workers, as objects that take turns."""

    def __init__(self) -> None:
        self.workers = [Elsewhere() for _ in NODES]
        self.dead: set[int] = set()
        self.dies_in: tuple[int, str] | None = None
        for rank, worker in enumerate(self.workers):
            worker.place = replace(worker.place, rank=rank)

    def call(self, method: Callable[..., Any], *args: Any, mode: Any = None, blocking: bool = True) -> Any:
        if not isinstance(mode, OneRank):
            return [getattr(worker, method.__name__)(*args) for worker in self.workers]
        sent = Sent(self._called(mode.rank, method.__name__, *args))
        if not blocking:
            return sent
        sent.wait()
        return sent.value

    def _called(self, rank: int, method: str, *args: Any) -> Any:
        if self.dies_in == (rank, method):
            self.dead.add(rank)
        if rank in self.dead:
            return WorkerDied(Death("storage", rank, None, "far", method, "it was stopped", None))
        values = [value.value if isinstance(value, Sent) else value for value in args]
        lost = [value for value in values if isinstance(value, WorkerDied)]
        return lost[0] if lost else getattr(self.workers[rank], method)(*values)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Mirror]:
    monkeypatch.setattr(mirrors, "CHUNK", 100)
    monkeypatch.setattr(Elsewhere, "root", tmp_path, raising=False)
    run = tmp_path / "driver" / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"created": "today"}')
    return lambda: Mirror(run, cast(Any, Machines()), NODES)


def save(mirror: Mirror, root: Path, step: int, *, keep: int = 2) -> Path | None:
    """What a run does: two ranks of a role, each on a machine of its own, write; then the driver completes it."""
    draft = mirror.begin(begin_checkpoint(root, step))
    far = Path(str(draft).replace("/driver/", "/far/"))
    shares: dict[str, FileDigest] = {}
    for rank, directory in enumerate((draft, far)):
        numbers = {"x": torch.arange(200.0) * step, REST: {}} if rank == 0 else {"y": torch.full((70,), 1.0 * step)}
        shares |= write_share(directory / "actor", numbers, rank)
    mirror.gather(draft, {"actor": shares})
    found = complete_checkpoint(draft, {}, {}, {"actor": shares}, keep=keep, elsewhere=mirror.commit)
    mirror.keep(root)
    return found


def same(tmp_path: Path, at: str = "run/checkpoints") -> bool:
    """All machines have the same files there, and nothing else."""
    first, *others = (digest_files(tmp_path / name / at) for name in NODES[:3])
    return bool(first) and all(other == first for other in others)


def test_each_machine_has_each_checkpoint_whole(made: Any, tmp_path: Path) -> None:
    mirror, root = made(), tmp_path / "driver/run/checkpoints"
    assert mirror.others == [1, 2], "machines that share their storage have one copy"
    for step in (1, 2, 3):
        (root.parent / "metrics.jsonl").write_text("row\n" * 60 * step)
        assert save(mirror, root, step) == checkpoint_path(root, step)
        assert same(tmp_path)
    assert [path.name for path in sorted((tmp_path / "far/run/checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000003",
    ], "pruned there, too, and no draft is left"
    for name in NODES[1:3]:
        found = newest_checkpoint(tmp_path / name / "run/checkpoints")
        assert found is not None and found.step == 3 and not found.warnings, "another machine could go on"
        assert (tmp_path / name / "run/metrics.jsonl").read_text() == "row\n" * 180


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_files_of_any_size_come_whole(size: int, made: Any, tmp_path: Path) -> None:
    far = tmp_path / "far/run/model"
    far.mkdir(parents=True)
    (far / "weights").write_bytes(os.urandom(size))
    (far.parent / "run.json").write_text('{"created": "today"}')
    mirror, path = made(), tmp_path / "driver/run/model"
    mirror.bring("far", [path, path.with_name("not there")])
    assert digest_files(path) == digest_files(far) and len(digest_files(path)) == 1
    mirror.bring("driver", [path])


def test_what_changes_on_the_way_is_told_and_the_former_checkpoint_stays(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, root = made(), tmp_path / "driver/run/checkpoints"
    save(mirror, root, 1)
    monkeypatch.setattr(Elsewhere, "spoils", True)
    with pytest.raises(UserError, match="did not arrive as it was written"):
        save(mirror, root, 2)
    monkeypatch.setattr(Elsewhere, "spoils", False)
    mirror.keep(root)
    prune(root, 2)
    assert same(tmp_path) and checkpoint_path(root, 1).is_dir() and not checkpoint_path(root, 2).exists()


def test_a_share_that_no_machine_has_is_named(made: Any, tmp_path: Path) -> None:
    mirror, root = made(), tmp_path / "driver/run/checkpoints"
    draft = mirror.begin(begin_checkpoint(root, 1))
    with pytest.raises(UserError, match="is on no machine as it was written"):
        mirror.gather(draft, {"actor": {"__1_0.distcp": FileDigest(3, "0" * 64)}})


@pytest.mark.parametrize("dies_in", ["read", "write", "commit"])
def test_a_machine_that_dies_leaves_the_former_checkpoint(dies_in: str, made: Any, tmp_path: Path) -> None:
    mirror, root = made(), tmp_path / "driver/run/checkpoints"
    save(mirror, root, 1)
    kept, at = digest_files(root), 2 if dies_in == "commit" else 1
    mirror._group.dies_in = (at, dies_in)
    with pytest.raises(WorkerDied, match=f"rank {at} of group") if dies_in == "read" else nullcontext():
        assert save(mirror, root, 2) is None, "the driver had all of it, but not every machine"
    prune(root, 2)
    assert digest_files(root) == kept
    with pytest.raises(WorkerDied, match=f"rank {at} of group"):
        mirror.begin(begin_checkpoint(root, 3))


def test_a_machine_without_a_whole_copy_is_given_one(made: Any, tmp_path: Path) -> None:
    """A new machine, one whose file was changed, and one that has a file more."""
    mirror, root = made(), tmp_path / "driver/run/checkpoints"
    path = save(mirror, root, 1)
    assert path is not None
    far, farther = (checkpoint_path(tmp_path / name / "run/checkpoints", 1) for name in NODES[1:3])
    for file in sorted(far.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    share = farther / "actor" / "__0_0.distcp"
    share.write_bytes(share.read_bytes()[:-1] + b"?")
    (farther / "stray").write_text("")
    assert not same(tmp_path)
    mirror = made()
    mirror.give(path)
    assert same(tmp_path)


@pytest.mark.parametrize("files", [{"run.json": '{"created": "yesterday"}'}, {"run.json": "[]"}, {"notes": ""}])
def test_what_another_machine_has_there_is_not_taken_over(files: dict[str, str], made: Any, tmp_path: Path) -> None:
    there = tmp_path / "far/run"
    there.mkdir(parents=True)
    for name, text in files.items():
        (there / name).write_text(text)
    before = digest_files(there)
    with pytest.raises(UserError, match="holds another run"):
        made()
    assert digest_files(there) == before


def test_paths_of_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert local_path(tmp_path / "run") == tmp_path / "run" and local_path(3) == 3
    monkeypatch.setenv(PATHS, f"{tmp_path}:/scratch")
    assert local_path(tmp_path / "run") == Path("/scratch/run") and local_path(Path("/other")) == Path("/other")
