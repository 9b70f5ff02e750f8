"""Which requests are held, which of them run and in which row, and what a step computes. Knows no tensors.

A running request's row in the batch is its cache slot. Rows ``0 … B-1`` have no gaps while a step decodes, and
neighbouring rows have similar lengths: decode attention runs in one kernel call per range of rows and reads each of
them up to the longest of the range. All running requests grow by one token a step, so an order by length lasts; only
comings and goings disturb it.

Requests are admitted first come, first served at every step. What a request needs before its first token is a chain of
blocks: its prompt, or after new weights its prompt and the tokens it already has. A step fills at most
``max_prefill_tokens`` tokens of blocks; a longer prompt is filled in chunks of that size over several steps, while
decoding goes on. Where a chunk begins and ends depends on the prompt alone, never on what else is computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from quartet.batch.pictures import is_picture, keys_in
from quartet.config import UserError
from quartet.rollout.drafter import NO_DRAFT, DraftTree, chain_tree
from quartet.rollout.prefix_cache import MIN_SHARED_TOKENS, CacheBlock, PrefixCache
from quartet.rollout.protocol import FinishReason, Request, UnfinishedRequest, check_request_ids

if TYPE_CHECKING:
    from torch import Tensor

Decode = Callable[[Sequence[int], Sequence[int]], str]
"""The text that the second token ids add to that of the first: ``TextCodec.decode_completion``."""

_INCOMPLETE = "\ufffd"
_CONTEXT = 8
"""Tokens before the newest ones that decide how these decode."""


class StopStringMatcher:
    """Decodes only the newest tokens of one response and looks for stop strings where they can newly stand.

    A token may decode differently on its own than after others (leading spaces, split UTF-8 characters), so
    the newest tokens are decoded after the few before them, and text that ends in half a character waits for
    the rest.

    Args:
        decode: makes the text that a reader of the completion has, which is where stop strings are looked for.
        prompt_ids: of the response's prompt.
    """

    def __init__(self, stop_strings: Sequence[str], decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._stop_strings, self._decode, self._prompt_ids = stop_strings, decode, prompt_ids
        self._overlap = max(map(len, stop_strings)) - 1
        self._read = 0
        self._tail = ""

    @classmethod
    def of(cls, request: Request, decode: Decode | None) -> StopStringMatcher | None:
        """Makes the matcher of a request; None where that has no stop strings."""
        strings = request.sampling.stop_strings
        return cls(strings, decode, request.prompt_ids) if strings and decode is not None else None

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Looks for stop strings. Call it with all generated tokens after each new one.

        Returns:
            Characters of the response's text before the earliest stop string, or None where there is none yet.
        """
        start = self._read - _CONTEXT
        before = token_ids[start : self._read] if start >= 0 else [*self._prompt_ids[start:], *token_ids[: self._read]]
        text = self._decode(before, token_ids[self._read :])
        grown = self._tail + text
        if any(s in grown for s in self._stop_strings):
            # Settled on the whole text, which is what a reader of the completion has.
            whole = self._decode(self._prompt_ids, token_ids)
            places = [place for s in self._stop_strings if (place := whole.find(s)) >= 0]
            return min(places) if places else None
        if text and not text.endswith(_INCOMPLETE):
            self._read = len(token_ids)
            self._tail = grown[-self._overlap :] if self._overlap else ""
        return None


R = TypeVar("R")

BAND = 16
"""Rows within a band stand in any order: wider bands cost longer reads, narrower ones more copies between slots."""


@dataclass(eq=False)
class RequestGroup:
    """A prompt and its members that are not finished.

    Attributes:
        block: the prompt's, once a member has come to its turn.
    """

    prompt: tuple[int, ...]
    num_members: int = 0
    num_waiting: int = 0
    block: CacheBlock | None = None


@dataclass(eq=False)
class DecodingRequest(UnfinishedRequest):
    """A request whose tokens come one by one.

    Attributes:
        max_tokens: ``max_new_tokens`` or what the model's context leaves, whichever is less.
    """

    max_tokens: int
    matcher: StopStringMatcher | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.request.sampling.stop_token_ids)

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


