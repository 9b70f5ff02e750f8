"""Training, rollout and whole steps on one GPU, each beside what bounds it; and training on several.

    python benchmarks/gpu/run.py --out results [--models 0.5B 1.5B 3B 7B] [--parts sharded training rollout step
        kernels] [--story DIR]

``sharded`` is one process per GPU of this machine (``--processes``), which hold the model between them, cut by FSDP
alone and with context and tensor ranks; it is left out with one. Of the other parts those are left out that one GPU has
no room for. ``--story`` names the directory of a real model (stories260K), for the part ``step``. Writes
``results/gpu.json`` and ``results/gpu.md``. ``--smoke --device cpu`` runs all of it on a tiny model (``--processes 2``:
over gloo), to see that it runs; its figures mean nothing. Nothing has run on several GPUs yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from packages import ensure_packages

MODELS = ("0.5B", "1.5B", "3B", "7B")
PARTS = ("sharded", "training", "rollout", "step", "kernels")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--processes", type=int, help="of the part sharded; all GPUs of this machine when left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--story", type=Path, help="directory of stories260K: whole steps on a real model, too")
    parser.add_argument("--add", action="store_true", help="to what is in the results already, part by part")
    parser.add_argument("--smoke", action="store_true")
    found = parser.parse_args(argv)
    if found.smoke:
        found.models, found.repeats = ["smoke"], 1
    if found.processes is None:
        found.processes = max(1, torch.cuda.device_count())
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # These import quartet, which may need packages that were just made importable.
    import machine
    import rollout
    import sharded
    import step
    import time_by_kernel
    import training
    from shapes import config_of, training_bytes

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --smoke --device cpu tries the scripts without one")
    results: dict[str, Any] = {
        "machine": machine.description(device),
        "smoke": args.smoke,
        "gemm_flops": machine.gemm_flops(device, smoke=args.smoke),
        "bandwidth": machine.bandwidth(device, smoke=args.smoke),
        "peak_flops": machine.peak_flops(device),
        "left_out": [],
        "parts": {},
    }
    if args.add and (args.out / "gpu.json").exists():
        results = json.loads((args.out / "gpu.json").read_text(encoding="utf-8"))
    results["parts"] |= {part: [] for part in args.parts}
    room = results["machine"].get("memory_bytes")
    if args.story is not None and "step" in args.parts:
        print("step story", file=sys.stderr, flush=True)
        results["parts"]["step"] += step.measure(
            "story", device, smoke=args.smoke, repeats=args.repeats, story=args.story
        )  # fmt: skip
        write(args.out, results)
    for name in args.models:
        for part in args.parts:
            needed = training_bytes(config_of(name))
            if part in ("training", "step", "kernels") and room is not None and needed > room:
                results["left_out"].append(f"{part} of {name}, {needed / 1e9:.0f} GB before a token is computed")
                continue
            if part == "sharded" and args.processes == 1:
                results["left_out"].append(f"{part} of {name}, one process")
                continue
            print(f"{part} {name}", file=sys.stderr, flush=True)
            if part == "sharded":
                for sizes in sharded.meshes(name, args.processes):
                    results["parts"][part] += sharded.measure(
                        name, device.type, processes=args.processes, sizes=sizes, smoke=args.smoke,
                        repeats=args.repeats,
                    )  # fmt: skip
            elif part == "training":
                results["parts"][part] += training.measure(
                    name, device, peak=results["peak_flops"], gemm=results["gemm_flops"], smoke=args.smoke,
                    repeats=args.repeats,
                )  # fmt: skip
            elif part == "rollout":
                results["parts"][part].append(
                    rollout.measure(name, device, rate=results["bandwidth"], smoke=args.smoke)
                )
            elif part == "kernels":
                results["parts"][part] += time_by_kernel.measure(name, device, smoke=args.smoke)
            else:
                results["parts"][part] += step.measure(name, device, smoke=args.smoke, repeats=args.repeats)
            write(args.out, results)
    return results


def write(folder: Path, results: dict[str, Any]) -> None:
    """After every part: a run that is cut short leaves what it has."""
    from report import markdown

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (folder / "gpu.md").write_text(markdown(results), encoding="utf-8")


def main(argv: list[str]) -> None:
    ensure_packages()
    args = arguments(argv)
    results = measure(args)
    from report import markdown

    print(markdown(results))


if __name__ == "__main__":
    main(sys.argv[1:])
