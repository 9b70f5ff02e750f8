"""Seconds of a weight sync over every transport that runs on a CPU, beside the machine's own memory copy.

    python benchmarks/weight_sync.py [--threads 1] [--repeats 5] [--megabytes 500] [--cases shared_memory,collective]

The sender is this process, the engine another one on the same machine. A sync is timed from the call of ``send`` to
its return, when the engine has verified every digest and serves the new version; all weights have changed before.
``memcpy`` copies as many bytes between two buffers that exist already, with the same number of threads, right before
each sync; the faster of torch's and numpy's copy counts. Medians; the first sync, which makes memory and forms groups,
is left out. The engine's process verifies while the sender copies, so it wants a core of its own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, markdown, write_results
from torch import Tensor

from quartet.weights import (
    CollectiveInlet,
    CollectiveOutlet,
    DiskInlet,
    DiskOutlet,
    Hasher,
    NamedSource,
    Receiver,
    Sender,
    SharedMemoryInlet,
    SharedMemoryOutlet,
    SharedSender,
    TensorSink,
)
from quartet.weights.session import Inlet, Outlet

HIDDEN, INNER = 1024, 2816
CASES: dict[str, tuple[str, bool]] = {
    "shared, zero copies": ("shared", True),
    "shared, copied": ("shared", False),
    "shared_memory, in place": ("shared_memory", True),
    "shared_memory, copied out": ("shared_memory", False),
    "collective, gloo": ("collective", False),
    "disk": ("disk", False),
}
"""Transport, and whether the sink adopts its memory."""
INLETS: dict[str, Callable[[], Inlet]] = {
    "shared_memory": SharedMemoryInlet,
    "collective": CollectiveInlet,
    "disk": DiskInlet,
}


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


def digest_seconds(num_bytes: int, repeats: int) -> float:
    hasher, flat = Hasher(), torch.ones(num_bytes, dtype=torch.uint8)
    return statistics.median(timed(lambda: hasher.digest(flat)) for _ in range(repeats))


def copy_seconds(num_bytes: int, repeats: int) -> float:
    """Of a sender's own work over shared memory: the copy, with the digest taken on the way."""
    hasher, source, target = Hasher(), *(torch.full((num_bytes,), n, dtype=torch.uint8) for n in (1, 2))
    return statistics.median(timed(lambda: hasher.copy(source, target)) for _ in range(repeats))


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def engine(kind: str, adopts: bool, num_bytes: int, threads: int, address: str, pipe: Connection) -> None:
    """The other process: receives until the sender leaves."""
    torch.set_num_threads(threads)
    sink = TensorSink(zeros(num_bytes).items(), adopts=adopts)
    receiver = Receiver(INLETS[kind](), address, timeout_s=300)
    pipe.send("ready")
    while pipe.recv():
        receiver.receive(sink)
    receiver.close()


def sync_seconds(kind: str, adopts: bool, args: Any, num_bytes: int, folder: Path) -> list[tuple[float, float]]:
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
        shared = SharedSender([TensorSink(zeros(num_bytes).items(), adopts=adopts)])
        return repeat(lambda version: shared.send(source, version))
    outlets: dict[str, Callable[[], Outlet]] = {
        "shared_memory": SharedMemoryOutlet,
        "collective": CollectiveOutlet,
        "disk": lambda: DiskOutlet(folder, keep=1),
    }
    sender = Sender(outlets[kind](), timeout_s=300)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    given = (kind, adopts, num_bytes, args.threads, str(sender.address), other)
    process = context.Process(target=engine, args=given)
    process.start()
    sender.connect()
    pipe.recv()

    def send(version: int) -> None:
        pipe.send(True)
        sender.send(source, version)

    pairs = repeat(send)
    pipe.send(False)
    process.join()
    sender.close()
    return pairs


def measure(args: Any) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    wanted = 2**22 if args.smoke else args.megabytes * 10**6
    num_bytes = sum(tensor.nbytes for tensor in zeros(wanted).values())
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, (kind, adopts) in CASES.items():
            if args.cases and kind not in args.cases.split(","):
                continue
            pairs = sync_seconds(kind, adopts, args, wanted, Path(folder))
            rows[case] = {
                "memcpy_s": statistics.median(copied for copied, _ in pairs),
                "sync_s": statistics.median(seconds for _, seconds in pairs),
                "share": statistics.median(copied / seconds for copied, seconds in pairs),
            }
    alone = {"digest_s": digest_seconds(num_bytes, args.repeats), "copy_s": copy_seconds(num_bytes, args.repeats)}
    return {"bytes": num_bytes, **alone, "syncs": rows}


def table(found: dict[str, Any]) -> str:
    gigabytes = found["bytes"] / 1e9

    def row(name: str, seconds: float, share: float) -> tuple[str, ...]:
        return name, f"{seconds:.3f}", f"{gigabytes / seconds:.2f}", f"{100 * share:.0f} %"

    memcpy = statistics.median(case["memcpy_s"] for case in found["syncs"].values())
    alone = {"digest alone": found["digest_s"], "copy with digest, alone": found["copy_s"]}
    rows = [row("memcpy", memcpy, 1.0), *(row(name, seconds, memcpy / seconds) for name, seconds in alone.items())]
    rows += [row(name, case["sync_s"], case["share"]) for name, case in found["syncs"].items()]
    return markdown((f"{gigabytes:.2f} GB", "s", "GB/s", "of memcpy"), rows)


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--cases", help="transports to measure, separated by commas; all when left out")
    args = parser.parse_args()
    found = measure(args)
    print(table(found))
    write_results(args, {"weight_sync": found})


if __name__ == "__main__":
    main()
