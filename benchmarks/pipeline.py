"""Pipeline stages: the bubble where all take the same time, and two real stages beside one process.

    python benchmarks/pipeline.py [--micro-batches 16] [--stages 2 4] [--repeats 3]

*Bubble.* Every stage sleeps for ``--forward-s`` and ``--backward-s`` in the place of computing; what travels is small.
The share of a stage's time in which it does nothing, beside (stages - 1) / (micro-batches + stages - 1).

*Speed.* An SFT update's gradients (fp32) of a Llama of 16 layers by two processes of one thread that have a stage each,
and by the first of them alone with the whole model; the two take turns in one run, and the median turn counts. Needs
two idle cores: on a busy machine the processor time of the busiest rank says more, with the bubble by the formula.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, markdown, write_results
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.worker import free_port
from quartet.models.packed_model import PackedCausalLM
from quartet.train.forward import ForwardNeeds, PackedPass
from quartet.train.parallel.pipeline import MicroBatch, Pipeline, Stage

VOCAB = 2048
ROWS = 8
"""Of hidden states of a micro-batch that is slept for."""


def model(args: argparse.Namespace, *, sleeps: bool) -> PackedCausalLM:
    torch.manual_seed(0)
    width = 16 if sleeps else args.width
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    return PackedCausalLM(LlamaForCausalLM(config).eval())


# What is computed ------------------------------------------------------------------------------------------


class Sleeping:
    """A micro-batch whose forward and backward take a fixed time."""

    num_rows = ROWS

    def __init__(self, stage: Stage, args: argparse.Namespace) -> None:
        self._stage, self._args = stage, args

    def forward(self, received: Tensor | None) -> Tensor:
        x = torch.zeros(ROWS, self._stage.width, requires_grad=True) if received is None else received
        slept: Tensor = _Sleep.apply(x, self._args)
        return slept.sum() if self._stage.index + 1 == self._stage.stages else slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, args: argparse.Namespace) -> Tensor:
        time.sleep(args.forward_s)
        ctx.seconds = args.backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Trained:
    """A micro-batch of which every token but the first of each sequence is trained on."""

    def __init__(self, packed: PackedCausalLM, batch: RaggedBatch) -> None:
        self._stage: Stage | None = packed.stage
        self._pass = PackedPass(packed, batch, ForwardNeeds(logprobs=True), 1024)
        self.num_rows = self._pass.num_rows

    def forward(self, received: Tensor | None) -> Tensor:
        if self._stage is not None and self._stage.index + 1 < self._stage.stages:
            return self._pass.hidden(received)
        logprobs = self._pass.outputs(received).logprobs
        assert logprobs is not None
        return -logprobs.mean()


def batches(args: argparse.Namespace) -> list[RaggedBatch]:
    """Micro-batches of four sequences; their numbers of tokens differ by up to a sixteenth."""
    draw, found = torch.Generator().manual_seed(0), []
    for i in range(args.micro_batches):
        length = args.tokens // 4 - i % 4 * args.tokens // 256
        texts = torch.randint(VOCAB, (4, length), generator=draw).tolist()
        mask = {"loss_mask": torch.arange(4 * length) % length > 0}
        found.append(RaggedBatch.from_sequences(texts, [str(n) for n in range(4)], token=mask))
    return found


# Ranks -----------------------------------------------------------------------------------------------------


def timed(function: Callable[[], None], group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds until all ranks have ended, and of this one's processor."""
    dist.barrier(group)
    begun, processor = time.perf_counter(), time.process_time()
    function()
    used = time.process_time() - processor
    dist.barrier(group)
    return time.perf_counter() - begun, used


def alone(packed: PackedCausalLM, parts: Sequence[RaggedBatch]) -> None:
    for part in parts:
        Trained(packed, part).forward(None).backward()


