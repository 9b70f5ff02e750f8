"""Shares: exactly what was saved comes back, into the tensors that are there, whoever wrote the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.files import digest_files
from quartet.schedule.model_worker import TrainWorker
from quartet.train.checkpoint import CheckpointShare, ShareWriter, write_share
from quartet.train.engine import TrainEngine

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def state() -> dict[str, Any]:
    """Tensors of every kind, with bits that comparisons of values would miss."""
    bits = torch.arange(48, dtype=torch.int64).mul(0x9E3779B97F4A7C15 % 2**62)
    found: dict[str, Any] = {f"model.{dtype}": bits.view(torch.uint8).clone().view(dtype)[:24] for dtype in DTYPES[:-1]}
    return {
        **found,
        "model.bool": bits % 3 == 0,
        "model.minus_zero": torch.tensor([-0.0, float("nan"), float("inf")]),
        "model.scalar": torch.tensor(3.0),
        "model.empty": torch.zeros(0, 4),
        "model.column_major": torch.arange(12.0).view(3, 4).t(),
        "model.part": torch.arange(100.0)[10:20],
        "rest": {"groups": [{"betas": (0.9, 0.95), "foreach": None, "fused": True}], "num": 3, "names": {"a": "b"}},
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    views = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*views)


def test_every_bit_comes_back_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    saved = state()
    written = write_share(tmp_path / "share", saved)
    assert written == digest_files(tmp_path / "share") and written.keys() == {".metadata", "__0_0.distcp"}
    share = CheckpointShare(tmp_path / "share")
    live = {name: torch.empty_like(value) for name, value in saved.items() if name != "rest"}
    share.read_into(live)
    assert share.rest() == saved["rest"]
    assert all(same_bits(live[name], saved[name]) for name in live) and live.keys() == share.shapes.keys()
    assert live["model.column_major"].stride() == (1, 4)


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    """So digests compare runs, too."""
    assert write_share(tmp_path / "one", state()) == write_share(tmp_path / "another", state())


def test_a_view_does_not_take_its_whole_storage_along(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    write_share(tmp_path / "share", {"model.part": large[:10], "rest": {}})
    assert (tmp_path / "share" / "__0_0.distcp").stat().st_size < 10_000


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_nothing_but_plain_values_is_made_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_share(tmp_path / "other", {"rest": {"x": Evil()}})
    with pytest.raises(UserError, match="cannot be loaded"):
        CheckpointShare(tmp_path / "other").rest()
    assert not Path("evil").exists()


def test_a_share_is_asked_for_without_waiting(tmp_path: Path) -> None:
    writer = ShareWriter()
    assert writer.finish(tmp_path / "share") == {}, "not begun by this process"
    weight = torch.zeros(3)
    writer.begin(tmp_path / "share", {"model.weight": weight, "rest": {}}, background=True)
    weight.add_(1)
    writer.begin(tmp_path / "next", {"model.weight": weight, "rest": {}}, background=False)
    assert writer.finish(tmp_path / "next") == digest_files(tmp_path / "next")
    assert writer.finish(tmp_path / "share") == {}
    values = [CheckpointShare(tmp_path / name).state()["model.weight"].tolist() for name in ("share", "next")]
    assert values == [[0.0] * 3, [1.0] * 3]


def test_without_room_for_a_copy_a_share_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("quartet.train.checkpoint.copy_fits", lambda size: asked.append(size) or False)
    weight, writer = torch.zeros(3), ShareWriter()
    saved = {"model.weight": weight, "model.tied": weight, "optimizer.state.weight.exp_avg": torch.ones(2), "rest": {}}
    writer.begin(tmp_path / "share", saved, background=True)
    assert writer.finish(tmp_path / "share") == digest_files(tmp_path / "share") and asked == [20]


def test_a_failure_in_the_background_is_told_when_asked(tmp_path: Path) -> None:
    draft = tmp_path / ".draft_00000003_1"
    draft.write_text("a file where the directory was")
    writer = ShareWriter()
    writer.begin(draft / "actor", {"rest": {}}, background=True)
    with pytest.raises(UserError, match="step_00000003 could not be written"):
        while writer.finish(draft / "actor") is None:
            pass


# In an engine ------------------------------------------------------------------------------------------------


def tied_engine(seed: int = 0, **changes: Any) -> TrainEngine[Any]:
    torch.manual_seed(seed)
    config = {
        "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **changes,
    }  # fmt: skip
    return TrainEngine(PackedCausalLM(LlamaForCausalLM(LlamaConfig(**config))), TrainConfig(), total_steps=4)


def update(engine: TrainEngine[Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in engine.packed.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    engine.optimizer.step()
    engine.num_updates += 1


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys() and one["rest"] == other["rest"]
    assert all(same_bits(one[name], other[name]) for name in one if name != "rest")


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    engine, other = tied_engine(), tied_engine(seed=1)
    update(engine)
    assert "model.lm_head.weight" not in engine.state()
    write_share(tmp_path / "actor", engine.state())
    parameters = list(other.packed.model.parameters())
    TrainWorker(other).load_checkpoint(tmp_path / "actor")
    assert_same(other.state(), engine.state())
    assert all(a is b for a, b in zip(parameters, other.packed.model.parameters(), strict=True))
    assert other.packed.model.lm_head.weight is other.packed.model.model.embed_tokens.weight
    for each in (engine, other):
        update(each)
    assert_same(other.state(), engine.state())


def test_another_model_s_share_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    write_share(tmp_path / "actor", tied_engine(intermediate_size=5).state())
    engine = tied_engine()
    before = {name: tensor.clone() for name, tensor in engine.packed.model.state_dict().items()}
    with pytest.raises(UserError, match="does not fit the model") as caught:
        TrainWorker(engine).load_checkpoint(tmp_path / "actor")
    assert "3 tensors differ, first model.model.layers.0.mlp.down_proj.weight: [4, 5] float32" in caught.value.found
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.packed.model.state_dict().items())


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    worker = TrainWorker(tied_engine())
    with pytest.raises(UserError, match="does not see") as caught:
        worker.save_checkpoint(tmp_path / "elsewhere" / "actor", background=True)
    assert "storage that all machines share" in caught.value.remedy
    assert not (tmp_path / "elsewhere").exists(), "nothing is written where nobody would look for it"
