"""Whole RL steps against TRL: samples per second, where the time goes, and peak memory.

    python benchmarks/rl_step.py [--cases tiny/grpo/64 small/rloo/128 small/grpo/64/512 ...] [--dtypes fp32 bf16]

A case is model/algorithm/longest response[/prompt length]. A step is 8 prompts x 8 completions: generate, score, one
update of all parameters. Both sides get the same prompts (16 to 30 tokens, or the given length), the same response
lengths (spread evenly from an eighth of the longest), the same dtype (bf16 is autocast over fp32 weights on both),
TRL's default KL (GRPO none, RLOO 0.05 in the reward), the same reward function, and a model of the same weights.

TRL updates in one micro-batch of 64 (16 with a given prompt length) without gradient checkpointing, its fastest
setting here; ``trl-default`` is
``per_device_train_batch_size`` 8 with checkpointing, as it comes. The floor is that of the update (floor.py) plus
decoding and, for RLOO, two forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    DTYPES,
    Group,
    arguments,
    build_tokenizer,
    markdown,
    model_config,
    prompt_ids,
    saved_model,
    step_groups,
    write_results,
)
from floor import floor_of, forward_operations, trace, update_operations
from rates import Rates
from rollout import TORCH_NAMES, decode_floor
from sides import SideSpec, peer_versions, sides_table, summary, take_turns, work_folder

CASES = (
    "small/grpo/128",
    "small/grpo/64",
    "small/rloo/128",
    "small/rloo/64",
    "tiny/grpo/64",
    "tiny/grpo/128",
    "tiny/rloo/64",
    "tiny/rloo/128",
    "tiny/grpo/64/512",
    "small/grpo/64/512",
)
SIDES = ("native", "trl", "trl-default")


@dataclass(frozen=True)
class Case:
    model: str
    algorithm: str
    longest: int
    prompt: int | None

    @staticmethod
    def parse(text: str) -> Case:
        model, algorithm, longest, *prompt = text.split("/")
        return Case(model, algorithm, int(longest), int(prompt[0]) if prompt else None)

    def groups(self, smoke: bool) -> list[Group]:
        return step_groups(2, 2, 8, 12) if smoke else step_groups(longest=self.longest, prompt=self.prompt)


def specs(case: Case, dtype: str, args: Any) -> list[SideSpec]:
    groups = case.groups(args.smoke)
    config = model_config(case.model)
    tokenizer = build_tokenizer(config.vocab_size)
    job = {
        "model": str(saved_model(case.model, work_folder("models"))),
        "algorithm": case.algorithm,
        "dtype": TORCH_NAMES[dtype],
        "threads": args.threads,
        "warm_up": 1,
        "prompts": [tokenizer.decode(ids) for ids in prompt_ids(groups, config.vocab_size)],
        "lengths": [length for group in groups for length in group.responses],
    }
    # 64 long prompts at once would need more memory than a small machine has.
    together = {"micro_batch": len(job["lengths"]) // (4 if case.prompt else 1), "checkpointing": False}
    apart = {"micro_batch": max(2, len(job["lengths"]) // 8), "checkpointing": True}
    train = {"token_budget": args.token_budget} if args.token_budget else {}
    known = {
        "native": SideSpec("native", "native_step.py", {**job, "train": train}, repeats=max(args.repeats, 3)),
        "trl": SideSpec("trl", "peers/trl_step.py", {**job, **together}, "trl"),
        "trl-default": SideSpec("trl-default", "peers/trl_step.py", {**job, **apart}, "trl", repeats=1),
    }
    return [known[side] for side in args.sides]


def step_floor(case: Case, groups: Sequence[Group], dtype: str, rates: Rates) -> dict[str, float]:
    """Seconds of the parts of a step, each at its floor."""
    shapes = trace(model_config(case.model))
    update = floor_of(update_operations(shapes, groups, DTYPES[dtype]), rates, DTYPES[dtype]).seconds
    forward = floor_of(forward_operations(shapes, groups, DTYPES[dtype]), rates, DTYPES[dtype]).seconds
    decode = decode_floor(shapes, groups, DTYPES[dtype], rates)
    scoring = 2 * forward if case.algorithm == "rloo" else 0.0
    return {"generate": decode["decode_s"] + decode["prefill_s"], "score": scoring, "update": update}


def measure(text: str, dtype: str, args: Any, rates: Rates) -> dict[str, Any]:
    case = Case.parse(text)
    folder = work_folder("logs/step-" + text.replace("/", "-") + f"-{dtype}")
    taken = take_turns(specs(case, dtype, args), folder, repeats=args.repeats, patience_s=args.patience)
    results = {}
    for name, side in taken.items():
        results[name] = summary(side)
        if side.answers:
            results[name]["samples_per_s"] = len(side.spec.job["lengths"]) / results[name]["seconds"]
            results[name]["phases"] = side.answers[-1]["phases"]
    return {
        "case": text,
        "dtype": dtype,
        "sides": results,
        "floor": step_floor(case, case.groups(args.smoke), dtype, rates),
    }


def table(parts: Sequence[dict[str, Any]]) -> str:
    return sides_table(parts, "samples_per_s", lambda part: sum(part["floor"].values()))


def phase_table(parts: Sequence[dict[str, Any]]) -> str:
    """Seconds of the last step's phases, longest first."""
    rows = []
    for part in parts:
        for name, found in part["sides"].items():
            phases = sorted(found.get("phases", {}).items(), key=lambda item: -item[1])
            text = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases if seconds >= 0.005)
            rows.append([part["case"], part["dtype"], name, text])
        text = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in part["floor"].items() if seconds)
        rows.append([part["case"], part["dtype"], "floor", text])
    return markdown(["case", "dtype", "side", "seconds by phase"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["native", "trl"])
    parser.add_argument("--patience", type=float, default=40.0, help="seconds of turns after which a side gets no more")
    parser.add_argument("--token-budget", type=int, help="the native side's micro-batches; the recipe's default if not")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = Rates(budget_s=0.01, working_sets=(2**20, 2**24)) if args.smoke else Rates(budget_s=0.05)
    parts = []
    for dtype in args.dtypes:
        for case in args.cases:
            parts.append(measure(case, dtype, args, rates))
            write_results(args, {"rl_step": parts, "peers": peer_versions(parts)})
    print(table(parts), phase_table(parts), sep="\n\n")


if __name__ == "__main__":
    main()
