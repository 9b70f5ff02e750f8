"""What the ranks of the tests of sharded models run; see ``ranks.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from quartet.config import UserError
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.attention import PackedAttention
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedModel
from quartet.observe.memory import held_bytes
from quartet.train.checkpoint import begin_checkpoint, complete_checkpoint, newest_checkpoint
from quartet.train.checkpoint_shares import Share, ShareWriter
from quartet.train.engine import TrainEngine
from quartet.train.parallel.loading import load_shares, original_twin
from quartet.train.parallel.tensors import local


def mesh_of(shard: int) -> DeviceMesh:
    world = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def shard(packed: PackedModel, mesh: DeviceMesh) -> None:
    layers = getattr(packed.body, "language_model", packed.body)
    for layer in next(c for n, c in layers.named_children() if n in ("layers", "h")):
        fully_shard(layer, mesh=mesh)
    fully_shard(packed.model, mesh=mesh)
    for module in packed.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(sharded: Any, expected: Any) -> list[str]:
    """Names of parameters and buffers that are not the same bits, or not sharded."""
    found = dict(sharded.named_parameters(remove_duplicate=False)) | dict(sharded.named_buffers())
    wanted = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    names = [n for n in found.keys() | wanted.keys() if n not in found or n not in wanted]
    names += [n for n, t in wanted.items() if n in found and not torch.equal(whole(found[n].detach()), t.detach())]
    return names + [n for n, p in sharded.named_parameters() if not isinstance(p, DTensor)]


# Loading -------------------------------------------------------------------------------------------------


def loaded_models(rank: int, paths: Sequence[str]) -> dict[str, list[str]]:
    """Each directory loaded in shares and whole: what differs."""
    mesh, found = mesh_of(torch.distributed.get_world_size()), {}
    for path in paths:
        packed = packed_causal_lm(load_causal_lm(path, empty=True))
        shard(packed, mesh)
        load_shares(packed, path)
        expected = packed_causal_lm(load_causal_lm(path)).model
        found[path] = differing(packed.model, expected)
        tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (packed.model, expected)]
        found[path] += ["ties"] if tied[0] != tied[1] else []
    return found


def loaded_heads(rank: int, causal: str, scalar: str) -> dict[str, list[str]]:
    """A critic from a causal LM's directory, from one of its own, and adapters: what differs from the whole ones."""
    mesh, found = mesh_of(2), {}
    lora = LoRAConfig(rank=2)
    cases = {
        "fresh head": (
            causal,
            packed_scalar_model,
            lambda e: scalar_model_from(load_causal_lm(causal, empty=e), seed=5),
            {},
        ),
        "own head": (scalar, packed_scalar_model, lambda e: load_scalar_model(scalar, empty=e), {}),
        "adapters": (causal, packed_causal_lm, lambda e: load_causal_lm(causal, empty=e), {"lora": lora, "seed": 5}),
        "critic's adapters": (
            scalar,
            packed_scalar_model,
            lambda e: load_scalar_model(scalar, empty=e),
            {"lora": lora, "seed": 5},
        ),
    }
    for name, (path, pack, load, options) in cases.items():
        packed = pack(load(True), **options)
        shard(packed, mesh)
        load_shares(packed, path, seed=5)
        found[name] = differing(packed.model, pack(load(False), **options).model)
    return found


def refused(rank: int, causal: str, paths: Mapping[str, str]) -> dict[str, str]:
    """What loading each broken directory into the model of ``causal`` raises."""
    mesh, found = mesh_of(2), {}
    for name, path in paths.items():
        packed = packed_causal_lm(load_causal_lm(causal, empty=True))
        shard(packed, mesh)
        try:
            load_shares(packed, path)
            found[name] = "nothing"
        except UserError as error:
            found[name] = str(error)
    return found


