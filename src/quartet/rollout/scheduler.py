"""Which requests run, and in which cache slot. Knows no tensors.

Requests are admitted first come, first served at every step. A running request's row in the batch is its
cache slot; ``schedule`` keeps the rows ``0 … B-1`` free of gaps, first with new requests, then by moving the
last ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quartet.config import UserError
from quartet.rollout.protocol import Completion, FinishReason, Request
from quartet.rollout.stop_strings import StopStringMatcher

Prepared = TypeVar("Prepared")


@dataclass(eq=False)
class Group(Generic[Prepared]):
    """A prompt and its members that are not finished.

    Attributes:
        prepared: what the runner computed for the prompt; kept while members wait.
        counted: whether the prompt stands in the count of distinct prompt tokens.
    """

    prompt_ids: tuple[int, ...]
    num_members: int = 0
    num_waiting: int = 0
    prepared: Prepared | None = None
    counted: bool = False


@dataclass(eq=False)
class Response(Generic[Prepared]):
    """One request with the tokens it has so far.

    Attributes:
        max_tokens: ``max_new_tokens`` or what the model's context leaves, whichever is less.
        row: batch row and cache slot, -1 while waiting.
        cached: the slot holds keys and values of every token but the newest.
    """

    request: Request
    group: Group[Prepared]
    max_tokens: int
    matcher: StopStringMatcher | None = None
    row: int = -1
    cached: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text_end: int | None = None

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.request.sampling.stop_token_ids)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values the slot holds once ``cached``."""
        return len(self.request.prompt_ids) + max(0, len(self.token_ids) - 1)

    def append(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Takes the next token; returns why the response ends with it, if it does."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.matcher is not None:
            self.text_end = self.matcher.find(self.token_ids)
            if self.text_end is not None:
                return FinishReason.STOP_STRING
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            group=self.request.group,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=reason,
            text_end=self.text_end,
        )


@dataclass(frozen=True)
class Schedule:
    """What changed: whether any row did, and slots to copy as ``(source, target, tokens)``, in order."""

    changed: bool
    moves: tuple[tuple[int, int, int], ...]


class Scheduler(Generic[Prepared]):
    """
    Args:
        max_running: requests that run at once.
        max_prefill_tokens: new prompt tokens of one step; a longer prompt is admitted alone.
    """

    def __init__(self, max_running: int, max_prefill_tokens: int) -> None:
        if max_running < 1 or max_prefill_tokens < 1:
            raise UserError(
                "a rollout engine must be able to run something",
                found=f"max_running = {max_running}, max_prefill_tokens = {max_prefill_tokens}",
                remedy="use 1 or more for both",
            )
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Response[Prepared]] = deque()
        self.groups: dict[str, Group[Prepared]] = {}
        self.held: dict[str, Response[Prepared]] = {}
        self._rows: list[Response[Prepared] | None] = []
        self._holes = False

    @property
    def running(self) -> list[Response[Prepared]]:
        """In row order; index equals row after ``schedule``."""
        return [response for response in self._rows if response is not None]

    @property
    def num_running(self) -> int:
        return len(self.held) - len(self.waiting)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises UserError where ``requests`` cannot be added to what is held."""
        ids: set[str] = set()
        prompts: dict[str, tuple[int, ...]] = {}
        for request in requests:
            if request.request_id in ids or request.request_id in self.held:
                raise UserError(
                    "a request id is already in use",
                    found=f"request_id {request.request_id!r} twice",
                    remedy="give every unfinished request an id of its own",
                )
            ids.add(request.request_id)
            group = self.groups.get(request.group)
            expected = group.prompt_ids if group else prompts.setdefault(request.group, request.prompt_ids)
            if expected != request.prompt_ids:
                raise UserError(
                    "requests of one group must have the same prompt",
                    found=f"another prompt in request {request.request_id!r} of group {request.group!r}",
                    remedy="name a group of its own for every prompt",
                )

    def add(self, request: Request, max_tokens: int, matcher: StopStringMatcher | None = None) -> None:
        group = self.groups.setdefault(request.group, Group(request.prompt_ids))
        group.num_members += 1
        group.num_waiting += 1
        response = Response(request, group, max_tokens, matcher)
        self.held[request.request_id] = response
        self.waiting.append(response)

    def schedule(self) -> Schedule:
        """Admits what fits and closes gaps; afterwards running request i sits in row i."""
        holes = [row for row, response in enumerate(self._rows) if response is None] if self._holes else []
        holes.reverse()
        changed = bool(holes)
        for response in self._admissible():
            changed = True
            if holes:
                response.row = holes.pop()
                self._rows[response.row] = response
            else:
                response.row = len(self._rows)
                self._rows.append(response)
        moves = self._close(holes)
        self._holes = False
        return Schedule(changed, tuple(moves))

    def _admissible(self) -> Iterable[Response[Prepared]]:
        """Takes from the queue in order until the batch or this step's prefill is full."""
        budget = self.max_prefill_tokens
        started: set[int] = set()
        room = self.max_running - self.num_running
        while self.waiting and room:
            group = self.waiting[0].group
            cost = 0 if group.prepared is not None or id(group) in started else len(group.prompt_ids)
            if cost > budget and started:
                return
            if cost:
                started.add(id(group))
                budget -= cost
            group.num_waiting -= 1
            room -= 1
            yield self.waiting.popleft()

    def _close(self, holes: list[int]) -> Iterable[tuple[int, int, int]]:
        """Moves the last rows into ``holes`` (descending); a moved slot is copied only if it holds
        something.
        """
        moves = []
        while holes:
            last = self._rows.pop()
            if last is None:
                holes.remove(len(self._rows))
                continue
            target = holes.pop()
            if last.cached:
                moves.append((last.row, target, last.num_cached))
            last.row = target
            self._rows[target] = last
        return moves

    def retire(self, responses: Iterable[Response[Prepared]]) -> None:
        """Takes responses out, running or waiting; their rows are free from the next ``schedule`` on."""
        waiting: set[int] = set()
        for response in responses:
            del self.held[response.request.request_id]
            if response.row >= 0:
                self._rows[response.row] = None
                self._holes = True
            else:
                waiting.add(id(response))
                response.group.num_waiting -= 1
            response.group.num_members -= 1
            if not response.group.num_members:
                del self.groups[response.request.group]
        if waiting:
            self.waiting = deque(r for r in self.waiting if id(r) not in waiting)

    def invalidate(self) -> None:
        """Forgets everything computed from the weights; tokens stay."""
        for response in self.running:
            response.cached = False
        for group in self.groups.values():
            group.prepared = None
