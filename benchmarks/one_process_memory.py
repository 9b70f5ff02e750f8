"""Where the memory of a run in one process goes, on a random model of the smallest real size.

    python benchmarks/one_process_memory.py [--kl 0.05] [--steps 3] [--checkpoint-every 1]

GRPO in fp32, 4 prompts of 16 to 22 tokens × 4 answers of 32 tokens, on a Qwen2 of 494 M parameters: vocabulary 151,936,
tied embeddings, 24 layers, hidden 896. The run is a process of its own, as `quartet rl` is; this one reads its
``/proc/<pid>/status`` every few milliseconds, so that nothing is measured by what is measured. ``anonymous`` is the
memory that no file stands behind; the rest of ``resident`` are pages of mapped files, which the system takes back when
it needs room.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PROMPTS, RESPONSES, ANSWER = 4, 4, 32
GIB = 2**30
SIZES = {
    "qwen2-0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    # Shaped alike, with a fourteenth of the numbers, for a quick look.
    "fourteenth": {
        "vocab_size": 37_984,
        "hidden_size": 256,
        "intermediate_size": 1216,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    # To see that the script runs; a test bounds its peak.
    "smoke": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


# The run --------------------------------------------------------------------------------------------------


def run(job: dict[str, Any]) -> None:
    """The process that is measured; says on standard output when what began and ended."""

    def say(name: str, begun: float) -> None:
        found = {"name": name, "start_s": begun, "end_s": time.time(), "parts": parts()}
        print("@" + json.dumps(found), flush=True)

    begun = time.time()
    import torch
    from common import build_tokenizer, prompt_ids, step_groups
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    import quartet
    from quartet.observe.progress import Progress
    from quartet.train import engine as train_engine

    owners: dict[str, list[Any]] = {"TrainEngine": [], "ComputeWeights": []}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            begun = time.time()
            found = work(*args, **options)
            say(name, begun)
            return found

        return inner

    def parts() -> dict[str, int]:
        trained = owners["TrainEngine"]
        parameters = [p for engine in trained for p in engine.packed.model.parameters()]
        return {
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
            "moments": sum(
                value.nbytes
                for engine in trained
                for state in engine.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ),
            "copies for decoding": sum(found.num_bytes for found in owners["ComputeWeights"]),
        }

    say("import", begun)
    train_engine.PackedPass.outputs = timed("forward", train_engine.PackedPass.outputs)  # type: ignore[method-assign]
    train_engine.clip_gradients = timed("clip", train_engine.clip_gradients)
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
    quartet.RLTrainer._step = _told(quartet.RLTrainer._step, say)  # type: ignore[method-assign]
    stack: list[float] = []
    register_optimizer_step_pre_hook(lambda *_: stack.append(time.time()))
    register_optimizer_step_post_hook(lambda *_: say("optimizer", stack.pop()))

    vocabulary = SIZES[job["model"]]["vocab_size"]
    tokenizer = build_tokenizer(vocabulary)
    prompts = [tokenizer.decode(ids) for ids in prompt_ids(step_groups(PROMPTS, RESPONSES, ANSWER), vocabulary)]
    begun = time.time()
    recipe = quartet.RLRecipe.model_validate(
        {
            "output_dir": job["run"],
            "threads": job["threads"],
            "actor": {"model": {"path": job["path"]}, "train": {"precision": "fp32", "optim": {"lr": 1e-6}}},
            "algorithm": {"name": "grpo", "kl": {"coef": job["kl"], "place": "loss", "estimator": "k3"}},
            "rollout": {"sampling": {"max_new_tokens": ANSWER}},
            "steps": job["steps"],
            "prompts_per_step": PROMPTS,
            "responses_per_prompt": RESPONSES,
            "checkpoint": {"every_steps": job["checkpoint_every"], "background": job["background"]},
        }
    )

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 7) for completion in completions]

    trainer = quartet.RLTrainer(recipe, tokenizer=tokenizer, rewards=[reward], prompts=prompts, progress=Progress())
    for found in gc.get_objects():
        owners.get(type(found).__name__, []).append(found)
    say("load and probe", begun)
    trainer.train()


def _told(step: Callable[..., Any], say: Callable[[str, float], None]) -> Any:
    async def told(self: Any, *args: Any) -> Any:
        begun = time.time()
        found = await step(self, *args)
        say("step", begun)
        now = time.time()
        time.sleep(0.1)  # long enough to be seen from outside
        say("between steps", now)
        return found

    return told


# What watches it ------------------------------------------------------------------------------------------


def watch(pid: int, samples: list[tuple[float, int, int]], ended: threading.Event) -> None:
    """``(time, bytes resident, bytes anonymous)`` until the process ends."""
    path = Path(f"/proc/{pid}/status")
    while not ended.is_set():
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, ProcessLookupError):
            return
        found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon"))}
        if len(found) == 2:
            samples.append((time.time(), 1024 * int(found["VmRSS"]), 1024 * int(found["RssAnon"])))
        time.sleep(0.004)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Peaks by stage, the parts at each stage's end, and seconds per step."""
    samples: list[tuple[float, int, int]] = []
    ended = threading.Event()
    process = subprocess.Popen(
        [sys.executable, str(HERE), "--run", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job["threads"])},
    )
    watcher = threading.Thread(target=watch, args=(process.pid, samples, ended))
    watcher.start()
    assert process.stdout is not None
    told = [json.loads(line[1:]) for line in process.stdout if line.startswith("@")]
    code = process.wait()
    ended.set()
    watcher.join()
    if code:
        raise SystemExit(f"the run ended with status {code}")
    spans = Path(job["run"], "spans.jsonl").read_text(encoding="utf-8").splitlines()
    told += [json.loads(line) for line in spans]
    peak = max(samples, key=lambda sample: sample[1])
    return {
        "peak_bytes": peak[1],
        "peak_anonymous_bytes": max(sample[2] for sample in samples),
        "peak_during": sorted({s["name"] for s in told if s["start_s"] <= peak[0] <= s["end_s"]}),
        "peak_parts": next((s["parts"] for s in sorted(told, key=_end) if "parts" in s and s["end_s"] >= peak[0]), {}),
        "step_s": [round(s["end_s"] - s["start_s"], 2) for s in told if s["name"] == "step"],
        "stages": list(_stages(told, samples)),
    }


