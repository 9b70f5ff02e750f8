"""The background writer: order, room, failures, the end."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from quartet.observe.background import BackgroundWriter

PATIENCE_S = 10.0


class Gate:
    """Work that waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.go.set()


@pytest.fixture
def writer(gate: Gate) -> Iterator[BackgroundWriter]:
    found = BackgroundWriter({"checkpoint": 1, "rollouts": 2})
    yield found
    gate.go.set()
    with contextlib.suppress(OSError):
        found.close(abandon=True)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def still_waits(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


def test_work_is_done_in_order_on_another_thread_while_the_caller_goes_on(writer: BackgroundWriter, gate: Gate) -> None:
    seen: list[object] = []
    writer.submit("rollouts", gate)
    writer.submit("checkpoint", lambda: seen.append(threading.current_thread().name))
    writer.submit("rollouts", lambda: seen.append("later"))
    assert gate.begun.wait(PATIENCE_S) and seen == []
    gate.go.set()
    writer.drain()
    assert seen == ["quartet-writer", "later"]


def test_only_so_much_waits(writer: BackgroundWriter, gate: Gate) -> None:
    """Of checkpoints one, of others two; who has no room waits, and the others do not."""
    writer.submit("checkpoint", gate)
    writer.submit("rollouts", lambda: None)
    writer.submit("rollouts", lambda: None)
    waiting = [in_thread(lambda name=name: writer.wait_for_room(name)) for name in ("checkpoint", "rollouts")]
    assert all(still_waits(thread) for thread in waiting)
    assert [writer.has_room(name) for name in ("checkpoint", "rollouts", "metrics")] == [False, False, True]
    writer.wait_for_room("metrics")
    gate.go.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_failure_drops_what_follows_and_comes_out_of_every_later_call(writer: BackgroundWriter, gate: Gate) -> None:
    full, done = OSError("no space"), []

    def fail() -> None:
        gate()
        raise full

    writer.submit("rollouts", fail)
    writer.submit("checkpoint", lambda: done.append("must not be announced"))
    waiting: list[BaseException] = []

    def drain() -> None:
        try:
            writer.drain()
        except OSError as error:
            waiting.append(error)

    drained = in_thread(drain)
    assert still_waits(drained)
    gate.go.set()
    drained.join(PATIENCE_S)
    assert waiting == [full]
    later: list[Callable[[], object]] = [
        writer.drain,
        writer.close,
        lambda: writer.wait_for_room("checkpoint"),
        lambda: writer.submit("checkpoint", lambda: done.append("nor this")),
    ]
    for call in later:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value is full
    assert not writer.has_room("checkpoint")
    assert done == []


def test_abandoning_leaves_only_the_piece_under_way(writer: BackgroundWriter, gate: Gate) -> None:
    done: list[str] = []
    writer.submit("rollouts", lambda: (gate(), done.append("under way")))
    writer.submit("checkpoint", lambda: done.append("waiting"))
    assert gate.begun.wait(PATIENCE_S)
    closed = in_thread(lambda: writer.close(abandon=True))
    assert still_waits(closed)
    gate.go.set()
    closed.join(PATIENCE_S)
    assert done == ["under way"]


def test_what_was_written_is_let_go(writer: BackgroundWriter) -> None:
    """A copy of a model's state must not live on until the next one comes."""

    class State:
        def write(self) -> None: ...

    state = State()
    gone = weakref.ref(state)
    writer.submit("checkpoint", state.write)
    del state
    writer.drain()
    gc.collect()
    assert gone() is None
