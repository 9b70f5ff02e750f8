"""Which waiting requests may run, by the pages that are left. Pure bookkeeping: no tensors here.

A request is given all the pages it may ever need. All of its tokens but the newest are computed beforehand or found in
pages; the newest is the input of its first decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from quartet.config import UserError
from quartet.rollout.cuda_pages import PagePool, PageRun, PrefixStore
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import Response


@dataclass
class Prefill:
    """What the requests admitted together need before their first step.

    Attributes:
        admitted: in the order in which they waited.
        computed: those of them whose tokens are to be computed; the others find theirs in pages.
        tokens: what to compute, one tuple per run of ``runs``.
        copies: pages to copy afterwards, ``(source, target)``.
    """

    admitted: list[Response] = field(default_factory=list)
    computed: list[Response] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    runs: list[PageRun] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0


class PagedAdmission:
    """
    Args:
        page_size: tokens per page.
        max_running: requests that run at once.
        max_prefill_tokens: tokens computed in one step; a longer prompt is computed alone.
        cache_tokens: tokens whose keys and values may be stored at a time; None: as many as are needed.

    Attributes:
        pool, prefixes: pages, and the prompts kept in them.
        runs: pages of each running request.
        widest: pages of the largest of them so far.
    """

    def __init__(self, *, page_size: int, max_running: int, max_prefill_tokens: int, cache_tokens: int | None) -> None:
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.cache_tokens = cache_tokens
        self.pool = PagePool(1 + (cache_tokens or 0) // page_size, page_size)
        self.prefixes = PrefixStore(self.pool)
        self.runs: dict[Response, PageRun] = {}
        self.widest = 1

    def check(self, request: Request, max_tokens: int) -> None:
        """Raises UserError where the pages could not hold ``request`` even if it ran alone."""
        if self.cache_tokens is None:
            return
        needed = self._most_pages(len(request.prompt_ids) + max_tokens)
        if needed >= self.pool.num_pages:
            size = self.pool.page_size
            raise UserError(
                "a request can never fit into the KV cache",
                found=f"request {request.request_id!r} needs up to {needed * size} tokens "
                f"({len(request.prompt_ids)} of its prompt, {max_tokens} new ones, in pages of {size}), "
                f"rollout.cache_tokens is {self.cache_tokens}",
                remedy="raise rollout.cache_tokens, or ask for fewer new tokens",
            )

    @property
    def num_stored_tokens(self) -> int:
        """Places in pages that are held."""
        return (self.pool.num_pages - 1 - self.pool.num_free) * self.pool.page_size

    def _most_pages(self, capacity: int) -> int:
        """Pages that a request takes at most: its own, and its prompt's last one that it copies."""
        return self.pool.pages_for(capacity) + 1

    def admit(self, waiting: Sequence[Response]) -> Prefill:
        """Takes requests in the order in which they wait while there are rows, pages and tokens of this step."""
        room = self.max_running - len(self.runs)
        if self.cache_tokens is None:
            self._grow(list(islice(waiting, room)), min(self.max_running, len(self.runs) + len(waiting)))
        prefill = Prefill()
        touched: set[tuple[int, ...]] = set()
        for response in islice(waiting, room):
            if not self._take(response, prefill, touched):
                break
        return prefill

    def _grow(self, candidates: Sequence[Response], num_rows: int) -> None:
        """Makes as many pages as ``num_rows`` requests of the largest size so far may need."""
        for response in candidates:
            self.widest = max(self.widest, self.pool.pages_for(_capacity(response)))
        if candidates:
            self.pool.grow(max(self.pool.num_pages, 1 + num_rows * (self.widest + 1)))

    def _take(self, response: Response, prefill: Prefill, touched: set[tuple[int, ...]]) -> bool:
        """Gives ``response`` its pages; False, and nothing changed, where it must wait.

        Args:
            touched: prompts that this step computes or copies from, which must stay where they are until it has.
        """
        pool, capacity = self.pool, _capacity(response)
        again = bool(response.token_ids)
        tokens = (*response.request.prompt_ids, *response.token_ids)[:-1]
        stored = None if again else self.prefixes.find(tokens)
        num_missing = 0 if stored is not None else len(tokens)
        if prefill.num_tokens and prefill.num_tokens + num_missing > self.max_prefill_tokens:
            return False
        if stored is not None:
            num_pages = pool.fork_cost(stored, capacity)
        elif again:
            num_pages = pool.pages_for(capacity)
        else:
            num_pages = pool.pages_for(len(tokens)) + pool.pages_for(capacity) - len(tokens) // pool.page_size
        touched.add(tokens)
        if not self.prefixes.make_room(num_pages, keep=touched):
            return False
        if stored is None:
            # Tokens of its own that nobody else has go straight into its own pages.
            stored = pool.open(len(tokens), capacity) if again else self.prefixes.add(tokens)
            if tokens:
                prefill.tokens.append(tokens)
                prefill.runs.append(stored)
                prefill.num_tokens += len(tokens)
            prefill.computed.append(response)
        if again:
            self.runs[response] = stored
        else:
            self.runs[response], copied = pool.fork(stored, capacity)
            prefill.copies.extend([copied] if copied is not None else ())
        self.widest = max(self.widest, len(self.runs[response].pages))
        prefill.admitted.append(response)
        return True

    def release(self, response: Response) -> None:
        """Takes the pages of ``response`` back, if it has any."""
        run = self.runs.pop(response, None)
        if run is not None:
            self.pool.close(run)

    def forget(self) -> None:
        """Takes all pages back: what they hold was computed with other weights."""
        for response in list(self.runs):
            self.release(response)
        self.prefixes.clear()


def _capacity(response: Response) -> int:
    """Tokens it may store: its newest token is stored by the step that follows it, which its last token has, too,
    because the host learns one step late that it was the last."""
    return len(response.request.prompt_ids) + response.max_tokens
