"""vLLM's engine core, driven step by step in the engine's own process, with the native engine's sampler and the
trainer's weights inside of its workers. Imported only where vLLM is installed.

The core's outputs are read here and not by vLLM's output processor: log-probabilities as the arrays that they are.

A token is a function of its distribution, its request's seed and its place, as everywhere here: vLLM's own generators
keep a state, which prompts computed in chunks advance, cost a call per request and step, and leave log-probabilities of
the truncated distribution alone. So a drafted token is kept where it is the one that is drawn there, as in the native
engine: vLLM's rejection sampler, whose random numbers would decide, is replaced, too.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm import SamplingParams as VLLMSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from quartet.models.directories import checkpoint_shapes
from quartet.models.memory import to_device
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    PartialCompletion,
    Request,
    SamplingParams,
    check_request_ids,
)
from quartet.rollout.sampler import SamplingRows, sample
from quartet.rollout.scheduler import Decode, DecodingRequest, StopStringMatcher, check_request
from quartet.rollout.vllm.pictures import PictureInputs
from quartet.rollout.vllm.start import DraftSettings, HeadPadding
from quartet.text.pictures import PictureCodec
from quartet.weights.manifest import WeightsRefused, WeightsUnusable

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
        """Draws from ``logits [B, V]`` a token of each row and its log-probability."""
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
        """Draws from ``logits [N, V]``, of each request behind its newest token and behind each drafted one,
        ``[B, K + 1]`` tokens, placeholders behind the first that was not drafted so.
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
    """Makes the sampler's output of ``tokens [B, K]`` and ``logprobs [B · K]``."""
    flat = tokens.reshape(-1, 1)
    return SamplerOutput(tokens, LogprobsTensors(flat, logprobs.unsqueeze(1), torch.zeros_like(flat[:, 0])))


Shapes = dict[str, tuple[int, ...]]


class WorkerExtension:
    """What vLLM's worker class can do besides (its ``worker_extension_cls``); methods are called on every rank."""

    model_runner: Any
    model_config: Any

    def quartet_replace_sampler(self) -> None:
        """Replaces vLLM's sampler, also where drafts are verified, and gives heads that share the model's LM head the
        one that serves."""
        runner = self.model_runner
        runner.sampler = SeededSampler(runner)
        if runner.speculative_config is None:
            return
        runner.rejection_sampler = SeededVerifier(runner.sampler)
        heads = getattr(runner.drafter, "model", None)
        if heads is not None and heads.config.original_lm_head:
            del heads.lm_head
            heads.lm_heads = [runner.get_model().lm_head] * len(heads.blocks)

    def quartet_update_weights(
        self, source: Iterable[tuple[str, Tensor]], shapes: Shapes, heads: Shapes, padding: HeadPadding | None
    ) -> None:
        """Replaces every weight, and those of the heads that draft where they are sent.

        Args:
            source: under the checkpoint's names; maybe with ``ties``, pairs of another name and the one that it has.
            shapes, heads: of the checkpoint, and of the heads that are sent beside it, as ``Drafts.shapes``.

        Raises:
            WeightsRefused: names, shapes or dtypes are not the checkpoint's; nothing has changed.
        """
        tensors = dict(source if padding is None else padding(source))
        of_heads = {n: tensors.pop(n) for n in heads if n in tensors}
        ties = dict(getattr(source, "ties", ()))
        if self.model_config.is_multimodal_model:
            of_files = _names_in_files(shapes)
            tensors = {of_files(name): tensor for name, tensor in tensors.items()}
            ties = {of_files(name): of_files(own) for name, own in ties.items()}
        named = _checked(tensors, ties, shapes, self.model_config.dtype)
        of_heads = _checked(of_heads, {}, heads, self.model_config.dtype)
        load_weights_in_place(self.model_runner.get_model(), named, self.model_config)
        if of_heads:
            of_heads = {name.partition(".")[2]: tensor for name, tensor in of_heads.items()}
            load_weights_in_place(
                self.model_runner.drafter.model, of_heads, self.model_runner.drafter.spec_config.draft_model_config
            )


