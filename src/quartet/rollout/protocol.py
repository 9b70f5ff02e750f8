"""What every rollout engine takes and gives back. Imports no torch at run time.

A ``RolloutEngine`` turns requests into completions at its own pace, wherever it computes. A ``StepEngine`` is driven
step by step by the thread that has it: the native engine, and what computes inside of an engine's own process.
``SteppedEngine`` and ``PacedEngine`` make either of the other.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quartet.config import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from quartet.weights.sink import TensorSink

_SEED_LIMIT = 1 << 64
_COLDEST = 1e-30
"""The lowest temperature: logits divided by less leave fp32's range."""
Draw = Literal["inverse", "gumbel"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (log-probabilities are then those at
            1).
        top_p: keeps the most likely tokens whose probabilities reach this sum; 1 keeps all.
        top_k: keeps this many of the most likely tokens, before ``top_p``; 0 keeps all.
        min_p: drops tokens less likely than this share of the most likely one; 0 keeps all.
        max_new_tokens: tokens generated at most; the model's context may end the request earlier.
        stop_token_ids: each of them ends the request and stays the last token of the completion.
        stop_strings: each of them ends the request as soon as it stands in the generated text.
        seed: every token is a function of (prompt, this seed, its position) and of nothing else.
        truncated_logprobs: log-probabilities are those of the tokens that ``top_p``, ``top_k`` and ``min_p`` keep, and
            of the sampled one.
        draw: by inverting the distribution function at one number, or by Gumbel noise for every token, which two
            distributions that are nearly alike share most tokens by; no server has it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    truncated_logprobs: bool = False
    draw: Draw = "inverse"

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or _COLDEST <= self.temperature < math.inf):
            raise _bad("temperature", self.temperature, f"a finite number from {_COLDEST} on, or 0 (greedy)")
        if not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "a number above 0 and up to 1 (1 keeps every token)")
        if self.top_k < 0:
            raise _bad("top_k", self.top_k, "0 (keep every token) or a positive count")
        if not 0 <= self.min_p <= 1:
            raise _bad("min_p", self.min_p, "a number from 0 (keep every token) to 1 (keep only the most likely)")
        if self.max_new_tokens < 1:
            raise _bad("max_new_tokens", self.max_new_tokens, "1 or more")
        if isinstance(self.stop_strings, str) or any(not s for s in self.stop_strings):
            raise _bad("stop_strings", self.stop_strings, "a tuple of non-empty strings")
        if not 0 <= self.seed < _SEED_LIMIT:
            raise _bad("seed", self.seed, "an integer from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Tells whether tokens are chosen from less than the whole distribution."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def _bad(name: str, found: object, remedy: str) -> UserError:
    return UserError(f"sampling parameter {name} is out of range", found=f"{name} = {found!r}", remedy=f"use {remedy}")


@dataclass(frozen=True)
class Request:
    """One response to be generated.

    Attributes:
        request_id: unique among the requests an engine holds.
        group: requests of one group have the same prompt, which is prefilled once for all of them.
        prompt_ids: at least one token.
        session: requests of one session (an episode's turns) begin alike, and are best answered where the earlier ones
            were.
    """

    request_id: str
    group: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    session: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UserError(
                "a request needs a prompt",
                found=f"request {self.request_id!r} with no prompt tokens",
                remedy="give at least one token, for example the beginning-of-text token",
            )


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled; it is the last of ``token_ids``."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """``max_new_tokens``, or the end of the model's context."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Completion:
    """What came of one request; all per-token columns have equal lengths.

    Attributes:
        token_ids: generated tokens, without the prompt.
        logprobs: of each token under the temperature-scaled distribution, in nats: the untruncated one, unless its
            request asks for ``truncated_logprobs``.
        versions: policy version that computed each token's distribution.
        text_end: with ``STOP_STRING``, the number of characters of the decoded tokens before the stop string.
        columns: further numbers of each token by name, which become token fields of the batch: int64 where all of a
            column are integers, else fp32. All completions of a run have the same.
    """

    request_id: str
    group: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text_end: int | None = None
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PartialCompletion:
    """What a request has so far; its columns are equally long."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(eq=False)
class UnfinishedRequest:
    """A request, and the tokens that it has so far; ``text_end`` as of ``Completion``."""

    request: Request
    token_ids: list[int] = field(default_factory=list, kw_only=True)
    logprobs: list[float] = field(default_factory=list, kw_only=True)
    versions: list[int] = field(default_factory=list, kw_only=True)
    text_end: int | None = field(default=None, kw_only=True)

    def generated(self) -> PartialCompletion:
        return PartialCompletion(tuple(self.token_ids), tuple(self.logprobs), tuple(self.versions))

    def completion(self, reason: FinishReason) -> Completion:
        columns = tuple(self.token_ids), tuple(self.logprobs), tuple(self.versions)
        return Completion(self.request.request_id, self.request.group, *columns, reason, self.text_end)


@dataclass
class EngineStats:
    """Counters since the engine was made (``num_*`` of requests: now).

    Attributes:
        prompt_tokens_prefilled: prompt tokens that went through the model for newly admitted requests.
        generated_tokens: tokens sampled.
        cached_tokens: places for keys and values that are allocated now, in slots and prompts.
        cache_bytes: held now by the KV cache: slots, prompts, and the logits that follow prompts.
        num_retries: requests to a server that were sent once more.
        num_restarts: engines that were started anew.
        num_rerouted: requests that were begun anew because their engine failed or left.
        num_row_steps: running requests, summed over the steps.
        drafted_by_depth: places with drafted tokens (several where a draft branches) whose forerunners in the draft
            were all kept, from the first of a draft on.
        kept_by_depth: of these the ones of which a token was kept, too.
        num_pictures: that went through a tower of the engine's own.
    """

    policy_version: int = 0
    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens_prefilled: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    cache_bytes: int = 0
    num_retries: int = 0
    num_restarts: int = 0
    num_rerouted: int = 0
    num_row_steps: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    kept_by_depth: tuple[int, ...] = ()
    num_pictures: int = 0

    @classmethod
    def total(cls, stats: Sequence[EngineStats]) -> EngineStats:
        """Returns the sums, by depth for what is counted by depth."""
        columns = {each.name: [getattr(one, each.name) for one in stats] for each in fields(cls)}
        return cls(**{name: _summed(values) for name, values in columns.items()})

    def sampling_less(self, other: EngineStats) -> EngineStats:
        """Returns the counters of sampling alone, less those of ``other``."""
        names = ("prompt_tokens_prefilled", "generated_tokens", "num_row_steps", "drafted_by_depth", "kept_by_depth")
        mine, theirs = ([getattr(stats, name) for name in names] for stats in (self, other))
        pairs = zip(names, mine, theirs, strict=True)
        return EngineStats(**{name: _summed([own, _negated(of_other)]) for name, own, of_other in pairs})


def _negated(value: Any) -> Any:
    return tuple(-each for each in value) if isinstance(value, tuple) else -value


def _summed(values: Sequence[Any]) -> Any:
    if any(isinstance(value, tuple) for value in values):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    return sum(values)


class GenerationError(UserError):
    """The model failed on particular requests (named in ``request_ids``); the engine goes on with the
    others.
    """

    def __init__(self, found: str, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        super().__init__(
            "the model gave logits that are not finite",
            found=found,
            remedy="check its weights; in training, lower the learning rate and resume from an earlier checkpoint",
        )


class StepEngine(Protocol):
    """An engine that computes in the calling thread, a step at a time: ``submit``, then ``step`` while it
    ``has_work``.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; all of them or, on an error, none.

        Raises:
            UserError: a prompt that leaves no room in the model's context, tokens outside the vocabulary, a
                request id already held, different prompts in one group, stop strings without a way to decode.
        """

    @property
    def has_work(self) -> bool:
        """Tells whether ``step`` has anything to do or to hand over."""

    def step(self) -> list[Completion]:
        """Admits, prefills, and adds one token to every running request.

        Returns:
            Completions that became final.

        Raises:
            GenerationError: logits of some requests were not finite; they are dropped, the others are
                unharmed.
        """

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends requests; they are handed over as ``CANCELLED`` with the tokens they have. Unknown ids are
        ignored, since a request may finish before its cancellation arrives."""

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        """Returns what requests have so far, by id, for those who watch; unknown and ended ones are left out."""

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Takes new weights; tokens sampled from now on carry ``version``.

        Running requests go on from the tokens they have: their keys and values are computed again with the
        new weights before their next token.

        Args:
            source: ``(name, tensor)`` of every parameter, or None for an engine that shares the trainer's
                model.

        Raises:
            WeightSyncError: names or shapes do not fit and the engine is unchanged, or a digest differs.
        """

    def weight_sink(self) -> TensorSink:
        """Returns where weights from other processes go, for an engine with its own; always the same one.

        Raises:
            UserError: the engine shares the trainer's model.
        """

    def stats(self) -> EngineStats: ...


class EngineFailed(UserError):
    """The engine cannot go on: its process died, it stalled, or it answered what cannot be. Nothing of what it held
    will be answered; it answers again only once it was started anew.
    """


class RolloutEngine(Protocol):
    """An engine that computes at its own pace. Its methods are called from one thread at a time."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; all of them or, on an error, none.

        Raises:
            UserError: as ``StepEngine.submit``.
            EngineFailed: it is gone.
        """

    def completed(self, timeout_s: float) -> list[Completion]:
        """Waits until requests have ended, at most so long; each is handed over once, cancelled ones included.

        Raises:
            GenerationError: logits of some requests were not finite; these have ended, the others go on.
            EngineFailed: it died, stalled, or broke its promises.
        """

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancels as ``StepEngine.cancel`` does."""

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        """Returns what requests have so far, by id, for those who watch; empty where an engine does not say."""

    def pause(self) -> None:
        """Returns when no more tokens are made. What runs stays as it is, and goes on after ``resume``."""

    def resume(self) -> None: ...

    def weight_sink(self) -> TensorSink:
        """Returns where new weights go, in a pause; always the same one. Tokens made after its ``commit`` carry the new
        version, whatever ran goes on from the tokens it has, and nothing computed from older weights is used.

        Raises:
            UserError: an engine that takes none.
        """

    def sleep(self, level: Literal[1, 2]) -> None:
        """Gives up, in a pause, the cache (1: weights move to host memory) or cache and weights (2)."""

    def wake(self) -> None:
        """Takes back what it gave up. After level 2 it computes only once weights were sent."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Ends what it started; the engine is not used any more. Closing twice is allowed."""


def check_request_ids(requests: Sequence[Request], held: Container[str]) -> None:
    """Raises UserError where an id is held already, or given twice."""
    twice = [i for i, n in Counter(request.request_id for request in requests).items() if n > 1 or i in held]
    if twice:
        raise UserError(
            "a request id is in use",
            found=f"{twice[0]!r} ({len(twice)} in all)",
            remedy="give every request an id of its own until it has ended",
        )


class RequestLedger:
    """What an engine owes: each request is answered once.

    Args:
        name: of the engine, for messages.

    Attributes:
        held: requests that are to be answered, by id, in the order in which they came; without cancelled ones.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, Request] = {}
        # Apart, because their ids may be used again at once.
        self._cancelled: list[Request] = []

    def __len__(self) -> int:
        """Returns how many answers are still to come, cancelled ones included."""
        return len(self.held) + len(self._cancelled)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests that the engine has taken."""
        self.held.update((request.request_id, request) for request in requests)

    def cancel(self, request_ids: Iterable[str]) -> list[str]:
        """Cancels requests and returns the ids among these that were held; each is expected once more, as cancelled."""
        cancelled = [self.held.pop(i) for i in dict.fromkeys(request_ids) if i in self.held]
        self._cancelled += cancelled
        return [request.request_id for request in cancelled]

    def settle(self, completion: Completion) -> None:
        """Strikes off what ``completion`` answers.

        Raises:
            EngineFailed: nobody asked, or it was answered already.
        """
        request_id = completion.request_id
        if completion.finish_reason is FinishReason.CANCELLED:
            request = next((request for request in self._cancelled if request.request_id == request_id), None)
            if request is not None:
                self._cancelled.remove(request)
        else:
            request = self.held.pop(request_id, None)
        if request is None:
            raise EngineFailed(
                f"the rollout engine {self.name!r} answers what nobody asked for, or answered already",
                found=f"{request_id!r} as {completion.finish_reason}",
                remedy="it is started anew where it can be; if that repeats itself, report it",
            )

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drops requests that have ended without an answer, by an error that named them."""
        for request_id in request_ids:
            if self.held.pop(request_id, None) is None:  # it was cancelled just before
                self._cancelled = [request for request in self._cancelled if request.request_id != request_id]

    def clear(self) -> tuple[list[Request], list[Request]]:
        """Empties the ledger, as nothing will be answered any more: returns what was held, in order, and what was
        cancelled."""
        held, cancelled = list(self.held.values()), self._cancelled
        self.held, self._cancelled = {}, []
        return held, cancelled


class RequestsRefused(GenerationError):
    """An engine did not take requests that had waited for it; these have ended, the others go on."""

    def __init__(self, error: UserError, request_ids: Sequence[str]) -> None:
        self.error = error
        self.request_ids = tuple(request_ids)
        UserError.__init__(self, error.problem, found=error.found, remedy=error.remedy)


class SteppedEngine:
    """A step engine that computes in the thread which waits for completions; closing it leaves that as it is."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._is_paused = False

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    @property
    def can_step(self) -> bool:
        """Tells whether there is work, and no pause."""
        return not self._is_paused and self.engine.has_work

    def completed(self, timeout_s: float) -> list[Completion]:
        """Returns completions as the protocol has it; makes at least one step where it can, however short the time
        is."""
        end = time.monotonic() + timeout_s
        done: list[Completion] = []
        while not done and self.can_step:
            done = self.engine.step()
            if time.monotonic() >= end:
                break
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.engine.cancel(request_ids)

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        return self.engine.generated(request_ids)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def weight_sink(self) -> TensorSink:
        return self.engine.weight_sink()

    def sleep(self, level: Literal[1, 2]) -> None:
        engine: Any = self.engine
        engine.sleep(level)

    def wake(self) -> None:
        engine: Any = self.engine
        engine.wake()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Does nothing: nothing was started."""


class PacedEngine:
    """A rollout engine whose steps wait until something has ended.

    Args:
        engine: generates at its own pace, between steps, too.
        step_s: longest step.
    """

    def __init__(self, engine: RolloutEngine, step_s: float = 1.0) -> None:
        self.engine = engine
        self.step_s = step_s
        self._held: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)
        self._held.update(request.request_id for request in requests)

    def note(self, request_ids: Iterable[str]) -> None:
        """Notes requests that were submitted to the engine by other ways, and are waited for."""
        self._held.update(request_ids)

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    def step(self) -> list[Completion]:
        try:
            done = self.engine.completed(self.step_s)
        except GenerationError as error:
            self._held.difference_update(error.request_ids)
            raise
        self._held.difference_update(completion.request_id for completion in done)
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.engine.cancel(request_ids)

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        from quartet.weights.sink import write_weights

        write_weights(self.weight_sink(), source or (), version)

    def weight_sink(self) -> TensorSink:
        return self.engine.weight_sink()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        return self.engine.generated(request_ids)
