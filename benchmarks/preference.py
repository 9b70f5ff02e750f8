"""DPO and reward-model steps against TRL: seconds, tokens that are computed, peak memory.

    python benchmarks/preference.py [--cases small/dpo/256 small/reward/256 small/dpo/64 small/reward/64]

A case is model/job/prompt length. A step is one optimizer update of all parameters on 16 pairs: a prompt of the given
length and two answers of 64 to 192 tokens (end of text included), spread evenly. Both sides get the same pairs, the
same weights, the same dtype (bf16 is autocast over fp32 weights on both). In DPO both read the reference's
log-probabilities, computed before the first step.

TRL updates in micro-batches of 4 pairs without gradient checkpointing, its fastest setting here; ``trl-default`` is
``per_device_train_batch_size`` 8 with checkpointing, as it comes. Tokens are those that go through the model in one
step: TRL computes a prompt for each answer, and pads. The floor is that of the update (floor.py) on distinct tokens;
a scalar head's is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    DTYPES,
    Group,
    arguments,
    build_tokenizer,
    model_config,
    saved_model,
    varied_lengths,
    write_results,
)
from floor import floor_of, trace, update_operations
from rates import Rates
from rollout import TORCH_NAMES
from sides import SideSpec, peer_versions, sides_table, summary, take_turns, work_folder

CASES = ("small/dpo/256", "small/reward/256", "small/dpo/64", "small/reward/64")
SIDES = ("native", "trl", "trl-default")
NUM_PAIRS = 16
SHORTEST, LONGEST = 64, 192


def pairs_of(vocab_size: int, prompt: int, num: int, shortest: int, longest: int) -> list[dict[str, str]]:
    """Random pairs; an answer of n tokens is n - 1 words, because both sides put the end of text behind it."""
    draw, tokenizer = random.Random(7), build_tokenizer(vocab_size)
    lengths = varied_lengths(2 * num, longest, shortest=shortest)

    def words(count: int) -> str:
        return str(tokenizer.decode([draw.randrange(3, vocab_size) for _ in range(count)]))

    return [
        {
            "prompt": words(prompt),
            "chosen": " " + words(lengths[2 * i] - 1),
            "rejected": " " + words(lengths[2 * i + 1] - 1),
        }
        for i in range(num)
    ]


def specs(case: str, dtype: str, args: Any) -> list[SideSpec]:
    model, job_name, prompt = case.split("/")
    num, shortest, longest = (4, 3, 6) if args.smoke else (NUM_PAIRS, SHORTEST, LONGEST)
    rows = pairs_of(model_config(model).vocab_size, 5 if args.smoke else int(prompt), num, shortest, longest)
    job = {
        "model": str(saved_model(model, work_folder("models"))),
        "job": job_name,
        "dtype": TORCH_NAMES[dtype],
        "threads": args.threads,
        "warm_up": 1,
        "rows": rows,
        "tokens_per_pair": [sum(len(row[side].split()) for side in row) + 2 for row in rows],
    }
    together, apart = max(1, num // 4), max(1, num // 2)
    train = {"token_budget": args.token_budget} if args.token_budget else {}
    known = {
        "native": SideSpec("native", "native_preference.py", {**job, "train": train}, repeats=max(args.repeats, 3)),
        "trl": SideSpec(
            "trl", "peers/trl_preference.py", {**job, "micro_batch": together, "checkpointing": False}, "trl"
        ),
        "trl-default": SideSpec(
            "trl-default",
            "peers/trl_preference.py",
            {**job, "micro_batch": apart, "checkpointing": True},
            "trl",
            repeats=1,
        ),
    }
    return [known[side] for side in args.sides]


def update_floor(case: str, rows: Sequence[dict[str, str]], dtype: str, rates: Rates) -> float:
    """Seconds of an update on the pairs, each prompt computed once."""
    model, job, _ = case.split("/")
    groups = [
        Group(len(row["prompt"].split()), tuple(len(row[side].split()) + 1 for side in ("chosen", "rejected")))
        for row in rows
    ]
    operations = update_operations(trace(model_config(model)), groups, DTYPES[dtype])
    if job == "reward":
        operations = [o for o in operations if not o.name.startswith(("head", "log-softmax"))]
    return floor_of(operations, rates, DTYPES[dtype]).seconds


def measure(case: str, dtype: str, args: Any, rates: Rates) -> dict[str, Any]:
    folder = work_folder("logs/preference-" + case.replace("/", "-") + f"-{dtype}")
    wanted = specs(case, dtype, args)
    taken = take_turns(wanted, folder, repeats=args.repeats, patience_s=args.patience)
    results = {}
    for name, side in taken.items():
        results[name] = summary(side)
        if side.answers:
            results[name]["pairs_per_s"] = len(side.spec.job["rows"]) / results[name]["seconds"]
    floor = update_floor(case, wanted[0].job["rows"], dtype, rates)
    return {"case": case, "dtype": dtype, "sides": results, "floor": floor}


def table(parts: Sequence[dict[str, Any]]) -> str:
    extra = {"tokens computed": lambda found: f"{found['tokens']:.0f}"}
    return sides_table(parts, "pairs_per_s", lambda part: float(part["floor"]), extra)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["native", "trl"])
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of turns after which a side gets no more")
    parser.add_argument("--token-budget", type=int, help="the native side's micro-batches; the recipe's default if not")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = Rates(budget_s=0.01, working_sets=(2**20, 2**24)) if args.smoke else Rates(budget_s=0.05)
    parts = []
    for dtype in args.dtypes:
        for case in args.cases:
            parts.append(measure(case, dtype, args, rates))
            write_results(args, {"preference": parts, "peers": peer_versions(parts)})
    print(table(parts))


if __name__ == "__main__":
    main()
