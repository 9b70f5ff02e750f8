"""The thread that drives a blocking engine for an event loop: requests in, events out."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from quartet.config import UserError
from quartet.config.foreign import described
from quartet.rollout.protocol import Completion, EngineFailed, Generated, GenerationError, Request, RolloutEngine

T = TypeVar("T")
Event = tuple[str, "Completion | Generated | UserError"]
"""A request's id, and its end, what it has so far, or why it has no end."""
_SLICE_S = 0.01
"""For so long the engine is waited for while requests may come."""
_IDLE_S = 0.5
"""Between two looks at an engine without work; one that died is started anew meanwhile."""


class EngineThread:
    """
    Args:
        engine: used by this thread alone from now on.

    Attributes:
        failure: why it answers nothing any more.
        held: requests without an end.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, asyncio.Queue[Event]] = {}
        self._streams: set[str] = set()
        self.failure: EngineFailed | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        return len(self._listeners)

    def ask(self, requests: Sequence[Request], *, stream: bool = False) -> asyncio.Queue[Event]:
        """Every request has one end among the events, and with ``stream`` what it has so far now and then."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        ids = [request.request_id for request in requests]
        self._listeners.update(dict.fromkeys(ids, events))

        def submit() -> None:
            try:
                self._engine.submit(requests)
            except UserError as error:
                if isinstance(error, EngineFailed):
                    raise
                self._tell(ids, error)
            else:
                self._streams.update(ids if stream else ())

        self._do(submit)
        if self.failure is not None:  # maybe just now, and then nobody else tells
            self._hand_over(ids, self.failure)
        return events

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more."""
        left = [each for each in request_ids if self._listeners.pop(each, None) is not None]
        if left:
            self._do(lambda: self._drop(left))

    def give_up(self, error: UserError) -> None:
        """All that is under way ends with ``error``."""
        ids = [*self._listeners]
        self._hand_over(ids, error)
        self._do(lambda: self._drop(ids))

    async def call(self, function: Callable[[RolloutEngine], T]) -> T:
        """``function`` of the engine, in its thread."""
        if self.failure is not None:
            raise self.failure
        result: Future[T] = Future()
        self._do(lambda: result.set_result(function(self._engine)))
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Ends the thread; the engine stays."""
        self._commands.put(None)
        self._thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        if self.failure is None:
            self._commands.put(command)

    # In the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._collect()
        except EngineFailed as error:
            self._fail(error)
        except BaseException as error:
            self._fail(
                EngineFailed(
                    "the thread that drives the engine broke",
                    found=described(error),
                    remedy="report it; the server's standard error has the traceback",
                )
            )
            raise

    def _fail(self, error: EngineFailed) -> None:
        """Nobody waits for an end that does not come."""
        self.failure = error
        self._tell([*self._listeners.copy()], error)

    def _obey(self) -> bool:
        """Whether it goes on."""
        is_idle = not self._listeners
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(is_idle, _IDLE_S)
                if command is None:
                    return False
                command()
                is_idle = False
        return True

    def _collect(self) -> None:
        try:
            completions = self._engine.completed(_SLICE_S if self._listeners else 0.0)
        except GenerationError as error:
            self._tell(error.request_ids, error)
            return
        for completion in completions:
            self._tell([completion.request_id], completion)
        if self._streams:
            self._tell_tokens()

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._streams.difference_update(request_ids)
        self._engine.cancel(request_ids)

    def _tell_tokens(self) -> None:
        for request_id, tokens in self._engine.generated([*self._streams]).items():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hand_over, [request_id], tokens)

    def _tell(self, request_ids: Sequence[str], event: Any) -> None:
        self._streams.difference_update(request_ids)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._hand_over, request_ids, event)

    def _hand_over(self, request_ids: Sequence[str], event: Any) -> None:
        for request_id in request_ids:
            if (events := self._listeners.get(request_id)) is not None:
                events.put_nowait((request_id, event))
                if not isinstance(event, Generated):
                    del self._listeners[request_id]
