"""The native engine against ``model.generate`` and a full forward of an unmodified model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quartet.rollout.protocol import Completion, Request

Tolerances = dict[torch.dtype, tuple[float, float]]


def test_greedy_equals_generate_token_for_token(
    family: Any,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: Tolerances,
) -> None:
    """Each prompt alone through ``generate``; here all together. Sequences outgrow Gemma-2's window of 7."""
    requests = [
        make_request(f"r{i}", length=length, temperature=0.0, max_new_tokens=25)
        for i, length in enumerate((1, 2, 3, 5, 8, 8, 13, 21, 40))
    ]
    done = run_all(family.engine(max_running=6), requests)
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = done[request.request_id]
        prompt = torch.tensor([request.prompt_ids])
        theirs = family.twin.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=25,
            pad_token_id=0,
            eos_token_id=[],
        )
        assert list(ours.token_ids) == theirs[0, len(request.prompt_ids) :].tolist()
        expected = family.logprobs(request.prompt_ids, ours.token_ids)
        torch.testing.assert_close(torch.tensor(ours.logprobs), expected, atol=atol, rtol=rtol)


def test_sampled_logprobs_equal_a_full_forward(
    family: Any,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: Tolerances,
) -> None:
    """Temperature counts, truncation does not."""
    options = [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.6},
    ]
    requests = [
        make_request(f"r{i}.{j}", group=f"g{i}", length=3 + 5 * i, seed=10 * i + j, max_new_tokens=20, **option)
        for i in range(4)
        for j, option in enumerate(options)
    ]
    done = run_all(family.engine(max_running=5), requests)
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = done[request.request_id]
        expected = family.logprobs(request.prompt_ids, ours.token_ids, request.sampling.temperature)
        torch.testing.assert_close(torch.tensor(ours.logprobs), expected, atol=atol, rtol=rtol)
    assert len({c.token_ids for c in done.values()}) == len(requests)
