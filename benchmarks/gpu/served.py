"""vLLM as rollout engine on one GPU: tokens per second, an update, and the bytes that sleep gives back.

    python benchmarks/gpu/served.py --python VLLM_ENV/bin/python --out results [--model 0.5B] [--smoke]

``--python`` is the interpreter of an environment with vLLM. Writes ``results/served.json``. ``--smoke`` runs a tiny
model with vLLM's CPU build, to see that it runs; nothing is given back there, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from packages import ensure_packages


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="0.5B")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args(argv)


def used_bytes() -> int:
    """Of the GPU, by everybody."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    from rollout import requests
    from shapes import build, config_of
    from transformers import Qwen2ForCausalLM

    from quartet.rollout.process import EngineProcess, EngineSpec
    from quartet.rollout.router import Router
    from quartet.rollout.staging import StagedWeights
    from quartet.weights.sink import write_weights

    if args.smoke:
        config = config_of("smoke")
        config.num_attention_heads = config.num_key_value_heads = 1  # of a size that attention on CPUs has
        model = Qwen2ForCausalLM(config).bfloat16()
    else:
        model = build(args.model, torch.device("cpu"), torch.bfloat16)
    model.save_pretrained(path)
    options: dict[str, Any] = {"cache_bytes": 1 << 26, "enforce_eager": True} if args.smoke else {}
    kwargs = {"path": str(path), "dtype": "bfloat16", "version": None, "max_num_seqs": 256, "sleep": True, **options}
    spec = EngineSpec("quartet.rollout.vllm.start:make_vllm_engine", kwargs, python=args.python)
    staging = StagedWeights(model.named_parameters(remove_duplicate=False))
    router = Router([EngineProcess(spec, staging)], max_outstanding=512)
    version = 0

    def update() -> float:
        nonlocal version
        version += 1
        begun = time.perf_counter()
        router.pause()
        write_weights(router.weight_sink(), model.named_parameters(), version)
        router.resume()
        return time.perf_counter() - begun

    def generate(new: int, tag: str) -> tuple[float, list[tuple[float, ...]]]:
        """Tokens per second, and log-probabilities by request."""
        asked = requests(model.config.vocab_size, new, smoke=args.smoke, tag=tag)
        begun = time.perf_counter()
        router.submit(asked)
        done: dict[str, tuple[float, ...]] = {}
        while len(done) < len(asked):
            done |= {completion.request_id: completion.logprobs for completion in router.completed(1.0)}
        return len(asked) * new / (time.perf_counter() - begun), [done[request.request_id] for request in asked]

    def asleep(level: Literal[1, 2]) -> dict[str, float]:
        router.pause()
        awake = used_bytes()
        begun = time.perf_counter()
        router.sleep(level)
        slept = time.perf_counter()
        given_back = awake - used_bytes()
        router.wake()
        woken = time.perf_counter()
        router.resume()
        return {"given_back_bytes": given_back, "sleep_s": slept - begun, "wake_s": woken - slept}

    new = 12 if args.smoke else 512
    update()
    expected = generate(8, "warm ")[1]
    found: dict[str, Any] = {"model": args.model, "tokens_per_s": generate(new, "whole ")[0]}
    found["update_s"] = sorted(update() for _ in range(5))[2]
    for level in (1, 2):
        found[f"sleep_{level}"] = asleep(level)
        if level == 2:
            update()
        after = generate(8, f"after {level} ")[1]
        found[f"sleep_{level}"]["logprob_difference"] = max(
            abs(a - b) for one, other in zip(expected, after, strict=True) for a, b in zip(one, other, strict=True)
        )
    router.close()
    staging.close()
    return found


def main(argv: list[str]) -> None:
    ensure_packages()
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "served.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
