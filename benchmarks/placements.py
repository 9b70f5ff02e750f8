"""Real PPO on tiny models under every placement: seconds per stage, overlap, samples per second, side by side.

    python benchmarks/placements.py [--parts placements judge ahead heads] [--steps 5] [--json FILE]

``placements``: one process with all threads against roles in Ray workers of one thread each, on the same cores. Steps
after the first are measured, and the final weights compared with those of the run without a placement.
``judge``: the reward waits for somebody else, one request at a time; ``full_offload`` begins to score when the step's
generation has ended, ``pipelined`` chunk by chunk.
``ahead``: the same judge under ``asynchronous``, whose coming chunks are judged while the actor trains.
``heads``: Medusa heads that learn along with the actor, in one process and while a larger critic trains in another.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import arguments, markdown, model_config, write_results
from safetensors.torch import load_file

from quartet.observe.spans import overlap_seconds, read_spans

BIG = 10**12
PARTS = ("placements", "judge", "ahead", "heads")
PROMPTS, RESPONSES, LONGEST, CHUNK = 16, 2, 64, 4
ONE_THREAD = {"type": "ray", "cpus_per_process": 0.1}
PLACEMENTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "full_offload": {"type": "full_offload", "pool": {"budget_bytes": 40_000_000}},
    "homogeneous": {"type": "homogeneous", "rollout": {}, "models": {"budget_bytes": 40_000_000}},
    "forward_offload": {
        "type": "forward_offload",
        "rollout": {},
        "actor_reference": {"budget_bytes": 40_000_000},
        "critic_reward": {"budget_bytes": 40_000_000},
    },
    "separated": {"type": "separated", "rollout": {}, "actor": {}, "critic": {}, "reference": {}, "reward": {}},
    "pipelined": {
        "type": "pipelined",
        "pools": {"policy": {"roles": ["rollout", "actor"]}, "scores": {"roles": ["critic", "reference", "reward"]}},
    },
    "asynchronous": {
        "type": "asynchronous",
        "max_staleness": 1,
        "pools": {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "critic", "reference", "reward"]}},
    },
}
STAGES = ("generate", "reward", "ref_logprobs", "old_logprobs", "values", "train_actor", "train_critic", "publish")
LEARNING = ("train_critic", "train_actor", "train_heads", "publish")
NAMES = {"reward": "reward/reward", "judge": "reward_score"}
"""Stages whose spans have another name."""
JUDGE = '''
import asyncio

ONE_AT_A_TIME = asyncio.Lock()

async def score(completions, **_):
    """A judge elsewhere that takes {seconds} s for every answer."""
    async with ONE_AT_A_TIME:
        await asyncio.sleep({seconds} * len(completions))
    return [float(len(text) % 7) for text in completions]
'''


def recipe_of(folder: Path, name: str, steps: int, threads: int, **changes: Any) -> dict[str, Any]:
    placement = PLACEMENTS[name]
    on_ray = name not in ("none", "full_offload") and "cluster" not in changes
    algorithm: dict[str, Any] = {"name": "ppo", "kl": {"coef": 0.05}}
    if name == "asynchronous":
        algorithm["off_policy"] = {"level": "token"}
    return {
        "output_dir": str(folder / f"run-{name}-{len(list(folder.glob('run-*')))}"),
        "threads": 1 if on_ray else threads,
        "actor": {"model": {"path": str(folder / "tiny")}},
        "critic": {"train": {"optim": {"lr": 2e-5}}},
        "rewards": [{"type": "model", "path": str(folder / "reward"), "name": "reward"}],
        "algorithm": algorithm,
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {"sampling": {"max_new_tokens": LONGEST}},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "responses_per_prompt": RESPONSES,
        "epochs": 2,
        "chunk_size": CHUNK,
        "checkpoint": {"every_steps": 10_000},
        "log": {"tensorboard": False},
        **({"placement": placement} if placement is not None else {}),
        **({"cluster": ONE_THREAD} if on_ray else {}),
        **changes,
    }


def run(folder: Path, name: str, recipe: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of the measured steps."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "quartet", "rl", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (Path(recipe["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 1]


def prepare(folder: Path) -> None:
    """A random model of the size that other benchmarks call tiny, and a reward model, with the quickstart's prompts."""
    from transformers import Qwen2ForCausalLM

    from quartet.extras.quickstart import task
    from quartet.extras.quickstart.tokenizer import build_tokenizer
    from quartet.extras.speculation.heads import MedusaHeads
    from quartet.models.loading import load_causal_lm, scalar_model_from
    from quartet.models.packed_model import PackedCausalLM

    tokenizer = build_tokenizer()
    config = model_config("tiny")
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    config.bos_token_id, config.pad_token_id = None, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    larger = copy.deepcopy(config)
    larger.num_hidden_layers, larger.layer_types = 2 * config.num_hidden_layers, 2 * config.layer_types
    critic = scalar_model_from(Qwen2ForCausalLM(larger), seed=2)
    for name, saved in (("tiny", model), ("reward", scalar_model_from(model, seed=1)), ("critic", critic)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    MedusaHeads(PackedCausalLM(load_causal_lm(str(folder / "tiny"))), 3).save(folder / "heads")
    rows = [json.dumps({"prompt": prompt}) for prompt in task.toy_prompts(0, 64)]
    (folder / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")


def median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row.get(name, 0.0) for row in rows)


def final_weights(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe["output_dir"]) / "model" / "model.safetensors")


