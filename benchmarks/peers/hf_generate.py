"""transformers' ``model.generate`` on left-padded batches; a batch runs until its longest response is done."""

from __future__ import annotations

import time

from turns import Turns

turns = Turns()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def generate(model: torch.nn.Module, requests: list[tuple[list[int], int]], batch_size: int) -> None:
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        wanted = max(length for _, length in batch)
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=wanted, pad_token_id=0, eos_token_id=[]
        )
        if out.shape[1] - longest != wanted:
            raise RuntimeError(f"{out.shape[1] - longest} new tokens instead of {wanted}")


job = turns.job
torch.set_num_threads(job["threads"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
requests = list(zip(job["prompts"], job["lengths"], strict=True))
with torch.no_grad():
    generate(model, [(prompt, 4) for prompt, _ in requests[: job["max_running"]]], job["max_running"])
    turns.report()
    while turns.wait():
        begun = time.perf_counter()
        generate(model, requests, job["max_running"])
        turns.report(seconds=time.perf_counter() - begun, tokens=sum(job["lengths"]))
