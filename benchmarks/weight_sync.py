"""Seconds of a weight sync over every transport that runs on a CPU, beside the machine's memory copy; and its parts.

    python benchmarks/weight_sync.py [--threads 1] [--repeats 5] [--megabytes 200] [--cases shared_memory,collective]

The sender is this process, the engine another one of the same machine. A sync is timed from the offer to the engine's
answer, when it has verified every digest and serves the new version; all weights have changed before. ``memcpy`` copies
as many bytes between two buffers that exist already, with the same number of threads, right before each sync; the
faster of torch's and numpy's copy counts. Medians; the first sync, which makes memory and forms groups, is left out.
The engine's process copies and verifies while the sender copies, so it wants a core of its own. The parts are measured
alone: the copy block by block, the sender's copy with its digest, the receiver's digest, and the messages of a sync
without data.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, markdown, write_results
from torch import Tensor

from quartet.weights.digest import BLOCK_BYTES, piece_digest
from quartet.weights.sink import NamedSource, TensorSink, sync_in_process
from quartet.weights.sync import Transport, WeightReceiver, WeightSender

HIDDEN, INNER = 1024, 2816
CASES: tuple[Transport, ...] = ("shared", "shared_memory", "collective")


def shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Those of a decoder with about as many bytes in fp32."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (max(1, num_bytes // 4 // 4 // HIDDEN), HIDDEN)}
    sizes = {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "o": HIDDEN, "gate": INNER, "up": INNER, "down": INNER}
    used, layer = 4 * found["embed.weight"][0] * HIDDEN, 0
    while used < num_bytes * 0.95:
        for name, rows in sizes.items():
            found[f"layers.{layer}.{name}.weight"] = (rows, HIDDEN)
            used += 4 * rows * HIDDEN
        found[f"layers.{layer}.norm.weight"] = (HIDDEN,)
        layer += 1
    return found


def zeros(num_bytes: int) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes(num_bytes).items()}


class Memcpy:
    """Copies between two buffers that exist already, the fastest way there is."""

    def __init__(self, num_bytes: int) -> None:
        source, target = (torch.full((num_bytes,), n, dtype=torch.uint8) for n in (1, 2))
        read, written = source.numpy(), target.numpy()
        self._ways: tuple[Callable[[], Any], ...] = (lambda: target.copy_(source), lambda: np.copyto(written, read))

    def seconds(self) -> float:
        return min(timed(way) for way in self._ways)


def parts(num_bytes: int, repeats: int) -> dict[str, float]:
    """Seconds of what each end does with as many bytes, alone."""
    source, target = (torch.full((num_bytes,), n, dtype=torch.uint8) for n in (1, 2))
    whole = num_bytes // BLOCK_BYTES * BLOCK_BYTES // 8
    read, written = (tensor.numpy()[: 8 * whole].view(np.uint64) for tensor in (source, target))

    def copy() -> None:
        for at in range(0, whole, BLOCK_BYTES // 8):
            np.positive(read[at : at + BLOCK_BYTES // 8], out=written[at : at + BLOCK_BYTES // 8])

    works: dict[str, Callable[[], Any]] = {
        "copy, block by block": copy,
        "copy with the sender's digest": lambda: piece_digest(source, 0, target),
        "the receiver's digest": lambda: piece_digest(source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(timed(work))
    return {name: statistics.median(found) for name, found in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def engine(num_bytes: int, threads: int, pipe: Connection) -> None:
    """The other process: takes offers until there are no more."""
    torch.set_num_threads(threads)
    receiver = WeightReceiver(TensorSink(zeros(num_bytes).items()))
    pipe.send(receiver.describe())
    while (offer := pipe.recv()) is not None:
        pipe.send(receiver.receive(offer, 0))


def sync_seconds(kind: Transport, args: Any, num_bytes: int) -> list[tuple[float, float]]:
    """Of ``repeats`` syncs after the first one: of a memory copy, and of the sync that followed it."""
    weights = zeros(num_bytes)
    memcpy = Memcpy(sum(tensor.nbytes for tensor in weights.values()))
    source = NamedSource(lambda: weights.items())

    def repeat(send: Callable[[int], Any]) -> list[tuple[float, float]]:
        pairs = []
        for version in range(args.repeats + 1):
            for tensor in weights.values():
                tensor.add_(1.0)
            copied = memcpy.seconds()
            begin = time.perf_counter()
            send(version)
            pairs.append((copied, time.perf_counter() - begin))
        return pairs[1:]

    if kind == "shared":
        sink = TensorSink(zeros(num_bytes).items())
        return repeat(lambda version: sync_in_process(source, sink, version))
    sender = WeightSender(lambda: weights.items(), device=torch.device("cpu"))
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=engine, args=(num_bytes, args.threads, other))
    process.start()
    assert sender.connect([pipe.recv()], kind, 300.0) == kind

    def send(version: int) -> None:
        pipe.send(sender.offer(version))
        for answer in (sender.send(), pipe.recv()):
            if answer is not None:
                raise answer

    pairs = repeat(send)
    pipe.send(None)
    process.join()
    sender.disconnect()
    return pairs


def processor() -> str:
    """Its name, and how many threads this machine has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {sum(line.startswith('processor') for line in lines)} threads"


def measure(args: Any) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    wanted = 2**22 if args.smoke else args.megabytes * 10**6
    num_bytes = sum(tensor.nbytes for tensor in zeros(wanted).values())
    rows = {}
    for case in CASES:
        if args.cases and case not in args.cases.split(","):
            continue
        pairs = sync_seconds(case, args, wanted)
        rows[case] = {
            "memcpy_s": statistics.median(copied for copied, _ in pairs),
            "sync_s": statistics.median(seconds for _, seconds in pairs),
            "share": statistics.median(copied / seconds for copied, seconds in pairs),
        }
    control_s = statistics.median(seconds for _, seconds in sync_seconds("shared_memory", args, 1))
    alone = {**parts(num_bytes, args.repeats), "control (messages of a sync without data)": control_s}
    return {"processor": processor(), "bytes": num_bytes, "alone": alone, "syncs": rows}


def table(found: dict[str, Any]) -> str:
    gigabytes = found["bytes"] / 1e9

    def row(name: str, seconds: float, share: float) -> tuple[str, ...]:
        return name, f"{seconds:.3f}", f"{gigabytes / seconds:.2f}", f"{100 * share:.0f} %"

    memcpy = statistics.median(case["memcpy_s"] for case in found["syncs"].values())
    rows = [row("memcpy", memcpy, 1.0), *(row(f"part: {n}", s, memcpy / s) for n, s in found["alone"].items())]
    rows += [row(name, case["sync_s"], case["share"]) for name, case in found["syncs"].items()]
    return markdown((f"{gigabytes:.2f} GB", "s", "GB/s", "of memcpy"), rows)


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--cases", help="transports to measure, separated by commas; all when left out")
    args = parser.parse_args()
    found = measure(args)
    print(found["processor"])
    print(table(found))
    write_results(args, {"weight_sync": found})


if __name__ == "__main__":
    main()
