"""Versioned states: who may read which version of the weights, and who may advance it.

A *state* is a set of weights with a version number, such as `actor` (the trainer's) or `rollout` (the
engine's copy). Any number of leases read it at once; one lease writes it, alone, and a clean end advances the
version by one. A `Reservation` is a promise that a version will still be read, and may be made before that
version exists: the writer that would advance past it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import TracebackType

from quartet.config.errors import UserError


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
        return (self.writes is not None and self.writes in other.states) or (
            other.writes is not None and other.writes in self.states
        )


class Reservation:
    """A promise that `reader` will read `state` at `version`, `uses` times.

    Each lease granted to the role `reader` that names this state and version uses it up by one, at its grant.
    `release()` (or the end of a `with` block) gives back what is left.
    """

    def __init__(
        self, state: str, version: int, reader: str, uses: int, on_release: Callable[[Reservation], None]
    ) -> None:
        self.state = state
        self.version = version
        self.reader = reader
        self.remaining = uses
        self._on_release = on_release

    def release(self) -> None:
        """Drops the uses that are left; calling it again does nothing."""
        if self.remaining:
            self.remaining = 0
            self._on_release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _State:
    def __init__(self, version: int) -> None:
        self.version = version
        self.readers = 0
        self.has_writer = False
        self.reservations: list[Reservation] = []


class Versions:
    """The book of all states: versions, active readers and writers, outstanding reservations."""

    def __init__(self, initial: Mapping[str, int]) -> None:
        self._states = {name: _State(version) for name, version in initial.items()}

    def current(self, state: str) -> int:
        return self._state(state).version

    def check(self, access: Access) -> None:
        """Raises `UserError` for an unknown state and `MissedVersion` for a version already replaced."""
        for state in access.states:
            self._state(state)
        missed = self.missed(access)
        if missed is not None:
            raise missed

    def missed(self, access: Access) -> MissedVersion | None:
        for state, version in access.reads.items():
            if version is not None and version < self.current(state):
                return MissedVersion(
                    f"{state!r} is at version {self.current(state)}, version {version} is gone: "
                    f"reserve({state!r}, {version}, reader) before the writer of version {version + 1} asks"
                )
        return None

    def reserve(
        self, state: str, version: int, reader: str, uses: int, on_release: Callable[[Reservation], None]
    ) -> Reservation:
        """Books a reservation; `MissedVersion` when that version is replaced or being replaced."""
        if uses < 1:
            raise ValueError(f"a reservation needs at least one use, not {uses}")
        self.check(Access(reads={state: version}))
        record = self._state(state)
        if record.has_writer and version == record.version:
            raise MissedVersion(f"{state!r} at version {version} is being advanced now: reserve it earlier")

        def drop(reservation: Reservation) -> None:
            record.reservations.remove(reservation)
            on_release(reservation)

        reservation = Reservation(state, version, reader, uses, drop)
        record.reservations.append(reservation)
        return reservation

    def reads_are_current(self, access: Access) -> bool:
        return all(v is None or v == self.current(state) for state, v in access.reads.items())

    def is_reserved_against(self, role: str, access: Access) -> bool:
        """True while somebody else's reservation of the current version forbids this write."""
        if access.writes is None:
            return False
        record = self._state(access.writes)
        promised = sum(r.remaining for r in record.reservations if r.version == record.version)
        own = self._own_reservation(access.writes, role, access)
        return promised > (1 if own is not None else 0)

    def is_free(self, access: Access) -> bool:
        """True when no active lease conflicts with this access."""
        if any(self._state(state).has_writer for state in access.states):
            return False
        return access.writes is None or self._state(access.writes).readers == 0

    def begin(self, role: str, access: Access) -> dict[str, int]:
        """Takes the states, uses up reservations; returns the version of every state read."""
        for state in access.reads:
            own = self._own_reservation(state, role, access)
            if own is not None:
                own.remaining -= 1
                if own.remaining == 0:
                    self._state(state).reservations.remove(own)
            self._state(state).readers += 1
        if access.writes is not None:
            self._state(access.writes).has_writer = True
        return {state: self.current(state) for state in access.reads}

    def end(self, access: Access, *, advance: bool) -> None:
        """Gives the states back; the written one moves on by one version when `advance`."""
        for state in access.reads:
            self._state(state).readers -= 1
        if access.writes is not None:
            record = self._state(access.writes)
            record.has_writer = False
            record.version += 1 if advance else 0

    def describe_reservations(self, state: str) -> str:
        record = self._state(state)
        readers = sorted({r.reader for r in record.reservations if r.version == record.version})
        return f"{state!r} at version {record.version} is reserved by {', '.join(readers)}"

    @property
    def is_idle(self) -> bool:
        """True when no lease reads or writes and nothing is reserved."""
        return not any(s.readers or s.has_writer or s.reservations for s in self._states.values())

    def _own_reservation(self, state: str, role: str, access: Access) -> Reservation | None:
        version = access.reads.get(state)
        for reservation in self._state(state).reservations:
            if reservation.reader == role and reservation.version == version:
                return reservation
        return None

    def _state(self, name: str) -> _State:
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            nearest = get_close_matches(name, self._states, n=1)
            raise UserError(
                f"there is no state {name!r}",
                found=f"known states: {known}",
                remedy=f"use {nearest[0]!r}" if nearest else "declare its first version in `versions`",
            )
        return self._states[name]
