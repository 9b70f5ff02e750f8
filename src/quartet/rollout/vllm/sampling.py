"""The native engine's sampler in vLLM's workers. Imported only where vLLM is installed.

A token is then a function of its distribution, its request's seed and its place, as everywhere here: vLLM's own
generators keep a state, which prompts computed in pieces advance, cost a call per request and step, and leave
log-probabilities of the truncated distribution alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, sample

SAMPLING = "quartet_sampling"
"""The key of a request's ``SamplingParams`` among the extra arguments that vLLM passes on."""


class SeededSampler(Sampler):
    """
    Args:
        runner: vLLM's model runner, whose requests stand in the order of the logits' rows.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._params: list[SamplingParams] = []
        self._rows: SamplingRows | None = None

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """``logits [B, V]`` → a token of each row and its log-probability."""
        states = [self._runner.requests[name] for name in self._runner.input_batch.req_ids]
        params = [state.sampling_params.extra_args[SAMPLING] for state in states]
        if self._rows is None or params != self._params:
            self._params, self._rows = params, SamplingRows.build(params, logits.shape[1], logits.device)
        places = np.array([len(state.output_token_ids) for state in states], dtype=np.uint64)
        tokens, logprobs = sample(logits.float(), self._rows, places)
        tokens = tokens.to(torch.int32).unsqueeze(1)
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs.unsqueeze(1), torch.zeros_like(tokens[:, 0])))
