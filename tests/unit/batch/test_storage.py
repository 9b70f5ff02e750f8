import os
from enum import StrEnum
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quartet.batch.ragged import Attachment, RaggedBatch
from quartet.batch.storage import load_batch, save_batch


def forked_batch(**changes):
    """A prompt, a turn, and two endings of it; a second prompt with one response."""
    shared = torch.arange(9.0)
    fields = {
        "input_ids": torch.arange(9),
        "segment_lengths": (2, 1, 2, 1, 2, 1),
        "parents": (-1, 0, 1, 1, -1, 4),
        "leaves": (3, 2, 5),
        "ids": ("a", "b", "\N{GREEK SMALL LETTER GAMMA}\ud800"),
        "token": {
            "logprobs": shared,
            "old_logprobs": shared,
            "half": shared.bfloat16(),
            "strided": torch.arange(18.0).view(2, 9).t(),
            "loss_mask": shared > 3,
        },
        "sequence": {"score": shared.double()[3:6]},
        "objects": {"answer": ("x", None, [1, 2.5, {"deep": [True]}]), "n": (1, 2, 3)},
        "attachments": {"image": Attachment(torch.arange(8.0).view(4, 2), (0, 3, 3, 4))},
        "meta": {"step": 7, "nested": {"list": ["a"]}},
    }
    return RaggedBatch(**{**fields, **changes})


def assert_same(found: RaggedBatch, expected: RaggedBatch) -> None:
    for name in ("segment_lengths", "parents", "leaves", "ids", "objects", "meta"):
        assert getattr(found, name) == getattr(expected, name)
    assert torch.equal(found.input_ids, expected.input_ids)
    for family in ("token", "sequence"):
        ours, theirs = getattr(found, family), getattr(expected, family)
        assert set(ours) == set(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name])
    assert set(found.attachments) == set(expected.attachments)
    for name, attachment in found.attachments.items():
        assert attachment.offsets == expected.attachments[name].offsets
        assert torch.equal(attachment.values, expected.attachments[name].values)


def test_round_trip(tmp_path):
    batch = forked_batch()
    save_batch(batch, tmp_path / "batch.safetensors")
    assert_same(load_batch(tmp_path / "batch.safetensors"), batch)
    assert os.listdir(tmp_path) == ["batch.safetensors"]


def test_round_trip_of_parts_and_of_nothing(tmp_path):
    batch = forked_batch()
    for part in (batch.select([2, 0]), batch.select([]), batch.unshare()[0], RaggedBatch.from_sequences([])):
        save_batch(part, str(tmp_path / "part"))
        assert_same(load_batch(str(tmp_path / "part")), part)


def test_tensors_with_a_gradient_are_saved_as_values(tmp_path):
    batch = forked_batch().with_token(logprobs=torch.ones(9, requires_grad=True))
    save_batch(batch, tmp_path / "b")
    assert not load_batch(tmp_path / "b").token["logprobs"].requires_grad


def test_field_names_may_hold_slashes(tmp_path):
    batch = forked_batch().with_token(**{"kl/k3": torch.zeros(9)})
    save_batch(batch, tmp_path / "b")
    assert_same(load_batch(tmp_path / "b"), batch)


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"objects\['answer'\]\[1\] is not a JSON value and cannot be saved: object"),
        ((1, 2), "tuple"),
        ({1: "a"}, "has the key 1 of type int"),
        ({"a": [{"b": {1, 2}}]}, r"\[1\]\['a'\]\[0\]\['b'\] is not a JSON value"),
        (float("nan"), "float nan"),
        (Colour.RED, "Colour"),
        (b"bytes", "bytes"),
        (torch.zeros(1), "Tensor"),
    ],
)
def test_objects_that_are_no_json_values_are_refused_before_writing(value, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        save_batch(forked_batch(objects={"answer": ("fine", value, "fine")}), tmp_path / "b")
    with pytest.raises(TypeError, match="meta"):
        save_batch(forked_batch(meta={"x": value}), tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "b"
    save_batch(forked_batch(), path)

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_batch(forked_batch(meta={"step": 8}), path)
    monkeypatch.undo()
    assert load_batch(path).meta["step"] == 7
    assert os.listdir(tmp_path) == ["b"]


def test_saving_replaces_what_was_there(tmp_path):
    save_batch(forked_batch(), tmp_path / "b")
    save_batch(forked_batch(meta={"step": 8}), tmp_path / "b")
    assert load_batch(tmp_path / "b").meta == {"step": 8}


def test_files_that_are_no_batches_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_batch(tmp_path / "missing")
    save_batch(forked_batch(), tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for name, damaged in (("cut", content[: len(content) // 2]), ("empty", b""), ("text", b"hello" * 10)):
        Path(tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            load_batch(tmp_path / name)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no saved batch"):
        load_batch(tmp_path / "model.safetensors")
