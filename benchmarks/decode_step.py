"""Milliseconds of a decode step with merged decoder layers (rollout/merged_layers.py) and with layers as they are.

    python benchmarks/decode_step.py [--models tiny small] [--rows 8 32 64]

Requests of 24 prompt tokens, each prompt its own, all running; steps of both engines take turns, so that both meet the
same machine. Medians over the steps from 32 to 96 new tokens.
"""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest import mock

import torch
from common import MODELS, arguments, build_model, markdown, write_results

from quartet.models.packed import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.merged_layers import MergedLayers
from quartet.rollout.protocol import Request, SamplingParams

PROMPT, FIRST, LAST = 24, 32, 96


def engine_of(model: str, rows: int, smoke: bool) -> NativeEngine:
    """An engine in which all requests run."""
    packed = PackedCausalLM(build_model(model))
    engine = NativeEngine(packed, max_running=rows)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, packed.vocab_size, (rows, PROMPT), generator=draw).tolist()
    sampling = [SamplingParams(max_new_tokens=LAST + 1, seed=i) for i in range(rows)]
    engine.submit([Request(f"r{i}", f"g{i}", tuple(prompts[i]), sampling[i]) for i in range(rows)])
    for _ in range(2 if smoke else FIRST):
        engine.step()
    return engine


def measure(model: str, rows: int, smoke: bool) -> dict[str, Any]:
    merged = engine_of(model, rows, smoke)
    with mock.patch.object(MergedLayers, "merge", return_value=None):
        apart = engine_of(model, rows, smoke)
    times: dict[str, list[float]] = {"merged": [], "apart": []}
    for _ in range(2 if smoke else LAST - FIRST):
        for name, engine in (("merged", merged), ("apart", apart)):
            begun = time.perf_counter()
            engine.step()
            times[name].append(time.perf_counter() - begun)
    return {"model": model, "rows": rows, **{name: 1e3 * statistics.median(found) for name, found in times.items()}}


def table(parts: list[dict[str, Any]]) -> str:
    rows = [
        [p["model"], str(p["rows"]), f"{p['apart']:.1f}", f"{p['merged']:.1f}", f"{p['apart'] / p['merged']:.2f}"]
        for p in parts
    ]
    return markdown(["model", "running", "as they are, ms", "merged, ms", "ratio"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for model in args.models:
        for rows in args.rows:
            parts.append(measure(model, rows, args.smoke))
            write_results(args, {"decode_step": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
