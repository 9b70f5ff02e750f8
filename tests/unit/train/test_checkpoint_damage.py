"""A campaign of damages: whatever happens to the newest checkpoint, it is told, and the one before it is used."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.observe.files import seal_json, unseal_json
from quartet.train import checkpoint
from quartet.train.checkpoint import (
    CheckpointShare,
    begin_checkpoint,
    claimed_steps,
    complete_checkpoint,
    join_metadata,
    newest_checkpoint,
    prune_checkpoints,
    write_share,
)

OLD, NEW = "step_00000002", "step_00000004"
SHARES = ("actor", "critic", "writer")
FILES = (
    *(f"{share}/{file}" for share in SHARES for file in (".metadata", "__0_0.distcp")),
    "info.json",
    "manifest.json",
)
SEED = 7

Damage = Callable[[Path], object]
"""Does something to the checkpoint ``NEW`` below the given root."""


def state(step: int, share: str) -> dict[str, Any]:
    """Values of every kind, in one shape for both shares, so that another's file would fit."""
    drawn = torch.Generator().manual_seed(step + 100 * SHARES.index(share))
    return {
        "model.weight": torch.randn(5, 7, generator=drawn),
        "model.bias": torch.randn(7, generator=drawn),
        "optimizer.state.weight.step": torch.tensor(float(step)),
        "rest": {"groups": [{"lr": 0.1 * step}], "num_updates": step},
    }


def save(root: Path, step: int, *, keep: int, info: Any = None) -> Path:
    draft = begin_checkpoint(root, step)
    shares = {share: write_share(draft / share, state(step, share)) for share in SHARES}
    return complete_checkpoint(draft, info or {}, shares, keep=keep)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "checkpoints"
    for step in (2, 4):
        save(root, step, info={"kl_coef": 0.1 * step, "stream": {"next": 8 * step}}, keep=2)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """A pipe in a file's place must not be waited for."""
    former = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def is_as_saved(root: Path, step: int) -> bool:
    found = newest_checkpoint(root)
    assert found is not None
    assert found.step == step
    for share in SHARES:
        read, expected = CheckpointShare(found.path / share).state(), state(step, share)
        assert read.pop("rest") == expected.pop("rest") and read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    return found.info == {"step": step, "kl_coef": 0.1 * step, "stream": {"next": 8 * step}}


# The damages -----------------------------------------------------------------------------------------------


def on_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(root: Path) -> None:
        path = root / NEW / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return damage


