"""A campaign of damages: whatever happens to the newest checkpoint, it is told, and the one before it is used."""

from __future__ import annotations

import json
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
from quartet.observe.files import seal, unseal
from quartet.train import checkpoint
from quartet.train.checkpoint import (
    Share,
    begin_checkpoint,
    claimed_steps,
    complete_checkpoint,
    newest_checkpoint,
    prune,
    set_aside_after,
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

Damage = Callable[[Path], None]
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


def newest(root: Path) -> checkpoint.Checkpoint:
    found = newest_checkpoint(root)
    assert found is not None
    return found


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
    found = newest(root)
    assert found.step == step
    for share in SHARES:
        read, expected = Share(found.path / share).state(), state(step, share)
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


def on_json(name: str, change: Callable[[Any], Any], *, sealed: bool = False) -> Damage:
    """``sealed``: as by somebody who writes a digest that fits."""

    def edited(data: bytes) -> bytes:
        value = change(unseal(data) if sealed else json.loads(data))
        return seal(value) if sealed else json.dumps(value, indent=2).encode() + b"\n"

    return on_file(name, edited)


def with_value(**changes: Any) -> Callable[[Any], Any]:
    return lambda value: {**value, **changes}


def in_place_of(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(root: Path) -> None:
        (root / NEW / name).unlink()
        make(root / NEW / name)

    return damage


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "data.pkl").write_bytes(b"x")


def root_of(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / OLD).exists())


def link_to_copy(path: Path) -> None:
    """Its content is right: it is refused for what it is."""
    root = root_of(path)
    shutil.copy(root.parent / "spare" / path.relative_to(root / NEW), root / "copy_of_it")
    path.symlink_to(root / "copy_of_it")


def link_to_the_other_step(path: Path) -> None:
    root = root_of(path)
    path.symlink_to(root / OLD / path.relative_to(root / NEW))


def swapped(root: Path) -> None:
    one, other, aside = (root / NEW / name for name in ("actor", "critic", "aside"))
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def of_the_other_step(*names: str) -> Damage:
    def damage(root: Path) -> None:
        for name in names:
            shutil.copy(root / OLD / name, root / NEW / name)

    return damage


def renamed(to: str) -> Damage:
    return lambda root: (root / NEW).rename(root / to)


def emptied(root: Path) -> None:
    shutil.rmtree(root / NEW)
    (root / NEW).mkdir()


def replaced(make: Callable[[Path], object]) -> Damage:
    def damage(root: Path) -> None:
        shutil.rmtree(root / NEW)
        make(root / NEW)

    return damage


def added(name: str, make: Callable[[Path], object] = lambda path: path.write_bytes(b"x")) -> Damage:
    return lambda root: make(root / NEW / name) and None


SHAPES = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"5",
    "an empty object": b"{}",
    "a huge number": b'{"step": ' + b"9" * 5000 + b"}",
    "an infinite number": b'{"step": 1e999}',
    "a step of text": b'{"step": "4"}',
    "a step that is true": b'{"step": true}',
    "deep": b"[" * 200_000,
    "half of it": b'{"step": 4, "kl',
    "binary": bytes(range(256)),
    "UTF-16": '{"step": 4}'.encode("utf-16"),
}


