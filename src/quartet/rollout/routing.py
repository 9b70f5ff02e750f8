"""Which engine gets a group of requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from quartet.rollout.protocol import Request
from quartet.rollout.router_member import Member

Policy = Literal["prefix", "least_tokens", "round_robin"]
_MAX_HOMES = 1 << 16
_MAX_FAILURES = 3


class Routing:
    """
    Args:
        policy, max_outstanding: as for ``Router``.

    Attributes:
        pins: requests that go to one engine whatever it has, by their ids.
    """

    def __init__(self, policy: Policy, max_outstanding: int) -> None:
        self._policy = policy
        self._max_outstanding = max_outstanding
        self.pins: dict[str, Member] = {}
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._last: Member | None = None
        self._failures: Counter[str] = Counter()  # by the ids of requests that engines had as they failed

    def choose(self, unit: Sequence[Request], loads: Mapping[Member, int]) -> Member | None:
        """
        Args:
            loads: of all engines that can be asked, in the order in which they joined: their outstanding tokens.

        Returns:
            None: there is no room anywhere.
        """
        if (pinned := self.pins.pop(unit[0].request_id, None)) in loads:
            return pinned
        free = [m for m in loads if len(m.ledger) < self._max_outstanding and not self._meets_suspects(unit, m)]
        if not free:
            return None
        if self._policy == "round_robin":
            members = list(loads)
            turn = members.index(self._last) + 1 if self._last is not None and self._last in loads else 0
            self._last = next(member for member in members[turn:] + members[:turn] if member in free)
            return self._last
        # Of equals the first.
        chosen = min(free, key=lambda member: loads[member])
        return self._home(unit, free, chosen) if self._policy == "prefix" else chosen

    def blame(self, request_ids: Iterable[str]) -> list[str]:
        """An engine failed with these; returns those with which too many have. The last one had nothing else."""
        self._failures.update(ids := list(request_ids))
        return [i for i in ids if self._failures[i] >= _MAX_FAILURES]

    def absolve(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._failures[request_id]

    def _meets_suspects(self, unit: Sequence[Request], member: Member) -> bool:
        if not self._failures:
            return False
        suspects = {i for i, number in self._failures.items() if number == _MAX_FAILURES - 1}
        if suspects.isdisjoint(request.request_id for request in unit):
            return not suspects.isdisjoint(member.ledger.held)
        return bool(member.ledger.held)

    def _home(self, unit: Sequence[Request], free: Sequence[Member], other: Member) -> Member:
        """Where the unit's session was last, or its group, if there is room; else ``other``."""
        keys = [*(f"session {r.session}" for r in unit if r.session is not None), f"group {unit[0].group}"]
        chosen = next((home for key in keys if (home := self._homes.get(key)) in free), None) or other
        for key in keys:
            self._homes[key] = chosen
            self._homes.move_to_end(key)
        while len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen
