"""The journal alone: what it notes, how it is followed, written and read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.schedule.clock import run_virtual
from quartet.schedule.groups import Diverged, Event, Journal


def test_without_a_script_everything_happens_at_once_and_is_noted() -> None:
    async def main() -> list[Event]:
        journal = Journal()
        assert journal.admit(3) and journal.admit(1)
        journal.begin_tick()
        await journal.turn("swap", 1)
        journal.note("swap", 1)
        assert not journal.is_due()
        journal.consume(0, 0, [(3, ((0, 1),))])
        return journal.events

    assert run_virtual(main()) == [
        Event("admit", 3, 0),
        Event("admit", 1, 0),
        Event("swap", 1, 1),
        Event("consume", 0, 1, 0, ((3, ((0, 1),)),)),
    ]


def test_a_script_decides_who_joins_and_when() -> None:
    async def main() -> None:
        journal = Journal([Event("admit", 1, 0), Event("admit", 0, 1), Event("swap", 1, 1), Event("admit", 2, 2)])
        assert not journal.admit(0) and journal.is_due()
        assert journal.admit(1) and not journal.admit(0) and not journal.is_due()
        swap = asyncio.create_task(journal.turn("swap", 1))
        await asyncio.sleep(1.0)
        assert not swap.done(), "it came a burst too early"
        journal.begin_tick()
        assert not journal.admit(2) and journal.admit(0)
        await asyncio.wait_for(swap, 1.0)
        assert journal.is_due() and not journal.admit(2)
        journal.note("swap", 1)
        journal.begin_tick()
        assert not journal.admit(5), "what the script does not name waits for its end"
        assert journal.admit(2) and journal.admit(5)

    run_virtual(main())


def test_a_burst_before_its_events_is_an_error() -> None:
    async def main() -> None:
        journal = Journal([Event("admit", 0, 0)])
        journal.begin_tick()
        with pytest.raises(Diverged, match="tick 1 began before"):
            journal.is_due()

    run_virtual(main())


def test_other_groups_than_the_journals_are_an_error() -> None:
    journal = Journal([Event("consume", 2, 0, 1, ((4, ((2, 3),)),))])
    journal.consume(2, 0, [(3, ((2, 3),))])  # the journal says nothing of this chunk
    with pytest.raises(Diverged, match=r"step 2, chunk 1.*\(4, \(\(2, 3\),\)\).*\(5, "):
        journal.consume(2, 1, [(5, ((2, 3),))])


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path=path)
    journal.admit(0)
    journal.consume(0, 1, [(0, ((0, 2), (1, 1))), (1, ((1, 1),))])
    assert Journal.load(path) == journal.events, "each event is there when it has happened"
    journal.note("swap", 1)
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert Journal.load(path) == journal.events[:-1]
