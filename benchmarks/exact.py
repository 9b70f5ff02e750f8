"""What ``numerics: exact`` costs: whole RL steps and rollouts with it and without, on one thread in fp32.

    python benchmarks/exact.py [--models tiny small] [--cases step/64 step/64/512 rollout/mixed rollout/shared]

``step/longest response[/prompt length]`` is a GRPO step of ``rl_step.py``, ``rollout/…`` a scenario of ``rollout.py``
with a cache as large as needed. Both sides have one thread, which exact numerics require, and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import (
    MODELS,
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
from rollout import RUNNING, scenario
from sides import SideSpec, summary, take_turns, work_folder

CASES = ("step/64", "step/64/512", "rollout/mixed", "rollout/shared")
NUMERICS = ("fast", "exact")


def case_groups(case: str, smoke: bool) -> list[Group]:
    kind, name, *prompt = case.split("/")
    if kind == "rollout":
        return scenario(name, smoke)
    return (
        step_groups(2, 2, 8, 12) if smoke else step_groups(longest=int(name), prompt=int(*prompt) if prompt else None)
    )


def specs(model: str, case: str, groups: Sequence[Group]) -> list[SideSpec]:
    vocab_size = model_config(model).vocab_size
    prompts = prompt_ids(groups, vocab_size)
    job = {
        "model": str(saved_model(model, work_folder("models"))),
        "dtype": "float32",
        "threads": 1,
        "lengths": [length for group in groups for length in group.responses],
    }
    if case.startswith("step"):
        tokenizer = build_tokenizer(vocab_size)
        script = "native_step.py"
        job |= {"algorithm": "grpo", "warm_up": 1, "prompts": [tokenizer.decode(ids) for ids in prompts]}
    else:
        script = "native_rollout.py"
        job |= {
            "prompts": [prompts[i] for i, group in enumerate(groups) for _ in group.responses],
            "max_running": RUNNING,
            "prefill_tokens": 2048,
            "cache_tokens": None,
        }
    return [SideSpec(numerics, script, {**job, "numerics": numerics}) for numerics in NUMERICS]


def measure(model: str, case: str, args: Any) -> dict[str, Any]:
    groups = case_groups(case, args.smoke)
    folder = work_folder(f"logs/exact-{model}-{case.replace('/', '-')}")
    taken = take_turns(specs(model, case, groups), folder, repeats=args.repeats)
    return {"model": model, "case": case, "sides": {name: summary(side) for name, side in taken.items()}}


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        sides = [part["sides"][name] for name in NUMERICS]
        if any("seconds" not in side for side in sides):
            rows.append([part["model"], part["case"], "failed", "", "", ""])
            continue
        fast, exact = (side["seconds"] for side in sides)
        peaks = [f"{side['peak_bytes'] / 2**20:,.0f}" for side in sides]
        rows.append(
            [part["model"], part["case"], f"{fast:.2f}", f"{exact:.2f}", f"{exact / fast:.2f}", " / ".join(peaks)]
        )
    return markdown(["model", "case", "fast s", "exact s", "exact over fast", "peak MiB, fast / exact"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    parts = []
    for model in args.models:
        for case in args.cases:
            parts.append(measure(model, case, args))
            write_results(args, {"exact": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