def damages() -> dict[str, Damage]:
    """Every damage by a name that says what it is; the positions are drawn with ``SEED``."""
    rng = random.Random(SEED)
    found: dict[str, Damage] = {}
    for name in FILES:
        for number in range(8):
            fraction, bit = rng.random(), rng.randrange(8)
            found[f"{name}: bit {bit} at {fraction:.3f} flipped ({number})"] = on_file(name, flipped(fraction, bit))
        for share in (0.0, 0.01, 0.5, 0.99):
            found[f"{name}: cut to {share}"] = on_file(name, lambda data, share=share: data[: int(share * len(data))])
        found[f"{name}: last byte gone"] = on_file(name, lambda data: data[:-1])
        found[f"{name}: a byte more"] = on_file(name, lambda data: data + b"\n")
        found[f"{name}: zeros"] = on_file(name, lambda data: bytes(len(data)))
        found[f"{name}: gone"] = in_place_of(name, lambda path: None)
        found[f"{name}: a directory"] = in_place_of(name, full_directory)
        found[f"{name}: an empty directory"] = in_place_of(name, Path.mkdir)
        found[f"{name}: a link to the other step's"] = in_place_of(name, link_to_the_other_step)
        found[f"{name}: a link to the same"] = in_place_of(name, link_to_copy)
        found[f"{name}: a link to nothing"] = in_place_of(name, lambda path: path.symlink_to("nowhere"))
        found[f"{name}: a pipe"] = in_place_of(name, os.mkfifo)
        if not name.endswith(".metadata"):  # which is the same, since it says shapes and places alone
            found[f"{name}: of the other step"] = of_the_other_step(name)
        found[f"{name}: upper case"] = lambda root, name=name: (root / NEW / name).rename(
            (root / NEW / name).with_name(Path(name).name.upper())
        )
    for what, content in SHAPES.items():
        for name in ("info.json", "manifest.json"):
            found[f"{name}: {what}"] = on_file(name, lambda data, content=content: content)
    for key, value in {"step": 2, "kl_coef": 0.5, "stream": {"next": 0}}.items():
        found[f"info.json: another {key}"] = on_json("info.json", with_value(**{key: value}))
    for sealed in (False, True):
        told = "manifest.json, sealed anew" if sealed else "manifest.json"
        for key, value in {
            "step": 2,
            "format": "quartet-checkpoint-99",
            "shares": [*SHARES, "reference"],
            "files": {},
        }.items():
            found[f"{told}: another {key}"] = on_json("manifest.json", with_value(**{key: value}), sealed=sealed)
        found[f"{told}: a path outside"] = on_json(
            "manifest.json",
            lambda value: {**value, "files": {**value["files"], f"../{OLD}/info.json": {}}},
            sealed=sealed,
        )
        found[f"{told}: one key more"] = on_json("manifest.json", with_value(more=1), sealed=sealed)
    found["the parts swapped"] = swapped
    found["info and manifest of the other step"] = of_the_other_step("info.json", "manifest.json")
    found["everything of the other step"] = of_the_other_step(*FILES)
    found["a share of the other step"] = of_the_other_step("actor/.metadata", "actor/__0_0.distcp")
    found["a share gone"] = lambda root: shutil.rmtree(root / NEW / "critic")
    found["a file more"] = added("reference.pt")
    found["a hidden file more"] = added(".hidden")
    found["a directory more"] = added("deeper", Path.mkdir)
    found["a file more below a directory"] = added("deeper", full_directory)
    found["emptied"] = emptied
    found["a file in its place"] = replaced(lambda path: path.write_text("a file"))
    found["a link to the other step in its place"] = replaced(lambda path: path.symlink_to(OLD))
    found["a link to nothing in its place"] = replaced(lambda path: path.symlink_to("nowhere"))
    for name in ("step_00000006", "step_99999999", "step_4", "step_00000004.old", "Step 4", "step_000000004", "copy"):
        found[f"renamed {name}"] = renamed(name)
    return found


DAMAGES = damages()


