"""Parts of a model leave a CUDA device for pinned memory or files, and come back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM

pytestmark = pytest.mark.gpu


@pytest.fixture
def batch(device: torch.device) -> RaggedBatch:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(1, 1000, (n,), generator=generator).tolist()

    found = RaggedBatch.from_groups(
        [tokens(20), tokens(31)], [[tokens(9), tokens(30)], [tokens(12)]], ["a0", "a1", "b0"]
    )
    return found.with_token(loss_mask=found.sequence_index() >= 0).to(device)


@pytest.fixture(params=["pinned", "files"])
def store(request: pytest.FixtureRequest, device: torch.device, tmp_path: Path) -> Any:
    from quartet.train.offload import MappedFileStore, PinnedMemoryStore

    if request.param == "files":
        return MappedFileStore(tmp_path)
    if device.type != "cuda":
        pytest.skip("pinned memory needs a CUDA device")
    return PinnedMemoryStore()


def engine_of(tiny: Any, *, lora: bool = False, family: str = "qwen2") -> Any:
    from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
    from quartet.train.engine import TrainEngine

    config = TrainConfig(optim=OptimConfig(lr=1e-3), lora=LoRAConfig(rank=4) if lora else None)
    packed = PackedCausalLM(tiny.model(family))
    if lora:
        packed.adapt(config.lora, seed=1)
    return TrainEngine(packed, config, total_steps=20)


def train(engine: Any, batch: RaggedBatch) -> dict[str, float]:
    from quartet.train.objectives import SFTObjective

    return engine.train_step(batch, SFTObjective())


def on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(child) for key, child in value.items()}
    return [on_host(child) for child in value] if isinstance(value, list) else value


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


def tensors_of(engine: Any) -> list[Tensor]:
    states = [t for values in engine.optimizer.state.values() for t in values.values()]
    return [*engine.packed.model.parameters(), *engine.packed.model.buffers(), *states]


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_hand_overs_change_no_bit(lora: bool, store: Any, tiny: Any, batch: RaggedBatch) -> None:
    """Each update begins from the same bits, so that an operation's own order of sums is no matter."""
    if lora:
        pytest.importorskip("peft")
    engine = engine_of(tiny, lora=lora)
    engine.offloading(store)
    for _ in range(4):
        train(engine, batch)
        there, places = on_host(engine.state()), [(t.device, t.stride(), t._version) for t in tensors_of(engine)]
        engine.offloading().offload()
        assert all(tensor.device.type == "cpu" for tensor in tensors_of(engine))
        assert_same(on_host(engine.state()), there)
        assert engine.offloading().offload().num_bytes == 0, "all was away"
        engine.offloading().onload()
        assert [(t.device, t.stride(), t._version) for t in tensors_of(engine)] == places
        assert_same(on_host(engine.state()), there)


def test_the_device_has_the_room_again(cuda: torch.device, store: Any, tiny: Any, batch: RaggedBatch) -> None:
    engine = engine_of(tiny)
    train(engine, batch)
    engine.offloading(store)
    totals = {
        "params": sum(p.nbytes for p in (*engine.packed.model.parameters(), *engine.packed.model.buffers())),
        "optimizer": sum(t.nbytes for values in engine.optimizer.state.values() for t in values.values()),
    }
    for parts in (("params",), ("optimizer",), ("params", "optimizer")):
        before = torch.cuda.memory_allocated(cuda)
        moved = engine.offloading().offload(parts)
        num_bytes = sum(totals[part] for part in parts)
        # The allocator's blocks are of 512 bytes, and there is one per tensor.
        slack = 512 * len(tensors_of(engine))
        assert moved.num_bytes == num_bytes
        assert moved.freed_bytes == before - torch.cuda.memory_allocated(cuda)
        assert num_bytes <= moved.freed_bytes <= num_bytes + slack
        assert engine.offloading().onload(parts).freed_bytes == -moved.freed_bytes
        assert torch.cuda.memory_allocated(cuda) == before


def test_pinned_memory_is_pinned_once(cuda: torch.device, tiny: Any) -> None:
    from quartet.train.offload import Offload, PinnedMemoryStore

    packed = PackedCausalLM(tiny.model("llama"))
    offload = Offload(packed, PinnedMemoryStore())
    offload.offload()
    places = {parameter.data_ptr() for parameter in packed.model.parameters()}
    assert all(parameter.is_pinned() for parameter in packed.model.parameters())
    offload.onload()
    offload.offload()
    assert {parameter.data_ptr() for parameter in packed.model.parameters()} == places


def test_a_device_without_room_leaves_everything_away(
    cuda: torch.device, store: Any, tiny: Any, batch: RaggedBatch
) -> None:
    engine = engine_of(tiny)
    train(engine, batch)
    # More than what the allocator may still have in its blocks.
    ballast = torch.zeros(2**29, dtype=torch.uint8, device=cuda)
    engine.packed.model.register_buffer("ballast", ballast, persistent=False)
    del ballast
    engine.offloading(store)
    expected = on_host(engine.state())
    engine.offloading().offload()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(cuda) + 2**20) / total, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            engine.offloading().onload()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert engine.offloading().offload().num_bytes == 0, "all was away"
    assert_same(on_host(engine.state()), expected)
    engine.offloading().onload()
    assert_same(on_host(engine.state()), expected)
    train(engine, batch)
