"""The native engine's sampler in vLLM's workers. Imported only where vLLM is installed.

A token is then a function of its distribution, its request's seed and its place, as everywhere here: vLLM's own
generators keep a state, which prompts computed in pieces advance, cost a call per request and step, and leave
log-probabilities of the truncated distribution alone.

So a drafted token is kept where it is the one that is drawn there, as in the native engine: vLLM's rejection sampler,
whose random numbers would decide, is replaced, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from quartet.models.memory import to_device
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
        tokens, logprobs = self.draw(logits, [1] * len(logits))
        return _output(tokens.unsqueeze(1), logprobs)

    def draw(self, logits: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draws the next tokens of every request, whose rows of ``logits [N, V]`` follow each other.

        Args:
            counts: ``[B]`` rows of each request, N in all.

        Returns:
            ``tokens [N]`` int32 and ``logprobs [N]`` fp32.
        """
        states = [self._runner.requests[name] for name in self._runner.input_batch.req_ids]
        rows = [(state, i) for state, count in zip(states, counts, strict=True) for i in range(count)]
        params = [state.sampling_params.extra_args[SAMPLING] for state, _ in rows]
        if self._rows is None or params != self._params:
            self._params, self._rows = params, SamplingRows.build(params, logits.shape[1], logits.device)
        places = np.array([len(state.output_token_ids) + i for state, i in rows], dtype=np.uint64)
        tokens, logprobs = sample(logits.float(), self._rows, places)
        return tokens.to(torch.int32), logprobs


class SeededVerifier(nn.Module):
    """Takes the place of vLLM's rejection sampler: keeps the drafted tokens that are drawn anyway, and one more.

    Args:
        sampler: that draws.
    """

    def __init__(self, sampler: SeededSampler) -> None:
        super().__init__()
        self._sampler = sampler

    def forward(self, metadata: SpecDecodeMetadata, _probs: Tensor | None, logits: Tensor, _: Any) -> SamplerOutput:
        """``logits [N, V]``, of each request behind its newest token and behind each drafted one, → ``[B, K + 1]``
        tokens, placeholders behind the first that was not drafted so.
        """
        device, longest = logits.device, metadata.max_spec_len
        counts = to_device(torch.tensor(metadata.num_draft_tokens), device).unsqueeze(1)
        offsets = torch.arange(longest + 1, device=device)
        tokens, logprobs = self._sampler.draw(logits, [1 + n for n in metadata.num_draft_tokens])
        drawn = tokens.new_full((len(counts), longest + 1), PLACEHOLDER_TOKEN_ID)
        found = logprobs.new_zeros(drawn.shape)
        drafted = torch.full_like(drawn[:, :-1], PLACEHOLDER_TOKEN_ID)
        drawn[offsets <= counts] = tokens
        found[offsets <= counts] = logprobs
        drafted[offsets[:-1] < counts] = metadata.draft_token_ids.to(torch.int32)
        kept = (drawn[:, :-1] == drafted).cumprod(1).sum(1, keepdim=True)
        # Behind a draft's end nothing equals: there a token is drawn, or none.
        drawn[offsets > kept] = PLACEHOLDER_TOKEN_ID
        return _output(drawn, found.flatten())


def _output(tokens: Tensor, logprobs: Tensor) -> SamplerOutput:
    """Of ``tokens [B, K]`` and ``logprobs [B · K]``."""
    flat = tokens.reshape(-1, 1)
    return SamplerOutput(tokens, LogprobsTensors(flat, logprobs.unsqueeze(1), torch.zeros_like(flat[:, 0])))
