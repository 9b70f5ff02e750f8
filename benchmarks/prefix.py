"""What sharing a long prompt saves: forward and update of one group with and without it, and peak memory.

    python benchmarks/prefix.py [--model small] [--prompt 1024] [--responses 8] [--length 128]

Both sides compute the same log-probabilities and gradients; without sharing every response carries its own copy of the
prompt. Each side has its own process; turns are interleaved.
"""

from __future__ import annotations

from typing import Any

import torch
from common import (
    DTYPES,
    MODELS,
    Group,
    arguments,
    markdown,
    model_config,
    saved_model,
    write_results,
)
from floor import floor_of, forward_operations, trace, unshared_tokens, update_operations, useful_tokens
from rates import Rates
from rollout import TORCH_NAMES
from sides import SideSpec, summary, take_turns, work_folder


def measure(dtype: str, args: Any) -> dict[str, Any]:
    group = Group(32, (8, 8)) if args.smoke else Group(args.prompt, (args.length,) * args.responses)
    job = {
        "model": str(saved_model(args.model, work_folder("models"))),
        "dtype": TORCH_NAMES[dtype],
        "threads": args.threads,
        "groups": [(group.prompt, group.responses)],
        "forward": True,
        "profile": False,
    }
    # Room for all of the group at once on both sides, so that only sharing differs.
    budget = {name: unshared_tokens([group]) for name in ("token_budget", "forward_token_budget")}
    specs = [
        SideSpec(name, "native_update.py", {**job, "train": {**budget, "share_prefixes": name == "shared"}})
        for name in ("shared", "unshared")
    ]
    taken = take_turns(specs, work_folder(f"logs/prefix-{args.model}-{dtype}"), repeats=args.repeats)
    rates = Rates(budget_s=0.01, working_sets=(2**20, 2**24)) if args.smoke else Rates(budget_s=0.05)
    shapes = trace(model_config(args.model))
    floors = {
        "forward_s": floor_of(forward_operations(shapes, [group], DTYPES[dtype]), rates, DTYPES[dtype]).seconds,
        "update_s": floor_of(update_operations(shapes, [group], DTYPES[dtype]), rates, DTYPES[dtype]).seconds,
    }
    return {
        "model": args.model,
        "dtype": dtype,
        "prompt": group.prompt,
        "responses": len(group.responses),
        "length": group.responses[0],
        "tokens": {"shared": useful_tokens([group]), "unshared": unshared_tokens([group])},
        "sides": {name: summary(side) for name, side in taken.items()},
        "floor": floors,
    }


def table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        sides = part["sides"]
        if any("seconds" not in side for side in sides.values()):
            rows.append([part["dtype"], "failed", "", "", "", "", ""])
            continue
        for what in ("forward_s", "update_s"):
            shared, unshared = sides["shared"][what], sides["unshared"][what]
            rows.append(
                [
                    part["dtype"],
                    what.removesuffix("_s"),
                    f"{unshared:.2f}",
                    f"{shared:.2f}",
                    f"{unshared / shared:.2f}",
                    f"{part['tokens']['unshared'] / part['tokens']['shared']:.2f}",
                    f"{part['floor'][what] / shared:.0%}",
                ]
            )
        peaks = [sides[name]["peak_bytes"] / 2**20 for name in ("unshared", "shared")]
        rows.append(
            [part["dtype"], "peak MiB", f"{peaks[0]:,.0f}", f"{peaks[1]:,.0f}", f"{peaks[0] / peaks[1]:.2f}", "", ""]
        )
    return markdown(["dtype", "", "unshared", "shared", "ratio", "ratio of tokens", "shared: of the floor"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for dtype in args.dtypes:
        parts.append(measure(dtype, args))
        write_results(args, {"prefix": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
