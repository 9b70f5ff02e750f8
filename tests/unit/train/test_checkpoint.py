"""Checkpoints: complete or not there, old ones safe, and a resumed engine that cannot be told from one that went on."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from quartet.config import UserError
from quartet.config.algorithms import PPO
from quartet.train import checkpoint
from quartet.train.checkpoint import (
    CheckpointShare,
    ShareWriter,
    begin_checkpoint,
    checkpoint_path,
    complete_checkpoint,
    delete_path,
    list_checkpoints,
    newest_checkpoint,
    write_share,
)
from quartet.train.objectives import PolicyObjective, SFTObjective, ValueObjective
from quartet.train.state import copy_to_host


def save(root, step, *, actor=None, info=None, keep=5):
    """As a run does it in one process."""
    draft = begin_checkpoint(root, step)
    try:
        writer = ShareWriter()
        writer.begin(draft / "actor", actor or {"rest": {}}, background=False)
        return complete_checkpoint(draft, info or {}, {"actor": writer.finish(draft / "actor")}, keep=keep)
    except Exception:
        delete_path(draft)
        raise


def _save(root: Path, step: int, keep: int = 5) -> Path:
    return save(
        root,
        step,
        actor={"model.weight": torch.full((3,), float(step)), "rest": {"num": 2}},
        info={"cursor": step * 10},
        keep=keep,
    )


def _intact(root: Path, step: int) -> bool:
    """Once newer ones are out of the way."""
    aside = [path.rename(path.with_name(f".{path.name}")) for path in root.glob("step_*") if int(path.name[5:]) > step]
    found = newest_checkpoint(root)
    for path in aside:
        path.rename(path.with_name(path.name[1:]))
    state = CheckpointShare(found.path / "actor").state()
    return (
        found.step == step
        and not found.warnings
        and torch.equal(state["model.weight"], torch.full((3,), float(step)))
        and state["rest"] == {"num": 2}
        and found.info == {"step": step, "cursor": step * 10}
    )


def _names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_round_trip(tmp_path):
    path = _save(tmp_path / "deep" / "checkpoints", 7)
    assert path == tmp_path / "deep" / "checkpoints" / "step_00000007"
    assert _names(path) == ["actor", "info.json", "manifest.json"]
    assert _names(path / "actor") == [".metadata", "__0_0.distcp"]
    assert _intact(path.parent, 7)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 30):
        _save(tmp_path, step, keep=2)
    assert list_checkpoints(tmp_path) == [10, 30]
    assert _names(tmp_path) == ["step_00000010", "step_00000030"]


def test_the_same_step_again_replaces(tmp_path):
    _save(tmp_path, 3)
    save(tmp_path, 3, info={"cursor": 0})
    found = newest_checkpoint(tmp_path)
    assert found.info == {"step": 3, "cursor": 0}
    assert CheckpointShare(found.path / "actor").state() == {"rest": {}}
    assert _names(tmp_path) == ["step_00000003"]


def test_what_is_not_a_complete_checkpoint_is_not_listed(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert list_checkpoints(tmp_path) == []
    _save(tmp_path, 5)
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "step_00000006" / "actor.pt").write_bytes(b"half")
    for name in ("step_7", "step_00000008.old", ".draft_00000009_1"):
        shutil.copytree(tmp_path / "step_00000005", tmp_path / name)
    (tmp_path / "step_00000010").write_text("a file")
    assert list_checkpoints(tmp_path) == [5]


def _full_disk(kind: type[Exception], after_parts: int):
    """torch.save that writes the beginning of a part and fails, from part ``after_parts`` on."""
    real, calls = torch.save, iter(range(100))

    def save(part, file):
        if next(calls) < after_parts:
            return real(part, file)
        file.write(b"PK half a zip")
        if kind is OSError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0")

    return save


@pytest.mark.parametrize(("kind", "after_parts", "step"), [(OSError, 0, 4), (OSError, 1, 5), (RuntimeError, 1, 4)])
def test_a_full_disk_is_said_and_harms_nothing(kind, after_parts, step, tmp_path, monkeypatch):
    _save(tmp_path, 2)
    _save(tmp_path, 5)
    monkeypatch.setattr(checkpoint.torch, "save", _full_disk(kind, after_parts))
    with pytest.raises(UserError, match="could not be written") as raised:
        _save(tmp_path, step, keep=1)
    assert checkpoint_path(tmp_path, step).name in raised.value.problem
    assert "space" in raised.value.remedy
    monkeypatch.undo()
    assert _names(tmp_path) == ["step_00000002", "step_00000005"], "no draft is left"
    assert _intact(tmp_path, 2) and _intact(tmp_path, 5)


def test_a_full_disk_at_the_very_end(tmp_path, monkeypatch):
    """While the counters are written, after all tensors."""
    _save(tmp_path, 2)

    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.json, "dumps", fail)
    with pytest.raises(UserError, match="could not be written"):
        _save(tmp_path, 3)
    assert _names(tmp_path) == ["step_00000002"]


class Killed(BaseException):
    """Stands for a process that ends here: nothing of ours runs after it."""


# Where a save is cut off, and the steps that must then be listed and whole. Step 9 is saved over 3 and 6 with keep=2.
CUTS = {
    "torch.save": [3, 6],
    "json.dumps": [3, 6],
    "CheckpointManifest.write": [3, 6],
    "sync_directory": [3, 6],
    "os.replace": [3, 6],
    # The new one is complete; the oldest is half deleted.
    "shutil.rmtree": [6, 9],
}


@pytest.mark.parametrize("where", list(CUTS))
def test_killed_while_saving(where, tmp_path, monkeypatch):
    for step in (3, 6):
        _save(tmp_path, step)
    target, _, name = where.rpartition(".")

    def kill(*args, **_options):
        if name == "rmtree":
            # A deletion that got half-way: one file is gone, info.json still there.
            (Path(args[0]) / "actor" / "__0_0.distcp").unlink()
        raise Killed

    monkeypatch.setattr(getattr(checkpoint, target) if target else checkpoint, name, kill)
    with pytest.raises(Killed):
        _save(tmp_path, 9, keep=2)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == CUTS[where]
    assert all(_intact(tmp_path, step) for step in CUTS[where])
    # The next save clears what was left.
    _save(tmp_path, 12, keep=2)
    assert list_checkpoints(tmp_path) == [CUTS[where][-1], 12]
    assert len(_names(tmp_path)) == 2


def load(engine, directory):
    share = CheckpointShare(directory)
    with engine.loading(share.shapes, share.rest()) as live:
        share.read_into(live)


@pytest.mark.parametrize(("kind", "precision"), [("causal", "fp32"), ("scalar", "bf16")])
def test_resumed_equals_uninterrupted_bit_for_bit(kind, precision, tmp_path, batch, make_engine, weights):
    """Weights, optimizer, learning rate and counters, through a copy and the files, into an engine of other weights."""
    settings = {
        "dtype": torch.float32,
        "precision": precision,
        "token_budget": 20,
        "total_steps": 6,
        "optim": {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    }
    causal = PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)
    objective = causal if kind == "causal" else ValueObjective(PPO(), 6)
    field = "advantages" if kind == "causal" else "returns"
    poisoned = batch.with_token(**{field: torch.full_like(batch.token[field], float("nan"))})
    straight, first = make_engine(kind, **settings), make_engine(kind, **settings)
    for engine in (straight, first):
        engine.train_step(batch, objective)
        engine.train_step(poisoned, objective)
        engine.train_step(batch, objective)
    writer = ShareWriter()
    writer.begin(tmp_path / "share", first.state(), background=True)
    first.train_step(batch, objective)
    while writer.finish(tmp_path / "share") is None:
        time.sleep(0.001)

    resumed = make_engine(kind, **settings)
    with torch.no_grad():
        for parameter in resumed.packed.model.parameters():
            parameter.add_(1.0)
    load(resumed, tmp_path / "share")
    assert (resumed.num_updates, resumed.num_skipped) == (2, 1)
    for _ in range(3):
        assert resumed.train_step(batch, objective) == straight.train_step(batch, objective)
    expected = weights(straight)
    assert all(torch.equal(values, expected[name]) for name, values in weights(resumed).items())


def test_an_untrained_engine_can_be_saved(tmp_path, batch, make_engine, weights):
    engine, other = make_engine(), make_engine()
    write_share(tmp_path / "share", engine.state())
    other.train_step(batch, SFTObjective())
    load(other, tmp_path / "share")
    for each in (engine, other):
        each.train_step(batch, SFTObjective())
    expected = weights(engine)
    assert all(torch.equal(values, expected[name]) for name, values in weights(other).items())


def test_a_snapshot_does_not_follow_its_state():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    state = {"tensors": (weight, weight.detach()[0]), "numbers": [1, {"deep": None}], "empty": torch.zeros(0)}
    copied = copy_to_host(state)
    with torch.no_grad():
        weight.fill_(1.0)
    state["numbers"][1]["deep"] = "changed"
    assert copied["numbers"] == [1, {"deep": None}] and copied["empty"].shape == (0,)
    whole, row = copied["tensors"]
    assert type(whole) is torch.Tensor and whole.tolist() == [[0.0] * 3] * 2
    row.fill_(2.0)
    assert whole.tolist() == [[2.0] * 3, [0.0] * 3], "shared as in the state"
