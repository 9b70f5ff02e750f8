"""The journal of an asynchronous run: what was decided by the clock, so that a second run may follow it.

Durations decide three things when generation runs ahead: before which lease of the engine a group was admitted, before
which one its weights were swapped, and therefore with which weights each group began. Everything else follows from the
data. The journal counts time in *ticks*, the leases that the engine has begun, so a run that follows it takes the same
decisions before the same ticks, whatever its own seconds are: what comes early waits.

What the training consumed is noted as well, and compared when a journal is followed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quartet.observe.files import RowAppender, as_dataclass, read_whole
from quartet.schedule.clock import News

EventKind = Literal["admit", "pause", "swap", "consume"]
Consumed = tuple[int, tuple[tuple[int, int], ...]]
"""A group: its index, and runs ``(version, parts)`` of the weights that made it, in order."""


class Diverged(RuntimeError):
    """A run that follows a journal came to something else than the journal says."""


@dataclass(frozen=True)
class Event:
    """``admit`` group ``number``; ``pause`` for, or ``swap`` to, version ``number``; ``consume`` in step ``number``.

    ``tick``: leases begun before it. ``groups`` are those consumed, of chunk ``chunk``.
    """

    kind: EventKind
    number: int
    tick: int
    chunk: int = 0
    groups: tuple[Consumed, ...] = ()


class Journal:
    """Notes what happens, in ``path`` as it happens where one is given; follows ``script`` as far as that goes.

    The engine's driver calls ``admit``, ``is_due`` and ``begin_tick``; what brings weights ``turn`` and ``note``;
    the consumer ``consume``.
    """

    def __init__(self, script: Iterable[Event] = (), path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._rows = RowAppender(path) if path is not None else None
        self.tick = 0
        given = list(script)
        self._script = deque(event for event in given if event.kind != "consume")
        self._consumed = {(e.number, e.chunk): e.groups for e in given if e.kind == "consume"}
        self._news = News()

    # The engine's driver ---------------------------------------------------------------------------------

    def admit(self, index: int) -> bool:
        """Whether the group may join the engine now, which is noted."""
        if self._script:
            due = self._due()
            if due is None or (due.kind, due.number) != ("admit", index):
                return False
            self._script.popleft()
        self._note(Event("admit", index, self.tick))
        self.tell()
        return True

    def is_due(self) -> bool:
        """True while something that the script puts before the next tick has not happened."""
        return self._due() is not None

    async def news(self) -> None:
        """Waits until something was told."""
        await self._news.wait(lambda: f"at tick {self.tick} the journal goes on with {self._due()}")

    def begin_tick(self) -> None:
        self.tick += 1
        self.tell()

    def tell(self) -> None:
        """Something changed that may be waited for: a group asks to be admitted, a tick began."""
        self._news.tell()

    # Weights, consumption --------------------------------------------------------------------------------

    async def turn(self, kind: Literal["pause", "swap"], version: int) -> None:
        """Following: waits until it is the next event and the engine has come to its tick."""
        while self._script:
            due = self._due()
            if due is not None and (due.kind, due.number) == (kind, version):
                return
            await self.news()

    def note(self, kind: Literal["pause", "swap"], version: int) -> None:
        """It has happened, before the next tick."""
        if self._script:
            self._script.popleft()
        self._note(Event(kind, version, self.tick))
        self.tell()

    def consume(self, step: int, chunk: int, groups: Sequence[Consumed]) -> None:
        """Raises `Diverged` when a followed journal has other groups there, or other versions."""
        found = Event("consume", step, self.tick, chunk, tuple(groups))
        expected = self._consumed.get((step, chunk), found.groups)
        if expected != found.groups:
            raise Diverged(
                f"step {step}, chunk {chunk}: the journal has groups (index, versions) {expected}, "
                f"this run has {found.groups}"
            )
        self._note(found)

    # Files -----------------------------------------------------------------------------------------------

    @staticmethod
    def load(path: Path) -> list[Event]:
        """A journal's events, one JSON object per line; a last line that a kill cut off is left out.

        Raises:
            UserError: it cannot be read, or a line of it is damaged.
        """
        return read_whole(path, _event)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if self._rows is not None:
            self._rows.append(asdict(event))

    def _due(self) -> Event | None:
        """The script's next event, if it belongs before the next tick."""
        if not self._script or self._script[0].tick > self.tick:
            return None
        if self._script[0].tick < self.tick:
            raise Diverged(f"tick {self.tick} began before {self._script[0]} of the journal")
        return self._script[0]


def _event(row: dict[str, Any]) -> Event:
    return as_dataclass(Event, {**row, "groups": tuple(_consumed(*group) for group in row["groups"])})


def _consumed(index: int, versions: Sequence[Sequence[int]]) -> Consumed:
    return index, tuple((version, parts) for version, parts in versions)
