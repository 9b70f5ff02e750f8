"""Tokens per second of the native rollout engine against ``model.generate`` on padded batches.

    python benchmarks/rollout.py --threads 2 --repeats 5

Both generate the same number of tokens for the same prompts from one random Qwen-2 of 1.8 million
parameters, by sampling at temperature 1. ``generate`` gets batches of 64, left-padded, with its own
key/value cache; a batch runs until its longest response is done. The lengths are given: "equal" gives every
response the same, "mixed" lengths from 4 to 36, of which ``generate`` computes the longest of each batch
for all.

``--cpu-time`` divides by processor seconds of this process instead of elapsed ones, for a machine that is
shared.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from quartet.models.packed import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams
from quartet.rollout.seeds import sample_seed

VOCAB = 512
GROUP_SIZE = 8
BATCH = 64


def build_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return Qwen2ForCausalLM(config).eval()


def build_requests(num: int, lengths: Sequence[int]) -> list[Request]:
    """Groups of eight; prompts of 12 to 27 tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(0, VOCAB, (12 + i % 16,), generator=generator).tolist())
        for i in range(-(-num // GROUP_SIZE))
    ]
    requests = []
    for i in range(num):
        group, member = divmod(i, GROUP_SIZE)
        sampling = SamplingParams(max_new_tokens=lengths[i], seed=sample_seed(0, 0, group, member))
        requests.append(Request(f"{group}.{member}", str(group), prompts[group], sampling))
    return requests


def with_engine(engine: NativeEngine, requests: Sequence[Request]) -> None:
    engine.submit(requests)
    while engine.has_work:
        engine.step()


@torch.no_grad()
def with_generate(model: PreTrainedModel, requests: Sequence[Request]) -> None:
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        longest = max(len(r.prompt_ids) for r in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(r.sampling.max_new_tokens for r in batch),
            pad_token_id=0,
            eos_token_id=[],
        )


def median_seconds(work: Callable[[], None], repeats: int, clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    model = build_model()
    engine = NativeEngine(PackedCausalLM(copy.deepcopy(model)), max_running=BATCH)
    table = Table("lengths", "tokens", "native tok/s", "generate tok/s", "speed-up", title=f"{args.threads} threads")
    for name, lengths in {
        "equal": [20] * args.requests,
        "mixed": [4 + (13 * i) % 33 for i in range(args.requests)],
    }.items():
        requests = build_requests(args.requests, lengths)
        tokens = sum(lengths)
        native = tokens / median_seconds(lambda r=requests: with_engine(engine, r), args.repeats, clock)
        theirs = tokens / median_seconds(lambda r=requests: with_generate(model, r), args.repeats, clock)
        table.add_row(name, str(tokens), f"{native:,.0f}", f"{theirs:,.0f}", f"{native / theirs:.2f} ×")
    Console().print(table)


if __name__ == "__main__":
    main()
