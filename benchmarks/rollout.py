"""Tokens per second of the native engine, ``model.generate``, transformers' continuous batching, and vLLM.

    python benchmarks/rollout.py [--models tiny small] [--scenarios mixed shared] [--dtypes fp32 bf16] [--sides ...]

Two scenarios, at most 64 requests running, temperature 1, response lengths given (8 to 256 tokens, spread evenly):

mixed: 256 requests, 32 short prompts of 8 responses each;
shared: 8 prompts of 512 tokens, 16 responses each.

``generate`` gets batches of 64, left-padded, and runs each to its longest response. Prompts must be computed again in
every turn: an engine's prefix cache is emptied before it, as a weight update would. Everybody has the same budget of
cache tokens (``generate`` none). Start-up, compilation and a short warm-up are not counted. Only the native engine
returns log-probabilities. The floor is what each decode step needs on this machine (floor.py), each step with the
requests that really run in it when slots are filled as they become free, plus the prefill of each prompt once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    DTYPES,
    MODELS,
    Group,
    arguments,
    markdown,
    model_config,
    prompt_ids,
    saved_model,
    varied_lengths,
    write_results,
)
from floor import Shapes, decode_operations, floor_of, forward_operations, trace
from rates import Rates
from sides import SideSpec, peer_versions, summary, take_turns, work_folder

RUNNING = 64
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
SIDES = ("native", "generate", "vllm", "vllm-compiled", "continuous")
MORE_SIDES = ("vllm-processes", "vllm-compiled-processes")
"""vLLM with scheduler and model in processes of their own, as it comes on a server."""


def scenario(name: str, smoke: bool) -> list[Group]:
    """Groups of requests; see the module's docstring."""
    if name == "mixed":
        num_groups, num_responses, prompts = (2, 4, [6, 8]) if smoke else (32, 8, [16 + 2 * (i % 8) for i in range(32)])
    else:
        num_groups, num_responses, prompts = (2, 4, [40, 40]) if smoke else (8, 16, [512] * 8)
    lengths = varied_lengths(num_groups * num_responses, 16 if smoke else 256, shortest=4 if smoke else 8)
    return [
        Group(prompts[i], tuple(lengths[i * num_responses : (i + 1) * num_responses])) for i in range(num_groups)
    ]  # fmt: skip


