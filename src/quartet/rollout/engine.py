"""The native rollout engine: generates with the trainer's own model object, in the trainer's process.

One step: place the rows → admit → one forward that decodes a token of everything running and fills new prompts →
sample a token for all → retire what is done. A forward costs the same few milliseconds of small operations and the same
reading of the weights for few rows as for many, so prompts ride along with decoding.

Shapes: B new tokens of running requests (one of each, or more), T tokens of blocks to fill, R >= B + T rows computed,
W wanted blocks, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.batch.pictures import picture_places
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.config.plugins import load_object, plugin_entries
from quartet.models.attention import AttentionContext
from quartet.models.exact import MIN_ROWS, row_multiple
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.models.memory import to_device
from quartet.models.packed_model import Numerics, PackedCausalLM, Precision
from quartet.models.packing_probe import check_decoding, model_context_length
from quartet.models.vision import FeatureStore
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.drafter import Drafter, make_drafter
from quartet.rollout.prefix_cache import CacheBlock, KVCache, next_slot_shape
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, GenerationError, PartialCompletion, Request
from quartet.rollout.rows import DecodeRows, DraftRows
from quartet.rollout.sampler import SamplingRows, sample
from quartet.rollout.scheduler import (
    Decode,
    EngineRequest,
    PrefillChunk,
    Scheduler,
    StopStringMatcher,
    check_request,
)
from quartet.rollout.step_attention import (
    AttentionBackend,
    ExactAttentionBackend,
    PlainAttentionBackend,
    StepAttention,
    starts_sequence,
)
from quartet.text.pictures import PictureStore
from quartet.text.tokenizer import TextCodec
from quartet.weights.sink import TensorSink, write_weights

_Sampled = dict[int, list[float]]
"""``[token, logprob]`` behind a row's newest token, 0, and behind drafted ones, ``1 + node``."""
_PACKED_ROWS = 64
"""Rows that weights are packed for at least: a form for fewer is slower for the 16 rows that every product has, and for
drafts (``benchmarks/products.py``)."""


def choose_attention_backend(packed: PackedCausalLM) -> AttentionBackend:
    """Chooses the attention of an engine that generates with ``packed``."""
    if packed.numerics == "exact":
        return ExactAttentionBackend(row_multiple(packed.body))
    if packed.device.type != "cpu":
        # Reading prompts in place takes some thirty operations per prompt and layer, each a kernel to launch: a step of
        # 0.5 B with 32 prompts took 219 ms on an H200. Copied prompts take none.
        return PlainAttentionBackend(shares_prefixes=False)
    return AttentionBackend(shares_prefixes=packed.shares_prefixes)


def copy_packed_model(packed: PackedCausalLM) -> PackedCausalLM:
    """Makes an independent copy for an engine of its own in the same process: weights, adapters, precision, numerics.

    What was found out about the model (shared prompts, the logits' scale) is taken over, not found out again. Gradients
    stay behind, and the copy takes none.
    """
    if packed.adapters is not None:
        packed.adapters.check_in()
    copied = copy.deepcopy(packed)
    copied.model.requires_grad_(False)
    copied.work.pictures = 0
    if copied.tower is not None and packed.tower is not None:
        copied.tower.passes = packed.tower.trains
    return copied


