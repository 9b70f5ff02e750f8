"""Seconds per million tokens of every method's advantages, and how they grow.

    python benchmarks/advantages.py [--tokens 250000 1000000 4000000] [--repeats 3] [--threads 1]

Timed is the step's whole ``estimate_advantages``: from one score per trajectory to one advantage per token, KL in the
reward. Four layouts: trajectories of 100 tokens and of 100,000, in one piece and "split" into two sequences whose
tokens stand apart; a shared prompt stands before each group, and a tenth of the tokens is masked. A figure is the
median of the repeats in the slowest of the layouts, in processor seconds summed over the threads (a busy machine
changes them little with ``--threads 1``; waiting threads count, too). Growth is the last column of seconds over the
first: 1 is linear. Ends with an error where a method takes more than 1 s per million tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from common import arguments, markdown, write_results
from torch import Tensor

from quartet.algorithms.segments import masked_owner, segment_count
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import PolicyGradientConfig
from quartet.trainers.experience import SHARP, ScoredBatch, estimate_advantages

GROUP_SIZE = 4
PROMPT_TOKENS = 50
LAYOUTS = [(length, split) for length in (100, 100_000) for split in (False, True)]
METHODS: dict[str, PolicyGradientConfig] = {method().name: method() for method in get_args(PolicyGradientConfig)}
MOST_SECONDS = 1.0


def layout(num_tokens: int, response_tokens: int, is_split: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Owner index ``[T]``, action mask ``[T]`` and group ``[N]`` of ``GROUP_SIZE`` responses per prompt."""
    if is_split:
        owner, action, group = layout(num_tokens // 2, response_tokens // 2, False)
        return owner.repeat(2), action.repeat(2), group
    num_groups = max(1, num_tokens // (PROMPT_TOKENS + GROUP_SIZE * response_tokens))
    num_trajectories = num_groups * GROUP_SIZE
    owner_rows = torch.arange(num_trajectories).repeat_interleave(response_tokens).view(num_groups, -1)
    prompts = torch.full((num_groups, PROMPT_TOKENS), -1)
    owner = torch.cat([prompts, owner_rows], dim=1).reshape(-1)
    action = (owner >= 0) & (torch.rand(owner.shape[0], generator=torch.Generator().manual_seed(0)) < 0.9)
    return owner, action, torch.arange(num_groups).repeat_interleave(GROUP_SIZE)


def step(num_tokens: int, response_tokens: int, is_split: bool) -> ScoredBatch:
    """What an estimator sees of a step of about so many tokens."""
    owner, action, group = layout(num_tokens, response_tokens, is_split)
    generator = torch.Generator().manual_seed(1)
    total, num = owner.shape[0], group.shape[0]
    owner_T = masked_owner(owner, action)
    columns = ("values", "ref_logprobs", "old_logprobs", SHARP)
    token = {name: torch.randn(total, generator=generator) for name in columns}
    # One long segment: estimators read fields and owners, never the segment table.
    batch = RaggedBatch(torch.zeros(total, dtype=torch.int64), (total,), (-1,), (0,), ("step",), token=token)
    scores = torch.randn(num, generator=generator)
    return ScoredBatch(
        batch=batch,
        owner_T=owner_T,
        scores_N=scores,
        shaped_N=scores,
        kl_T=torch.where(action, token["old_logprobs"] - token["ref_logprobs"], 0.0),
        kl_coef=0.05,
        group_N=group,
        length_N=segment_count(owner_T, num),
        ended_N=torch.ones(num, dtype=torch.bool),
        baseline_N=torch.randn(num, generator=generator),
    )


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def measure(num_tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds by method in its slowest layout, and per million of that layout's tokens."""
    found = {name: {"seconds": 0.0, "per_million": 0.0} for name in METHODS}
    for response_tokens, is_split in LAYOUTS:
        data = step(num_tokens, response_tokens, is_split)
        total = len(data.owner_T)
        for name, config in METHODS.items():
            seconds = median_seconds(lambda config=config, data=data: estimate_advantages(config, data), repeats)
            if seconds / total > found[name]["per_million"] / 1e6:
                found[name] = {"seconds": seconds, "per_million": seconds / total * 1e6}
    return found


def table(parts: dict[int, dict[str, dict[str, float]]]) -> str:
    sizes = sorted(parts)
    head = ["method", *(f"s per million at {size / 1e6:g} M tokens" for size in sizes), "growth"]
    rows = []
    for name in METHODS:
        per_million = [parts[size][name]["per_million"] for size in sizes]
        growth = per_million[-1] / per_million[0]
        rows.append([f"`{name}`", *(f"{value:.3f}" for value in per_million), f"{growth:.2f}"])
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[250_000, 1_000_000, 4_000_000])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts: dict[int, Any] = {}
    for num_tokens in [1000] if args.smoke else args.tokens:
        parts[num_tokens] = measure(num_tokens, args.repeats)
        write_results(args, {"advantages": parts})
    print(table(parts))
    slow = {
        name for size, found in parts.items() if size >= 250_000
        for name, figures in found.items() if figures["per_million"] > MOST_SECONDS
    }  # fmt: skip
    if slow:
        raise SystemExit(f"more than {MOST_SECONDS} s per million tokens: {', '.join(sorted(slow))}")


if __name__ == "__main__":
    main()
