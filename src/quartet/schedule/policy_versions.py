"""Versioned states: who may read which version of the weights, and who may advance it.

A *state* is a set of weights with a version number, such as `actor` (the trainer's) or `rollout` (the
engine's copy). Any number of leases read it at once; one lease writes it, alone, and a clean end advances the
version by one. A reservation is a promise that a version will still be read, and may be made before that
version exists: the writer that would advance past it waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class MissedVersion(RuntimeError):
    """A reader asked for a version that a writer has already replaced."""


@dataclass(frozen=True)
class Access:
    """What a lease does to states. A read of `None` takes whatever version is current when it is granted."""

    reads: Mapping[str, int | None] = field(default_factory=dict)
    writes: str | None = None

    @property
    def states(self) -> set[str]:
        return set(self.reads) | ({self.writes} if self.writes is not None else set())

    def conflicts(self, other: Access) -> bool:
        """True when the two may not be held at once: one writes what the other reads or writes."""
        return self.writes in other.states or other.writes in self.states


@dataclass(eq=False)
class Reservation:
    """A promise that role `reader` will read `state` at `version` once."""

    state: str
    version: int
    reader: str


@dataclass
class _State:
    version: int
    readers: int = 0
    has_writer: bool = False
    reservations: list[Reservation] = field(default_factory=list)


class Versions:
    """The book of all states: versions, active readers and writers, outstanding reservations."""

    def __init__(self, initial: Mapping[str, int]) -> None:
        self._states = {name: _State(version) for name, version in initial.items()}

    def current(self, state: str) -> int:
        return self._states[state].version

    def missed(self, access: Access) -> MissedVersion | None:
        for state, version in access.reads.items():
            if version is not None and version < self.current(state):
                return MissedVersion(
                    f"{state!r} is at version {self.current(state)}, version {version} is gone: "
                    f"reserve({state!r}, {version}, reader) before the writer of version {version + 1} asks"
                )
        return None

    def reserve(self, state: str, version: int, reader: str) -> Reservation:
        """Books a reservation; `MissedVersion` when that version is replaced or being replaced."""
        record = self._states[state]
        if missed := self.missed(Access(reads={state: version})):
            raise missed
        if record.has_writer and version == record.version:
            raise MissedVersion(f"{state!r} at version {version} is being advanced now: reserve it earlier")
        reservation = Reservation(state, version, reader)
        record.reservations.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Drops a reservation that was not used."""
        reservations = self._states[reservation.state].reservations
        if reservation in reservations:
            reservations.remove(reservation)

    def reads_are_current(self, access: Access) -> bool:
        return all(v is None or v == self.current(state) for state, v in access.reads.items())

    def is_reserved_against(self, role: str, access: Access) -> bool:
        """True while another's reservation of the current version forbids this write."""
        if access.writes is None:
            return False
        record = self._states[access.writes]
        promised = sum(r.version == record.version for r in record.reservations)
        own = self._own_reservation(access.writes, role, access)
        return promised > (1 if own is not None else 0)

    def is_free(self, access: Access) -> bool:
        """True when no active lease conflicts with this access."""
        if any(self._states[state].has_writer for state in access.states):
            return False
        return access.writes is None or self._states[access.writes].readers == 0

    def begin(self, role: str, access: Access) -> dict[str, int]:
        """Takes the states, uses up reservations; returns the version of every state read."""
        for state in access.reads:
            record = self._states[state]
            if (own := self._own_reservation(state, role, access)) is not None:
                record.reservations.remove(own)
            record.readers += 1
        if access.writes is not None:
            self._states[access.writes].has_writer = True
        return {state: self.current(state) for state in access.reads}

    def end(self, access: Access, *, advance: bool) -> None:
        """Gives the states back; the written one moves on by one version when `advance`."""
        for state in access.reads:
            self._states[state].readers -= 1
        if access.writes is not None:
            record = self._states[access.writes]
            record.has_writer = False
            record.version += 1 if advance else 0

    def describe_reservations(self, state: str) -> str:
        record = self._states[state]
        readers = sorted({r.reader for r in record.reservations if r.version == record.version})
        return f"{state!r} at version {record.version} is reserved by {', '.join(readers)}"

    @property
    def is_idle(self) -> bool:
        """True when no lease reads or writes and nothing is reserved."""
        return not any(s.readers or s.has_writer or s.reservations for s in self._states.values())

    def _own_reservation(self, state: str, role: str, access: Access) -> Reservation | None:
        for reservation in self._states[state].reservations:
            if reservation.reader == role and reservation.version == access.reads.get(state):
                return reservation
        return None
