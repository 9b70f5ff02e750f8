"""What the ranks of the tests of sharded models run; see ``ranks.py``."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.directories import meta_twin, save_gathered
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.observe.memory import held_bytes
from quartet.schedule.model_worker import TrainWorker
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.weight_sync import WeightReceiverMixin, open_weight_sync, sync_weights
from quartet.train.checkpoint import (
    CheckpointShare,
    ShareWriter,
    begin_checkpoint,
    complete_checkpoint,
    newest_checkpoint,
    write_share,
)
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import SFTObjective
from quartet.train.offload import MappedFileStore, Offload
from quartet.train.parallel.data import shard_model, sharded
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.tensors import local, write_part
from quartet.train.state import copy_to_host, state_tensors
from quartet.weights.sink import NamedSource, TensorSink, gather


def run_calls(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What each call, a function and its arguments, returns; one begins when all ranks have ended the one before."""
    results = []
    for function, *args in calls:
        results.append(function(*args))
        dist.barrier()
    return results


def packed_causal_lm(
    model: PreTrainedModel, *, lora: LoRAConfig | None = None, seed: int = 0, kind: type[Any] = PackedCausalLM
) -> Any:
    """As that of ``models.loading`` without its probe, which takes most of the time of these tests."""
    packed = kind(model)
    if lora is not None:
        packed.adapt(lora, seed=seed)
    return packed


packed_scalar_model = partial(packed_causal_lm, kind=PackedScalarModel)


Cut = int | tuple[int, int, int] | tuple[int, int, int, int]
"""Shard, or shard, context and tensor, and pipeline."""


def mesh_of(cut: Cut) -> Mesh:
    shard, context, tensor, pipeline = (cut, 1, 1, 1) if isinstance(cut, int) else (*cut, 1)[:4]
    return Mesh.of(DataParallelGroup.of_world(), shard=shard, pipeline=pipeline, context=context, tensor=tensor)


def whole(tensor: Tensor) -> Tensor:
    found = gather(tensor, everywhere=True)
    assert found is not None
    return found


def differing(packed: PackedModel, expected: Any) -> list[str]:
    """Names of parameters and buffers that are not the same bits, or not sharded, of all stages."""
    sharded, stage = packed.model, packed.stage
    found = dict(sharded.named_parameters(remove_duplicate=False)) | dict(sharded.named_buffers())
    wanted = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    missing = set() if stage is None else {n for n in wanted if n not in found}
    names = [n for n in found.keys() | (wanted.keys() - missing) if n not in found or n not in wanted]
    names += [n for n, t in wanted.items() if n in found and not torch.equal(whole(found[n].detach()), t.detach())]
    names += [n for n, p in sharded.named_parameters() if stage is None and not isinstance(p, DTensor)]
    if stage is not None:
        of_stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_stages, missing)
        names += set.intersection(*of_stages)
    return names


# Loading -------------------------------------------------------------------------------------------------


def loaded_models(paths: Sequence[str], cut: Cut = 4) -> dict[str, list[str]]:
    """Each directory loaded in shares and whole: what differs."""
    mesh, found = mesh_of(cut), {}
    for path in paths:
        packed = packed_causal_lm(load_causal_lm(path, empty=True))
        shard_model(packed, mesh)
        load_shares(packed, path)
        held = packed_causal_lm(load_causal_lm(path))
        expected = held.model
        found[path] = differing(packed, expected)
        found[path] += ["fused"] if packed.stage is None and len(packed._fused) != len(held._fused) else []
        tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (packed.model, expected)]
        found[path] += ["ties"] if packed.stage is None and tied[0] != tied[1] else []
    return found


def loaded_heads(causal: str, scalar: str, cut: Cut = 2) -> dict[str, list[str]]:
    """A critic from a causal LM's directory, from one of its own, and adapters: what differs from the whole ones."""
    mesh, found = mesh_of(cut), {}
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
        shard_model(packed, mesh)
        load_shares(packed, path, seed=5)
        found[name] = differing(packed, pack(load(False), **options).model)
    return found


def refused(causal: str, paths: Mapping[str, str]) -> dict[str, str]:
    """What loading each broken directory into the model of ``causal`` raises."""
    mesh, found = mesh_of(2), {}
    for name, path in paths.items():
        packed = packed_causal_lm(load_causal_lm(causal, empty=True))
        shard_model(packed, mesh)
        try:
            load_shares(packed, path)
            found[name] = "nothing"
        except UserError as error:
            found[name] = str(error)
    return found


