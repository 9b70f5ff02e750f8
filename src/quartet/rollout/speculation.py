"""Drafted tokens in the native engine: what proposes them, and when it pays to have them verified.

A drafter proposes tokens to follow each running request's newest one; the engine verifies all of them in one forward
(``NativeEngine.step``) and keeps those that it would have drawn anyway. How many are drafted is decided by counts
alone: running rows, tokens on offer, the share of drafted tokens kept so far by depth, and what steps cost, which was
measured once. No clock runs, so a run that goes on from a checkpoint decides as it would have.

Depth 1 is the first drafted token of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from quartet.config.speculation import StepCosts
from quartet.rollout.scheduler import Response
from quartet.rollout.step_costs import cost

PROBE_EVERY = 64
"""Steps in which fewer tokens are drafted than could be, until one row gets all of its draft: acceptance may have
changed."""
_MARGIN = 1.02
"""By so much drafting must promise to be quicker."""
_WINDOW = 4096
"""Tokens drafted at a depth from which on older ones count half."""


class Drafter(Protocol):
    """
    Attributes:
        longest: tokens of a draft.
        reads_hidden: drafts are made from ``Response.hidden``.
    """

    longest: int
    reads_hidden: bool

    def lengths(self, running: Sequence[Response]) -> list[int]:
        """Tokens that it could draft for each, ``longest`` at most; costs little."""

    def draft(self, running: Sequence[Response], depth: int) -> Sequence[Sequence[int]]:
        """Tokens for each, ``depth`` at most."""

    def finished(self, response: Response) -> None:
        """It ended by itself, and has all its tokens."""

    def forget(self, response: Response) -> None:
        """It ended, in whatever way."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """What a trainer sends with the model's own weights, named."""

    def state(self) -> dict[str, Any]:
        """What it has learned, as tensors and plain values by name; not changed by what follows."""

    def load(self, state: Mapping[str, Any]) -> None: ...


class Acceptance:
    """How many of the drafted tokens were kept, by depth; a token behind one that was not kept does not count.

    Attributes:
        drafted, kept: since the engine was made, for metrics.
    """

    def __init__(self, longest: int) -> None:
        self.drafted = [0] * longest
        self.kept = [0] * longest
        self._recent = [[0, 0] for _ in range(longest)]

    def note(self, drafted: int, kept: int) -> None:
        """Of one row, ``drafted`` tokens."""
        for i in range(min(drafted, kept + 1)):
            self.drafted[i] += 1
            self.kept[i] += i < kept
            recent = self._recent[i]
            recent[0] += 1
            recent[1] += i < kept
            if recent[0] >= _WINDOW:
                recent[:] = recent[0] // 2, recent[1] // 2

    def rate(self, depth: int) -> float:
        """Of tokens at ``depth`` whose forerunners are kept; a half where nothing is known."""
        drafted, kept = self._recent[depth - 1]
        return (kept + 1) / (drafted + 2)

    def state(self) -> list[list[int]]:
        return [list(recent) for recent in self._recent]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        for recent, saved in zip(self._recent, state, strict=False):
            recent[:] = saved


class Speculator:
    """Gives running requests their drafts.

    Args:
        costs: None: the engine measures them before its first step.
    """

    def __init__(self, drafter: Drafter, costs: StepCosts | None = None) -> None:
        self.drafter = drafter
        self.costs = costs
        self.acceptance = Acceptance(drafter.longest)
        self._num_shortened = 0
        self._marked: dict[str, Any] | None = None

    def propose(
        self, running: Sequence[Response], computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Sets ``draft`` of each.

        Args:
            computing: in which the drafter is asked for drafts.
        """
        room = [min(self.drafter.longest, r.max_tokens - len(r.token_ids) - 1) for r in running]
        if not any(n > 0 for n in room):
            return
        # What is on offer need not be looked at where even whole drafts of all would not pay.
        depth = self.depth(room)
        probes = depth < self.drafter.longest and self._num_shortened >= PROBE_EVERY
        if depth:
            room = [min(n, m) for n, m in zip(room, self.drafter.lengths(running), strict=True)]
            depth = self.depth(room)
        if depth:
            with computing():
                drafts = self.drafter.draft(running, depth)
            for response, draft, n in zip(running, drafts, room, strict=True):
                response.draft = tuple(draft[: max(n, 0)])
        if probes:
            with computing():
                self._probe(max(running, key=lambda r: r.max_tokens - len(r.token_ids)))
        self._num_shortened = 0 if probes else self._num_shortened + (depth < self.drafter.longest)

    def _probe(self, response: Response) -> None:
        (n,) = self.drafter.lengths([response])
        n = min(n, response.max_tokens - len(response.token_ids) - 1)
        if n > len(response.draft):
            (draft,) = self.drafter.draft([response], n)
            response.draft = tuple(draft[:n])

    def depth(self, lengths: Sequence[int]) -> int:
        """Tokens to draft per row at most, for the most tokens per second; 0 where plain decoding has that.

        Args:
            lengths: tokens on offer for each running request.
        """
        assert self.costs is not None, "measured before the first step"
        num_rows = len(lengths)
        best, least = 0, cost(self.costs.plain, num_rows) / num_rows / _MARGIN
        gained, share, num_tokens = float(num_rows), 1.0, num_rows
        making = cost(self.costs.drafting, num_rows)
        for depth in range(1, max(lengths, default=0) + 1):
            reaching = sum(n >= depth for n in lengths)
            share *= self.acceptance.rate(depth)
            gained += reaching * share
            num_tokens += reaching
            seconds = (cost(self.costs.drafted, num_tokens) + making) / gained
            if seconds < least:
                best, least = depth, seconds
        return best

    # ---- checkpoints ----

    def mark(self) -> dict[str, Any]:
        """``state`` from now on is that of this moment, which is returned."""
        self._marked = self._state()
        return self._marked

    def state(self) -> dict[str, Any]:
        """As of the last ``mark``: tensors by name, and plain values."""
        return self._state() if self._marked is None else self._marked

    def _state(self) -> dict[str, Any]:
        own = {"acceptance": self.acceptance.state(), "shortened": self._num_shortened}
        costs = None if self.costs is None else self.costs.model_dump()
        return {**own, "costs": costs, "drafter": self.drafter.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.acceptance.load(state["acceptance"])
        self._num_shortened = state["shortened"]
        if state["costs"] is not None:
            self.costs = StepCosts(**state["costs"])
        self.drafter.load(state["drafter"])
        self._marked = None
