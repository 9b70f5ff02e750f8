"""The native rollout engine: generates with the trainer's own model object, in the trainer's process.

One step: settle the rows → admit → one forward that decodes a token of everything running and fills new prompts →
sample a token for all → retire what is done.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from quartet.config import UserError
from quartet.models.packed import PackedCausalLM
from quartet.models.probe import check_decoding, context_length
from quartet.observe.memory import held_bytes
from quartet.rollout.admission import Admission
from quartet.rollout.cache import KVCache, slot_shape
from quartet.rollout.compute_weights import ComputeWeights
from quartet.rollout.contexts import MIN_ROWS, Contexts
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, GenerationError, Request
from quartet.rollout.request_checks import check_proposals, check_request, not_finite
from quartet.rollout.rows import Rows, Spans
from quartet.rollout.runner import ModelRunner, choose_contexts
from quartet.rollout.sampler import SamplingRows, sample
from quartet.rollout.scheduler import Response, Scheduler
from quartet.rollout.stop_strings import Decode, StopStringMatcher
from quartet.rollout.weights import DiscardedWeights, num_bytes_of
from quartet.weights import NamedSource, TensorSink, WeightsRefused, sync_in_process


class _Stream:
    """What one ``generate`` call still waits for, and what is ready for it."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.pending = set(request_ids)
        self.ready: deque[Completion] = deque()
        self.failure: GenerationError | None = None


