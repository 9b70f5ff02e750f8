"""One update of the train engine: its time over the floor, its useful FLOPs over the GEMM rate, where the time goes.

    python benchmarks/update.py [--model small] [--longest 64 128] [--dtypes fp32 bf16] [--before OTHER/src]

64 responses to 8 prompts of 16 to 30 tokens, GRPO, one micro-batch, with gradient clipping and AdamW. Useful FLOPs are
those of linears and attention on useful tokens, forward once and backward once; the GEMM rate is that of a large square
product on this machine; the floor is the sum over floor.py's list. Rates are measured right before the update.

``--before``: the same update by another checkout of Quartet, in turns with this one; their seconds side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    DTYPES,
    MODELS,
    arguments,
    markdown,
    model_config,
    saved_model,
    step_groups,
    write_results,
)
from floor import floor_of, trace, update_operations, useful_tokens
from rates import Rates
from rollout import TORCH_NAMES
from sides import SideSpec, summary, take_turns, work_folder


def measure(model: str, longest: int, dtype: str, args: Any) -> dict[str, Any]:
    groups = step_groups(2, 2, 8, 12) if args.smoke else step_groups(longest=longest)
    rates = Rates(budget_s=0.01, working_sets=(2**20, 2**24)) if args.smoke else Rates()
    floor = floor_of(update_operations(trace(model_config(model)), groups, DTYPES[dtype]), rates, DTYPES[dtype])
    job = {
        "model": str(saved_model(model, work_folder("models"))),
        "dtype": TORCH_NAMES[dtype],
        "threads": args.threads,
        "groups": [(group.prompt, group.responses) for group in groups],
        "train": {},
        "forward": False,
        "profile": True,
    }
    folder = work_folder(f"logs/update-{model}-{longest}-{dtype}")
    specs = [SideSpec("update", "native_update.py", job)]
    if args.before is not None:
        specs.append(SideSpec("before", "native_update.py", job, source=args.before.resolve()))
    sides = take_turns(specs, folder, repeats=args.repeats)
    side = sides["update"]
    return {
        "before": summary(sides["before"]) if "before" in sides else {},
        "model": model,
        "longest": longest,
        "dtype": dtype,
        "tokens": useful_tokens(groups),
        "side": summary(side),
        "kinds": side.ready.get("kinds", {}),
        "floor": floor.as_dict(),
    }


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        side, floor = part["side"], part["floor"]
        if "seconds" not in side:
            rows.append([part["model"], part["dtype"], str(part["longest"]), "failed", "", "", "", "", ""])
            continue
        rows.append(
            [
                part["model"],
                part["dtype"],
                str(part["longest"]),
                str(part["tokens"]),
                f"{side['seconds']:.3f}",
                f"{floor['useful_flops'] / side['seconds'] / 1e9:,.0f}",
                f"{floor['peak_flops_per_s'] / 1e9:,.0f}",
                f"{floor['useful_flops_at_peak_s'] / side['seconds']:.0%}",
                f"{floor['seconds'] / side['seconds']:.0%}",
            ]
        )
    head = ["model", "dtype", "longest", "useful tokens", "s", "useful GFLOP/s", "GEMM GFLOP/s", "of the GEMM rate"]
    return markdown([*head, "of the floor"], rows)


def kind_table(parts: Sequence[dict[str, Any]]) -> str:
    """Shares of a profiled update (the profiler itself costs a little)."""
    rows = []
    for part in parts:
        total = sum(part["kinds"].values())
        kinds = sorted(part["kinds"].items(), key=lambda item: -item[1])
        text = ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in kinds)
        rows.append([part["model"], part["dtype"], str(part["longest"]), text])
    return markdown(["model", "dtype", "longest", "share of the time"], rows)


def before_table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        found = [part[name][key] for key in ("seconds", "processor_s") for name in ("before", "side")]
        texts = [f"{value:.3f}" for value in found]
        ratios = [f"{after / before:.3f}" for before, after in (found[:2], found[2:])]
        rows.append([part["model"], part["dtype"], str(part["longest"]), *texts[:2], ratios[0], *texts[2:], ratios[1]])
    head = ["model", "dtype", "longest", "s before", "now", "ratio", "processor s before", "now", "ratio"]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--longest", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for dtype in args.dtypes:
        for longest in args.longest:
            parts.append(measure(args.model, longest, dtype, args))
            write_results(args, {"update": parts})
    print(table(parts), kind_table(parts), sep="\n\n")
    if args.before is not None:
        print("", before_table(parts), sep="\n")


if __name__ == "__main__":
    main()
