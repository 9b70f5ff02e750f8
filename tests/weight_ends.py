"""Both ends of every weight transport, for the tests; run as a script, a process that is one of them.

weight_ends.py engine                     takes commands on standard input, one JSON object per line, and answers each
weight_ends.py trainer RANK WORLD STORE   one rank of a trainer with weights sharded on two axes; the same
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from quartet.weights import (
    GATE_UP,
    TRANSPORTS,
    GatherWatch,
    Hasher,
    NamedSource,
    TensorSink,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    qkv,
)
from quartet.weights.disk import DiskReceive, DiskSend
from quartet.weights.messages import from_json, to_json
from quartet.weights.shared_memory import Segment
from quartet.weights.transport import ReceiveTransport, SendTransport

BETWEEN_PROCESSES = ("shared_memory", "cuda_ipc", "collective", "disk")
KINDS = ("shared", *BETWEEN_PROCESSES)
BUCKET_BYTES = 1024
"""Small, so that tensors are cut and buffers used again and again."""
FUSED = (qkv(4, 2), GATE_UP)


class SegmentHandles:
    """In the place of CUDA handles: memory of the machine that another process opens by a path."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._of: dict[int, Segment] = {}

    def allocate(self, num_bytes: int) -> Tensor:
        segment = Segment.create(num_bytes)
        self._segments.append(segment)
        self._of[segment.bytes.data_ptr()] = segment
        return segment.bytes

    def export(self, buffer: Tensor) -> Mapping[str, Any]:
        segment = self._of[buffer.data_ptr()]
        return {"path": f"/proc/{os.getpid()}/fd/{segment.descriptor}", "bytes": segment.num_bytes}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        descriptor = os.open(handle["path"], os.O_RDONLY)
        segment = Segment(descriptor, handle["bytes"], owner=False)
        segment.close()
        return segment.bytes

    def synchronize(self) -> None:
        pass


def send_transport(
    kind: str, folder: Path, num_receivers: int = 1, timeout_s: float = 20.0, bucket_bytes: int = BUCKET_BYTES
) -> SendTransport:
    if kind == "disk":
        return DiskSend(folder / "published")
    options: dict[str, Any] = {"handles": SegmentHandles()} if kind == "cuda_ipc" else {}
    if kind in ("cuda_ipc", "collective"):
        options["bucket_bytes"] = bucket_bytes
    return TRANSPORTS[kind][0](num_receivers, timeout_s=timeout_s, **options)


def receive_transport(kind: str, rank: int = 0, timeout_s: float = 20.0) -> ReceiveTransport:
    if kind == "disk":
        return DiskReceive()
    options: dict[str, Any] = {"handles": SegmentHandles()} if kind == "cuda_ipc" else {}
    return TRANSPORTS[kind][1](rank, timeout_s=timeout_s, **options)


def sender_of(weights: Mapping[str, Tensor]) -> WeightSender:
    return WeightSender(lambda: weights.items(), device=torch.device("cpu"))


def fused_weights(seed: int = 0) -> dict[str, Tensor]:
    """A layer with fused projections, and what does not divide by the number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (37, 16),
        "layers.0.self_attn.qkv_proj.weight": (32, 16),
        "layers.0.self_attn.qkv_proj.bias": (32,),
        "layers.0.mlp.gate_up_proj.weight": (44, 16),
        "layers.0.mlp.down_proj.weight": (16, 22),
        "norm.weight": (15,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def empty_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def reply(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def answer(end: WeightSender | WeightReceiver, message: Mapping[str, Any]) -> None:
    """One message of a sync, as it goes between machines."""
    print(json.dumps(to_json(end.answer(from_json(message)))), flush=True)


# An engine in a process of its own -----------------------------------------------------------------------


class Engine:
    def __init__(self) -> None:
        self.receiver: WeightReceiver | None = None

    def hold(self, staged: bool = False, adopts: bool = False) -> dict[str, Any]:
        self.weights = empty_like(fused_weights())
        self.sink = TensorSink(self.weights.items(), staged=staged, adopts=adopts)
        if self.receiver is not None:
            self.receiver.disconnect()
        self.receiver = WeightReceiver(self.sink)
        return {}

    def use(self, kind: str, rank: int, timeout_s: float) -> dict[str, Any]:
        assert self.receiver is not None
        self.receiver.use(receive_transport(kind, rank, timeout_s))
        return {}

    def state(self) -> dict[str, Any]:
        digests = [Hasher().digest(tensor) for tensor in self.weights.values()]
        return {"version": self.sink.version, "status": str(self.sink.status), "digests": digests}


def run_engine() -> None:
    engine = Engine()
    reply(pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        if "do" in command:
            reply(**getattr(engine, command.pop("do"))(**command))
        else:
            assert engine.receiver is not None
            answer(engine.receiver, command)


# A sharded trainer ---------------------------------------------------------------------------------------


def sharded_weights(rank: int, world: int, store: str) -> dict[str, Tensor]:
    """``fused_weights`` as DTensors on a mesh of two axes: rows over one, columns over the other."""
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    mesh = init_device_mesh("cpu", (2, world // 2))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0), Shard(1) if tensor.dim() > 1 else Replicate()])
        for name, tensor in fused_weights().items()
    }


def run_trainer(rank: int, world: int, store: str, _: list[str]) -> None:
    """Answers messages; a line ``{"use": KIND}`` before them chooses the transport."""
    weights = sharded_weights(rank, world, store)
    source = NamedSource(lambda: weights.items(), fused=FUSED)
    sender = WeightSender(lambda: weights.items(), device=torch.device("cpu"), rank=rank)
    reply(pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        if "use" in command:
            sender.use(send_transport(command["use"], Path(store).parent), source)
            reply()
        else:
            answer(sender, command)
    dist.destroy_process_group()


def run_gather(rank: int, world: int, store: str, _: list[str]) -> None:
    """Rank 1 stops before its second tensor; what rank 0 says then is the result."""
    weights = sharded_weights(rank, world, store)
    progress = dist.FileStore(store + ".progress", world)
    source = NamedSource(lambda: weights.items(), watch=GatherWatch(progress, rank, world, timeout_s=2.0))
    tensors: Iterator[Tensor] = source.tensors()
    try:
        for n, _tensor in enumerate(tensors):
            if rank == 1 and n == 0:
                reply(stopped=True)
                time.sleep(300)
    except WeightSyncError as error:
        reply(error=type(error).__name__, rank=error.rank, tensor=error.tensor, found=error.found)
        sys.stdout.flush()
        os._exit(0)  # the collective that hangs is still there


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "engine":
        run_engine()
    else:
        run = {"trainer": run_trainer, "gather": run_gather}[sys.argv[1]]
        run(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
