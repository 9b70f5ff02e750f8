"""Our side of ``rollout.py``: the native engine, its cache forgotten between turns as after a weight update."""

from __future__ import annotations

import time

from peers.turns import Turns

turns = Turns()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quartet.models.packed_model import PackedCausalLM  # noqa: E402
from quartet.rollout.engine import NativeEngine  # noqa: E402
from quartet.rollout.protocol import Request, SamplingParams  # noqa: E402
from quartet.rollout.sampler import sample_seed  # noqa: E402

job = turns.job
torch.set_num_threads(job["threads"])
# As a trainer shares it with its engine: fp32 weights, computed in the precision of the run.
precision = {"float32": "fp32", "bfloat16": "bf16"}[job["dtype"]]
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
engine = NativeEngine(
    PackedCausalLM(model, precision, numerics=job.get("numerics", "fast")),
    max_running=job["max_running"],
    max_prefill_tokens=job["prefill_tokens"],
    cache_tokens=job["cache_tokens"],
)


peak = [0]
"""Most bytes of the cache in any step."""


def generate(lengths: list[int], version: int) -> int:
    """Requests with equal prompts are one group. Returns the number of tokens."""
    engine.update_weights(None, version)
    groups: dict[tuple[int, ...], int] = {}
    requests = []
    for i, (prompt, length) in enumerate(zip(job["prompts"], lengths, strict=False)):
        group = groups.setdefault(tuple(prompt), len(groups))
        sampling = SamplingParams(max_new_tokens=length, seed=sample_seed(0, version, group, i))
        requests.append(Request(str(i), str(group), tuple(prompt), sampling))
    engine.submit(requests)
    tokens = 0
    while engine.has_work:
        tokens += sum(len(completion.token_ids) for completion in engine.step())
        peak[0] = max(peak[0], engine.stats().cache_bytes)
    return tokens


generate([8] * job["max_running"], 0)
turns.report()
version = 1
while turns.wait():
    steps = engine.stats().num_steps
    begun = time.perf_counter()
    tokens = generate(job["lengths"], version)
    seconds = time.perf_counter() - begun
    if tokens != sum(job["lengths"]):
        raise RuntimeError(f"{tokens} tokens instead of {sum(job['lengths'])}")
    stats = engine.stats()
    turns.report(seconds=seconds, tokens=tokens, steps=stats.num_steps - steps, cache_bytes=peak[0])
    version += 1