def flipped(fraction: float, bit: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = int(fraction * len(data))
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

    return change


def resealed(**changes: Any) -> Damage:
    """A manifest changed by somebody who writes a digest that fits."""
    return on_file("manifest.json", lambda data: seal_json({**unseal_json(data), **changes}))


def in_place_of(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(root: Path) -> None:
        (root / NEW / name).rename(root.parent / "former")
        make(root / NEW / name)

    return damage


def swapped(root: Path) -> None:
    one, other, aside = (root / NEW / name for name in ("actor", "critic", "aside"))
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def damages() -> dict[str, Damage]:
    """Every damage by a name that says what it is; the positions are drawn with ``SEED``."""
    rng = random.Random(SEED)
    found: dict[str, Damage] = {}
    for name in FILES:
        for _ in range(2):
            fraction, bit = rng.random(), rng.randrange(8)
            found[f"{name}: bit {bit} at {fraction:.3f} flipped"] = on_file(name, flipped(fraction, bit))
        found[f"{name}: half"] = on_file(name, lambda data: data[: len(data) // 2])
        found[f"{name}: gone"] = in_place_of(name, lambda path: None)
    for name in ("actor/__0_0.distcp", "info.json", "manifest.json"):
        found[f"{name}: empty"] = on_file(name, lambda data: b"")
        found[f"{name}: a byte more"] = on_file(name, lambda data: data + b"\n")
        found[f"{name}: a pipe"] = in_place_of(name, os.mkfifo)
        found[f"{name}: a directory"] = in_place_of(name, Path.mkdir)
        found[f"{name}: of the other step"] = lambda root, name=name: shutil.copy(root / OLD / name, root / NEW / name)
    for content in (b"[]", b"[" * 200_000, b'{"step": ' + b"9" * 5000 + b"}"):
        for name in ("info.json", "manifest.json"):
            found[f"{name}: {content[:12]!r}"] = on_file(name, lambda data, content=content: content)
    for key, value in {"step": 2, "format": "quartet-checkpoint-99", "files": {}}.items():
        found[f"a sealed manifest with another {key}"] = resealed(**{key: value})
    found["the parts swapped"] = swapped
    found["a file more"] = lambda root: (root / NEW / "actor" / "more").write_bytes(b"x")
    found["nothing in it"] = lambda root: [shutil.rmtree(root / NEW), (root / NEW).mkdir()]
    found["a file in its place"] = lambda root: [shutil.rmtree(root / NEW), (root / NEW).write_bytes(b"x")]
    found["renamed"] = lambda root: (root / NEW).rename(root / "step_00000006")
    return found


DAMAGES = damages()


@pytest.fixture
def damaged(root: Path, request: pytest.FixtureRequest) -> Path:
    DAMAGES[request.param](root)
    return root


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_a_damage_is_told_and_the_checkpoint_before_is_used(damaged: Path) -> None:
    assert is_as_saved(damaged, 2)
    found = newest_checkpoint(damaged)
    assert found is not None
    left = {path.name for path in damaged.iterdir()} - {OLD}
    assert len(found.warnings) == 1 and OLD in found.warnings[0] and any(name in found.warnings[0] for name in left)


def test_without_a_good_one_nothing_is_loaded(root: Path) -> None:
    on_file("actor/__0_0.distcp", flipped(0.5, 3))(root)
    (root / OLD / "info.json").write_bytes(b"")
    with pytest.raises(UserError, match="can be used") as caught:
        newest_checkpoint(root)
    assert "info.json has 0 bytes" in caught.value.found and NEW in caught.value.found
    assert "restore" in caught.value.remedy


# Other ways to be refused ----------------------------------------------------------------------------------


def test_nothing_is_unpickled_before_everything_is_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (OLD, NEW):
        (root / step / "manifest.json").write_bytes(b"")
    monkeypatch.setattr(checkpoint.torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(UserError):
        newest_checkpoint(root)


def test_the_metadata_of_a_rank_is_not_unpickled_unless_it_is_what_the_rank_wrote(tmp_path: Path) -> None:
    """Another machine may have written it. The driver joins those of all ranks of a share."""
    files: dict[str, Any] = {}
    for rank in range(2):
        files |= write_share(tmp_path / "actor", {f"weight {rank}": torch.ones(3)}, rank)
    (other,) = (tmp_path / "actor" / name for name in files if name.endswith(".metadata") and name != ".metadata")
    before = other.read_bytes()
    other.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(checkpoint.CheckpointDamage, match="is not what its rank has written"):
        join_metadata(tmp_path / "actor", files)
    other.write_bytes(before)
    assert other.name not in join_metadata(tmp_path / "actor", files)


def test_what_may_not_be_read_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives the permission loses no step; it is simulated, since the administrator may read everything."""
    real = checkpoint.digest_file

    def refuse(path: Path) -> Any:
        if NEW in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(checkpoint, "digest_file", refuse)
    with pytest.raises(UserError, match=f"{NEW}/actor/__0_0.distcp could not be read") as caught:
        newest_checkpoint(root)
    assert caught.value.found == "Permission denied" and "chmod" in caught.value.remedy


def test_a_disk_that_cannot_read_a_file_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.digest_file

    def fail(path: Path) -> Any:
        if NEW in path.parts:
            raise OSError(5, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(checkpoint, "digest_file", fail)
    found = newest_checkpoint(root)
    assert found is not None and found.step == 2
    assert f"{NEW}: __0_0.distcp cannot be read (Input/output error)" in found.warnings[0]


def test_what_cannot_be_loaded_although_it_is_whole_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory, another torch: an earlier checkpoint would be of no use."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(checkpoint.torch, "load", fail)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        CheckpointShare(root / NEW / "actor").rest()
    assert "allocate" in caught.value.found and NEW in caught.value.problem


# What stays on disk ------------------------------------------------------------------------------------------


def test_a_damaged_one_does_not_count_and_goes_only_when_enough_good_ones_are_newer(root: Path) -> None:
    (root / NEW / "actor/.metadata").write_bytes(b"")
    save(root, 6, keep=2)
    assert claimed_steps(root) == [2, 4, 6], "two good ones, the damaged one between them"
    save(root, 8, keep=2)
    assert claimed_steps(root) == [6, 8]


def test_keep_holds_after_a_kill_between_rename_and_deletion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(checkpoint, "prune_checkpoints", kill)
        with pytest.raises(Killed):
            save(root, 6, keep=1)
    assert claimed_steps(root) == [2, 4, 6]
    (root / ".draft_00000008_1").mkdir()
    prune_checkpoints(root, 1)
    assert os.listdir(root) == ["step_00000006"]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(OLD), Path.mkdir])
def test_whatever_has_the_place_of_the_next_checkpoint_gives_way(root: Path, make: Callable[[Path], object]) -> None:
    make(root / "step_00000006")
    save(root, 6, keep=3)
    assert sorted(os.listdir(root)) == [OLD, NEW, "step_00000006"]
    found = newest_checkpoint(root)
    assert found is not None and found.step == 6
