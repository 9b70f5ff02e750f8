"""The native rollout engine: generates with the trainer's own model object, in the trainer's process.

One step: admit → compute again what new weights made stale → decode one token of everything running →
prefill new prompts → sample a token for all → retire what is done.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quartet.config import UserError
from quartet.models.packed import PackedCausalLM
from quartet.rollout.cache import KVCache
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, GenerationError, Request
from quartet.rollout.runner import MIN_ROWS, ModelRunner, PreparedPrompt, Rows
from quartet.rollout.sampler import sample
from quartet.rollout.scheduler import Group, Response, Scheduler
from quartet.rollout.stop_strings import Decode, StopStringMatcher
from quartet.rollout.weights import DiscardedWeights, copy_weights


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
        owns_weights: ``packed`` is this engine's own copy, refreshed by ``update_weights`` and freed by
            ``sleep``.
        max_running: requests decoded together.
        max_prefill_tokens: prompt tokens of one forward pass; a longer prompt runs alone.
        decode: token ids → text, needed for stop strings.
        version: policy version of the weights as they are.
    """

    def __init__(
        self,
        packed: PackedCausalLM,
        *,
        owns_weights: bool = False,
        max_running: int = 64,
        max_prefill_tokens: int = 8192,
        decode: Decode | None = None,
        version: int = 0,
    ) -> None:
        self.packed = packed
        self.owns_weights = owns_weights
        self._decode = decode
        self._scheduler: Scheduler[PreparedPrompt] = Scheduler(max_running, max_prefill_tokens)
        self._runner = ModelRunner(packed)
        self._cache = KVCache()
        self._rows: Rows | None = None
        self._stats = EngineStats(policy_version=version)
        self._finished: list[Completion] = []
        self._failure: GenerationError | None = None
        self._streams: dict[str, _Stream] = {}
        self._asleep = False
        self._needs_weights = False
        self._wanted_capacity = 0
        self._discarded: DiscardedWeights | None = None
        config = packed.model.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._vocab_size = packed.vocab_size

    # ---- requests ----

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check(request)
        self._scheduler.check(requests)
        if not self._scheduler.held:
            self._wanted_capacity = 0
        for request in requests:
            sampling = request.sampling
            limit = sampling.max_new_tokens
            if self._context is not None:
                limit = min(limit, self._context - len(request.prompt_ids))
            self._wanted_capacity = max(self._wanted_capacity, len(request.prompt_ids) + limit)
            matcher = None
            if sampling.stop_strings and self._decode is not None:
                matcher = StopStringMatcher(sampling.stop_strings, self._decode)
            self._scheduler.add(request, limit, matcher)

    def _check(self, request: Request) -> None:
        num_prompt = len(request.prompt_ids)
        if self._context is not None and num_prompt >= self._context:
            raise UserError(
                "a prompt leaves no room in the model's context",
                found=f"request {request.request_id!r}: {num_prompt} tokens, a context of {self._context}",
                remedy="shorten or drop such prompts (generation that reaches the context's end stops there)",
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._vocab_size:
            raise UserError(
                "a prompt holds tokens the model does not have",
                found=f"request {request.request_id!r}: ids {lowest} to {highest}, {self._vocab_size} tokens",
                remedy="use the tokenizer that belongs to the model",
            )
        if request.sampling.stop_strings and self._decode is None:
            raise UserError(
                "stop strings need a way to decode tokens",
                found=f"request {request.request_id!r} with stop strings, engine without decode",
                remedy="build the engine with decode=tokenizer.decode, or use stop_token_ids",
            )

    def cancel(self, request_ids: Iterable[str]) -> None:
        for response in self._drop(request_ids):
            self._hand_over(response.completion(FinishReason.CANCELLED))

    def _drop(self, request_ids: Iterable[str]) -> list[Response[PreparedPrompt]]:
        """Ends what is still held of ``request_ids``."""
        held = self._scheduler.held
        responses = [held[i] for i in dict.fromkeys(request_ids) if i in held]
        self._scheduler.retire(responses)
        self._stats.num_cancelled += len(responses)
        return responses

    # ---- driving ----

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.held or self._finished or self._failure)

    def step(self) -> list[Completion]:
        self._advance()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        finished, self._finished = self._finished, []
        return finished

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
        if self._asleep:
            raise RuntimeError("the rollout engine sleeps; call wake() before generating")
        if self._needs_weights:
            raise RuntimeError("the rollout engine has no weights since it slept; call update_weights() first")
        if not self._scheduler.held:
            return
        schedule = self._scheduler.schedule()
        self._cache.move(schedule.moves)
        running = self._scheduler.running
        # Kept only from one completed step to the next, so an interrupted step leaves nothing half-updated.
        rows, self._rows = self._rows, None
        fresh: list[Response[PreparedPrompt]] = []
        if rows is None or schedule.changed:
            self._cache.reserve(max(MIN_ROWS, len(running), self._wanted_slots()), self._wanted_capacity)
            self._recompute([r for r in running if r.token_ids and not r.cached])
            fresh = [r for r in running if not r.token_ids]
            rows = Rows(running, self._vocab_size, self.packed.device)
        logits = self._next_logits(rows, running, fresh)
        tokens, logprobs = sample(logits, rows.sampling, rows.num_generated)
        self._record(running, tokens, logprobs)
        if not fresh:
            rows.advance(tokens)
            self._rows = rows

    def _wanted_slots(self) -> int:
        return min(self._scheduler.max_running, len(self._scheduler.held))

    def _next_logits(
        self, rows: Rows, running: list[Response[PreparedPrompt]], fresh: list[Response[PreparedPrompt]]
    ) -> Tensor:
        """``[B, V]``; decoding comes first because it writes position 0 of rows that have nothing to
        decode.
        """
        if len(fresh) == len(running):
            return self._first_logits(fresh)
        logits = self._runner.decode(self._cache, rows)[: len(running)]
        if fresh:
            logits[[r.row for r in fresh]] = self._first_logits(fresh)
        return logits

    def _first_logits(self, fresh: list[Response[PreparedPrompt]]) -> Tensor:
        """Fills the slots of ``fresh`` with their prompts, each computed once; logits after the prompt, per
        response.
        """
        groups = list(dict.fromkeys(r.group for r in fresh))
        missing = [group for group in groups if group.prepared is None]
        if missing:
            parts, hidden = self._runner.prefill([group.prompt_ids for group in missing])
            logits = self._runner.logits(hidden)
            for i, group in enumerate(missing):
                group.prepared = PreparedPrompt(parts[i], logits[i])
                self._count_prefill(group)
        prepared: list[Tensor] = []
        for group in groups:
            prompt = _prepared(group)
            self._cache.write([r.row for r in fresh if r.group is group], prompt.key_values)
        for response in fresh:
            response.cached = True
            prepared.append(_prepared(response.group).logits)
        for group in groups:
            if group.num_waiting == 0:
                group.prepared = None
            elif group in missing:
                # A view would keep the whole pack's keys and values alive.
                group.prepared = _prepared(group).clone()
        return torch.stack(prepared)

    def _count_prefill(self, group: Group[PreparedPrompt]) -> None:
        self._stats.prompt_tokens_prefilled += len(group.prompt_ids)
        if not group.counted:
            group.counted = True
            self._stats.distinct_prompt_tokens += len(group.prompt_ids)

    def _recompute(self, stale: list[Response[PreparedPrompt]]) -> None:
        """Fills the slots of running requests anew, a bounded number of tokens at a time."""
        while stale:
            batch = [stale.pop()]
            num_tokens = batch[0].num_cached
            while stale and num_tokens + stale[-1].num_cached <= self._scheduler.max_prefill_tokens:
                num_tokens += stale[-1].num_cached
                batch.append(stale.pop())
            parts, _ = self._runner.prefill([(*r.request.prompt_ids, *r.token_ids[:-1]) for r in batch])
            for response, part in zip(batch, parts, strict=True):
                self._cache.write([response.row], part)
                response.cached = True
            self._stats.recomputed_tokens += num_tokens

    def _record(self, running: list[Response[PreparedPrompt]], tokens: Tensor, logprobs: Tensor) -> None:
        version = self._stats.policy_version
        done: list[tuple[Response[PreparedPrompt], FinishReason]] = []
        failed: list[Response[PreparedPrompt]] = []
        for response, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                failed.append(response)
                continue
            reason = response.append(token, logprob, version)
            if reason is not None:
                done.append((response, reason))
        stats = self._stats
        stats.num_steps += 1
        stats.generated_tokens += len(running) - len(failed)
        stats.num_completed += len(done)
        stats.peak_running = max(stats.peak_running, len(running))
        stats.peak_cache_bytes = max(stats.peak_cache_bytes, self._cache_bytes())
        self._scheduler.retire(response for response, _ in done)
        for response, reason in done:
            self._hand_over(response.completion(reason))
        if failed:
            self._fail(failed)

    def _fail(self, failed: list[Response[PreparedPrompt]]) -> None:
        """Drops responses whose logits are not finite, and tells whoever waits for them."""
        for response in failed:
            self._cache.clear(response.row)
            response.group.prepared = None
        self._scheduler.retire(failed)
        unclaimed: list[Response[PreparedPrompt]] = []
        for response in failed:
            stream = self._streams.pop(response.request.request_id, None)
            if stream is None:
                unclaimed.append(response)
            else:
                stream.failure = stream.failure or _not_finite([response])
        if unclaimed:
            self._failure = _not_finite(unclaimed)

    # ---- weights and memory ----

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if self.owns_weights != (source is not None):
            raise UserError(
                "the rollout engine cannot take these weights",
                found="its own copy of the weights and no source" if self.owns_weights else "a model it shares",
                remedy="pass (name, tensor) pairs to an engine with its own weights, else None",
            )
        if source is not None:
            if self._asleep:
                raise RuntimeError("the rollout engine sleeps; call wake() before update_weights()")
            copy_weights(self.packed.model, source)
            self._needs_weights = False
        self._forget()
        self._stats.policy_version = version

    def sleep(self) -> None:
        self._forget()
        self._cache.release()
        if self.owns_weights and not self._asleep:
            self._discarded = DiscardedWeights(self.packed.model)
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False
        if self._discarded is not None:
            self._discarded.restore()
            self._discarded = None
            self._needs_weights = True

    def _forget(self) -> None:
        self._scheduler.invalidate()
        self._rows = None

    def _cache_bytes(self) -> int:
        groups = self._scheduler.groups.values()
        return self._cache.num_bytes + sum(g.prepared.num_bytes for g in groups if g.prepared is not None)

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            cache_bytes=self._cache_bytes(),
        )


def _prepared(group: Group[PreparedPrompt]) -> PreparedPrompt:
    if group.prepared is None:
        raise RuntimeError("a prompt was scheduled but not computed")
    return group.prepared


def _not_finite(responses: Sequence[Response[PreparedPrompt]]) -> GenerationError:
    ids = [response.request.request_id for response in responses]
    first = responses[0]
    return GenerationError(
        f"logits of request {ids[0]!r} are not finite at response token {len(first.token_ids)}"
        + (f" ({len(ids)} requests in all)" if len(ids) > 1 else ""),
        ids,
    )
