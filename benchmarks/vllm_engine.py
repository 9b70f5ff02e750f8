"""Our side of ``engines.py``: vLLM as rollout engine, in a process behind a router, with new weights in every turn."""

from __future__ import annotations

import os
import time

from peers.environments import python_of
from peers.turns import Turns

turns = Turns()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quartet.rollout.process import EngineProcess, EngineSpec  # noqa: E402
from quartet.rollout.protocol import Request, SamplingParams  # noqa: E402
from quartet.rollout.router import Router  # noqa: E402
from quartet.rollout.sampler import sample_seed  # noqa: E402
from quartet.rollout.staging import StagedWeights  # noqa: E402
from quartet.weights.sink import write_weights  # noqa: E402

BLOCK = 32

job = turns.job
torch.set_num_threads(job["threads"])
dtype = getattr(torch, job["dtype"])
cores = [str(core) for core in sorted(os.sched_getaffinity(0))[: job["threads"]]]
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
longest = max(map(len, job["prompts"])) + max(job["lengths"])
spec = EngineSpec(
    "quartet.rollout.vllm.start:make_vllm_engine",
    {
        "path": job["model"],
        "dtype": job["dtype"],
        "version": None,
        "max_num_seqs": job["max_running"],
        "max_model_len": -(-longest // BLOCK) * BLOCK,
        "cache_bytes": 2 * job["cache_tokens"] * job["cache_bytes_per_token"],
        "enforce_eager": job["eager"],
        "engine_args": {
            "max_num_batched_tokens": job["prefill_tokens"],
            "num_gpu_blocks_override": -(-job["cache_tokens"] // BLOCK),
        },
    },
    python=str(python_of("vllm")),
    environment={
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(cores),
        "GOMP_CPU_AFFINITY": " ".join(cores),
        "HF_HUB_OFFLINE": "1",
    },
)
staging = StagedWeights(model.named_parameters(remove_duplicate=False))
router = Router([EngineProcess(spec, staging)], max_outstanding=len(job["prompts"]))


def update(version: int) -> float:
    """Seconds of sending every weight."""
    begun = time.perf_counter()
    router.pause()
    write_weights(router.weight_sink(), model.named_parameters(), version)
    router.resume()
    return time.perf_counter() - begun


def generate(lengths: list[int], version: int) -> int:
    """Requests with equal prompts are one group. Returns the number of tokens."""
    groups: dict[tuple[int, ...], int] = {}
    requests = []
    for i, (prompt, length) in enumerate(zip(job["prompts"], lengths, strict=False)):
        group = groups.setdefault(tuple(prompt), len(groups))
        sampling = SamplingParams(max_new_tokens=length, seed=sample_seed(0, version, group, i))
        requests.append(Request(str(i), str(group), tuple(prompt), sampling))
    router.submit(requests)
    tokens = done = 0
    while done < len(requests):
        completions = router.completed(1.0)
        done += len(completions)
        tokens += sum(len(completion.token_ids) for completion in completions)
    return tokens


version = 1
update(version)
generate([8] * job["max_running"], version)
turns.report()
while turns.wait():
    version += 1
    begun = time.perf_counter()
    update_s = update(version)
    tokens = generate(job["lengths"], version)
    seconds = time.perf_counter() - begun
    if tokens != sum(job["lengths"]):
        raise RuntimeError(f"{tokens} tokens instead of {sum(job['lengths'])}")
    turns.report(seconds=seconds, tokens=tokens, update_s=update_s)
router.close()
staging.close()
