"""Who holds which page of the KV cache. Pure bookkeeping: no tensors here.

A page stores the keys and values of ``page_size`` neighbouring tokens, for all layers. A request's pages are handed
out when it is admitted, as many as it may ever need, so nothing runs out on the way and a page table changes only
when the batch does. Pages that a prompt fills completely are shared by all requests that start with it; of a page
that it fills in part every request gets a copy, because each writes its own tokens behind the prompt's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

IDLE_PAGE = 0
"""Never handed out: rows of a batch that nobody uses write here."""


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


@dataclass(frozen=True, eq=False)
class PageRun:
    """The pages of one sequence, first to last; the first ``length`` tokens are stored or about to be."""

    pages: tuple[int, ...]
    length: int


class PagePool:
    """Hands out pages and counts who holds them.

    Args:
        num_pages: including the idle page.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages that hold tokens, found {num_pages} pages of {page_size}")
        self.page_size = page_size
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, IDLE_PAGE, -1))

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, num_pages: int) -> None:
        """Adds pages until there are ``num_pages``; never takes any away."""
        added = range(num_pages - 1, self.num_pages - 1, -1)
        # What was free before goes first.
        self._free = [*added, *self._free]
        self._holders.extend([0] * len(added))

    def open(self, length: int, capacity: int | None = None) -> PageRun:
        """Fresh pages for ``length`` tokens, with room for ``capacity`` in all.

        Raises:
            OutOfPages: nothing was handed out.
        """
        return PageRun(self._take(self.pages_for(max(length, capacity or 0))), length)

    def fork_cost(self, run: PageRun, capacity: int) -> int:
        """Free pages that ``fork`` takes."""
        return max(self.pages_for(capacity), self.pages_for(run.length)) - run.length // self.page_size

    def fork(self, run: PageRun, capacity: int) -> tuple[PageRun, tuple[int, int] | None]:
        """A run with the same tokens and room for ``capacity`` in all; pages full of tokens are shared.

        Returns:
            The new run, and the page to copy as ``(source, target)`` where the last tokens fill one in part.

        Raises:
            OutOfPages: nothing was handed out.
        """
        num_shared, rest = divmod(run.length, self.page_size)
        fresh = self._take(self.fork_cost(run, capacity))
        shared = run.pages[:num_shared]
        self._hold(shared)
        return PageRun(shared + fresh, run.length), (run.pages[num_shared], fresh[0]) if rest else None

    def close(self, run: PageRun) -> None:
        """Gives the run's pages back; those that nobody else holds become free.

        Raises:
            RuntimeError: the run was closed before.
        """
        if any(not self._holders[page] for page in run.pages):
            raise RuntimeError(f"pages {run.pages} were given back twice")
        for page in reversed(run.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _take(self, count: int) -> tuple[int, ...]:
        if count > len(self._free):
            raise OutOfPages(f"{count} pages were asked for, {len(self._free)} of {self.num_pages} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        self._hold(pages)
        return pages

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] += 1


class PrefixStore:
    """Token runs whose keys and values are in pages, kept for requests to come; the least recently used go first.

    Args:
        pool: where the pages come from. The store holds each run once, beside the requests that forked it.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._runs: OrderedDict[tuple[int, ...], PageRun] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, tokens: tuple[int, ...]) -> PageRun | None:
        run = self._runs.get(tokens)
        if run is not None:
            self._runs.move_to_end(tokens)
        return run

    def add(self, tokens: tuple[int, ...]) -> PageRun:
        """Opens a run for ``tokens``, which are not stored yet.

        Raises:
            OutOfPages: there is no room for it.
        """
        if tokens in self._runs:
            raise RuntimeError("a prefix is stored twice")
        run = self._runs[tokens] = self._pool.open(len(tokens))
        return run

    def make_room(self, num_pages: int, keep: Collection[tuple[int, ...]] = ()) -> bool:
        """Forgets runs until ``num_pages`` are free; False, and nothing forgotten, where that cannot be reached.

        Args:
            keep: tokens of runs that must stay.
        """
        going: list[tuple[int, ...]] = []
        reachable = self._pool.num_free
        for tokens, run in self._runs.items():
            if reachable >= num_pages:
                break
            if tokens not in keep:
                going.append(tokens)
                reachable += sum(self._pool.holders(page) == 1 for page in run.pages)
        if reachable < num_pages:
            return False
        for tokens in going:
            self._pool.close(self._runs.pop(tokens))
        return True

    def clear(self) -> None:
        for run in self._runs.values():
            self._pool.close(run)
        self._runs.clear()