def cache_budget(groups: Sequence[Group]) -> int:
    """Tokens that ``RUNNING`` requests of full length need, a prompt per group once, in whole blocks."""
    block = 32
    longest = max(max(group.responses) for group in groups)
    prompt = max(group.prompt for group in groups)
    per_group = min(len(group.responses) for group in groups)
    num_groups = -(-RUNNING // per_group) + 1
    return num_groups * -(-prompt // block) * block + RUNNING * (-(-longest // block) + 1) * block


def specs(model: str, path: Path, groups: Sequence[Group], dtype: str, threads: int, sides: Sequence[str]) -> list[Any]:
    config = model_config(model)
    prompts = prompt_ids(groups, config.vocab_size)
    head = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * DTYPES[dtype].itemsize
    job = {
        "model": str(path),
        "dtype": TORCH_NAMES[dtype],
        "threads": threads,
        "prompts": [prompts[i] for i, group in enumerate(groups) for _ in group.responses],
        "lengths": [length for group in groups for length in group.responses],
        "max_running": RUNNING,
        "prefill_tokens": 2048,
        "cache_tokens": cache_budget(groups),
        "cache_bytes_per_token": per_token,
    }
    known = {
        "native": SideSpec("native", "native_rollout.py", job),
        "generate": SideSpec("generate", "peers/hf_generate.py", job, "trl"),
        "continuous": SideSpec("continuous", "peers/hf_continuous.py", job, "trl"),
        **{
            name: SideSpec(
                name,
                "peers/vllm_rollout.py",
                {**job, "eager": "compiled" not in name, "in_process": "processes" not in name},
                "vllm",
            )
            for name in (*SIDES, *MORE_SIDES)
            if name.startswith("vllm")
        },
    }
    return [known[side] for side in sides]


def decode_floor(shapes: Shapes, groups: Sequence[Group], dtype: torch.dtype, rates: Rates) -> dict[str, float]:
    """Seconds of all decode steps and of the prefill, of a schedule that never leaves a slot empty.

    Steps are sampled (their cost changes slowly), rows rounded up to a multiple of 8.
    """
    steps = _contexts_per_step(groups)
    stride = max(1, len(steps) // 24)
    seconds = 0.0
    for i in range(0, len(steps), stride):
        contexts, shared = steps[i]
        padded = contexts + [0] * (-len(contexts) % 8)
        once = floor_of(decode_operations(shapes, padded, dtype, shared=shared), rates, dtype).seconds
        seconds += once * min(stride, len(steps) - i)
    # A prompt's first responses are sampled from its last position; nothing else of it reaches the head.
    prompts = [Group(group.prompt, (1,)) for group in groups]
    prefill = floor_of(forward_operations(shapes, prompts, dtype), rates, dtype).seconds
    return {"decode_s": seconds, "prefill_s": prefill, "steps": len(steps), "step_s": seconds / len(steps)}


def _contexts_per_step(groups: Sequence[Group]) -> list[tuple[list[int], int]]:
    """``(contexts, prompt tokens read more than once)`` of every decode step, requests admitted in order."""
    waiting = [(g, length) for g, group in enumerate(groups) for length in group.responses]
    running: list[tuple[int, int, int]] = []  # (last step, group, first step)
    steps = []
    step, next_up = 0, 0
    while next_up < len(waiting) or running:
        while running and running[0][0] < step:
            heapq.heappop(running)
        while next_up < len(waiting) and len(running) < RUNNING:
            group, length = waiting[next_up]
            heapq.heappush(running, (step + length - 1, group, step))
            next_up += 1
        if running:
            contexts = [groups[group].prompt + step - first + 1 for _, group, first in running]
            distinct = sum(groups[group].prompt for group in {group for _, group, _ in running})
            steps.append((contexts, sum(groups[group].prompt for _, group, _ in running) - distinct))
        step += 1
    return steps


def measure(model: str, name: str, dtype: str, args: Any, rates: Rates) -> dict[str, Any]:
    groups = scenario(name, args.smoke)
    path = saved_model(model, work_folder("models"))
    wanted = specs(model, path, groups, dtype, args.threads, args.sides)
    folder = work_folder(f"logs/rollout-{model}-{name}-{dtype}")
    taken = take_turns(wanted, folder, repeats=args.repeats, patience_s=args.patience)
    floor = decode_floor(trace(model_config(model)), groups, DTYPES[dtype], rates)
    results = {}
    for side, found in taken.items():
        results[side] = summary(found)
        if found.answers:
            results[side]["tokens_per_s"] = results[side]["tokens"] / results[side]["seconds"]
    return {"model": model, "scenario": name, "dtype": dtype, "sides": results, "floor": floor}


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        native = part["sides"].get("native", {}).get("tokens_per_s")
        for side, found in part["sides"].items():
            speed = found.get("tokens_per_s")
            if speed is None:
                rows.append([part["model"], part["dtype"], part["scenario"], side, "failed", "", "", "", ""])
                continue
            floor_s = part["floor"]["decode_s"] + part["floor"]["prefill_s"]
            cache = found.get("cache_bytes")
            rows.append(
                [
                    part["model"],
                    part["dtype"],
                    part["scenario"],
                    side,
                    f"{speed:,.0f}",
                    f"{native / speed:.2f}" if native and side != "native" else "",
                    f"{floor_s / found['seconds']:.0%}",
                    f"{(found['resident_bytes'] - (cache or 0)) / 2**20:,.0f}" if cache else "",
                    str(found["turns"]),
                ]
            )
    head = ["model", "dtype", "scenario", "engine", "tokens/s", "native over it", "of the floor", "MiB without cache"]
    return markdown([*head, "turns"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--scenarios", nargs="+", choices=("mixed", "shared"), default=["mixed", "shared"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, *MORE_SIDES), default=list(SIDES))
    parser.add_argument("--patience", type=float, default=40.0, help="seconds of turns after which a side gets no more")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for model in args.models:
        for dtype in args.dtypes:
            rates = Rates(budget_s=0.01, working_sets=(2**20, 2**24)) if args.smoke else Rates(budget_s=0.05)
            for name in args.scenarios:
                parts.append(measure(model, name, dtype, args, rates))
                write_results(args, {"rollout": parts, "peers": peer_versions(parts)})
    print(table(parts))


if __name__ == "__main__":
    main()
