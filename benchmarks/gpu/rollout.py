"""Generation with 256 requests running: time of a decode step against the bytes it must read, and ``generate``."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from machine import peak_memory, seconds_of, synchronize
from shapes import build, config_of, decode_bytes
from transformers import PreTrainedModel

from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams

RUNNING, PER_PROMPT, PROMPT, NEW = 256, 8, 512, 128
WARM_UP = 8
"""Tokens of the requests that compile everything before the clock starts."""


def sizes(smoke: bool) -> tuple[int, int, int, int]:
    return (8, 4, 10, 12) if smoke else (RUNNING, PER_PROMPT, PROMPT, NEW)


def requests(vocab_size: int, new: int, *, smoke: bool, seed: int = 0, tag: str = "") -> list[Request]:
    running, per_prompt, prompt, _ = sizes(smoke)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocab_size, (running // per_prompt, prompt), generator=generator).tolist()
    return [
        Request(f"{tag}{g}-{i}", f"{tag}{g}", tuple(tokens), SamplingParams(max_new_tokens=new, seed=g * 1000 + i))
        for g, tokens in enumerate(ids)
        for i in range(per_prompt)
    ]


def run(engine: NativeEngine, asked: list[Request]) -> int:
    """Tokens generated."""
    engine.submit(asked)
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(completion.token_ids) for completion in engine.step())
    return num_tokens


def engine_of(name: str, device: torch.device, *, smoke: bool) -> NativeEngine:
    packed = PackedCausalLM(build(name, device), "bf16")
    return NativeEngine(packed, max_running=sizes(smoke)[0])


def measure_engine(name: str, device: torch.device, *, rate: float, smoke: bool) -> dict[str, Any]:
    """Tokens per second of the whole (prompts included), and the middle half of the decode steps by themselves."""
    config = config_of(name)
    running, _, prompt, new = sizes(smoke)
    engine = engine_of(name, device, smoke=smoke)
    # Kernels are chosen and compiled, with as many rows as the clock sees.
    run(engine, requests(config.vocab_size, WARM_UP, smoke=smoke, seed=1, tag="warm "))
    peak_memory(device)
    whole = seconds_of(lambda: run(engine, requests(config.vocab_size, new, smoke=smoke, tag="whole ")), device)
    engine.submit(requests(config.vocab_size, new, smoke=smoke, tag="steps "))
    for _ in range(new // 4):
        engine.step()
    num_steps = new // 2
    step_s = seconds_of(lambda: [engine.step() for _ in range(num_steps)], device) / num_steps
    while engine.has_work:
        engine.step()
    context = prompt + new / 4 + num_steps / 2
    bound = decode_bytes(config, running, context) / rate
    found = {
        "model": name,
        "tokens_per_s": running * new / whole,
        "step_s": step_s,
        "bound_s": bound,
        "share_of_bound": bound / step_s,
        "cache_bytes": engine.stats().cache_bytes,
        "peak_bytes": peak_memory(device),
    }
    engine.release_cache()
    return found


@torch.no_grad()
def measure_generate(name: str, device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """transformers' ``generate`` on a bf16 copy, one batch of equal lengths: nothing of it is padding or finished."""
    running, _, _, new = sizes(smoke)
    model: PreTrainedModel = build(name, device, torch.bfloat16)
    ids = torch.tensor([r.prompt_ids for r in requests(config_of(name).vocab_size, new, smoke=smoke)], device=device)

    def work(num_new: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=num_new, max_new_tokens=num_new,
        )  # fmt: skip

    work(WARM_UP)
    synchronize(device)
    peak_memory(device)
    seconds = seconds_of(lambda: work(new), device)
    return {"model": name, "tokens_per_s": running * new / seconds, "peak_bytes": peak_memory(device)}


def measure(name: str, device: torch.device, *, rate: float, smoke: bool) -> dict[str, Any]:
    engines = [measure_engine(name, device, rate=rate, smoke=smoke)]
    gc.collect()
    with contextlib.suppress(AttributeError):
        torch.cuda.empty_cache()
    generate = measure_generate(name, device, smoke=smoke)
    for found in engines:
        found["times_generate"] = found["tokens_per_s"] / generate["tokens_per_s"]
    return {"engine": engines, "generate": generate}