class PeakMemory:
    """The most memory of its own (``RssAnon``) that this process holds within, above what it held before.

    Attributes:
        own: bytes.
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
        self.own = self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.0003):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(lines["RssAnon"].split()[0])


def memory_of_loading(path: str, cut: Cut) -> dict[str, int]:
    """Peak in bytes while a model is loaded in shares, and what it is made of."""
    packed = packed_causal_lm(load_causal_lm(path, empty=True))
    shard_model(packed, mesh_of(cut))
    meta_twin(packed.model)  # what only its first use takes
    with PeakMemory() as peak:
        load_shares(packed, path)
    sizes = [local(p).numel() for p in packed.model.parameters()]
    return {"own": peak.own, "shard": 4 * sum(sizes)}


# Export --------------------------------------------------------------------------------------------------


def exported(
    path: str, out: str, kind: str, options: Mapping[str, Any], tokenizer: Any, cut: Cut = 2
) -> dict[str, list[str]]:
    """Exports a model from shards, and on rank 0 whole: names of all files, and of those that differ or are missing."""
    load = load_causal_lm if kind == "causal" else load_scalar_model
    pack = packed_causal_lm if kind == "causal" else packed_scalar_model
    for name in ("sharded", "whole"):
        if name == "whole" and dist.get_rank():
            continue
        packed: Any = pack(load(path, empty=name == "sharded"), **options)
        if name == "sharded":
            shard_model(packed, mesh_of(cut))
            load_shares(packed, path, seed=options.get("seed", 0))
        if packed.adapters is not None:
            for adapter, factor in packed.adapters.trained.items():
                if "lora_B" in adapter:
                    drawn = torch.Generator().manual_seed(zlib.crc32(adapter.encode()))
                    write_part(factor, torch.randn(factor.shape, generator=drawn))
        if kind == "causal":
            save_causal_lm(packed, tokenizer, Path(out, name, "model"))
        else:
            # All tokens occur in data, so one is added to pad with.
            seen = torch.ones(packed.vocab_size, dtype=torch.bool)
            save_scalar_model(packed, tokenizer, Path(out, name, "model"), seen=seen)
    if dist.get_rank():
        return {}
    found = {
        n: {str(p.relative_to(Path(out, n))): p.read_bytes() for p in Path(out, n).rglob("*") if p.is_file()}
        for n in ("sharded", "whole")
    }
    names = found["sharded"].keys() | found["whole"].keys()
    assert any(name.endswith(".safetensors") for name in names)
    return {
        "differing": sorted(n for n in names if found["sharded"].get(n) != found["whole"].get(n)),
        "files": sorted(names),
    }


def memory_of_export(path: str, out: str, cut: Cut) -> dict[str, int]:
    """Peak in bytes while a model is exported, and its largest tensor."""
    packed = packed_causal_lm(load_causal_lm(path, empty=True))
    shard_model(packed, mesh_of(cut))
    load_shares(packed, path)
    meta_twin(packed.model)
    dist.barrier()
    with PeakMemory() as peak:
        save_gathered(packed, Path(out), packed.gather)
    return {"own": peak.own, "largest": max(4 * p.numel() for p in packed.model.parameters())}


def synced(path: str, cut: Cut) -> dict[str, Any] | None:
    """What the first rank sends to engines: bits as the parameters of the whole model, under their names."""
    packed = packed_causal_lm(load_causal_lm(path, empty=True))
    shard_model(packed, mesh_of(cut))
    load_shares(packed, path)
    source = NamedSource(lambda: packed.complete_trained().items(), whole=packed.gather.whole)
    sent = [tensor.clone() for tensor in source.tensors()]
    if dist.get_rank():
        assert not sent
        return None
    expected = dict(load_causal_lm(path).named_parameters())
    assert [spec.name for spec in source.specs()] == list(expected)
    return {n: torch.equal(t, expected[n].detach()) for n, t in zip(expected, sent, strict=True)}


def sync_of_workers(path: str, cut: Cut) -> list[str]:
    """One weight sync by a trainer's workers, all asked for every step; what the engine has other than them."""
    worker, rank = TrainWorker(make_engine(path, mesh_of(cut))), dist.get_rank()
    steps(worker.engine, 1)

    class Ranks:
        """All of them, from the first one."""

        async def call(self, method: Any, *args: Any) -> Any:
            dist.broadcast_object_list([(method.__name__, args)])
            return getattr(worker, method.__name__)(*args)

    if rank:
        while True:
            asked: list[Any] = [None]
            dist.broadcast_object_list(asked)
            if asked[0] is None:
                break
            assert getattr(worker, asked[0][0])(*asked[0][1]) is None
    trained = worker.packed.complete_trained()
    served = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in trained.items()}
    if not rank:
        sink, receiving = TensorSink(served.items()), WeightReceiverMixin()
        receiving.engine = SimpleNamespace(weight_sink=lambda: sink)  # type: ignore[assignment]

        async def run() -> None:
            trainer: Any = Ranks()
            assert await open_weight_sync(trainer, [LocalGroup(receiving)]) == "shared"
            await sync_weights(trainer, [LocalGroup(receiving)], 1)

        asyncio.run(run())
        dist.broadcast_object_list([None])
    weights = whole_weights(worker.engine)
    return [] if rank else [name for name in served if not torch.equal(served[name], weights[name])]


