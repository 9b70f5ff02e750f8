"""Seconds per million tokens of the advantage estimators.

    python benchmarks/advantages.py [--tokens 1000000 4000000] [--repeats 5] [--threads 2]

Many short trajectories (100 tokens each) and few long ones (100,000 each), with a shared prompt before each
group and masked tokens inside. "split" trajectories have two sequences each, whose tokens stand apart and are
put in order first. Figures are medians of wall time (use an idle machine) and include everything from a score
per trajectory to an advantage per token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quartet.algorithms import (
    broadcast_to_tokens,
    completion_rewards,
    gae,
    group_relative,
    leave_one_out,
    masked_whiten,
    token_rewards,
)

GROUP_SIZE = 4
PROMPT_TOKENS = 50


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


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(num_tokens: int, response_tokens: int, is_split: bool, repeats: int) -> dict[str, float]:
    """Seconds per million tokens by estimator."""
    owner, action, group = layout(num_tokens, response_tokens, is_split)
    generator = torch.Generator().manual_seed(1)
    total = owner.shape[0]
    kl, values = torch.rand(total, generator=generator), torch.randn(total, generator=generator)
    scores = torch.randn(group.shape[0], generator=generator)

    def ppo() -> Tensor:
        rewards = token_rewards(scores, kl, 0.05, action, owner)
        return masked_whiten(gae(rewards, values, action, owner, 1.0, 0.95)[0], action)

    def grpo() -> Tensor:
        return broadcast_to_tokens(group_relative(scores, group, True), owner, action)

    def rloo() -> Tensor:
        return broadcast_to_tokens(
            leave_one_out(completion_rewards(scores, kl, 0.05, action, owner), group), owner, action
        )

    estimators = {"gae": ppo, "grpo": grpo, "rloo": rloo}
    return {name: median_seconds(work, repeats) / total * 1e6 for name, work in estimators.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("seconds per million tokens")
    print(f"{'tokens':>10} {'response':>9} {'':>5} {'gae':>8} {'grpo':>8} {'rloo':>8}")
    for num_tokens in arguments.tokens:
        for response_tokens in (100, 100_000):
            for is_split in (False, True):
                found = measure(num_tokens, response_tokens, is_split, arguments.repeats)
                row = " ".join(f"{found[name]:8.4f}" for name in ("gae", "grpo", "rloo"))
                print(f"{num_tokens:>10} {response_tokens:>9} {'split' if is_split else '':>5} {row}")


if __name__ == "__main__":
    main()