class NativeEngine:
    """
    Args:
        packed: the model. Shared with the trainer unless ``owns_weights``: then nothing may train while a
            step runs.
        owns_weights: ``packed`` is this engine's own copy, refreshed through ``weight_sink`` and freed by
            ``sleep``. With adapters these alone are sent, and the frozen weights stay.
        max_running: requests decoded together.
        max_prefill_tokens: prompt tokens computed in one step; a longer prompt takes several.
        cache_tokens: tokens whose keys and values may be stored at a time, prompts included; requests wait for
            room. None: as many as are needed.
        decode: token ids → text, needed for stop strings.
        version: policy version of the weights as they are. None: 0 for a shared model; an engine with its own
            weights then has none to compute with until they were sent.
        contexts: how it attends. None: by the model's device and numerics.

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
        contexts: Contexts | None = None,
    ) -> None:
        if not packed.shares_prefixes:
            check_decoding(packed)
        self.packed = packed
        self.owns_weights = owns_weights
        self._decode = decode
        contexts = contexts or choose_contexts(packed)
        self._scheduler = Scheduler(max_running)
        self._admission = Admission(
            self._scheduler,
            max_prefill_tokens=max_prefill_tokens,
            cache_tokens=cache_tokens,
            shares_prefixes=contexts.shares_prefixes,
            round_up=contexts.slot_length,
        )
        self._runner = ModelRunner(packed, contexts)
        self._weights = ComputeWeights(packed, num_rows=max_running, in_place=owns_weights)
        self._cache = KVCache()
        self._rows = Rows(max_running, MIN_ROWS, packed.vocab_size, packed.device)
        self._rows_valid = self._rows_current = False
        self._stats = EngineStats(policy_version=version or 0)
        self._finished: list[Completion] = []
        self._failure: GenerationError | None = None
        self._streams: dict[str, _Stream] = {}
        self._asleep = False
        self._discarded: DiscardedWeights | None = None
        self._sink = self._make_sink(version) if owns_weights else None
        self._context = context_length(packed.model)
        self._vocab_size = packed.vocab_size

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_request(request, context=self._context, vocab_size=self._vocab_size, decodes=self._decode is not None)
            self._admission.check(request, self._limit(request))
        self._scheduler.check(requests)
        for request in requests:
            matcher = None
            if request.sampling.stop_strings and self._decode is not None:
                matcher = StopStringMatcher(request.sampling.stop_strings, self._decode)
            self._scheduler.add(request, self._limit(request), matcher)

    def _limit(self, request: Request) -> int:
        """Tokens it may get, where the model's context ends included."""
        limit = request.sampling.max_new_tokens
        return limit if self._context is None else min(limit, self._context - len(request.prompt_ids))

    def cancel(self, request_ids: Iterable[str]) -> None:
        for response in self._drop(request_ids):
            self._hand_over(response.completion(FinishReason.CANCELLED))

    def _drop(self, request_ids: Iterable[str]) -> list[Response]:
        """Ends what is still held of ``request_ids``."""
        held = self._scheduler.held
        responses = [held[i] for i in dict.fromkeys(request_ids) if i in held]
        self._retire(responses)
        self._stats.num_cancelled += len(responses)
        return responses

    def _retire(self, responses: Sequence[Response]) -> None:
        self._scheduler.retire(responses)
        for response in responses:
            self._admission.release(response)
        if responses:
            self._rows_current = False

    # ---- driving ----

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.held or self._finished or self._failure)

    def step(self, proposed: Mapping[str, Sequence[int]] | None = None) -> list[Completion]:
        """As the protocol has it.

        Args:
            proposed: tokens that might follow what running requests have, by request id, any number each. They are
                computed together with the request's newest token. Each is kept as long as it is the one that would
                have been sampled, and one more comes behind the last kept one: completions are those of a run without
                proposals, to rounding, and to the bit under exact numerics. Proposals for requests that do not run are
                left out.

        Raises:
            UserError: a proposed token that the model does not have.
        """
        if proposed:
            self._take_proposals(proposed)
        self._advance()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        finished, self._finished = self._finished, []
        return finished

    def _take_proposals(self, proposed: Mapping[str, Sequence[int]]) -> None:
        check_proposals(proposed, self._vocab_size)
        for response in self._scheduler.running:
            # The last token that it may still get is sampled behind the proposals.
            room = response.max_tokens - len(response.token_ids) - 1
            response.draft = tuple(proposed.get(response.request.request_id, ()))[:room]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.submit(requests)
        stream = _Stream(request.request_id for request in requests)
        self._streams.update(dict.fromkeys(stream.pending, stream))
        try:
            while stream.pending:
                while stream.ready:
                    completion = stream.ready.popleft()
                    stream.pending.discard(completion.request_id)
                    yield completion
                if stream.failure is not None:
                    raise stream.failure
                if stream.pending:
                    self._advance()
                    await asyncio.sleep(0)
        finally:
            for request_id in stream.pending:
                self._streams.pop(request_id, None)
            self._drop(stream.pending)

    def _hand_over(self, completion: Completion) -> None:
        """To the stream that waits for it, else to the next ``step``."""
        stream = self._streams.pop(completion.request_id, None)
        if stream is None:
            self._finished.append(completion)
        else:
            stream.ready.append(completion)

    # ---- one step ----

    @torch.no_grad()
    def _advance(self) -> None:
        self._check_usable()
        if not self._scheduler.held:
            return
        running = self._settle()
        plan = self._admission.plan()
        if plan.fills:
            self._fit_slots(running)
        drafts = [response.draft for response in running]
        spans = Spans.of(self._rows, drafts) if any(drafts) else None
        # True again once the step is complete, so an interrupted one leaves no half-updated rows.
        self._rows_valid = False
        with self._weights.active():
            wanted = [r.block for r in plan.admitted if r.block is not None]
            rows = self._rows if running else None
            logits, first_logits = self._runner.step(self._cache, rows, plan.fills, wanted, spans)
        plan.count(self._stats)
        if plan.fills:
            self._note_peak()
        self._stats.peak_running = max(self._stats.peak_running, len(running) + len(plan.admitted))
        if spans is not None:
            self._record(running, *self._sample([r for r in running for _ in (0, *r.draft)], logits))
        elif running:
            tokens, logprobs = sample(logits, self._rows.sampling, self._rows.num_generated)
            self._record(running, tokens, logprobs)
            self._rows.advance(tokens)
        if plan.admitted:
            self._begin(plan.admitted, first_logits)
        # After proposals rows advance by different numbers of tokens and are loaded anew.
        self._rows_valid = spans is None

    def _check_usable(self) -> None:
        """
        Raises:
            RuntimeError: it sleeps.
            WeightsUnusable: its own weights are not those of a policy version: none came yet, or none since it woke.
        """
        if self._asleep:
            raise RuntimeError("the rollout engine sleeps; call wake() before generating")
        if self._sink is not None:
            self._sink.require()

    def _settle(self) -> list[Response]:
        """Makes rows of what runs, and room in the cache for a token of each."""
        settled = self._scheduler.settle()
        if any(target >= self._cache.num_slots for _, target, _ in settled.moves):
            self._fit_slots(self._scheduler.rows)
        for source, target, length in settled.moves:
            self._cache.move(source, target, length)
        running = self._scheduler.rows
        if not running:
            return running
        current = self._rows_valid and self._rows_current and not settled.changed and not any(r.draft for r in running)
        if not current or self._runner.contexts.slot_length(self._rows.longest) > self._cache.capacity:
            self._fit_slots(running)
            for response in settled.placed:
                self._place(response)
            shape = (self._cache.num_slots, self._cache.capacity)
            changed = settled.changed if self._rows_valid else range(len(running))
            self._rows.load(running, changed, shape)
            self._rows_current = True
            self._note_peak()
            if self._admission.cache_tokens is None:
                self._admission.prefixes.trim(self._cache.num_tokens, self._scheduler.wanted_blocks)
        return running

    def _fit_slots(self, running: Sequence[Response]) -> None:
        """Gives the cache room for the next tokens of each of ``running``, within ``cache_tokens``."""
        cache, admission = self._cache, self._admission
        limit = None if admission.cache_tokens is None else admission.cache_tokens - admission.prefixes.num_tokens
        if not running:
            if limit is not None and cache.num_tokens > limit:
                cache.resize(0, 0)
            return
        longest = self._runner.contexts.slot_length(max(r.num_stored + len(r.draft) for r in running) + 1)
        if (
            longest > cache.capacity
            or len(running) > cache.num_slots
            or (limit is not None and cache.num_tokens > limit)
        ):
            cache.resize(
                *slot_shape(
                    (cache.num_slots, cache.capacity),
                    num_rows=len(running),
                    longest=longest,
                    most=max(map(admission.slot_tokens, running)),
                    max_rows=min(self._scheduler.max_running, len(self._scheduler.held)),
                    limit=limit,
                )
            )

    def _place(self, response: Response) -> None:
        """Fills the slot of a request that got its row from its block, and lets go of what it then has itself."""
        block = response.block
        if block is None:
            raise RuntimeError("a request came to a row without anything computed for it")
        if block is response.prefix:
            self._cache.allocate_like(block.keys, block.values)
            response.block = None
            return
        self._cache.write([response.row], block.keys, block.values)
        prefix = response.prefix
        if prefix is not None:
            self._admission.prefixes.hold(prefix)
        self._admission.prefixes.drop(block)
        response.block = None

    def _note_peak(self) -> None:
        self._stats.peak_cache_bytes = max(self._stats.peak_cache_bytes, self._cache_bytes())
        self._stats.peak_cached_tokens = max(self._stats.peak_cached_tokens, self._cached_tokens())

    def _begin(self, admitted: Sequence[Response], logits: Tensor) -> None:
        """Samples the next token of requests whose blocks are complete, from ``[A, V]`` logits."""
        self._scheduler.admit(admitted)
        for response in admitted:
            first = response.block and response.block.chain[0]
            response.prefix = first if first and first.shared else None
        self._record(admitted, *self._sample(admitted, logits))

    def _sample(self, responses: Sequence[Response], logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token and its log-probability for each row of ``logits [B, V]``; a response's rows stand together."""
        sampling = SamplingRows.build([r.request.sampling for r in responses], self._vocab_size, self.packed.device)
        places = [len(r.token_ids) + i for _, own in groupby(responses, key=id) for i, r in enumerate(own)]
        return sample(logits, sampling, np.array(places, dtype=np.uint64))

    def _record(self, responses: Sequence[Response], tokens: Tensor, logprobs: Tensor) -> None:
        """Gives each response its token, or those that its proposals let stand; retires what ends or has none."""
        version = self._stats.policy_version
        done: list[tuple[Response, FinishReason]] = []
        failed: list[Response] = []
        sampled = iter(self._read(tokens, logprobs))
        for response in responses:
            own = list(islice(sampled, 1 + len(response.draft)))
            end = response.num_stored + len(own)
            for (token, logprob), proposed in zip(own, (*response.draft, None), strict=True):
                if not math.isfinite(logprob):
                    failed.append(response)
                    break
                reason = response.append(int(token), logprob, version)
                self._stats.generated_tokens += 1
                if reason is not None:
                    done.append((response, reason))
                    break
                if token != proposed:
                    break
            if response.draft:
                response.draft = ()
                self._cache.truncate(response.row, response.num_stored, end)
        self._stats.num_completed += len(done)
        if failed:
            self._fail(failed)
        self._retire([response for response, _ in done])
        for response, reason in done:
            self._hand_over(response.completion(reason))

    def _read(self, tokens: Tensor, logprobs: Tensor) -> list[list[float]]:
        """Pairs on the host: the only place in a step where the host waits for the device."""
        # fp64 holds both, so one copy is enough.
        return torch.stack([tokens.double(), logprobs.double()], 1).tolist()

    def _fail(self, failed: Sequence[Response]) -> None:
        """Drops responses whose logits are not finite, and tells whoever waits for them."""
        for response in failed:
            if response.row >= 0:
                self._cache.clear(response.row)
            prompt = self._admission.prefixes.find(*response.request.prompt_key)
            if prompt is not None:
                self._admission.prefixes.discard(prompt)
        self._retire(failed)
        unclaimed: list[Response] = []
        for response in failed:
            stream = self._streams.pop(response.request.request_id, None)
            if stream is None:
                unclaimed.append(response)
            else:
                stream.failure = stream.failure or not_finite([response])
        if unclaimed:
            self._failure = not_finite(unclaimed)

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
        return TensorSink(named, on_begin=self._before_sync, on_commit=self._take_version, version=version)

    def _before_sync(self) -> None:
        if self._asleep:
            raise WeightsRefused(
                "the rollout engine sleeps and has no room for weights",
                found="a weight sync before wake()",
                remedy="call wake() first",
            )

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
        pairs, sink = list(source), self.weight_sink()
        sync_in_process(NamedSource(lambda: pairs, like=sink.dtypes()), [sink], version)

    def sleep(self) -> int:
        before = held_bytes(self.packed.device)
        self._forget()
        self._release()
        # What is frozen is not sent again, so a base model stays, and the adapters with it: they are as new as before.
        if self._sink is not None and not self._asleep and self.packed.adapters is None:
            self._discarded = DiscardedWeights(self.packed.model)
            self._sink.invalidate("the engine slept and gave its weights back")
        self._asleep = True
        return before - held_bytes(self.packed.device)

    def _release(self) -> None:
        """Gives back what can be computed again."""
        self._cache.release()
        self._weights.release()

    def release_cache(self) -> None:
        """Gives back what can be computed again: keys and values, weights in other forms. Weights and requests stay."""
        self._forget()
        self._release()

    def wake(self) -> int:
        before = held_bytes(self.packed.device)
        self._asleep = False
        if self._discarded is not None:
            self._discarded.restore()
            self._discarded = None
        return held_bytes(self.packed.device) - before

    def resident_bytes(self) -> int:
        own = num_bytes_of(self.packed.model) if self.owns_weights else 0
        return own + self._weights.num_bytes + self._cache_bytes()

    def _forget(self) -> None:
        """Everything computed from the weights; tokens stay."""
        self._scheduler.preempt_all()
        self._admission.prefixes.clear()
        self._rows_valid = self._rows_current = False

    def _cache_bytes(self) -> int:
        return self._cache.num_bytes + self._admission.prefixes.num_bytes

    def _cached_tokens(self) -> int:
        return self._cache.num_tokens + self._admission.prefixes.num_tokens

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            cached_tokens=self._cached_tokens(),
            cache_bytes=self._cache_bytes(),
        )