class NativeEngine:
    """
    Args:
        packed: the model. Shared with the trainer unless ``owns_weights``: then nothing may train while a
            step runs.
        owns_weights: ``packed`` is this engine's own copy, refreshed through ``weight_sink``. With adapters these alone
            are sent, and the frozen weights stay.
        max_running: requests decoded together.
        max_prefill_tokens: prompt tokens computed in one step; a longer prompt takes several.
        cache_tokens: tokens whose keys and values may be stored at a time, prompts included; requests wait for
            room. None: as many as are needed.
        decode: a codec's ``decode_completion``, needed for stop strings.
        version: policy version of the weights as they are. None: 0 for a shared model; an engine with its own
            weights then has none to compute with until they were sent.
        contexts: how it attends. None: by the model's device and numerics.
        drafter: proposes running requests' next tokens, which are computed together with its newest one and
            kept as long as they are what would have been sampled. Completions are those
            without, to rounding, and to the bit under exact numerics.

    Raises:
        UserError: the model cannot go on from stored keys and values.
    """

    def __init__(
        self,
        packed: PackedCausalLM,
        *,
        owns_weights: bool = False,
        max_running: int = 64,
        max_prefill_tokens: int = 2048,
        cache_tokens: int | None = None,
        decode: Decode | None = None,
        version: int | None = None,
        contexts: AttentionBackend | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if not packed.shares_prefixes:
            check_decoding(packed)
        self.packed = packed
        self._tower: Any = packed.tower
        self._has_axes = packed.tower is not None and packed.tower.has_axes
        self._device = packed.device
        self.owns_weights = owns_weights
        self.max_running = max_running
        self._decode = decode
        contexts = contexts or choose_attention_backend(packed)
        self._contexts = contexts
        self._scheduler = Scheduler(
            max_running,
            max_prefill_tokens=max_prefill_tokens,
            cache_tokens=cache_tokens,
            shares_prefixes=contexts.shares_prefixes,
            round_up=contexts.slot_length,
        )
        self._weights = ComputeWeights(packed, num_rows=max(max_running, _PACKED_ROWS), in_place=owns_weights)
        self._cache = KVCache()
        self._rows = DecodeRows(max_running, MIN_ROWS, packed.vocab_size, packed.device)
        self._rows_valid = self._rows_current = False
        self._stats = EngineStats(policy_version=version or 0)
        self._finished: list[Completion] = []
        self._failed: list[EngineRequest] = []
        self.drafter = drafter
        self._keeps_hidden = drafter is not None and drafter.reads_hidden
        self._sink = self._make_sink(version) if owns_weights else None
        self.context = model_context_length(packed.model)
        self._vocab_size = packed.vocab_size

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_request(
                request,
                context=self.context,
                vocab_size=self._vocab_size,
                decodes=self._decode is not None,
                sees=self._tower is not None,
            )
        self._scheduler.check(requests, self._limit)
        shifts = {ids: self._position_shift(ids) for ids in {request.prompt_ids for request in requests}}
        for request in requests:
            matcher, shift = StopStringMatcher.of(request, self._decode), shifts[request.prompt_ids]
            self._scheduler.add(request, self._limit(request), matcher, shift)

    def _position_shift(self, prompt_ids: Sequence[int]) -> int:
        """Returns how far the position behind a prompt lies from its number of tokens."""
        return self._tower.positions(prompt_ids, 0)[1] - len(prompt_ids) if self._has_axes else 0

    def _limit(self, request: Request) -> int:
        """Returns how many tokens a request may get: as it asks, or less where the model's context ends."""
        limit = request.sampling.max_new_tokens
        return limit if self.context is None else min(limit, self.context - len(request.prompt_ids))

    def cancel(self, request_ids: Iterable[str]) -> None:
        held = self._scheduler.held
        responses = [held[i] for i in dict.fromkeys(request_ids) if i in held]
        self._retire(responses)
        self._finished += [response.completion(FinishReason.CANCELLED) for response in responses]

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        held = self._scheduler.held
        return {i: held[i].generated() for i in request_ids if i in held}

    @property
    def held(self) -> Mapping[str, EngineRequest]:
        """The responses by request id, waiting ones too."""
        return self._scheduler.held

    @property
    def running(self) -> list[EngineRequest]:
        return self._scheduler.running

    def _retire(self, responses: Sequence[EngineRequest]) -> None:
        self._scheduler.retire(responses)
        for response in responses:
            if self.drafter is not None:
                self.drafter.forget(response)
        if responses:
            self._rows_current = False

    # ---- driving ----

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.held or self._finished)

    # ---- one step ----

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Takes a step as the protocol has it.

        Raises:
            WeightsUnusable: its own weights are not those of a policy version, as none came yet.
        """
        if self._sink is not None:
            self._sink.require()
        if not self._scheduler.held:
            return self._hand_over()
        if self.drafter is not None:
            self.drafter.propose(self, self._weights.active if self._keeps_hidden else nullcontext)
        running = self._place_rows()
        plan = self._scheduler.plan()
        if plan.prefills:
            self._fit_slots(running)
        drafts = [response.draft for response in running]
        spans = DraftRows.of(self._rows, drafts, [r.tree for r in running]) if any(drafts) else None
        # True again once the step is complete, so an interrupted one leaves no half-updated rows.
        self._rows_valid = False
        wanted = [r.block for r in plan.admitted if r.block is not None]
        logits, hidden, first_logits, first_hidden = self._forward(bool(running), plan.prefills, wanted, spans)
        self._stats.num_steps += 1
        self._stats.num_row_steps += len(running)
        new = (prefill for prefill in plan.prefills if not prefill.block.again)
        self._stats.prompt_tokens_prefilled += sum(prefill.end - prefill.start for prefill in new)
        if spans is not None:
            self._record(running, self._sample_drafted(running, logits), hidden)
        elif running:
            tokens, logprobs = sample(logits, self._rows.sampling, self._rows.num_generated)
            self._record(running, [{0: pair} for pair in self._read(tokens, logprobs)], hidden)
            self._rows.advance(tokens)
        if plan.admitted:
            self._begin(plan.admitted, first_logits, first_hidden)
        # After proposals rows advance by different numbers of tokens and are loaded anew.
        self._rows_valid = spans is None
        return self._hand_over()

    def _hand_over(self) -> list[Completion]:
        if self._failed:
            failed, self._failed = self._failed, []
            ids = [response.request.request_id for response in failed]
            raise GenerationError(
                f"logits of request {ids[0]!r} are not finite at response token {len(failed[0].token_ids)}"
                + (f" ({len(ids)} requests in all)" if len(ids) > 1 else ""),
                ids,
            )
        finished, self._finished = self._finished, []
        return finished

    def _forward(
        self, decodes: bool, prefills: Sequence[PrefillChunk], wanted: Sequence[CacheBlock], spans: DraftRows | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decodes new tokens of the rows and fills blocks.

        Args:
            decodes: something runs.
            wanted: blocks whose following logits are asked for, complete after this step; repeats cost nothing.
            spans: the rows' new tokens; None: the newest of each.

        Returns:
            Logits ``[B, V]`` and hidden states ``[B, D]`` at each new token of the rows, ``[W, V]`` and ``[W, D]`` at
            the end of each wanted block.
        """
        contexts, rows = self._contexts, self._rows
        prefills = sorted(
            prefills, key=lambda prefill: (not starts_sequence(prefill), prefill.end if starts_sequence(prefill) else 0)
        )
        num_rows = 0 if not decodes else rows.num_rows if spans is None else len(spans.tokens)
        sizes = [prefill.end - prefill.start for prefill in prefills]
        parts: list[tuple[AttentionContext, int]] = []
        if decodes:
            parts.append((contexts.decode(self._cache, rows, spans), num_rows))
        if prefills:
            parts.append((contexts.prefill(prefills), sum(sizes)))
        with self._weights.active():
            hidden = None
            if total := num_rows + sum(sizes):
                computed = contexts.padded_rows(total)
                context = parts[0][0] if len(parts) == 1 and computed == total else StepAttention(parts)
                new = (spans or rows) if decodes else None
                hidden = self.packed.hidden(*self._inputs(new, num_rows, prefills, computed), context)
            end = num_rows
            for prefill, size in zip(prefills, sizes, strict=True):
                end += size
                prefill.block.done = prefill.end
                if prefill.finishes and hidden is not None:
                    # A view would keep the whole step's hidden states alive.
                    prefill.block.finish(hidden[end - 1].clone())
            blocks = list(dict.fromkeys(wanted))
            states = self._states(hidden, num_rows, blocks)
            logits = self.packed.logits(states) if len(states) else states.new_zeros(0, self.packed.vocab_size)
        place = {block: num_rows + i for i, block in enumerate(blocks)}
        places = to_device(torch.tensor([place[block] for block in wanted], dtype=torch.int64), logits.device)
        return logits[:num_rows], states[:num_rows], logits[places], states[places]

    def _inputs(
        self, new: DecodeRows | DraftRows | None, num_rows: int, prefills: Sequence[PrefillChunk], computed: int
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and positions ``[R]``: rows, then fills, then zeros."""
        axes = self._has_axes
        newest = None
        if new is not None:
            newest = (new.positions + new.shifts).expand(3, -1) if axes else new.positions
            if not prefills and computed <= len(new.tokens):
                return new.tokens[:computed], newest[..., :computed]
        filling = [token for prefill in prefills for token in prefill.token_ids]
        rest = torch.zeros(computed - num_rows - len(filling), dtype=torch.int64)
        tokens = torch.cat([torch.tensor(filling, dtype=torch.int64), rest])
        places = [self._positions(prefill) for prefill in prefills]
        positions = torch.cat([*places, rest.expand(3, -1) if axes else rest], -1)
        filled = to_device(torch.cat([tokens.unsqueeze(0), positions.view(-1, len(tokens))]), self.packed.device)
        if self._tower is None or not bool(picture_places(tokens).any()):  # pictures are looked for on the host
            tokens = filled[0]
        positions = filled[1:] if axes else filled[1]
        if new is None or newest is None:
            return tokens, positions
        newest_tokens = new.tokens[:num_rows].to(tokens.device)
        return torch.cat([newest_tokens, tokens]), torch.cat([newest[..., :num_rows], positions], -1)

    def _positions(self, prefill: PrefillChunk) -> Tensor:
        """Returns the positions ``[n]``, or ``[3, n]``, of a chunk's tokens."""
        block = prefill.block
        if not self._has_axes:
            return torch.arange(prefill.start, prefill.end) + block.start
        start = 0 if block.parent is None else self._tower.positions(block.parent.token_ids, 0)[1]
        return self._tower.positions(block.token_ids, start)[0][:, prefill.start : prefill.end]

    def _states(self, hidden: Tensor | None, num_rows: int, blocks: Sequence[CacheBlock]) -> Tensor:
        """Returns the states ``[B + blocks, D]`` of which the logits are wanted, filled up to enough rows."""
        wanted = num_rows + len(blocks)
        computed = self._contexts.padded_rows(wanted)
        if hidden is not None and not blocks and hidden.shape[0] == computed:
            return hidden
        if not wanted:
            return torch.zeros(0, 0, device=self.packed.device)
        picked = [] if hidden is None else [hidden[:num_rows]]
        picked += [block.last_hidden.unsqueeze(0) for block in blocks if block.last_hidden is not None]
        return F.pad(torch.cat(picked), (0, 0, 0, computed - wanted))

    def _place_rows(self) -> list[EngineRequest]:
        """Makes rows of what runs, and room in the cache for a token of each."""
        placement = self._scheduler.place_rows()
        if any(target >= self._cache.num_slots for _, target, _ in placement.moves):
            self._fit_slots(self._scheduler.rows)
        for source, target, length in placement.moves:
            self._cache.move(source, target, length)
        running = self._scheduler.rows
        if not running:
            return running
        current = (
            self._rows_valid and self._rows_current and not placement.changed and not any(r.draft for r in running)
        )
        if not current or self._contexts.slot_length(self._rows.longest) > self._cache.capacity:
            self._fit_slots(running)
            for response in placement.placed:
                self._place(response)
            shape = (self._cache.num_slots, self._cache.capacity)
            changed = placement.changed if self._rows_valid else range(len(running))
            self._rows.load(running, changed, shape)
            self._rows_current = True
            if self._scheduler.cache_tokens is None:
                self._scheduler.prefixes.trim(self._cache.num_tokens, self._scheduler.wanted_blocks)
        return running

    def _fit_slots(self, running: Sequence[EngineRequest]) -> None:
        """Gives the cache room for the next tokens of each of ``running``, within ``cache_tokens``."""
        cache, scheduler = self._cache, self._scheduler
        limit = None if scheduler.cache_tokens is None else scheduler.cache_tokens - scheduler.prefixes.num_tokens
        if not running:
            if limit is not None and cache.num_tokens > limit:
                cache.resize(0, 0)
            return
        longest = self._contexts.slot_length(max(r.num_stored + len(r.draft) for r in running) + 1)
        shape = next_slot_shape(
            (cache.num_slots, cache.capacity),
            num_rows=len(running),
            longest=longest,
            most=max(map(scheduler.slot_tokens, running)),
            max_rows=min(scheduler.max_running, len(scheduler.held)),
            limit=limit,
        )
        cache.resize(*shape)

    def _place(self, response: EngineRequest) -> None:
        """Fills the slot of a request that got its row from its block, and lets go of what it then has itself."""
        block, prefix = response.block, response.prefix
        assert block is not None, "it was admitted with what was computed for it"
        # What is read in place fills no slot, but the first of a layer says what its slots are like.
        self._cache.write([] if block is prefix else [response.row], block.keys, block.values)
        if block is not prefix:
            if prefix is not None:
                self._scheduler.prefixes.hold(prefix)
            self._scheduler.prefixes.drop(block)
        response.block = None

    def _begin(self, admitted: Sequence[EngineRequest], logits: Tensor, hidden: Tensor) -> None:
        """Samples the next token of requests whose blocks are complete, from ``logits [A, V]``, ``hidden [A, D]``."""
        self._scheduler.admit(admitted)
        for response in admitted:
            first = response.block and response.block.chain[0]
            response.prefix = first if first and first.shared else None
        sampled = self._sample(admitted, [0] * len(admitted), logits)
        self._record(admitted, [{0: pair} for pair in sampled], hidden)

    def _sample(self, responses: Sequence[EngineRequest], ahead: Sequence[int], logits: Tensor) -> list[list[float]]:
        """Samples token and log-probability for each row of ``logits [B, V]``, ``ahead`` places behind its response's
        next."""
        sampling = SamplingRows.build([r.request.sampling for r in responses], self._vocab_size, self.packed.device)
        places = [len(r.token_ids) + n for r, n in zip(responses, ahead, strict=True)]
        return self._read(*sample(logits, sampling, np.array(places, dtype=np.uint64)))

    def _sample_drafted(self, running: Sequence[EngineRequest], logits: Tensor) -> list[_Sampled]:
        """Samples, of the rows' new tokens, ``logits [T, V]``, what follows the newest and each drafted one that was
        drawn.

        On a CPU the others are never sampled: with noise for a whole vocabulary that costs as much as a small layer.
        Another device samples all at once, since waiting for it costs more.
        """
        in_turn = logits.device.type == "cpu"
        found: list[_Sampled] = [{} for _ in running]
        first = list(accumulate((1 + len(r.draft) for r in running), initial=0))
        asked = [(row, at) for row, r in enumerate(running) for at in range(1 if in_turn else 1 + len(r.draft))]
        while asked:
            responses = [running[row] for row, _ in asked]
            ahead = [r.tree.depths[at - 1] if at else 0 for r, (_, at) in zip(responses, asked, strict=True)]
            places = to_device(torch.tensor([first[row] + at for row, at in asked]), logits.device)
            sampled = self._sample(responses, ahead, logits[places])
            drawn = []
            for response, (row, at), pair in zip(responses, asked, sampled, strict=True):
                found[row][at] = pair
                if in_turn and (held := response.held(at, pair[0])) is not None:
                    drawn.append((row, 1 + held))
            asked = drawn
        return found

    def _record(self, responses: Sequence[EngineRequest], sampled: Sequence[_Sampled], hidden: Tensor) -> None:
        """Gives each response its token, or those that its proposals let stand; retires what ends or has none.

        Args:
            hidden: ``[T, D]`` at all new tokens.
        """
        done: list[tuple[EngineRequest, FinishReason]] = []
        failed: list[EngineRequest] = []
        first = 0
        for response, own in zip(responses, sampled, strict=True):
            size, before = 1 + len(response.draft), len(response.token_ids)
            behind = response.num_stored + 1
            reason, kept = response.extend(own, self._stats.policy_version)
            num_new, newest = len(response.token_ids) - before, kept[-1] + 1 if kept else 0
            self._stats.generated_tokens += num_new
            if reason is not None:
                done.append((response, reason))
            elif not math.isfinite(own[newest][1]):
                failed.append(response)
            elif self._keeps_hidden:
                response.hidden = hidden[first + newest]
            if response.draft:
                if self.drafter is not None:
                    self.drafter.verified(response, kept, ended=num_new == len(kept))
                response.propose(())
                self._cache.keep(response.row, [behind + i for i in kept], behind, behind + size - 1)
            first += size
        self._drop(failed)
        if self.drafter is not None:
            for response, _ in done:
                self.drafter.finished(response)
        self._retire([response for response, _ in done])
        self._finished += [response.completion(reason) for response, reason in done]

    def _read(self, tokens: Tensor, logprobs: Tensor) -> list[list[float]]:
        """Brings pairs to the host: the only place in a step where the host waits for the device."""
        # fp64 holds both, so one copy is enough.
        return torch.stack([tokens.double(), logprobs.double()], 1).tolist()

    def _drop(self, failed: Sequence[EngineRequest]) -> None:
        """Drops responses whose logits are not finite, and what was computed with them; the step's end names them."""
        for response in failed:
            if response.row >= 0:
                self._cache.clear(response.row)
            prompt = self._scheduler.prefixes.find(response.request.prompt_ids)
            if prompt is not None:
                self._scheduler.prefixes.discard(prompt)
        self._retire(failed)
        self._failed += failed

    # ---- weights and memory ----

    def weight_sink(self) -> TensorSink:
        if self._sink is None:
            raise UserError(
                "the rollout engine has no weights of its own",
                found="a model that it shares with the trainer",
                remedy="build it with owns_weights=True on a copy (own_copy), or call update_weights(None, version)",
            )
        return self._sink

    def _make_sink(self, version: int | None) -> TensorSink:
        # Weights that are cast or turned around in place have that form before the first sync asks for it.
        self._weights.prepare()
        adapters, model = self.packed.adapters, self.packed.model
        named = model.named_parameters(remove_duplicate=False) if adapters is None else adapters.trained.items()
        drafting = self.drafter.weights() if self.drafter is not None else ()
        return TensorSink([*named, *drafting], on_commit=self._take_version, version=version)

    def _take_version(self, version: int) -> None:
        self._weights.refresh()
        self._forget()
        self._stats.policy_version = version

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if self.owns_weights != (source is not None):
            raise UserError(
                "the rollout engine cannot take these weights",
                found="its own copy of the weights and no source" if self.owns_weights else "a model it shares",
                remedy="pass (name, tensor) pairs to an engine with its own weights, else None",
            )
        if source is None:
            self._take_version(version)
            return
        write_weights(self.weight_sink(), source, version)

    def release_cache(self) -> int:
        """Gives back what can be computed again: keys and values, weights in other forms. Weights and requests stay.

        Returns:
            Bytes held by these.
        """
        held = self._weights.num_bytes + self._cache_bytes()
        self._forget()
        self._cache.release()
        self._weights.release()
        return held

    def sleep(self, level: Literal[1, 2]) -> None:
        """Destroys the cache, and moves the weights to the host. Level 2 keeps them there, too (frozen ones are never
        sent again), but uses them no more."""
        self.release_cache()
        self.packed.model.to("cpu")
        if level == 2:
            self.weight_sink().invalidate("it slept, and takes new weights")

    def wake(self) -> None:
        self.packed.model.to(self._device)

    def _forget(self) -> None:
        """Forgets everything computed from the weights; tokens stay."""
        self._scheduler.preempt_all()
        self._rows_valid = self._rows_current = False

    def _cache_bytes(self) -> int:
        return self._cache.num_bytes + self._scheduler.prefixes.num_bytes

    def _cached_tokens(self) -> int:
        return self._cache.num_tokens + self._scheduler.prefixes.num_tokens

    def stats(self) -> EngineStats:
        drafted, kept = self.drafter.by_depth() if self.drafter is not None else ((), ())
        return replace(
            self._stats,
            drafted_by_depth=tuple(drafted),
            kept_by_depth=tuple(kept),
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            cached_tokens=self._cached_tokens(),
            cache_bytes=self._cache_bytes(),
            num_pictures=self.packed.work.pictures if self.owns_weights else 0,
        )


def load_engine(
    path: str,
    *,
    device: str = "cpu",
    precision: Precision = "fp32",
    numerics: Numerics = "fast",
    lora: Mapping[str, Any] | None = None,
    seed: int = 0,
    version: int | None = None,
    speculation: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    pictures: PictureStore | None = None,
    **options: Any,
) -> NativeEngine:
    """Loads the engine over the model in a directory, for a process of its own too (the target of an ``EngineSpec``).

    Args:
        path: a model's directory with its tokenizer.
        lora, seed: of the trainer's adapters, which alone are sent then.
        version: None: it computes once weights were sent.
        speculation: the section of a recipe.
        trust_remote_code: run Python code that comes with the model, where it needs that.
        pictures: of a run, where prompts may have any.
        options: of ``NativeEngine``.
    """
    model = load_causal_lm(path, trust_remote_code=trust_remote_code).to(torch.device(device))
    adapters = None if lora is None else LoRAConfig(**lora)
    packed = packed_causal_lm(model, precision, numerics=numerics, lora=adapters, seed=seed)
    packed.model.requires_grad_(False)
    codec = TextCodec.from_pretrained(path, trust_remote_code=trust_remote_code, pictures=pictures)
    if packed.tower is not None and codec.pictures is not None:
        packed.tower.connect(FeatureStore.of(codec.pictures))
    section = (
        None
        if speculation is None
        else load_object(plugin_entries("drafters")[speculation["type"]].section)(**speculation)
    )
    drafter = make_drafter(section, packed)
    options |= {"decode": codec.decode_completion, "version": version, "drafter": drafter}
    return NativeEngine(packed, owns_weights=True, **options)