# Checkpoints ---------------------------------------------------------------------------------------------


def make_engine(path: str, mesh: Mesh | None, *, on_host: bool = False, **options: Any) -> TrainEngine[Any]:
    """A trained model in fp64, on a mesh or whole."""
    packed = packed_causal_lm(load_causal_lm(path, empty=mesh is not None).double(), **options)
    if mesh is not None:
        shard_model(packed, mesh, on_host=on_host)
        load_shares(packed, path, seed=options.get("seed", 0))
    optim = OptimConfig(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1)
    config = TrainConfig(optim=optim, lora=options.get("lora"), token_budget=40)
    return TrainEngine(packed, config, total_steps=10, mesh=mesh)


def steps(engine: TrainEngine[Any], num: int) -> list[float]:
    """Losses of updates, each with its own batch."""
    losses = []
    for _ in range(num):
        generator = torch.Generator().manual_seed(engine.num_updates)
        rows = [torch.randint(30, (n,), generator=generator).tolist() for n in (9, 5, 12, 7, 3, 8)]
        batch = RaggedBatch.from_sequences(rows, [str(i) for i in range(len(rows))])
        mask = torch.ones(batch.num_tokens, dtype=torch.bool)
        mask[list(batch.segment_offsets[:-1])] = False
        batch = batch.with_token(loss_mask=mask)
        losses.append(engine.train_step(batch, SFTObjective())["loss/sft"])
    return losses


