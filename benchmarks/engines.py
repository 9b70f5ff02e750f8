"""Tokens per second of rollout engines: ours over vLLM beside vLLM alone, the native one, and transformers' two.

    python benchmarks/engines.py [--models tiny small] [--scenarios mixed shared] [--dtypes fp32 bf16] [--sides ...]

Temperature 1, response lengths given (8 to 256 tokens, spread evenly), at most 64 requests running:

mixed: 64 requests, 8 short prompts of 8 responses each;
shared: 8 prompts of 512 tokens, 16 responses each.

Sides: ``quartet-vllm`` is our engine in a process of its own behind a router, with seeds and log-probabilities; each of
its turns begins with new weights, which count. ``vllm`` is vLLM's offline engine alone, in one process and without
either; ``vllm-asked`` is that with a seed for each request and the log-probability of each token, which is what
training needs; ``vllm-processes`` as it starts by itself, in processes of its own. ``…-compiled``: not eager.
``native`` has its cache forgotten in every turn, as after an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import DTYPES, MODELS, Group, arguments, markdown, model_config, prompt_ids, saved_model, varied_lengths
from common import write_results as write
from rollout import RUNNING, TORCH_NAMES, cache_budget
from sides import SideSpec, peer_versions, summary, take_turns, work_folder

SIDES = ("native", "quartet-vllm", "vllm", "vllm-asked", "vllm-processes", "generate", "continuous")
MORE_SIDES = ("quartet-vllm-compiled", "vllm-compiled")


def scenario(name: str, smoke: bool) -> list[Group]:
    num_groups, num_responses, prompt = (8, 8, None) if name == "mixed" else (8, 16, 512)
    if smoke:
        num_groups, num_responses, prompt = 2, 4, prompt and 40
    lengths = varied_lengths(num_groups * num_responses, 16 if smoke else 256, shortest=4 if smoke else 8)
    responses = [tuple(lengths[i * num_responses : (i + 1) * num_responses]) for i in range(num_groups)]
    return [Group(prompt or 16 + 2 * i, own) for i, own in enumerate(responses)]


def specs(model: str, path: Path, groups: Sequence[Group], dtype: str, threads: int, sides: Sequence[str]) -> list[Any]:
    config = model_config(model)
    prompts = prompt_ids(groups, config.vocab_size)
    head = config.hidden_size // config.num_attention_heads
    job = {
        "model": str(path),
        "dtype": TORCH_NAMES[dtype],
        "threads": threads,
        "prompts": [prompts[i] for i, group in enumerate(groups) for _ in group.responses],
        "lengths": [length for group in groups for length in group.responses],
        "max_running": RUNNING,
        "prefill_tokens": 2048,
        "cache_tokens": cache_budget(groups),
        "cache_bytes_per_token": 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * head
        * DTYPES[dtype].itemsize,
    }

    def side(name: str) -> SideSpec:
        if name == "native":
            return SideSpec(name, "native_rollout.py", job)
        if name in ("generate", "continuous"):
            return SideSpec(name, f"peers/hf_{name}.py", job)
        vllm = {**job, "eager": "compiled" not in name, "in_process": "processes" not in name, "asked": "asked" in name}
        if name.startswith("quartet"):
            return SideSpec(name, "vllm_engine.py", vllm)
        return SideSpec(name, "peers/vllm_rollout.py", vllm, "vllm")

    return [side(name) for name in sides]


def measure(model: str, name: str, dtype: str, args: Any) -> dict[str, Any]:
    groups = scenario(name, args.smoke)
    wanted = specs(model, saved_model(model, work_folder("models")), groups, dtype, args.threads, args.sides)
    taken = take_turns(wanted, work_folder(f"logs/engines-{model}-{name}-{dtype}"), repeats=args.repeats)
    sides = {side: summary(found) for side, found in taken.items()}
    for found in sides.values():
        if "seconds" in found:
            found["tokens_per_s"] = found["tokens"] / found["seconds"]
            found["tokens_per_cpu_s"] = found["tokens"] / found["cpu_s"]
    return {"model": model, "scenario": name, "dtype": dtype, "sides": sides}


def table(parts: Sequence[dict[str, Any]]) -> str:
    """Ratios by the clock, and by processor time, which other work on the machine disturbs less."""
    rows = []
    for part in parts:
        for name, found in part["sides"].items():
            row = [part["model"], part["dtype"], part["scenario"], name]
            if "tokens_per_s" not in found:
                rows.append([*row, "failed", "", "", "", ""])
                continue
            mine = part["sides"].get("quartet-vllm-compiled" if "compiled" in name else "quartet-vllm", {})
            ratios = ["", ""]
            if "quartet" not in name and "tokens_per_s" in mine:
                ratios = [f"{mine[rate] / found[rate]:.2f}" for rate in ("tokens_per_s", "tokens_per_cpu_s")]
            update = f"{1000 * found['update_s']:.0f}" if "update_s" in found else ""
            rows.append([*row, f"{found['tokens_per_s']:,.0f}", *ratios, update, str(found["turns"])])
    head = ["model", "dtype", "scenario", "engine", "tokens/s", "quartet-vllm over it", "by processor time"]
    return markdown([*head, "update, ms", "turns"], rows)


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--scenarios", nargs="+", choices=("mixed", "shared"), default=["mixed", "shared"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sides", nargs="+", choices=(*SIDES, *MORE_SIDES), default=list(SIDES))
    args = parser.parse_args()
    parts = []
    for model in args.models:
        for dtype in args.dtypes:
            for name in args.scenarios:
                parts.append(measure(model, name, dtype, args))
                write(args, {"engines": parts, "peers": peer_versions(parts)})
    print(table(parts))


if __name__ == "__main__":
    main()