class PeakMemory:
    """The most memory that this process holds within, above what it held before.

    Attributes:
        own, mapped: bytes of its own (``RssAnon``), and of the pages of files that it has read (``RssFile``), which
            all processes share and the system may take back.
    """

    def __enter__(self) -> PeakMemory:
        held_bytes(torch.device("cpu"))  # gives back what is free
        self._before = self._most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.own, self.mapped = (m - b for m, b in zip(self._most, self._before, strict=True))

    def _watch(self) -> None:
        while not self._ended.wait(0.0003):
            self._most = [max(pair) for pair in zip(self._most, self._now(), strict=True)]

    @staticmethod
    def _now() -> list[int]:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return [1024 * int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")]


def memory_of_loading(rank: int, path: str, reads_all: bool) -> dict[str, int]:
    """Peaks in bytes while a model is loaded in shares, and what they are made of.

    Args:
        reads_all: the fault: every rank reads the whole model and takes its part.
    """
    mesh = mesh_of(torch.distributed.get_world_size())
    packed = packed_causal_lm(load_causal_lm(path, empty=True))
    shard(packed, mesh)
    original_twin(packed.model)  # what only its first use takes
    with PeakMemory() as peak:
        if reads_all:
            load_shares(packed, {name: t.float() for name, t in load_file(f"{path}/model.safetensors").items()})
        else:
            load_shares(packed, path)
    sizes = [local(p).numel() for p in packed.model.parameters()]
    return {"own": peak.own, "mapped": peak.mapped, "shard": 4 * sum(sizes)}


# Checkpoints ---------------------------------------------------------------------------------------------


def make_engine(path: str, mesh: DeviceMesh | None, **options: Any) -> TrainEngine[Any]:
    """A trained model in fp64, on a mesh or whole."""
    packed = packed_causal_lm(load_causal_lm(path, empty=mesh is not None).double(), **options)
    if mesh is not None:
        shard(packed, mesh)
        load_shares(packed, path)
    config = TrainConfig(optim=OptimConfig(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1), lora=options.get("lora"))
    return TrainEngine(packed, config, total_steps=10)


def steps(engine: TrainEngine[Any], num: int) -> list[float]:
    """Losses of updates on eight sequences, dealt to the ranks."""
    losses = []
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for _ in range(num):
        generator, total = torch.Generator().manual_seed(engine.num_updates), torch.zeros((), dtype=torch.float64)
        ids = torch.randint(30, (8, 9), generator=generator)
        for row in ids[rank::world]:
            context = PackedAttention((len(row),), (-1,))
            logits = engine.packed.model(
                input_ids=row[None], position_ids=torch.arange(9)[None], attention_mask=None, use_cache=False,
                quartet_attention=context,
            ).logits  # fmt: skip
            loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), row[1:], reduction="sum") / 64
            loss.backward()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
        torch.nn.utils.clip_grad_norm_(engine.packed.model.parameters(), 0.5)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.num_updates += 1
    return losses


def save(engine: TrainEngine[Any], root: Path, step: int, *, after: Callable[[], Any] = lambda: None) -> Any:
    """Every rank writes its share in the background, while ``after`` goes on; rank 0 completes the checkpoint."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    draft = [begin_checkpoint(root, step) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(draft)
    writer = ShareWriter()
    writer.begin(draft[0] / "actor", engine.state(), background=True, rank=rank)
    result = after()
    while (files := writer.finish(draft[0] / "actor")) is None:
        time.sleep(0.002)
    of_ranks: list[Any] = [files]
    if world > 1:
        of_ranks = [None] * world
        dist.all_gather_object(of_ranks, files)
    if rank == 0:
        joined = {name: digest for found in of_ranks for name, digest in found.items()}
        complete_checkpoint(draft[0], {}, {}, {"actor": joined}, keep=9)
    if world > 1:
        dist.barrier()
    return result


def resume(engine: TrainEngine[Any], root: Path) -> None:
    found = newest_checkpoint(root)
    assert found is not None
    share = Share(found.path / "actor")
    with engine.loading(share.shapes, share.rest()) as live:
        share.read_into(live)


def whole_weights(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in engine.packed.model.named_parameters()}


def saved_run(rank: int, path: str, root: str, sharded: int | None, options: Mapping[str, Any] = {}) -> Any:
    """Two steps, a checkpoint, two more: the losses of those, and the weights after them."""
    engine = make_engine(path, None if sharded is None else mesh_of(sharded), **options)
    steps(engine, 2)
    losses = save(engine, Path(root), 2, after=lambda: steps(engine, 2))
    return losses, whole_weights(engine)


def resumed_run(rank: int, path: str, root: str, sharded: int | None, options: Mapping[str, Any] = {}) -> Any:
    """As the last two steps of ``saved_run``, from the checkpoint; the engine had made other ones before."""
    engine = make_engine(path, None if sharded is None else mesh_of(sharded), **options)
    steps(engine, 1)
    resume(engine, Path(root))
    return steps(engine, 2), whole_weights(engine)