@dataclass(eq=False)
class EngineRequest(DecodingRequest):
    """One request as the native engine holds it.

    Attributes:
        order: its place among all requests ever submitted.
        row: batch row and cache slot, -1 while it has none.
        block: what holds its keys and values while it has no row: the prompt, or prompt and tokens after new weights.
        prefix: the shared block it reads beside its slot.
        draft: tokens proposed to follow its newest one, within one step.
        tree: which of them follows which.
        hidden: ``[D]`` of the position that gave the newest token, where drafts are made from it.
        position_shift: what pictures in the prompt add to the positions behind it, of models with several axes.
    """

    group: RequestGroup
    order: int
    row: int = -1
    block: CacheBlock | None = None
    prefix: CacheBlock | None = None
    draft: tuple[int, ...] = ()
    tree: DraftTree = NO_DRAFT
    hidden: Tensor | None = None
    position_shift: int = 0

    @property
    def position(self) -> int:
        """The place of the newest token, whose keys and values come next."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def num_stored(self) -> int:
        """Tokens that its slot holds between two steps."""
        return self.position - (0 if self.prefix is None else len(self.prefix))

    def propose(self, tokens: Sequence[int], tree: DraftTree | None = None) -> None:
        """Proposes tokens that might follow the newest one: one behind the other, or as ``tree`` has it."""
        self.draft, self.tree = tuple(tokens), chain_tree(len(tokens)) if tree is None else tree

    def held(self, at: int, token: float) -> int | None:
        """Returns the node behind ``at`` (0 the newest token, ``1 + node``) that proposed ``token``."""
        return next((node for node in self.tree.children[at] if self.draft[node] == token), None)

    def extend(self, sampled: Mapping[int, Sequence[float]], version: int) -> tuple[FinishReason | None, list[int]]:
        """Takes tokens as long as they are among those that were proposed, and one more; none whose logits are not
        finite.

        Args:
            sampled: ``(token, logprob)`` behind the newest token, 0, and behind each node ``1 + node`` that holds.

        Returns:
            Why the response ends with its newest token, if it does, and the nodes of the tree that hold.
        """
        kept: list[int] = []
        while True:
            at = kept[-1] + 1 if kept else 0
            token, logprob = sampled[at]
            if not math.isfinite(logprob):
                return None, kept
            reason = self.append(int(token), logprob, version)
            held = self.held(at, token)
            if held is not None:
                kept.append(held)
            if reason is not None or held is None:
                return reason, kept


@dataclass(frozen=True)
class RowChanges:
    """What changed in the rows since the last step.

    Attributes:
        moves: slots to copy as ``(source, target, tokens)``, in order.
        placed: requests that came to a row and whose block goes into its slot.
        changed: rows with another request than before.
    """

    moves: tuple[tuple[int, int, int], ...]
    placed: tuple[EngineRequest, ...]
    changed: tuple[int, ...]


class Scheduler:
    """Requests wait (first come, first served), then arrive with a first token, then run in a row.

    Args:
        max_running: requests that run at once.
        max_prefill_tokens: tokens filled in one step, at most.
        cache_tokens: places for keys and values in slots and blocks together; None: as many as needed.
        shares_prefixes: long prompts may be read from their block instead of being copied.
        round_up: length of a slot for so many tokens.

    Attributes:
        arrivals: running requests that have a token but no row before the next ``place_rows``.
    """

    def __init__(
        self,
        max_running: int,
        *,
        max_prefill_tokens: int = 2048,
        cache_tokens: int | None = None,
        shares_prefixes: bool = False,
        round_up: Callable[[int], int] = int,
    ) -> None:
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.cache_tokens = cache_tokens
        self._shares_prefixes = shares_prefixes
        self._round_up = round_up
        self.prefixes = PrefixCache()
        self.waiting: deque[EngineRequest] = deque()
        self.arrivals: list[EngineRequest] = []
        self.groups: dict[str, RequestGroup] = {}
        self.held: dict[str, EngineRequest] = {}
        self._rows: list[EngineRequest | None] = []
        self._gaps = False
        self._num_submitted = 0

    @property
    def rows(self) -> list[EngineRequest]:
        """Requests in row order; index equals row after ``place_rows``."""
        return [response for response in self._rows if response is not None]

    @property
    def running(self) -> list[EngineRequest]:
        return [*self.rows, *self.arrivals]

    @property
    def num_running(self) -> int:
        return len(self.held) - len(self.waiting)

    def wanted_blocks(self) -> set[CacheBlock]:
        """Returns the prompts of groups that have members waiting."""
        return {g.block for g in self.groups.values() if g.num_waiting and g.block is not None}

    def check(self, requests: Sequence[Request], max_tokens: Callable[[Request], int]) -> None:
        """Raises UserError where ``requests``, of so many new tokens, cannot be added to what is held."""
        check_request_ids(requests, self.held)
        prompts: dict[str, tuple[int, ...]] = {}
        for request in requests:
            self._check_fits(request, max_tokens(request))
            group = self.groups.get(request.group)
            expected = group.prompt if group else prompts.setdefault(request.group, request.prompt_ids)
            if expected != request.prompt_ids:
                raise UserError(
                    "requests of one group must have the same prompt",
                    found=f"another prompt in request {request.request_id!r} of group {request.group!r}",
                    remedy="name a group of its own for every prompt",
                )

    def _check_fits(self, request: Request, max_tokens: int) -> None:
        """Raises UserError where the cache could not hold ``request`` even if it ran alone."""
        if self.cache_tokens is None:
            return
        longest = len(request.prompt_ids) + max_tokens
        # Blocks of the sequence so far, and a slot for all of it that is filled from them.
        needed = longest + self._round_up(longest)
        if needed > self.cache_tokens:
            raise UserError(
                "a request can never fit into the KV cache",
                found=f"request {request.request_id!r} needs up to {needed} tokens ({len(request.prompt_ids)} of its "
                f"prompt, {max_tokens} new ones, and a slot for both), rollout.cache_tokens is {self.cache_tokens}",
                remedy="raise rollout.cache_tokens, or ask for fewer new tokens",
            )

    def add(
        self, request: Request, max_tokens: int, matcher: StopStringMatcher | None = None, position_shift: int = 0
    ) -> None:
        group = self.groups.setdefault(request.group, RequestGroup(request.prompt_ids))
        group.num_members += 1
        group.num_waiting += 1
        response = EngineRequest(
            request, max_tokens, group, self._num_submitted, matcher=matcher, position_shift=position_shift
        )
        self._num_submitted += 1
        self.held[request.request_id] = response
        self.waiting.append(response)

    def admit(self, responses: Sequence[EngineRequest]) -> None:
        """Takes ``responses``, the first of the queue, out of it; they get rows from the next ``place_rows``."""
        for response in responses:
            first = self.waiting.popleft()
            assert first is response
            response.group.num_waiting -= 1
            self.arrivals.append(response)

    def place_rows(self) -> RowChanges:
        """Gives every arrival a row and closes gaps; afterwards running request i sits in row i."""
        if not (self._gaps or self.arrivals):
            return RowChanges((), (), ())
        moves, changed = [], []
        for response, row in compact_rows(self._rows, self.arrivals, lambda r: r.num_stored):
            if response.row >= 0:
                moves.append((response.row, row, response.num_stored))
            response.row = row
            changed.append(row)
        placed, self.arrivals = tuple(self.arrivals), []
        self._gaps = False
        return RowChanges(tuple(moves), placed, tuple(changed))

    def retire(self, responses: Iterable[EngineRequest]) -> None:
        """Takes responses out, running or waiting, and off their blocks; their rows are free from the next
        ``place_rows`` on."""
        gone: set[int] = set()
        for response in responses:
            block = response.block or response.prefix
            if block is not None:
                self.prefixes.drop(block)
            response.block = response.prefix = None
            del self.held[response.request.request_id]
            if response.row >= 0:
                self._rows[response.row] = None
                self._gaps = True
            else:
                gone.add(id(response))
            response.group.num_members -= 1
            if not response.group.num_members:
                del self.groups[response.request.group]
        if not gone:
            return
        self.arrivals = [r for r in self.arrivals if id(r) not in gone]
        if any(id(r) in gone for r in self.waiting):
            for response in self.waiting:
                response.group.num_waiting -= id(response) in gone
            self.waiting = deque(r for r in self.waiting if id(r) not in gone)

    def preempt_all(self) -> None:
        """Sends everything running back to the head of the queue, with the tokens it has but no row, and forgets all
        blocks."""
        running = sorted(self.running, key=lambda r: r.order)
        for response in running:
            response.group.num_waiting += 1
        for response in (*running, *self.waiting):
            response.row, response.block, response.prefix = -1, None, None
            response.group.block = None
        self.waiting.extendleft(reversed(running))
        self.arrivals, self._rows, self._gaps = [], [], False
        self.prefixes.clear()

    # What a step computes --------------------------------------------------------------------------------

    def slot_tokens(self, response: EngineRequest) -> int:
        """Returns how many places ``response`` may come to need in its slot."""
        first = response.prefix or (response.block and response.block.chain[0])
        copied = 0 if first is not None and first.shared else len(response.request.prompt_ids)
        return self._round_up(copied + response.max_tokens)

    def plan(self) -> PrefillPlan:
        """Goes through the queue until rows, this step's tokens or the cache are used up.

        Blocks of planned requests are taken into the cache; nothing else changes.
        """
        plan = PrefillPlan()
        budget = self.max_prefill_tokens
        planned: dict[CacheBlock, int] = {}
        room = self.max_running - self.num_running
        for response in islice(self.waiting, room):
            if response.block is None and not self._claim(response, plan):
                break
            assert response.block is not None, "its claim was granted"
            for block in response.block.chain:
                done = planned.get(block, block.done)
                while done < len(block):
                    end = min(len(block), done + self.max_prefill_tokens)
                    if end - done > budget:
                        return plan
                    plan.prefills.append(PrefillChunk(block, done, end))
                    budget -= end - done
                    done = planned[block] = end
            plan.admitted.append(response)
        return plan

    def _claim(self, response: EngineRequest, plan: PrefillPlan) -> bool:
        """Gives ``response`` its block, new or found; False where the cache has no room for what it needs."""
        request = response.request
        prompt_ids = request.prompt_ids
        again = bool(response.token_ids)
        prompt = self.prefixes.find(prompt_ids)
        if prompt is None:
            prompt = CacheBlock(prompt_ids, again=again)
        # A block that others copied may still be read in place by those who come now.
        prompt.shared = prompt.shared or self._is_shared(response)
        block = prompt
        if again:
            parent = prompt if prompt.shared else None
            tokens = tuple(response.token_ids) if prompt.shared else (*prompt_ids, *response.token_ids)
            block = CacheBlock(tokens, parent, reusable=False, again=True)
        response.block, response.group.block = block, prompt
        self.prefixes.hold(block)
        if not self._fits(response, plan):
            self.prefixes.drop(block)
            response.block = None
            return False
        return True

    def _is_shared(self, response: EngineRequest) -> bool:
        """Tells whether a prompt is read in place, as one is that many would store over again."""
        repeated = (response.group.num_members - 1) * len(response.request.prompt_ids)
        return self._shares_prefixes and repeated >= MIN_SHARED_TOKENS

    def _fits(self, response: EngineRequest, plan: PrefillPlan) -> bool:
        """Tells whether slots for all and the blocks held have room; idle prompts are evicted for it."""
        if self.cache_tokens is None:
            return True
        with_slots = [*self.running, *plan.admitted, response]
        slots = len(with_slots) * max(map(self.slot_tokens, with_slots))
        excess = slots + self.prefixes.num_tokens - self.cache_tokens
        return self.prefixes.evict(excess, self.wanted_blocks)


def compact_rows(rows: list[R | None], arrivals: Sequence[R], length: Callable[[R], int]) -> list[tuple[R, int]]:
    """Fills the gaps of ``rows`` so that every gap gets a request which belongs in its band by length.

    Bands hold requests by falling length. A request from another band that comes to a gap leaves one behind, which is
    filled in turn; requests that no gap calls for stay where they are, even in a wrong band.

    Args:
        rows: changed in place; afterwards without gaps.
        arrivals: requests without a row.

    Returns:
        ``(request, its new row)`` in the order in which slots must be copied.
    """
    present = [(request, row) for row, request in enumerate(rows) if request is not None]
    ranked = [*present, *((request, -1) for request in arrivals)]
    ranked.sort(key=lambda entry: -length(entry[0]))
    num_rows = len(ranked)
    rows.extend([None] * (num_rows - len(rows)))
    # Of each band: who belongs there and is elsewhere. From the end are taken first those beyond the last row, which
    # must go, and arrivals, which cost no copy.
    elsewhere: dict[int, list[tuple[R, int]]] = {}
    for rank, (request, row) in enumerate(ranked):
        if row < 0 or row >= num_rows or row // BAND != rank // BAND:
            elsewhere.setdefault(rank // BAND, []).append((request, row))
    for requests in elsewhere.values():
        requests.sort(key=lambda entry: 0 <= entry[1] < num_rows, reverse=True)
    gaps = [row for row in range(num_rows - 1, -1, -1) if rows[row] is None]
    changes: list[tuple[R, int]] = []
    while gaps:
        gap = gaps.pop()
        request, former = elsewhere[gap // BAND].pop()
        rows[gap] = request
        changes.append((request, gap))
        if former >= 0:
            rows[former] = None
            if former < num_rows:
                gaps.append(former)
    del rows[num_rows:]
    return changes


# Refusals ------------------------------------------------------------------------------------------------


def check_request(request: Request, *, context: int | None, vocab_size: int, decodes: bool, sees: bool = False) -> None:
    """Refuses a request that this engine cannot serve.

    Args:
        context: tokens of the model's context, if it has an end.
        decodes: tokens can be turned into text.
        sees: the model reads pictures.

    Raises:
        UserError: the prompt fills the context or has unknown tokens or pictures that the model cannot read, or stop
            strings could not be found.
    """
    num_prompt = len(request.prompt_ids)
    if context is not None and num_prompt >= context:
        raise UserError(
            "a prompt leaves no room in the model's context",
            found=f"request {request.request_id!r}: {num_prompt} tokens, a context of {context}",
            remedy="shorten or drop such prompts (generation that reaches the context's end stops there)",
        )
    pictures = keys_in(request.prompt_ids)
    if pictures and not sees:
        raise UserError(
            "a prompt has pictures, and the engine reads none",
            found=f"request {request.request_id!r} with {len(pictures)} pictures",
            remedy="use a vision-language model and the native engine or vLLM, or prompts of text",
        )
    tokens = [token for token in request.prompt_ids if not is_picture(token)] if pictures else request.prompt_ids
    lowest, highest = min(tokens, default=0), max(tokens, default=0)
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            "a prompt holds tokens the model does not have",
            found=f"request {request.request_id!r}: ids {lowest} to {highest}, {vocab_size} tokens",
            remedy="use the tokenizer that belongs to the model",
        )
    if request.sampling.stop_strings and not decodes:
        raise UserError(
            "stop strings need a way to decode tokens",
            found=f"request {request.request_id!r} with stop strings, engine without decode",
            remedy="build the engine with decode=codec.decode_completion, or use stop_token_ids",
        )


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``start`` to ``end`` of ``block`` are computed in this step."""

    block: CacheBlock
    start: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.block.token_ids[self.start : self.end]

    @property
    def finishes(self) -> bool:
        return self.end == len(self.block)


@dataclass
class PrefillPlan:
    """What to fill, parents first, and the requests that then have all they need."""

    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