@torch.no_grad()
def load_weights_in_place(model: Any, tensors: Mapping[str, Tensor], model_config: Any) -> None:
    """Writes ``tensors`` into a model that serves, in place: graphs that were captured stay valid."""
    initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        # A tied head keeps a packed copy of its own on CPUs, which the reload knows nothing of.
        if isinstance(module, ParallelLMHead):
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)
    # A layer that got no weights is left without memory.
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise RuntimeError(f"vLLM put no weights into {empty[0]!r} ({len(empty)} in all)")


_WRAPPERS = {"model", "language_model", "vision_model"}


def _names_in_files(shapes: Shapes) -> Callable[[str], str]:
    """Returns what gives a tensor's name in files for the one that it has in transformers: of a vision-language model
    the two differ in the modules that wrap others.
    """

    def bare(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    known = {bare(name): name for name in shapes}
    return lambda name: known.get(bare(name), name)


def _checked(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], shapes: Shapes, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the tensors in the checkpoint's order, a tied one under each name that the checkpoint has of it.

    Raises:
        WeightsRefused: one is missing, unknown, or has another shape or dtype.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name, tensors.get(ties.get(name, name)))
        if tensor is None:
            raise _refused(f"nothing for {name!r}", name)
        if tuple(tensor.shape) != shape:
            raise _refused(f"{name!r} of shape {list(tensor.shape)}, needed {list(shape)}", name)
        if tensor.dtype != dtype:
            raise _refused(f"{name!r} in {tensor.dtype}, the engine computes in {dtype}", name)
        found[name] = tensor
    used = {tensor.data_ptr() for tensor in found.values()}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in used:
            raise _refused(f"an unknown name {name!r}", name)
    return found


def save_adapter(named: Iterable[tuple[str, Tensor]], path: Path, lora: Mapping[str, Any]) -> None:
    """Writes trained factors as the adapter directory that vLLM loads."""
    tensors = {f"base_model.model.{name.replace('.default.weight', '.weight')}": t for name, t in named}
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": modules, "peft_type": "LORA"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _refused(found: str, name: str) -> WeightsRefused:
    return WeightsRefused(
        "the new weights do not fit the vLLM engine",
        found=found,
        remedy="send every tensor of the checkpoint that the engine was started from, in the engine's dtype",
        tensor=name,
    )