def save(engine: TrainEngine[Any], root: Path, step: int, *, after: Callable[[], Any] = lambda: None) -> Any:
    """Every rank writes its share in the background, while ``after`` goes on; rank 0 completes the checkpoint."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    draft = [begin_checkpoint(root, step) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(draft)
    writer = ShareWriter()
    root_of = sharded(engine.packed)
    state = engine.state() if root_of is None else root_of.written(engine.state())
    writer.begin(draft[0] / "actor", state, background=True, rank=rank)
    result = after()
    while (files := writer.finish(draft[0] / "actor")) is None:
        time.sleep(0.002)
    of_ranks: list[Any] = [files]
    if world > 1:
        of_ranks = [None] * world
        dist.all_gather_object(of_ranks, files)
    if rank == 0:
        joined = {name: digest for found in of_ranks for name, digest in found.items()}
        complete_checkpoint(draft[0], {}, {"actor": joined}, keep=9)
    if world > 1:
        dist.barrier()
    return result


def resume(engine: TrainEngine[Any], root: Path) -> None:
    found = newest_checkpoint(root)
    assert found is not None
    share = CheckpointShare(found.path / "actor")
    with engine.loading(share.shapes, share.rest()) as live:
        share.read_into(live)


def incomplete(path: str, root: str, other: str) -> dict[str, str]:
    """What is raised where a rank's files are missing, and where a checkpoint is another model's."""
    mesh, rank, found = mesh_of(2), dist.get_rank(), {}
    engine = make_engine(path, mesh)
    steps(engine, 1)
    draft = [begin_checkpoint(Path(root), 1) if rank == 0 else None]
    dist.broadcast_object_list(draft)
    files = write_share(draft[0] / "actor", sharded(engine.packed).written(engine.state()), rank)
    dist.barrier()
    if rank == 0:
        try:
            # A rank that has told nothing of a share that it has written, or has written another step's.
            only = {"actor": {**files, "__1.metadata": _empty_metadata(draft[0] / "actor")}}
            complete_checkpoint(draft[0], {}, only, keep=9)
        except UserError as error:
            found["incomplete"] = str(error)
    dist.barrier()
    save(engine, Path(root), 2)
    try:
        resume(make_engine(other, mesh), Path(root))
    except UserError as error:
        found["other"] = str(error)
    return found


def _empty_metadata(directory: Path) -> Any:
    (directory / "__1.metadata").unlink()
    (directory / "__1_0.distcp").unlink()
    return write_share(directory, {}, 1)["__1.metadata"]


def whole_copies(engine: TrainEngine[Any]) -> dict[str, Tensor | None]:
    found = {name: engine.packed.gather.whole(tensor) for name, tensor in engine.weights()}
    return {name: None if tensor is None else tensor.clone() for name, tensor in found.items()}


def whole_weights(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    packed = engine.packed
    named = packed.complete_trained()
    return {name: packed.gather.whole(p, everywhere=True).detach().clone() for name, p in named.items()}


def saved_run(path: str, root: str, sharded: Cut | None, options: Mapping[str, Any] = {}) -> Any:
    """Two steps, a checkpoint, two more: the losses of those, and the weights after them."""
    engine = make_engine(path, None if sharded is None else mesh_of(sharded), **options)
    steps(engine, 2)
    losses = save(engine, Path(root), 2, after=lambda: steps(engine, 2))
    return losses, whole_weights(engine)


def resumed_run(path: str, root: str, sharded: Cut | None, options: Mapping[str, Any] = {}) -> Any:
    """As the last two steps of ``saved_run``, from the checkpoint; the engine had made other ones before."""
    engine = make_engine(path, None if sharded is None else mesh_of(sharded), **options)
    steps(engine, 1)
    resume(engine, Path(root))
    return steps(engine, 2), whole_weights(engine)


# Offload -------------------------------------------------------------------------------------------------


def offloaded(path: str, directory: str, shard: Cut, options: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of an engine whose parts leave and come back between them, and of one that stays."""
    engines = [make_engine(path, mesh_of(shard), **options) for _ in range(2)]
    moving = engines[0]
    parts = moving.offloading(MappedFileStore(Path(directory) / str(dist.get_rank())))
    losses: list[list[float]] = [[], []]
    for away in (("params", "grads", "optimizer"), ("optimizer",), ("params",), ("grads", "params")):
        parts.offload(away)
        for i, engine in enumerate(engines):
            parts.onload() if i == 0 else None
            losses[i] += steps(engine, 1)
    moved = parts.offload()
    weights = [whole_copies(engine) for engine in engines]  # read where they are
    states = [state_tensors(copy_to_host(engine.state())) for engine in engines]
    refused = ""
    # The root itself refuses before it gathers, whoever calls it.
    for compute in (lambda: steps(moving, 1), lambda: moving.packed.one_call(lambda: None)):
        try:
            compute()
        except RuntimeError as error:
            refused += str(error)
    parts.onload()
    again = [steps(engine, 1) for engine in engines]
    equal = [torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True) if a is not None]
    equal += [torch.equal(local(states[0][n]), local(states[1][n])) for n in states[1]]
    held = sum(local(t).numel() * t.element_size() for t in states[0].values())
    return {
        "losses": losses,
        "again": again,
        "equal": equal,
        "refused": refused,
        "moved": moved.num_bytes,
        "held": held,
    }


def memory_of_offload(path: str, directory: str) -> dict[str, int]:
    """Bytes of a rank's shards, what was freed as they left, how many frozen ones keep their copy."""
    packed = packed_causal_lm(load_causal_lm(path, empty=True))
    packed.freeze()
    shard_model(packed, mesh_of(dist.get_world_size()))
    load_shares(packed, path)
    batch = RaggedBatch.from_sequences([[1, 2, 3]], ["a"])
    batch = batch.with_token(wanted=torch.tensor([False, True, True]))
    needs = ForwardNeeds(logprobs=True, mask="wanted")
    before = forward_only(packed, batch, needs, 64)
    parts = Offload(packed, MappedFileStore(Path(directory) / str(dist.get_rank())))
    out = parts.offload()
    parts.onload()
    after = forward_only(packed, batch, needs, 64)
    kept = [home.copied_to is not None for home in parts._homes.values()]
    shards = sum(4 * local(p).numel() for p in packed.model.parameters())
    same = all(torch.equal(before.token[n], after.token[n]) for n in before.token)
    return {"shards": shards, "moved": out.num_bytes, "freed": out.freed_bytes, "same": same, "kept": sum(kept)}


def on_host(path: str) -> list[Any]:
    """Losses and weights of a model whose shards and optimizer are kept on the host, and of another."""
    engines = [make_engine(path, mesh_of(2), on_host=kept) for kept in (True, False)]
    return [(steps(engine, 3), whole_weights(engine)) for engine in engines]