def bubbles(stages: int, group: dist.ProcessGroup, args: argparse.Namespace) -> list[tuple[float, float]]:
    packed = model(args, sleeps=True)
    stage = Stage.cut(packed, dist.get_rank(group), stages)
    pipeline = Pipeline(packed, stage, group)
    parts: list[Callable[[], MicroBatch]] = [partial(Sleeping, stage, args)] * args.micro_batches
    pipeline.make_passes(parts[:2], gradients=True)
    return [timed(partial(pipeline.make_passes, parts, gradients=True), group) for _ in range(args.repeats)]


def speeds(group: dist.ProcessGroup, args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    rank, packed, parts = dist.get_rank(group), model(args, sleeps=False), batches(args)
    whole = model(args, sleeps=False) if rank == 0 else None
    pipeline = Pipeline(packed, Stage.cut(packed, rank, 2), group)
    micro_batches: list[Callable[[], MicroBatch]] = [partial(Trained, packed, part) for part in parts]
    ways: dict[str, Callable[[], None]] = {
        "one process": partial(alone, whole, parts) if whole is not None else lambda: None,
        "two stages": partial(pipeline.make_passes, micro_batches, gradients=True),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(args.repeats + 1):
        for way, function in ways.items():
            seconds = timed(function, group)
            if turn > 0:  # the first one warms up
                found[way].append(seconds)
    if whole is not None:
        weights = dict(whole.model.named_parameters())
        for name, parameter in packed.model.named_parameters():
            torch.testing.assert_close(parameter.grad, weights[name].grad)
    return found


def run_rank(answer: Connection, rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found: dict[str, Any] = {"bubbles": {}}
    for stages in sorted({*args.stages, 2}):
        group = dist.new_group(range(stages))
        if rank < stages and stages in args.stages:
            found["bubbles"][stages] = bubbles(stages, group, args)
        if rank < stages and stages == 2:
            found["speeds"] = speeds(group, args)
        dist.barrier()
    answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


# Results ---------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    spawn, port, world = multiprocessing.get_context("spawn"), free_port(), max(2, *args.stages)
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=run_rank, args=(theirs, rank, world, port, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    of_ranks = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    num, of_one, found = args.micro_batches, args.forward_s + args.backward_s, []
    for stages, turns in of_ranks[0]["bubbles"].items():
        seconds = statistics.median(wall for wall, _ in turns)
        found.append(
            {"stages": stages, "bubble": 1 - num * of_one / seconds, "formula": (stages - 1) / (num + stages - 1)}
        )
    speed = {}
    for way in of_ranks[0]["speeds"]:
        turns = [of_rank["speeds"][way] for of_rank in of_ranks[:2]]
        speed[way] = {
            "seconds": statistics.median(wall for wall, _ in turns[0]),
            "processor": max(statistics.median(used for _, used in of_rank) for of_rank in turns),
        }
    return {"micro_batches": num, "bubbles": found, "speed": speed}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--forward-s", type=float, default=0.1)
    parser.add_argument("--backward-s", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    if args.smoke:
        args.micro_batches, args.width, args.tokens, args.layers = 4, 32, 64, 8
        args.forward_s, args.backward_s = 0.01, 0.02
    found = measure(args)
    write_results(args, {"pipeline": found})
    rows = [
        [str(of["stages"]), f"{of['bubble']:.4f}", f"{of['formula']:.4f}", f"{of['bubble'] / of['formula']:.3f}"]
        for of in found["bubbles"]
    ]
    print(markdown(["stages", "bubble", "formula", "ratio"], rows))
    one = found["speed"]["one process"]
    rows = [
        [way, f"{of['seconds']:.3f}", f"{one['seconds'] / of['seconds']:.2f}", f"{of['processor']:.3f}",
         f"{one['processor'] / of['processor']:.2f}"]
        for way, of in found["speed"].items()
    ]  # fmt: skip
    print(markdown(["way", "s", "times as fast", "processor, s of the busiest", "ratio"], rows))


if __name__ == "__main__":
    main()