class VLLMEngine:
    """A ``StepEngine`` over vLLM's engine core.

    Args:
        engine_args: as ``start.make`` chooses them.
        decode: a codec's ``decode_completion``, needed for stop strings.
        version: policy version of the weights that it loaded; None: it computes only once weights were sent.
        lora: ``rank`` and ``alpha`` of adapters, which alone are sent then.
        padding: that the model's heads have.
        drafts: what proposes tokens; None: nothing does.
        pictures: of the model and the run; None: prompts have none.
    """

    def __init__(
        self,
        engine_args: Mapping[str, Any],
        *,
        decode: Decode | None = None,
        version: int | None = 0,
        lora: Mapping[str, Any] | None = None,
        padding: HeadPadding | None = None,
        drafts: DraftSettings | None = None,
        pictures: PictureCodec | None = None,
    ) -> None:
        config = EngineArgs(**engine_args).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._core.collective_rpc("quartet_replace_sampler")
        self._model = config.model_config
        self._block_size = config.cache_config.block_size
        self._num_blocks = config.cache_config.num_gpu_blocks or 0
        self._decode = decode
        self._pictures = None if pictures is None else PictureInputs(config.model_config, pictures)
        self._lora, self._padding, self._drafts = lora, padding, drafts
        depth = 0 if drafts is None else drafts.config["num_speculative_tokens"]
        self._drafted_by_depth, self._kept_by_depth = [0] * depth, [0] * depth
        self._drafted: dict[str, tuple[int, int]] = {}
        # The scheduler tells it, of each request whose drafts were verified, before it gives out the tokens.
        self._core.scheduler.make_spec_decoding_stats = self._note_drafted
        self._shapes = checkpoint_shapes(Path(config.model_config.model))
        self._adapter = None if lora is None else LoRARequest("policy", 1, "(loaded before the first step)")
        self._version = version
        self._held: dict[str, DecodingRequest] = {}
        self._ended: list[Completion] = []
        self._failed: list[str] = []
        self._stats = EngineStats(policy_version=version or 0)

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> None:
        check_request_ids(requests, self._held)
        given: list[tuple[Request, list[int], list[MultiModalFeatureSpec]]] = []
        for request in requests:
            ids, pictures = list(request.prompt_ids), list[MultiModalFeatureSpec]()
            if self._pictures is not None:
                ids, pictures = self._pictures(ids)
            given.append((request, ids, pictures))
            check_request(
                replace(request, prompt_ids=tuple(ids)),
                context=self._model.max_model_len,
                vocab_size=self._model.get_vocab_size(),
                decodes=self._decode is not None,
            )
        for request, ids, pictures in given:
            self._add(request, ids, pictures)

    def _add(self, request: Request, ids: list[int], pictures: list[MultiModalFeatureSpec]) -> None:
        limit = min(request.sampling.max_new_tokens, self._model.max_model_len - len(request.prompt_ids))
        matcher = StopStringMatcher.of(request, self._decode)
        self._held[request.request_id] = DecodingRequest(request, limit, matcher=matcher)
        wanted = EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=ids,
            mm_features=pictures or None,
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

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
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

    def _take(self, response: DecodingRequest, output: EngineCoreOutput) -> None:
        """Adds a step's tokens to a response, and ends it where they end it."""
        if output.prefill_stats is not None and not response.token_ids:
            self._stats.prompt_tokens_prefilled += output.prefill_stats.num_computed_tokens
        assert output.new_logprobs is not None and self._version is not None
        for token, logprob in zip(output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist(), strict=True):
            if not math.isfinite(logprob):
                self._end(output)
                self._failed.append(response.request.request_id)
                return
            self._stats.generated_tokens += 1
            reason = response.append(token, logprob, self._version)
            if reason is not None:
                self._end(output)
                self._ended.append(response.completion(reason))
                return
        if output.finish_reason is not None:
            raise RuntimeError(f"vLLM ended request {output.request_id!r} by {output.finish_reason}")

    def _note_drafted(
        self, _: object, *, request_id: str, num_draft_tokens: int, num_accepted_tokens: int, **__: object
    ) -> None:
        """Notes the drafted tokens of a request, in place of vLLM's own statistics, whose sums do not tell which
        drafted tokens stood behind kept ones."""
        self._drafted[request_id] = num_draft_tokens, num_accepted_tokens

    def _count_tokens(self, request_id: str, number: int) -> None:
        """Counts a row that was given ``number`` tokens."""
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

    # ---- weights and memory ----

    def update_weights(self, source: Any, version: int) -> None:
        """Updates the weights as the protocol has it.

        Args:
            source: a ``StagedHandle``, or other plain data that workers can iterate: each of them reads its part.
        """
        self._version = None
        if self._lora is None:
            heads = {} if self._drafts is None else self._drafts.shapes
            self._core.collective_rpc("quartet_update_weights", args=(source, self._shapes, heads, self._padding))
        else:
            self._load_adapter(source, self._lora)
        # Keys and values of the old weights are wrong under the new ones; requests go on from the tokens they have.
        self._core.reset_prefix_cache(reset_running_requests=True)
        if self._pictures is not None:  # features that a tower of other weights has computed
            self._core.reset_encoder_cache()
        self._version = self._stats.policy_version = version

    def _load_adapter(self, source: Iterable[tuple[str, Tensor]], lora: Mapping[str, Any]) -> None:
        """Loads an adapter by way of a directory: vLLM reads adapters from nothing else."""
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


def _sampling(sampling: SamplingParams) -> VLLMSamplingParams:
    """Makes vLLM's parameters: what ends a response is vLLM's, how its tokens are drawn is ``SeededSampler``'s."""
    return VLLMSamplingParams(
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={SAMPLING: sampling},
    )
