"""The native rollout engine on a CUDA device: the host runs one step behind.

One step: admit → settle the rows → prefill → launch a decode step → read what the step before it sampled → retire what
is done. The device computes the new step while the host looks at the last one, so neither waits for the other. The
price is that a response is decoded one token past its end; that token is dropped. Tokens stay a function of prompt,
seed and position: when the host looks decides nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from quartet.config import UserError
from quartet.models.packed import PackedCausalLM
from quartet.rollout.cuda_admission import PagedAdmission, Prefill
from quartet.rollout.cuda_runner import CudaRunner
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import Response
from quartet.rollout.stop_strings import Decode

PAGE_SIZE = 16


def engine_for(
    packed: PackedCausalLM,
    *,
    max_running: int,
    max_prefill_tokens: int = 2048,
    cache_tokens: int | None = None,
    owns_weights: bool = False,
    decode: Decode | None = None,
    version: int | None = None,
) -> NativeEngine:
    """The engine of the device that the model is on."""
    kind = CudaEngine if packed.device.type == "cuda" else NativeEngine
    return kind(
        packed,
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        cache_tokens=cache_tokens,
        owns_weights=owns_weights,
        decode=decode,
        version=version,
    )


class CudaEngine(NativeEngine):
    """
    Args:
        max_prefill_tokens: prompt tokens computed in one step; a longer prompt is computed alone.
        page_size: tokens per page of the KV cache.
        graphs: replay decode steps as CUDA graphs. On a device without them every step runs as it is.

    The others are those of ``NativeEngine``, and so are requests, streams and weights.

    Raises:
        UserError: the model asks for exact numerics.
    """

    def __init__(
        self,
        packed: PackedCausalLM,
        *,
        owns_weights: bool = False,
        max_running: int = 256,
        max_prefill_tokens: int = 8192,
        cache_tokens: int | None = None,
        decode: Decode | None = None,
        version: int | None = None,
        page_size: int = PAGE_SIZE,
        graphs: bool = True,
    ) -> None:
        if packed.numerics == "exact":
            raise UserError(
                "exact numerics need the CPU",
                found=f"a model on {packed.device}, and products there whose bits depend on the number of rows",
                remedy="run on the CPU in fp32, or set numerics: fast",
            )
        super().__init__(
            packed,
            owns_weights=owns_weights,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            decode=decode,
            version=version,
        )
        self._paged = PagedAdmission(
            page_size=page_size,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            cache_tokens=cache_tokens,
        )
        self._device_runner = CudaRunner(packed, self._weights, self._paged, graphs=graphs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What runs otherwise than asked for, in words."""
        return self._device_runner.remarks

    def _check(self, request: Request) -> None:
        super()._check(request)
        self._paged.check(request, self._limit(request))

    def _retire(self, responses: Sequence[Response]) -> None:
        super()._retire(responses)
        for response in responses:
            self._paged.release(response)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._drain()
        super().cancel(request_ids)

    # ---- one step ----

    @torch.no_grad()
    def _advance(self) -> None:
        self._check_usable()
        runner, scheduler = self._device_runner, self._scheduler
        if not scheduler.held:
            return
        work = self._paged.admit(scheduler.waiting)
        scheduler.admit(work.admitted)
        settled = scheduler.settle()
        runner.prefill(work)
        runner.settle(settled, scheduler.rows)
        runner.launch()
        self._count_step(work)
        if runner.num_launched > 1:
            self._receive()
        if all(len(r.token_ids) + 1 >= r.max_tokens for r in scheduler.rows):
            # The step on its way gives everybody the last token.
            self._drain()

    def _drain(self) -> None:
        while self._device_runner.num_launched:
            self._receive()

    def _receive(self) -> None:
        """Takes what the oldest step sampled for the requests that are still there."""
        sampled = self._device_runner.receive()
        held = self._scheduler.held
        kept = [i for i, r in enumerate(sampled.responses) if held.get(r.request.request_id) is r]
        columns = ([values[i] for i in kept] for values in (sampled.tokens, sampled.logprobs))
        tokens, logprobs = (torch.tensor(column) for column in columns)
        self._record([sampled.responses[i] for i in kept], tokens, logprobs)

    def _count_step(self, work: Prefill) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.peak_running = max(stats.peak_running, len(self._scheduler.rows))
        for response in work.admitted:
            num_prompt = len(response.request.prompt_ids)
            if response.token_ids:
                stats.recomputed_tokens += response.position
            elif response in work.computed:
                stats.prompt_tokens_prefilled += num_prompt
            else:
                stats.prefix_hit_tokens += num_prompt
            if not response.group.counted:
                response.group.counted = True
                stats.distinct_prompt_tokens += num_prompt
        if work.admitted:
            stats.peak_cache_bytes = max(stats.peak_cache_bytes, self._cache_bytes())
            stats.peak_cached_tokens = max(stats.peak_cached_tokens, self._cached_tokens())

    # ---- weights and memory ----

    def _before_sync(self) -> None:
        super()._before_sync()
        # What is on its way was computed with the weights that are about to go.
        self._drain()

    def _release(self) -> None:
        super()._release()
        self._device_runner.release()

    def _forget(self) -> None:
        # Sampled with the weights that were.
        self._drain()
        super()._forget()
        self._paged.forget()
        self._device_runner.forget()

    def _cache_bytes(self) -> int:
        return self._device_runner.num_bytes

    def _cached_tokens(self) -> int:
        return self._paged.num_stored_tokens
