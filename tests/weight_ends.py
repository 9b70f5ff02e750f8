"""Both ends of every weight transport for the tests, and processes that are one of them.

The processes are forked from a server that has imported torch and this file once: one of its own takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forkserver
from quartet.schedule.weight_sync import WeightReceiverMixin, WeightSenderMixin
from quartet.weights import sync
from quartet.weights.digest import BLOCK_BYTES, tensor_digest
from quartet.weights.sink import TensorSink
from quartet.weights.sync import SyncEndpoint, WeightSender

BETWEEN_PROCESSES = ("shared_memory", "collective")
KINDS = ("shared", *BETWEEN_PROCESSES)
SMALL_BUCKETS = {"memory": BLOCK_BYTES + 1024, "collective": BLOCK_BYTES + 1024}
"""Tensors are cut, and buffers used again and again."""
ELSEWHERE = (os.getppid(), 1)
"""Processes that live as long as this one: threads that are to be taken for other processes say that they are these."""


class Sending(WeightSenderMixin):
    def __init__(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        self.weight_sender = WeightSender(weights.items, device=torch.device("cpu"), rank=rank)


class Receiving(WeightReceiverMixin):
    def __init__(self, sink: TensorSink) -> None:
        self.engine: Any = SimpleNamespace(weight_sink=lambda: sink)


class Worker:
    """An end that answers one call after the other on a thread of its own; these come as they do from elsewhere.

    Args:
        pid: of the process that it says it is.
    """

    def __init__(self, host: Any, pid: int | None = None) -> None:
        self.host = host
        self.thread = ThreadPoolExecutor(1)
        self._pid = pid

    async def call(self, method: Any, *args: Any) -> Any:
        sent, bound = pickle.dumps(args), getattr(self.host, method.__name__)
        answer = await asyncio.get_running_loop().run_in_executor(self.thread, lambda: bound(*pickle.loads(sent)))
        if isinstance(answer, SyncEndpoint) and self._pid is not None:
            answer = replace(answer, pid=self._pid)
        return pickle.loads(pickle.dumps(answer))

    def idle(self) -> None:
        """Returns when no call is under way."""
        self.thread.submit(lambda: None).result(30)


def layer_weights(seed: int = 0) -> dict[str, Tensor]:
    """A layer of more than one bucket each, and what does not divide by the number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (37, 4000),
        "layers.0.self_attn.qkv_proj.weight": (32, 5000),
        "layers.0.self_attn.qkv_proj.bias": (32,),
        "layers.0.mlp.gate_up_proj.weight": (44, 4000),
        "layers.0.mlp.down_proj.weight": (16, 9002),
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

    async def call(self, method: Any, *args: Any) -> Any:
        """One after the other, as a worker's calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.ask, method.__name__, *args)

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
    def hold(self) -> None:
        self.weights = empty_like(layer_weights())
        self.sink = TensorSink(self.weights.items())
        receiving = Receiving(self.sink)
        self.describe_weights, self.receive_weights = receiving.describe_weights, receiving.receive_weights

    def state(self) -> dict[str, Any]:
        digests = [tensor_digest(tensor) for tensor in self.weights.values()]
        return {"version": self.sink.version, "status": str(self.sink.status), "digests": digests}


class Trainer(Sending):
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
        named = {name.replace("/", "."): parameter.detach() for name, parameter in module.named_parameters()}
        super().__init__(named, rank)
        sync.BUCKET_BYTES |= SMALL_BUCKETS


class Ranks:
    """All ranks of a trainer, which get every call; the first one answers."""

    def __init__(self, ranks: list[Process]) -> None:
        self._ranks = ranks

    async def call(self, method: Any, *args: Any) -> Any:
        return await asyncio.to_thread(self._called, method.__name__, *args)

    def _called(self, *asked: Any) -> Any:
        for rank in self._ranks:
            rank.tell(*asked)
        first, *_ = [rank.heard() for rank in self._ranks]
        return first
