"""Peak memory of the process that starts an RL run on Ray, by the size of the model: it should not depend on it.

    python benchmarks/driver_memory.py [--sizes 2 28 300] [--source src]

GRPO without a reference, one step of four short answers, on random models of about so many million parameters (fp32).
Actor and engine share one worker; with 300 million it needs about 6 GiB. Every size is a process of its own:
``imported`` is what it held before the trainer was made, ``peak`` the most it ever held, in MiB. ``--source`` measures
another tree, the one before a change, say.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {2: (128, 512, 8), 28: (384, 1536, 12), 300: (1024, 2816, 24)}
"""Millions of parameters → width, width of the MLP, layers."""


def make_model(path: Path, size: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from quartet.extras.quickstart.tokenizer import build_tokenizer

    width, inner, layers = SHAPES[size]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def run(path: Path) -> None:
    """One run in this process; prints what it held, in MiB, and seconds."""
    import resource

    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    from quartet.config.recipe import RLRecipe
    from quartet.trainers.rl import RLTrainer

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    recipe = RLRecipe.model_validate(
        {
            "actor": {"model": {"path": str(path)}},
            "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
            "rollout": {"sampling": {"max_new_tokens": 4}},
            "steps": 1,
            "prompts_per_step": 2,
            "responses_per_prompt": 2,
            "threads": 1,
            "placement": {"type": "pipelined", "pools": {"policy": {"roles": ["rollout", "actor"]}}},
            "cluster": {"type": "ray", "cpus_per_process": 0.1},
            "output_dir": str(path.parent / f"run-{path.name}"),
        },
    )
    imported, begun = peak(), time.perf_counter()
    trainer = RLTrainer(recipe, prompts=["1+2=", "3+4="], rewards=_length)
    made = peak()
    trainer.train()
    figures = {"imported": imported, "trainer made": made, "peak": peak(), "seconds": time.perf_counter() - begun}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


def _length(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [float(len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--make", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        return make_model(options.run, options.make) if options.make else run(options.run)
    environment = {**os.environ, "PYTHONPATH": str(options.source.resolve()), "TRANSFORMERS_VERBOSITY": "error"}
    print(f"{'M parameters':>12}  {'imported':>9} {'made':>9} {'peak':>9} MiB  {'seconds':>7}")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / str(size)
            command = [sys.executable, __file__, "--run", str(path)]
            subprocess.run([*command, "--make", str(size)], env=environment, check=True, stdout=subprocess.DEVNULL)
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{size:12d}  {found['imported']:9.0f} {found['trainer made']:9.0f} {found['peak']:9.0f} MiB"
            f"  {found['seconds']:7.1f}",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
