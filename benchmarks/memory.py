"""Peak memory of a whole step, from one prompt to 64, with budgets fixed.

    python benchmarks/memory.py [--model small] [--factors 1 4 16 64]

GRPO, 8 responses of up to 32 tokens per prompt. The micro-batch budget, the requests that run together and the cache
are those that one prompt fills, so 64 prompts could only need more for what is stored per token. Every step runs
in a process of its own, from its start to its end.
"""

from __future__ import annotations

from typing import Any

import torch
from common import (
    MODELS,
    arguments,
    build_tokenizer,
    markdown,
    model_config,
    prompt_ids,
    saved_model,
    step_groups,
    write_results,
)
from floor import useful_tokens
from sides import SideSpec, summary, take_turns, work_folder

RESPONSES = 8
LONGEST = 32


def measure(factor: int, args: Any) -> dict[str, Any]:
    groups = step_groups(factor, RESPONSES, 8 if args.smoke else LONGEST)
    config = model_config(args.model)
    tokenizer = build_tokenizer(config.vocab_size)
    # The largest group, each response as long as they come.
    budget = 30 + RESPONSES * LONGEST
    job = {
        "model": str(saved_model(args.model, work_folder("models"))),
        "algorithm": "grpo",
        "dtype": "float32",
        "threads": args.threads,
        "warm_up": 0,
        "prompts": [tokenizer.decode(ids) for ids in prompt_ids(groups, config.vocab_size)],
        "lengths": [length for group in groups for length in group.responses],
        "train": {"token_budget": budget, "forward_token_budget": budget, "logprob_chunk": 256},
        "rollout": {"engine": {"type": "native", "max_running": RESPONSES}},
    }
    folder = work_folder(f"logs/memory-{args.model}-{factor}")
    side = take_turns([SideSpec("step", "native_step.py", job)], folder, repeats=1)["step"]
    return {
        "factor": factor,
        "tokens": useful_tokens(groups),
        "before_bytes": side.ready.get("peak_bytes", 0),
        **summary(side),
    }


def table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        if "peak_bytes" not in part:
            rows.append([str(part["factor"]), str(part["tokens"]), "failed", "", "", ""])
            continue
        first = parts[0]
        rows.append(
            [
                str(part["factor"]),
                str(part["tokens"]),
                f"{part['seconds']:.1f}",
                f"{part['peak_bytes'] / 2**20:,.0f}",
                f"{part['peak_bytes'] / first['peak_bytes']:.3f}",
                f"{(part['peak_bytes'] - part['before_bytes']) / 2**20:,.0f}",
            ]
        )
    head = ["prompts per step", "useful tokens", "s", "peak MiB", "of one prompt's", "MiB above the model loaded"]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for factor in args.factors:
        parts.append(measure(factor, args))
        write_results(args, {"model": args.model, "memory": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