@pytest.fixture
def damaged(root: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copytree(root / NEW, root.parent / "spare")
    DAMAGES[request.param](root)
    return root


def test_the_campaign_is_as_large_as_promised() -> None:
    assert len(DAMAGES) >= 71


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_a_damage_is_told_and_the_checkpoint_before_is_used(damaged: Path) -> None:
    assert is_as_saved(damaged, 2)
    found = newest_checkpoint(damaged)
    assert found is not None
    left = {path.name for path in damaged.iterdir()} - {OLD, "copy_of_it"}
    assert len(found.warnings) == 1 and OLD in found.warnings[0] and any(name in found.warnings[0] for name in left)


@pytest.mark.parametrize("damaged", random.Random(SEED).sample(sorted(DAMAGES), 24), indirect=True)
def test_without_a_good_one_nothing_is_loaded(damaged: Path) -> None:
    (damaged / OLD / "info.json").write_bytes(b"")
    with pytest.raises(UserError, match="can be used") as caught:
        newest_checkpoint(damaged)
    assert "info.json has 0 bytes" in caught.value.found and OLD in caught.value.found
    assert "restore" in caught.value.remedy


# Other ways to be refused ----------------------------------------------------------------------------------


def test_nothing_is_unpickled_before_everything_is_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (OLD, NEW):
        (root / step / "manifest.json").write_bytes(b"")
    monkeypatch.setattr(checkpoint.torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(UserError):
        newest_checkpoint(root)


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


@pytest.mark.skipif(os.getuid() == 0, reason="the administrator may read everything")
@pytest.mark.parametrize("name", ["", *FILES])
def test_permissions(root: Path, name: str) -> None:
    (root / NEW / name).chmod(0)
    with pytest.raises(UserError, match="could not be read"):
        newest_checkpoint(root)
    (root / NEW / name).chmod(0o700)


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


def test_the_directory_itself(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UserError, match="could not be read"):
            newest_checkpoint(tmp_path / name)
    (tmp_path / "only_misnamed" / "step_6").mkdir(parents=True)
    with pytest.raises(UserError, match="can be used") as caught:
        newest_checkpoint(tmp_path / "only_misnamed")
    assert "step_6 is not the name of a checkpoint" in caught.value.found


def test_what_is_whole_but_does_not_suit_the_run_is_told(root: Path) -> None:
    found = newest_checkpoint(root, lambda names, info: "other" if info["step"] == 4 else None)
    assert found is not None and found.step == 2 and f"{NEW}: other" in found.warnings[0]


def test_what_cannot_be_loaded_although_it_is_whole_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory, another torch: an earlier checkpoint would be of no use."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(checkpoint.torch, "load", fail)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        Share(newest(root).path / "actor").rest()
    assert "allocate" in caught.value.found and NEW in caught.value.problem


def test_a_step_of_more_than_eight_digits_is_found(tmp_path: Path) -> None:
    save(tmp_path, 123_456_789, keep=1)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.step == 123_456_789


# What stays on disk ------------------------------------------------------------------------------------------


def test_a_damaged_one_does_not_count_and_goes_only_when_enough_good_ones_are_newer(root: Path) -> None:
    (root / NEW / "actor/.metadata").write_bytes(b"")
    save(root, 6, keep=2)
    assert claimed_steps(root) == [2, 4, 6], "two good ones, the damaged one between them"
    save(root, 8, keep=2)
    assert claimed_steps(root) == [6, 8]


def test_what_was_passed_over_is_set_aside_until_the_next_is_complete(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / NEW / "actor/.metadata").write_bytes(b"")
    set_aside_after(root, 2)
    assert sorted(os.listdir(root)) == [f"damaged_{NEW}", OLD]
    found = newest_checkpoint(root)
    assert found is not None and found.step == 2 and not found.warnings
    draft = begin_checkpoint(root, 3)
    with monkeypatch.context() as failing:
        failing.setattr(checkpoint.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(UserError):
            complete_checkpoint(draft, {}, {}, keep=1)
    assert sorted(os.listdir(root)) == [f"damaged_{NEW}", OLD]
    save(root, 3, keep=1)
    assert os.listdir(root) == ["step_00000003"]


def test_keep_holds_after_a_kill_between_rename_and_deletion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(checkpoint, "prune", kill)
        with pytest.raises(Killed):
            save(root, 6, keep=1)
    assert claimed_steps(root) == [2, 4, 6]
    (root / ".draft_00000008_1").mkdir()
    prune(root, 1)
    assert os.listdir(root) == ["step_00000006"]


def test_what_cannot_be_deleted_costs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Path:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as refusing:
        refusing.setattr(checkpoint, "_set_aside", refuse)
        save(root, 6, keep=1)
    assert claimed_steps(root) == [2, 4, 6]
    save(root, 8, keep=1)
    assert claimed_steps(root) == [8]


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to(OLD), Path.mkdir])
def test_whatever_has_the_place_of_the_next_checkpoint_gives_way(root: Path, make: Callable[[Path], object]) -> None:
    make(root / "step_00000006")
    save(root, 6, keep=3)
    assert sorted(os.listdir(root)) == [OLD, NEW, "step_00000006"]
    found = newest_checkpoint(root)
    assert found is not None and found.step == 6
