"""Both ends of every weight transport for the tests, and processes that are one of them.

The processes are forked from a server that has imported torch and this file once: one of its own takes seconds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forkserver
from quartet.weights.cuda_ipc import CudaHandles
from quartet.weights.digest import tensor_digest
from quartet.weights.endpoint import TRANSPORTS, WeightReceiver, WeightSender
from quartet.weights.shared_memory import Segment
from quartet.weights.sink import TensorSink
from quartet.weights.transport import ReceiveTransport, SendTransport

BETWEEN_PROCESSES = ("shared_memory", "cuda_ipc", "collective")
KINDS = ("shared", *BETWEEN_PROCESSES)
BUCKET_BYTES = 1024
"""Small, so that tensors are cut and buffers used again and again."""


class SegmentHandles(CudaHandles):
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


def send_transport(kind: str, num_receivers: int = 1, timeout_s: float = 20.0) -> SendTransport:
    options: dict[str, Any] = {"handles": SegmentHandles()} if kind == "cuda_ipc" else {}
    if kind in ("cuda_ipc", "collective"):
        options["bucket_bytes"] = BUCKET_BYTES
    return TRANSPORTS[kind][0](num_receivers, timeout_s=timeout_s, **options)  # type: ignore[index]


def receive_transport(kind: str, rank: int = 0, timeout_s: float = 20.0) -> ReceiveTransport:
    options: dict[str, Any] = {"handles": SegmentHandles()} if kind == "cuda_ipc" else {}
    return TRANSPORTS[kind][1](rank, timeout_s=timeout_s, **options)  # type: ignore[index]


def sender_of(weights: Mapping[str, Tensor]) -> WeightSender:
    return WeightSender(lambda: weights.items(), device=torch.device("cpu"))


def layer_weights(seed: int = 0) -> dict[str, Tensor]:
    """A layer, and what does not divide by the number of ranks."""
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


# Processes -----------------------------------------------------------------------------------------------


class Process:
    """A process that answers requests one after the other: methods of what ``make(*args)`` returns there."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = forkserver.context()
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, *args), daemon=True)
        self._process.start()
        other.close()
        self._thread = ThreadPoolExecutor(1)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.is_alive()

    def tell(self, request: str, *args: Any) -> None:
        self._pipe.send((request, args))

    def heard(self) -> Any:
        """The answer to the oldest request that has not been answered; EOFError where the process has ended."""
        return self._pipe.recv()

    def ask(self, request: str, *args: Any) -> Any:
        self.tell(request, *args)
        return self.heard()

    async def answer(self, request: str, *args: Any) -> Any:
        """To a request of a sync; one after the other, as a worker's calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.ask, "answer", request, *args)

    def idle(self) -> None:
        """Returns when no request is under way."""
        self._thread.submit(lambda: None).result(30)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._thread.shutdown()
        self._pipe.close()


def _serve(pipe: Connection, make: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    made = make(*args)
    while True:
        try:
            request, given = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(made, request)(*given))


class Engine:
    def __init__(self) -> None:
        self.receiver: WeightReceiver | None = None

    def hold(self, adopts: bool = False) -> None:
        self.weights = empty_like(layer_weights())
        self.sink = TensorSink(self.weights.items(), adopts=adopts)
        if self.receiver is not None:
            self.receiver.disconnect()
        self.receiver = WeightReceiver(self.sink)

    def use(self, kind: str, rank: int, timeout_s: float) -> None:
        assert self.receiver is not None
        self.receiver.use(receive_transport(kind, rank, timeout_s))

    def answer(self, request: str, *args: Any) -> Any:
        assert self.receiver is not None
        return self.receiver.answer(request, *args)

    def state(self) -> dict[str, Any]:
        digests = [tensor_digest(tensor) for tensor in self.weights.values()]
        return {"version": self.sink.version, "status": str(self.sink.status), "digests": digests}


class Trainer:
    """One rank of a trainer whose weights, ``layer_weights``, are cut twice: over two tensor ranks, and by FSDP."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        mesh = init_device_mesh("cpu", (1, world // 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        module = nn.ParameterDict()
        for name, tensor in layer_weights().items():
            kind = Shard(1) if "down" in name else Replicate() if "norm" in name else Shard(0)
            module[name.replace(".", "/")] = nn.Parameter(distribute_tensor(tensor, mesh["tensor"], [kind]))
        fully_shard(module, mesh=mesh["replicate", "shard"])
        self.weights = {name.replace("/", "."): parameter.detach() for name, parameter in module.named_parameters()}
        self.sender = WeightSender(self.weights.items, device=torch.device("cpu"), rank=rank)

    def use(self, kind: str) -> None:
        self.sender.use(send_transport(kind))

    def answer(self, request: str, *args: Any) -> Any:
        return self.sender.answer(request, *args)