def placements(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """``same``: the weights are those of the run without a placement, with threads of its own kind."""
    found, plain = [], {}
    for threads in {1, args.threads}:
        recipe = recipe_of(folder, "none", args.steps, threads)
        rows = run(folder, f"none-{threads}", recipe)
        plain[threads] = final_weights(recipe)
        found.append(summary("none", threads, 1, rows, None))
    for name, placement in PLACEMENTS.items():
        if placement is None:
            continue
        recipe = recipe_of(folder, name, args.steps, args.threads)
        rows = run(folder, name, recipe)
        weights, base = final_weights(recipe), plain[recipe["threads"]]
        same = all(torch.equal(weights[key], base[key]) for key in base)
        pools = placement.get("pools", {k: v for k, v in placement.items() if isinstance(v, dict)})
        found.append(summary(name, recipe["threads"], len(pools) if "cluster" in recipe else 1, rows, same))
    return found


def summary(name: str, threads: int, processes: int, rows: list[dict[str, float]], same: bool | None) -> dict[str, Any]:
    step_s = median(rows, "time/step_s")
    return {
        "placement": name,
        "processes": processes,
        "threads": threads,
        "step_s": step_s,
        "samples_per_s": PROMPTS * RESPONSES / step_s,
        "stages": {
            stage: median(rows, f"time/{stage}_s") or median(rows, f"time/reward_{stage}_s") for stage in STAGES
        },
        "overlap_s": median(rows, "overlap/score_generate_s"),
        "moved_bytes": median(rows, "handover/onload_bytes") + median(rows, "handover/offload_bytes"),
        "moving_s": median(rows, "handover/onload_s") + median(rows, "handover/offload_s"),
        "same_weights": same,
    }


def judged(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What recipes with a judge have in common."""
    (folder / "judge.py").write_text(JUDGE.format(seconds=args.judge_s), encoding="utf-8")
    return {
        "rewards": [{"type": "function", "target": "judge.py:score"}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "cluster": {"type": "local"},
        # In waves of about equal length: where all answers decode together, or the first chunk has the longest one,
        # chunks are complete at the end, and there is nothing to overlap.
        "rollout": {
            "sampling": {"max_new_tokens": LONGEST // 4},
            "engine": {"max_running": 8, "steps_per_lease": args.steps_per_lease},
        },
        "responses_per_prompt": 2 * RESPONSES,
    }


def judge(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Turns of both, so that both meet the same machine."""
    changes = judged(folder, args)
    one_pool = {"type": "pipelined", "pools": {"all": {"roles": ["rollout", "actor"]}}}
    seconds: dict[str, list[float]] = {"full_offload": [], "pipelined": []}
    for _ in range(args.repeats):
        for name in seconds:
            placement = one_pool if name == "pipelined" else {"type": "full_offload", "pool": {}}
            recipe = {**recipe_of(folder, "none", args.steps, args.threads, **changes), "placement": placement}
            seconds[name].append(median(run(folder, f"judge-{name}", recipe), "time/step_s"))
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    return {
        "judge_s": args.judge_s,
        "step_s": medians,
        "all": seconds,
        "ratio": medians["full_offload"] / medians["pipelined"],
    }


def ahead(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step; the judge, generation and the update would take ``sum_s`` one after the other."""
    changes = judged(folder, args)
    changes["algorithm"] = {**changes["algorithm"], "off_policy": {}}
    changes["epochs"] = 2  # an update of about the judge's length
    pools = {"rollout": {"roles": ["rollout"]}, "actor": {"roles": ["actor"]}}
    placement = {"type": "asynchronous", "pools": pools}
    changes["placement"] = placement
    rows = [
        run(folder, "ahead", recipe_of(folder, "none", args.steps, args.threads, **changes))
        for _ in range(args.repeats)
    ]
    found = {
        name: statistics.median(median(of, f"time/{name}_s") for of in rows)
        for name in ("step", "generate", "reward_score", "train_actor")
    }
    return {"judge_s": args.judge_s, "step_s": found.pop("step"), "stages": found, "sum_s": sum(found.values())}


def heads(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the stages of learning, those in which heads and critic train at once, and whether the weights, with
    those of the heads, are the same in one process with one thread as on two pools."""
    costs = {"plain": [1.0], "drafted": [1.0, 1.1, 1.2, 1.4, 1.8]}
    speculation = {"type": "medusa", "path": str(folder / "heads"), "costs": costs, "train": {}}
    changes = {
        "rollout": {"sampling": {"max_new_tokens": LONGEST}, "speculation": speculation},
        "critic": {"path": str(folder / "critic"), "train": {"optim": {"lr": 2e-5}}},
    }
    found: dict[str, Any] = {}
    weights = []
    for name in ("none", "pipelined"):
        recipe = recipe_of(folder, name, args.steps, 1, **changes)
        rows, path = run(folder, f"heads-{name}", recipe), Path(recipe["output_dir"])
        weights.append({**final_weights(recipe), **load_file(path / "medusa" / "model.safetensors")})
        found[name] = {stage: median(rows, f"time/{stage}_s") for stage in ("step", *LEARNING)}
        spans = [span for span in read_spans(path / "spans.jsonl") if span.step]  # the first step is 0
        found[name]["overlap"] = overlap_seconds(spans, "train_heads", "train_critic") / (args.steps - 1)
    found["same_weights"] = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    return found


def placements_table(found: list[dict[str, Any]]) -> str:
    head = [
        "placement",
        "processes × threads",
        "s/step",
        "samples/s",
        *STAGES,
        "overlap",
        "moved MB",
        "moving s",
        "bits",
    ]
    rows = [
        [
            f"`{of['placement']}`",
            f"{of['processes']} × {of['threads']}",
            f"{of['step_s']:.2f}",
            f"{of['samples_per_s']:.1f}",
            *(f"{of['stages'][stage]:.2f}" for stage in STAGES),
            f"{of['overlap_s']:.2f}",
            f"{of['moved_bytes'] / 1e6:.0f}",
            f"{of['moving_s']:.2f}",
            {True: "the same", False: "others", None: ""}[of["same_weights"]],
        ]
        for of in found
    ]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--judge-s", type=float, default=0.012, help="seconds that the judge takes for an answer")
    parser.add_argument("--steps-per-lease", type=int, default=2, help="decode steps between looks at complete chunks")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.repeats = 2, 1
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if "placements" in args.parts:
            results["placements"] = placements(folder, args)
            print(placements_table(results["placements"]))
        for part, measure in (("judge", judge), ("ahead", ahead), ("heads", heads)):
            if part in args.parts:
                results[part] = measure(folder, args)
                print(json.dumps(results[part], indent=1))
    write_results(args, results)


if __name__ == "__main__":
    main()
