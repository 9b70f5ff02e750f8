"""How fast a model's parts leave their device and come back, and what memory that frees.

    python benchmarks/offload.py [--model small] [--device cuda] [--directory DIR]

A frozen model moves its parameters, a trained one its optimizer's moments too. The first time out takes new memory from
the store; later ones use it again, and of a frozen model only buffers are copied then. Coming back always copies.
Beside it the machine's memcpy, into fresh memory and into memory in use; on a GPU torch's copies to and from pinned
memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import MODELS, arguments, build_model, markdown, write_results

from quartet.models.packed_model import PackedCausalLM
from quartet.train.offload import MappedFileStore, MoveResult, Offload, PinnedMemoryStore


def memcpy(num_bytes: int, device: torch.device) -> dict[str, float]:
    """GB/s of plain copies."""

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return num_bytes / 1e9 / (time.perf_counter() - begun)

    here = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rate(host, here)
        return {"out": rate(host, here), "in": rate(here, host)}
    host = torch.empty(num_bytes, dtype=torch.uint8)
    return {"fresh": rate(host, here), "again": rate(host, here)}


def offload_for(args: Any, kind: str, store: Any) -> Offload:
    packed = PackedCausalLM(build_model(args.model).to(args.device))
    if kind == "frozen":
        packed.model.requires_grad_(False)
        return Offload(packed, store)
    optimizer = torch.optim.AdamW(packed.model.parameters(), lr=0.0, fused=True)
    for parameter in packed.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return Offload(packed, store, optimizer)


def measure(args: Any, kind: str, name: str) -> dict[str, Any]:
    """One model, out and in ``args.repeats`` times; the first is told apart from later ones."""
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        offload = offload_for(args, kind, MappedFileStore(directory) if name == "files" else PinnedMemoryStore())
        out: list[MoveResult] = []
        back: list[MoveResult] = []
        for _ in range(1 + args.repeats):
            out.append(offload.offload())
            back.append(offload.onload())
    return {
        "kind": kind,
        "store": name,
        "num_bytes": out[0].num_bytes,
        "first_out_s": out[0].seconds,
        "later_out_s": statistics.median(moved.seconds for moved in out[1:]),
        "in_s": statistics.median(moved.seconds for moved in back),
        "freed_bytes": statistics.median(moved.freed_bytes for moved in out),
        "taken_bytes": -statistics.median(moved.freed_bytes for moved in back),
    }


def table(rows: list[dict[str, Any]]) -> str:
    def rate(row: dict[str, Any], key: str) -> str:
        return f"{row['num_bytes'] / 1e9 / row[key]:.1f} ({1e3 * row[key]:.0f} ms)"

    return markdown(
        ["model", "store", "MiB", "first out, GB/s", "later out", "in", "freed", "taken"],
        [
            [
                row["kind"],
                row["store"],
                f"{row['num_bytes'] / 2**20:.0f}",
                rate(row, "first_out_s"),
                rate(row, "later_out_s"),
                rate(row, "in_s"),
                f"{row['freed_bytes'] / row['num_bytes']:.0%}",
                f"{row['taken_bytes'] / row['num_bytes']:.0%}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--directory", type=Path, help="where the mapped files are; the system's own for temporary ones"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.model = "tiny" if args.smoke else args.model
    stores = ["pinned", "files"] if args.device.type == "cuda" else ["files"]
    rows = [measure(args, kind, name) for name in stores for kind in ("frozen", "trained")]
    plain = memcpy(rows[-1]["num_bytes"], args.device)
    print(table(rows))
    print(f"plain copies of {rows[-1]['num_bytes'] / 2**20:.0f} MiB, GB/s:", plain)
    write_results(args, {"rows": rows, "memcpy_gb_per_s": plain})


if __name__ == "__main__":
    main()
