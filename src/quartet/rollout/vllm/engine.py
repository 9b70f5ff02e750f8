"""vLLM's engine core, driven step by step in the engine's own process. Imported only where vLLM is installed.

The core's outputs are read here and not by vLLM's output processor: log-probabilities as the arrays that they are.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm import SamplingParams as VLLMSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VLLMFinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from quartet.config import UserError
from quartet.models.directories import checkpoint_shapes
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    Generated,
    GenerationError,
    Request,
    SamplingParams,
    Unfinished,
)
from quartet.rollout.scheduler import check_request
from quartet.rollout.stop_strings import Decode, StopStringMatcher
from quartet.rollout.vllm.head_padding import HeadPadding
from quartet.rollout.vllm.sampling import SAMPLING
from quartet.rollout.vllm.start import Drafts
from quartet.rollout.vllm.weights import save_adapter
from quartet.weights.manifest import WeightsUnusable


@dataclass(eq=False)
class _Response(Unfinished):
    matcher: StopStringMatcher | None


class VLLMEngine:
    """A ``StepEngine`` over vLLM's engine core.

    Args:
        engine_args: as ``start.make`` chooses them.
        decode: a codec's ``decode_completion``, needed for stop strings.
        version: policy version of the weights that it loaded; None: it computes only once weights were sent.
        lora: ``rank`` and ``alpha`` of adapters, which alone are sent then.
        padding: that the model's heads have.
        drafts: what proposes tokens; None: nothing does.
    """

    def __init__(
        self,
        engine_args: Mapping[str, Any],
        *,
        decode: Decode | None = None,
        version: int | None = 0,
        lora: Mapping[str, Any] | None = None,
        padding: HeadPadding | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        config = EngineArgs(**engine_args).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._core.collective_rpc("quartet_replace_sampler")
        self._model = config.model_config
        self._block_size = config.cache_config.block_size
        self._num_blocks = config.cache_config.num_gpu_blocks or 0
        self._decode = decode
        self._lora, self._padding, self._drafts = lora, padding, drafts
        depth = 0 if drafts is None else drafts.config["num_speculative_tokens"]
        self._drafted_by_depth, self._kept_by_depth = [0] * depth, [0] * depth
        self._drafted: dict[str, tuple[int, int]] = {}
        # The scheduler tells it, of each request whose drafts were verified, before it gives out the tokens.
        self._core.scheduler.make_spec_decoding_stats = self._note_drafted
        self._shapes = checkpoint_shapes(Path(config.model_config.model))
        self._adapter = None if lora is None else LoRARequest("policy", 1, "(loaded before the first step)")
        self._version = version
        self._held: dict[str, _Response] = {}
        self._ended: list[Completion] = []
        self._failed: list[str] = []
        self._stats = EngineStats(policy_version=version or 0)

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> None:
        given: set[str] = set()
        for request in requests:
            check_request(
                request,
                context=self._model.max_model_len,
                vocab_size=self._model.get_vocab_size(),
                decodes=self._decode is not None,
            )
            _check_contents(request)
            if request.request_id in self._held or request.request_id in given:
                raise UserError(
                    "a request id is held already", found=repr(request.request_id), remedy="give each request its own"
                )
            given.add(request.request_id)
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        strings = request.sampling.stop_strings
        matcher = None
        if strings and self._decode is not None:
            matcher = StopStringMatcher(strings, self._decode, request.prompt_ids)
        self._held[request.request_id] = _Response(request, matcher)
        wanted = EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=list(request.prompt_ids),
            mm_features=None,
            sampling_params=_sampling(request.sampling),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapter,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(self._core.preprocess_add_request(wanted)[0])

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (response := self._held.pop(request_id, None)) is not None:
                self._core.abort_requests([request_id])
                self._ended.append(response.completion(FinishReason.CANCELLED))

    def generated(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        held = (self._held[i] for i in request_ids if i in self._held)
        return {r.request.request_id: r.generated() for r in held}

    # ---- driving ----

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._ended or self._failed)

    def step(self) -> list[Completion]:
        if self._version is None:
            raise WeightsUnusable(
                "the vLLM engine has no weights to compute with",
                found="none since it was started or woken",
                remedy="send the policy's weights before requests are answered",
            )
        if self._held:
            self._advance()
        if self._failed and not self._ended:
            failed, self._failed = self._failed, []
            raise GenerationError(f"logits of request {failed[0]!r} ({len(failed)} in all)", failed)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self) -> None:
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        self._stats.num_steps += 1
        for output in outputs[0].outputs if outputs else ():
            response = self._held.get(output.request_id)
            if response is not None:
                before = len(response.token_ids)
                self._take(response, output)
                self._count_tokens(output.request_id, len(response.token_ids) - before)
        self._drafted.clear()
        cached = round(self._core.scheduler.get_kv_cache_usage() * self._num_blocks) * self._block_size
        self._stats.cached_tokens = cached
        self._stats.peak_cached_tokens = max(self._stats.peak_cached_tokens, cached)

    def _take(self, response: _Response, output: EngineCoreOutput) -> None:
        """Adds a step's tokens to a response, and ends it where it has its stop string or vLLM says so."""
        if output.prefill_stats is not None and not response.token_ids:
            self._count_prompt(response, output.prefill_stats)
        assert output.new_logprobs is not None and self._version is not None
        for token, logprob in zip(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist(), strict=True):
            if not math.isfinite(logprob):
                self._end(output)
                self._failed.append(response.request.request_id)
                return
            response.token_ids.append(token)
            response.logprobs.append(logprob)
            response.versions.append(self._version)
            self._stats.generated_tokens += 1
            if response.matcher is None or token in response.request.sampling.stop_token_ids:
                continue
            response.text_end = response.matcher.find(response.token_ids)
            if response.text_end is not None:
                self._end(output)
                self._ended.append(response.completion(FinishReason.STOP_STRING))
                return
        if output.finish_reason is None:
            return
        reasons = {VLLMFinishReason.STOP: FinishReason.STOP, VLLMFinishReason.LENGTH: FinishReason.LENGTH}
        if output.finish_reason not in reasons:
            raise RuntimeError(f"vLLM ended request {output.request_id!r} by {output.finish_reason}")
        self._end(output)
        self._ended.append(response.completion(reasons[output.finish_reason]))

    def _note_drafted(
        self, _: object, *, request_id: str, num_draft_tokens: int, num_accepted_tokens: int, **__: object
    ) -> None:
        """In place of vLLM's own statistics, whose sums do not tell which drafted tokens stood behind kept ones."""
        self._drafted[request_id] = num_draft_tokens, num_accepted_tokens

    def _count_tokens(self, request_id: str, number: int) -> None:
        """Of a row that was given so many tokens."""
        self._stats.num_row_steps += number > 0
        drafted, kept = self._drafted.get(request_id, (0, 0))
        kept = min(kept, number)
        # Behind a kept token that ends the response nothing was tried.
        for depth in range(min(drafted, kept + (number > kept))):
            self._drafted_by_depth[depth] += 1
            self._kept_by_depth[depth] += depth < kept

    def _end(self, output: EngineCoreOutput) -> None:
        del self._held[output.request_id]
        if output.finish_reason is None:
            self._core.abort_requests([output.request_id])

    def _count_prompt(self, response: _Response, prefill: Any) -> None:
        self._stats.prompt_tokens_prefilled += prefill.num_computed_tokens
        self._stats.prefix_hit_tokens += prefill.num_cached_tokens
        others = (r for r in self._held.values() if r is not response and r.request.group == response.request.group)
        if not any(other.token_ids for other in others):
            self._stats.distinct_prompt_tokens += len(response.request.prompt_ids)

    # ---- weights and memory ----

    def update_weights(self, source: Any, version: int) -> None:
        """As the protocol has it.

        Args:
            source: a ``StagedHandle``, or other plain data that workers can iterate: each of them reads its part.
        """
        self._version = None
        if self._lora is None:
            heads = {} if self._drafts is None else self._drafts.shapes
            self._core.collective_rpc("quartet_update_weights", args=(source, self._shapes, heads, self._padding))
        else:
            self._load_adapter(source, self._lora)
        self._stats.recomputed_tokens += sum(r.num_computed_tokens for r in self._core.scheduler.running)
        # Keys and values of the old weights are wrong under the new ones; requests go on from the tokens they have.
        self._core.reset_prefix_cache(reset_running_requests=True)
        self._version = self._stats.policy_version = version

    def _load_adapter(self, source: Iterable[tuple[str, Tensor]], lora: Mapping[str, Any]) -> None:
        """vLLM reads adapters from a directory alone."""
        with tempfile.TemporaryDirectory(prefix="quartet-adapter-") as folder:
            save_adapter(source if self._padding is None else self._padding(source), Path(folder), lora)
            self._core.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))

    def sleep(self, level: int) -> None:
        """Gives up the cache, and moves the weights to host memory (1) or forgets them (2; but where some are sent by
        nobody again: those that adapters are added to, heads that stay)."""
        if level == 2:
            self._version = None
        stay = self._lora is not None or (self._drafts is not None and self._drafts.stay)
        self._core.sleep(1 if stay else level, mode="keep")

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        """Ends workers, and gives back shared memory, which would outlast them."""
        self._core.shutdown()

    def stats(self) -> EngineStats:
        running, waiting = self._core.scheduler.get_request_counts()
        return replace(
            self._stats,
            drafted_by_depth=tuple(self._drafted_by_depth),
            kept_by_depth=tuple(self._kept_by_depth),
            num_running=running,
            num_waiting=waiting,
        )


def _check_contents(request: Request) -> None:
    if request.content_digests:
        raise UserError(
            "the vLLM engine takes token ids alone",
            found=f"request {request.request_id!r} with contents that its tokens do not say",
            remedy="use the native engine for it",
        )


def _sampling(sampling: SamplingParams) -> VLLMSamplingParams:
    """What ends a response is vLLM's, how its tokens are drawn is ``SeededSampler``'s."""
    return VLLMSamplingParams(
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={SAMPLING: sampling},
    )
