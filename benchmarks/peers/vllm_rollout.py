"""vLLM's offline engine: prompts as token ids, no text, prefixes cached within a turn and forgotten between turns.

``job["in_process"]`` runs scheduler and model in this process, without copies between processes; ``job["asked"]`` asks
for a seed of each request and the log-probability of each token.
"""

from __future__ import annotations

import os
import time
from typing import Any

from turns import Turns, mapping_resident_bytes

BLOCK = 32


def main(turns: Turns) -> None:
    """Nothing runs at import: processes that vLLM starts import this file, too."""
    job = turns.job
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: job["threads"]])
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if job["in_process"] else "1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        GOMP_CPU_AFFINITY=cores.replace(",", " "),
    )
    import torch
    from vllm import LLM, SamplingParams

    if job["in_process"]:
        torch.set_num_threads(job["threads"])
    longest = max(map(len, job["prompts"])) + max(job["lengths"])
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=job["eager"],
        max_num_seqs=job["max_running"],
        max_num_batched_tokens=job["prefill_tokens"],
        max_model_len=-(-longest // BLOCK) * BLOCK,
        block_size=BLOCK,
        num_gpu_blocks_override=-(-job["cache_tokens"] // BLOCK),
        # Only has to be large enough: the number of blocks decides.
        kv_cache_memory_bytes=2 * job["cache_tokens"] * job["cache_bytes_per_token"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        seed=0,
    )

    def asked(i: int) -> dict[str, int]:
        return {"seed": 7919 * i, "logprobs": 0} if job.get("asked") else {}

    def generate(requests: list[tuple[list[int], int]]) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, **asked(i))
                for i, (_, length) in enumerate(requests)
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    requests = list(zip(job["prompts"], job["lengths"], strict=True))
    generate([(prompt, 8) for prompt, _ in requests[: job["max_running"]]])
    turns.report()
    while turns.wait():
        begun = time.perf_counter()
        tokens = generate(requests)
        seconds = time.perf_counter() - begun
        if tokens != sum(job["lengths"]):
            raise RuntimeError(f"{tokens} tokens instead of {sum(job['lengths'])}")
        # In another process nobody can look; the whole budget is then the most that the cache may take.
        budget = job["cache_tokens"] * job["cache_bytes_per_token"]
        turns.report(seconds=seconds, tokens=tokens, cache_bytes=cache_bytes(llm) if job["in_process"] else budget)


def cache_bytes(llm: Any) -> int:
    """What of the key/value cache is really in memory."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    caches = {cache.untyped_storage().data_ptr() for cache in runner.kv_caches}
    return sum(mapping_resident_bytes(address) for address in caches)


if __name__ == "__main__":
    main(Turns())
