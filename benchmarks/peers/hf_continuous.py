"""transformers' continuous batching: every request with its own length, as many at once as the other sides run."""

from __future__ import annotations

import time

from turns import Turns

turns = Turns()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402

PAGE = 32

job = turns.job
torch.set_num_threads(job["threads"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
generation = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(job["lengths"]), eos_token_id=-1)
config = ContinuousBatchingConfig(
    page_size=PAGE,
    num_blocks=-(-job["cache_tokens"] // PAGE),
    max_batch_tokens=job["prefill_tokens"],
    max_requests_per_batch=job["max_running"],
    max_blocks_per_request=0,
)


def generate(requests: list[tuple[list[int], int]]) -> tuple[int, float]:
    """Tokens, and seconds from the first request to the last result: starting the manager is not counted."""
    tokens = 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        begun = time.perf_counter()
        for prompt, length in requests:
            manager.add_request(prompt, max_new_tokens=length)
        for _ in requests:
            result = None
            while result is None:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended early")
            if result.error:
                raise RuntimeError(result.error)
            tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - begun
    return tokens, seconds


requests = list(zip(job["prompts"], job["lengths"], strict=True))
generate([(prompt, 4) for prompt, _ in requests[: job["max_running"]]])
turns.report()
while turns.wait():
    tokens, seconds = generate(requests)
    if tokens != sum(job["lengths"]):
        raise RuntimeError(f"{tokens} tokens instead of {sum(job['lengths'])}")
    turns.report(seconds=seconds, tokens=tokens)