def _end(stage: dict[str, Any]) -> float:
    return float(stage["end_s"])


def _stages(told: Sequence[dict[str, Any]], samples: Sequence[tuple[float, int, int]]) -> Iterator[dict[str, Any]]:
    """In order of their beginning."""
    for stage in sorted(told, key=lambda stage: stage["start_s"]):
        inside = [sample for sample in samples if stage["start_s"] <= sample[0] <= stage["end_s"]]
        if inside:
            yield {
                "name": stage["name"],
                "role": stage.get("role") or "",
                "seconds": stage["end_s"] - stage["start_s"],
                "peak_bytes": max(sample[1] for sample in inside),
                "end_bytes": inside[-1][1],
                "end_anonymous_bytes": inside[-1][2],
                "parts": stage.get("parts", {}),
            }


def table(found: dict[str, Any]) -> str:
    from common import markdown

    columns = ("parameters", "gradients", "moments", "copies for decoding")
    rows = [
        [
            f"{stage['name']} {stage['role']}".strip(),
            f"{stage['seconds']:.2f}",
            *(f"{stage[key] / GIB:.2f}" for key in ("peak_bytes", "end_bytes", "end_anonymous_bytes")),
            *(f"{stage['parts'][name] / GIB:.2f}" if name in stage["parts"] else "" for name in columns),
        ]
        for stage in found["stages"]
        if stage["seconds"] > 0.02
    ]
    return markdown(["stage", "s", "peak GiB", "at its end", "of it anonymous", *columns], rows)


# The model ------------------------------------------------------------------------------------------------


def saved(name: str, folder: Path) -> Path:
    """The random model as a Hugging Face directory; made in a process that then ends."""
    path = folder / name
    if not (path / "model.safetensors").exists():
        subprocess.run([sys.executable, str(HERE), "--save", json.dumps([name, str(path)])], check=True)
    return path


def save(name: str, path: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES[name],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,  # no answer ends before its last token
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


@contextmanager
def run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def options() -> argparse.ArgumentParser:
    from common import arguments

    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SIZES, default="qwen2-0.5b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient of the KL; above 0 there is a reference")
    parser.add_argument(
        "--checkpoint-every", type=int, default=1_000, help="steps; one is written at the end in any case"
    )
    parser.add_argument("--foreground", action="store_true", help="checkpoint.background: false")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        return run(json.loads(sys.argv[2]))
    if sys.argv[1:2] == ["--save"]:
        return save(*json.loads(sys.argv[2]))
    from common import machine, write_results
    from sides import work_folder

    args = options().parse_args()
    name = "smoke" if args.smoke else args.model
    with run_folder() as folder:
        found = measure(
            {
                "model": name,
                "path": str(saved(name, work_folder("models"))),
                "run": str(folder / "run"),
                "threads": args.threads,
                "steps": args.steps,
                "kl": args.kl,
                "checkpoint_every": args.checkpoint_every,
                "background": not args.foreground,
            }
        )
    write_results(args, {"model": name, "kl": args.kl, **found})
    print(table(found))
    about = machine(args.threads)
    print(f"\n{about['processor']}, {about['cores']} cores, {args.threads} threads, torch {about['torch']}")
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in found["peak_parts"].items())
    print(f"peak {found['peak_bytes'] / GIB:.2f} GiB ({found['peak_anonymous_bytes'] / GIB:.2f} anonymous)")
    print(f"  during {', '.join(found['peak_during'])}; {parts}")
    print(f"seconds per step: {found['step_s']}, median {statistics.median(found['step_s']):.1f}")


if __name__ == "__main__":
    main()
