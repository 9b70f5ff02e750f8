"""What each fusion on the CPU saves of a decode step and of an update, and the bytes that it holds.

    python benchmarks/fusions.py --threads 1 [--models tiny small] [--rows 8 64]

Kernels of ``extras/cpu_kernels``: ``norms`` are normalisation and rotary embedding in fewer passes (decode steps and
updates), ``layers`` decoder layers as few operations, ``forms`` weights in the order that their product reads (both
decode steps only). Each variant goes without one of them, ``none``
without all. A decode step has ``--rows`` running requests with a prompt of 24 tokens each; an update is forward, loss
and backward of ``--tokens`` tokens in sequences of 128. Variants take turns in one process. Shown are medians of
processor seconds of this process, so that other programs disturb little, and how much longer than with all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from common import MODELS, arguments, build_model, markdown, write_results

from quartet.extras.cpu_kernels import fused, merged_layers
from quartet.extras.cpu_kernels.merged_layers import MergedLayers
from quartet.models.attention import PackedAttention
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import keep_dtype
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams

PROMPT, FIRST, LAST, LENGTH = 24, 32, 96, 128
VARIANTS = {
    "all": (),
    "norms": ("norms",),
    "layers": ("layers",),
    "forms": ("forms",),
    "none": ("norms", "layers", "forms"),
}


@contextlib.contextmanager
def without(fusions: tuple[str, ...]) -> Iterator[None]:
    """Models and engines that are built and take their first step within go without ``fusions``."""
    with contextlib.ExitStack() as stack:
        if "norms" in fusions:
            stack.enter_context(mock.patch.object(fused, "install_fused", return_value=[]))
        if "layers" in fusions:
            stack.enter_context(mock.patch.object(MergedLayers, "merge", return_value=None))
        if "forms" in fusions:
            stack.enter_context(mock.patch.object(merged_layers, "is_packed_best", return_value=False))
            stack.enter_context(mock.patch.object(merged_layers, "plain_form", return_value=keep_dtype))
        yield


def decode_step(model: str, rows: int, fusions: tuple[str, ...], smoke: bool) -> NativeEngine:
    """An engine in which all requests run."""
    with without(fusions):
        packed = PackedCausalLM(build_model(model))
        engine = NativeEngine(packed, max_running=rows)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, packed.vocab_size, (rows, PROMPT), generator=draw).tolist()
        sampling = [SamplingParams(max_new_tokens=LAST + 1, seed=i) for i in range(rows)]
        engine.submit([Request(f"r{i}", f"g{i}", tuple(prompts[i]), sampling[i]) for i in range(rows)])
        for _ in range(2 if smoke else FIRST):
            engine.step()
    return engine


def update(model: str, num_tokens: int, fusions: tuple[str, ...]) -> Callable[[], object]:
    with without(fusions):
        packed = PackedCausalLM(build_model(model))
    num = num_tokens // LENGTH
    ids = torch.randint(3, packed.vocab_size, (num * LENGTH,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).repeat(num)

    def step() -> None:
        hidden = packed.hidden(ids, positions, PackedAttention([LENGTH] * num))
        packed.token_logprobs(hidden, ids)[0].mean().backward()
        packed.model.zero_grad()

    return step


def medians(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor milliseconds per call; every round takes each once, and the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(repeats + 1):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            if i:
                times[name].append(time.process_time() - begun)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def measure_decode(model: str, rows: int, smoke: bool) -> dict[str, Any]:
    engines = {name: decode_step(model, rows, fusions, smoke) for name, fusions in VARIANTS.items()}
    found = medians({name: engine.step for name, engine in engines.items()}, 1 if smoke else LAST - FIRST - 1)
    held = {name: engine._weights.num_bytes for name, engine in engines.items()}
    return {"model": model, "step": f"decode, {rows} running", "ms": found, "copies_bytes": held}


def measure_update(model: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    found = medians({name: update(model, num_tokens, VARIANTS[name]) for name in ("all", "norms")}, repeats)
    return {"model": model, "step": f"update, {num_tokens} tokens", "ms": found}


def table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        ms = part["ms"]
        more = [f"{100 * (ms[name] / ms['all'] - 1):+.0f} %" if name in ms else "–" for name in list(VARIANTS)[1:]]
        held = f"{part['copies_bytes']['all'] / 1e6:.1f}" if "copies_bytes" in part else "–"
        rows.append([part["model"], part["step"], f"{ms['all']:.1f}", *more, held])
    header = ["model", "step", "all, ms", *(f"without {name}" for name in list(VARIANTS)[1:-1]), "none", "copies, MB"]
    return markdown(header, rows)


def main() -> None:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.repeats, args.tokens = 1, 2 * LENGTH
    parts = []
    for model in args.models:
        parts += [measure_decode(model, rows, args.smoke) for rows in args.rows]
        parts.append(measure_update(model, args.tokens, args.repeats))
        write_results(args, {"fusions": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
