"""What a step computes besides decoding: whose turn it is, what of its prompt is missing, whether there is room.

Requests are admitted first come, first served at every step. What a request needs before its first token is a chain of
blocks: its prompt, or after new weights its prompt and the tokens it already has. A step fills at most
``max_prefill_tokens`` tokens of blocks; a longer prompt is filled in pieces of that size over several steps, while
decoding goes on. Where a piece begins and ends depends on the prompt alone, never on what else is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from quartet.config import UserError
from quartet.rollout.prefix_cache import MIN_SHARED_TOKENS, Block, PrefixCache
from quartet.rollout.protocol import EngineStats, Request
from quartet.rollout.scheduler import Response, Scheduler


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``start`` to ``end`` of ``block`` are computed in this step."""

    block: Block
    start: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.block.token_ids[self.start : self.end]

    @property
    def finishes(self) -> bool:
        return self.end == len(self.block)


@dataclass
class StepPlan:
    """What to fill, parents first, and the requests that then have all they need."""

    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Response] = field(default_factory=list)
    prefix_hits: int = 0

    def count(self, stats: EngineStats) -> None:
        """Counts the step that did this."""
        stats.num_steps += 1
        stats.prefix_hit_tokens += self.prefix_hits
        for prefill in self.prefills:
            if prefill.block.again:
                stats.recomputed_tokens += prefill.end - prefill.start
            else:
                stats.prompt_tokens_prefilled += prefill.end - prefill.start
        for response in self.admitted:
            if not response.group.counted:
                response.group.counted = True
                stats.distinct_prompt_tokens += len(response.request.prompt_ids)


class Admission:
    """
    Args:
        scheduler: whose queue is served.
        max_prefill_tokens: tokens filled in one step, at most.
        cache_tokens: places for keys and values in slots and blocks together; None: as many as needed.
        shares_prefixes: long prompts may be read from their block instead of being copied.
        round_up: length of a slot for so many tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_prefill_tokens: int,
        cache_tokens: int | None,
        shares_prefixes: bool,
        round_up: Callable[[int], int],
    ) -> None:
        self.scheduler = scheduler
        self.prefixes = PrefixCache()
        self.max_prefill_tokens = max_prefill_tokens
        self.cache_tokens = cache_tokens
        self._shares_prefixes = shares_prefixes
        self._round_up = round_up

    def check(self, request: Request, max_tokens: int) -> None:
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

    def slot_tokens(self, response: Response) -> int:
        """Places that ``response`` may come to need in its slot."""
        first = response.prefix or (response.block and response.block.chain[0])
        copied = 0 if first is not None and first.shared else len(response.request.prompt_ids)
        return self._round_up(copied + response.max_tokens)

    def plan(self) -> StepPlan:
        """Goes through the queue until rows, this step's tokens or the cache are used up.

        Blocks of planned requests are taken into the cache; nothing else changes.
        """
        plan = StepPlan()
        budget = self.max_prefill_tokens
        planned: dict[Block, int] = {}
        room = self.scheduler.max_running - self.scheduler.num_running
        for response in islice(self.scheduler.waiting, room):
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

    def _claim(self, response: Response, plan: StepPlan) -> bool:
        """Gives ``response`` its block, new or found; False where the cache has no room for what it needs."""
        request = response.request
        prompt_ids = request.prompt_ids
        again = bool(response.token_ids)
        prompt = found = self.prefixes.find(*request.prompt_key)
        if prompt is None:
            prompt = Block(prompt_ids, again=again, content_digests=request.content_digests)
        # A block that others copied may still be read in place by those who come now.
        prompt.shared = prompt.shared or self._is_shared(response)
        block = prompt
        if again:
            parent = prompt if prompt.shared else None
            tokens = tuple(response.token_ids) if prompt.shared else (*prompt_ids, *response.token_ids)
            block = Block(tokens, parent, reusable=False, again=True)
        response.block, response.group.block = block, prompt
        self.prefixes.hold(block)
        if not self._fits(response, plan):
            self.prefixes.drop(block)
            response.block = None
            return False
        if found is not None and not again:
            plan.prefix_hits += len(prompt_ids)
        return True

    def _is_shared(self, response: Response) -> bool:
        """A prompt that many would store over again is read in place."""
        repeated = (response.group.num_members - 1) * len(response.request.prompt_ids)
        return self._shares_prefixes and repeated >= MIN_SHARED_TOKENS

    def _fits(self, response: Response, plan: StepPlan) -> bool:
        """Whether slots for all and the blocks held have room; idle prompts are evicted for it."""
        if self.cache_tokens is None:
            return True
        with_slots = [*self.scheduler.running, *plan.admitted, response]
        slots = len(with_slots) * max(map(self.slot_tokens, with_slots))
        excess = slots + self.prefixes.num_tokens - self.cache_tokens
        return self.prefixes.evict(excess, self.scheduler.wanted_blocks)

    def release(self, response: Response) -> None:
        """Takes ``response`` off its blocks: it ended, or its slot holds all it needs."""
        if response.block is not None:
            self.prefixes.drop(response.block)
        elif response.prefix is not None:
            self.prefixes.drop(response.prefix)
        response.block = response.prefix = None
