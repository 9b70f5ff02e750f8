"""Updates of one model that several GPUs hold between them: MFU, bytes between them, and the memory of a rank.

The batch grows with the processes: with sharding alone every rank has as many micro-batches as one GPU has in
``training``. On meshes with tensor or context ranks it is the same batch.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from machine import peak_flops, peak_memory, synchronize
from shapes import config_of, training_flops
from torch.distributed.tensor import DTensor
from training import batch_of, layouts, objective_of, settings_of
from transformers import Qwen2ForCausalLM

from quartet.cluster.worker import free_port
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.train.engine import TrainEngine
from quartet.train.parallel.data import shard_model
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.mesh import DataParallelGroup, Mesh

MODELING = "transformers.models.qwen2.modeling_qwen2"
LIMIT_S = 1_800.0
"""For one model: loading, compiling, updates."""


Sizes = tuple[int, int, int]
"""Shard, context and tensor of a mesh with one copy of the model."""


def meshes(name: str, processes: int) -> list[Sizes]:
    """Those of so many processes over whose peers the model's heads divide."""
    heads, kv_heads = (getattr(config_of(name), f"num_{kind}_heads") for kind in ("attention", "key_value"))
    peers = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4)]
    return [
        (processes // (context * tensor), context, tensor)
        for context, tensor in peers
        if processes % (context * tensor) == heads % (context * tensor) == 0 and tensor <= max(2, kv_heads)
    ]


def engine_of(name: str, device: torch.device, sizes: Sizes, *, smoke: bool) -> TrainEngine[PackedCausalLM]:
    """A model of random weights; no process ever has all of it."""
    settings = settings_of(name, fused=False, smoke=smoke)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config_of(name)).eval()
    packed = packed_causal_lm(model, precision="bf16", activation_checkpointing=settings.activation_checkpointing)
    shard, context, tensor = sizes
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard, context=context, tensor=tensor)
    shard_model(packed, mesh)
    load_shares(packed, {n: torch.ones(()).expand(t.shape) for n, t in model.state_dict().items()}, device=device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in packed.model.parameters():
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim > 1:
                here.normal_(std=0.02)
    return TrainEngine(packed, settings, total_steps=1000, mesh=mesh)


def rank_process(
    answer: Connection, rank: int, world: int, port: int, name: str, kind: str, sizes: Sizes, smoke: bool, repeats: int
) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Values go over gloo, weights over nccl.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    engine = engine_of(name, device, sizes, smoke=smoke)
    found = []
    for layout, groups in layouts(smoke).items():
        groups = groups * world
        batch = batch_of(groups, engine.packed.vocab_size, torch.device("cpu"))
        objective = objective_of(groups, len(batch))
        for _ in range(2):
            engine.train_step(batch, objective)
        peak_memory(device)
        engine.packed.work.take(device, "bf16")
        seconds = []
        for _ in range(repeats):
            synchronize(device)
            dist.barrier()
            begun = time.perf_counter()
            engine.train_step(batch, objective)
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        work = engine.packed.work.take(device, "bf16")
        found.append(
            {
                "layout": layout,
                "useful_tokens": batch.num_tokens,
                "seconds": statistics.median(seconds),
                "flops": training_flops(config_of(name), groups),
                "sent_bytes": work.sent_bytes / repeats,
                "peak_flops": peak_flops(device),
                "peak_bytes": peak_memory(device),
                "host_peak_bytes": work.host_peak_bytes,
            }
        )
    answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, kind: str, *, processes: int, sizes: Sizes, smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """One entry per layout, of the slowest and largest rank.

    Raises:
        RuntimeError: a rank ended without an answer; what it said is above.
    """
    context, port = multiprocessing.get_context("forkserver"), free_port()
    # Ranks of all meshes are forked from one process that has imported these and has no threads or device.
    context.set_forkserver_preload(["quartet.train.engine", "quartet.train.parallel.data", MODELING])
    ranks, pipes = [], []
    for rank in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, processes, port, name, kind, sizes, smoke, repeats)
        ranks.append(context.Process(target=rank_process, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    deadline = time.monotonic() + LIMIT_S
    try:
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} of {name} gave no answer in {LIMIT_S:g} s")
            answers.append(pipe.recv())
    except EOFError as error:
        raise RuntimeError(f"a rank of {name} ended without an answer; its error is above") from error
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
    return [_joined(name, sizes, of_ranks) for of_ranks in zip(*answers, strict=True)]


def _joined(name: str, sizes: Sizes, ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    first, processes = ranks[0], len(ranks)
    seconds = max(found["seconds"] for found in ranks)
    peak, peaks = first["peak_flops"], [found["peak_bytes"] for found in ranks]
    return {
        **first,
        "model": name,
        "processes": processes,
        **dict(zip(("shard", "context", "tensor"), sizes, strict=True)),
        "seconds": seconds,
        "tokens_per_s_per_device": first["useful_tokens"] / seconds / processes,
        "mfu": first["flops"] / seconds / processes / peak if peak else None,
        "sent_bytes": max(found["sent_bytes"] for found in ranks),
        "peak_bytes": None if None in peaks else max(peaks),
        "host_peak_bytes": max(found["host_peak_bytes"] for found in ranks),
    }
