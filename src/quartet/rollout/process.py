"""A rollout engine in a process of its own, maybe of another Python environment; ``quartet/processes.py`` starts it.

There one thread takes messages and computes: between two steps it looks for messages, and without work it waits for
them. A message is ``(what, arguments)``, its answer ``("answer" | "error", value, stats)``. Between these it says by
itself: ``made``, ``completed`` (completions), ``failed`` (a GenerationError), ``alive``. Any other error ends the
process, and so does the end of the connection.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import queue
import select
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quartet.config import UserError
from quartet.observe.process import VARIABLE, set_up_from_environment
from quartet.processes import MessagePipe, Process, ProcessTimeout
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    EngineStats,
    GenerationError,
    PartialCompletion,
    Request,
    RequestLedger,
    SteppedEngine,
    check_request_ids,
)

if TYPE_CHECKING:
    from quartet.rollout.staging import StagedWeights
    from quartet.weights.sink import TensorSink

_log = logging.getLogger("quartet.rollout.process")
_PACKAGE = Path(__file__).parents[1]
_SHOWN_LINES, _SHOWN_BYTES = 30, 3000
_LOOK_S = 0.5
"""Between two looks whether a silent process stands still."""
_END_S = 5.0
"""For the status of a process that has closed its connection, or has not started yet."""
ALIVE_S = 0.5
"""Most seconds without a word, but for a step that takes longer."""
_CLOSE_S = 20.0
"""To end in order. vLLM with two workers takes 7 on two cores."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's process is made of.

    Attributes:
        target: ``package.module:function``, whose result there, with ``kwargs`` (plain data), is a ``StepEngine``.
        python: the interpreter; None: this one.
        environment: added to this process's variables.
        start_timeout_s: for the engine to be made, and to take weights, sleep or wake.
        stall_timeout_s: for a step, and an answer.
        name: for messages.
    """

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0
    stall_timeout_s: float = 120.0
    name: str = "engine"


class _EngineChild(Process):
    """The process, what it prints, and what it says.

    Raises:
        OSError: its interpreter cannot be started.
    """

    dies_within_s = _END_S

    def __init__(self, spec: EngineSpec, has_weights: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quartet-engine-")
        # Finds this package there, and nothing else of this environment if it has another one.
        (Path(self._folder.name) / "quartet").symlink_to(_PACKAGE)
        variables, path = {**os.environ, **spec.environment}, [self._folder.name]
        if spec.python is None or "PYTHONPATH" in spec.environment:
            path += filter(None, [variables.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join(path)
        # It appends: what is read here does not move where the process writes.
        self._log = open(Path(self._folder.name) / "log", "a+b", buffering=0)  # noqa: SIM115
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stderr = os.dup(2)  # for log records
        settings = {"target": spec.target, "kwargs": dict(spec.kwargs), "has_weights": has_weights, "stderr": stderr}
        options: dict[str, Any] = {"python": spec.python, "environment": variables, "passed": (stderr,)}
        try:
            super().__init__("quartet.rollout.process:serve_engine", settings, output=self._log, **options)
        except OSError:
            self._close()
            raise
        finally:
            os.close(stderr)

    def take(self, message: Any) -> None:
        self._messages.put(message)
        os.eventfd_write(self.bell, 1)

    def take_end(self) -> None:
        self.take(None)

    def receive(self, timeout_s: float) -> list[Any]:
        """Returns the messages that have come, the last one None at its end; waits for the first at most so long."""
        poll = select.poll()  # ``select`` itself knows no descriptors above 1023
        poll.register(self.bell, select.POLLIN)
        if self._messages.empty():
            poll.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def drop_folder(self) -> None:
        """Removes the folder, which a process that has started needs no more: nothing stays if this process is
        killed."""
        self._folder.cleanup()

    def end(self, patience_s: float) -> str:
        said = super().end(patience_s)
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _SHOWN_BYTES))
        text = self._log.read().decode(errors="replace")
        lines = text.strip().splitlines()[-_SHOWN_LINES:]
        self._close()
        return said + ("; its last lines:\n" + "\n".join(lines) if lines else "; it printed nothing")

    def _close(self) -> None:
        os.close(self.bell)
        self._log.close()
        self._folder.cleanup()


class EngineProcess:
    """Starts at once; ``wait_ready`` or ``is_ready`` say when it can be used.

    Args:
        staging: where its weights come from, whenever they are new there, and again after a restart. None: it has what
            its target loads, as version 0.

    Attributes:
        version: of the weights that it computes with; None: it has none yet.
    """

    def __init__(self, spec: EngineSpec, staging: StagedWeights | None = None) -> None:
        self.spec = spec
        self.name = spec.name
        self._staging = staging
        self._ledger = RequestLedger(spec.name)
        self._child: _EngineChild | None = None
        self._start()
        if staging is not None:
            staging.attach(self._take_commit)

    # Life ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.version = None if self._staging is not None else 0
        self._ledger.clear()
        self._inbox: deque[Completion | GenerationError] = deque()
        self._stats = EngineStats()
        self._then: Callable[[], object] | None = None  # of the call whose answer is awaited
        self._answer: Any = None
        self._failure: UserError | None = None
        self._is_made = self._is_paused = self._is_asleep = False
        self._heard = time.monotonic()
        try:
            self._child = _EngineChild(self.spec, self._staging is None)
        except OSError as error:
            self._failure = self._error(f"its interpreter does not start: {error}")
            raise self._failure from error
        self._deadline = self._heard + self.spec.start_timeout_s

    def wait_ready(self) -> None:
        """
        Raises:
            UserError: what the target raised.
            EngineFailed: it cannot be made, or not in time.
        """
        while not self.is_ready():
            self._receive(_LOOK_S)

    def is_ready(self) -> bool:
        """Tells whether the engine has been made; if so it takes what is staged.

        Raises:
            UserError, EngineFailed: as ``wait_ready``.
        """
        self._require()
        if not self._is_made:
            self._receive(0.0)
        if not self._is_made:
            if time.monotonic() > self._deadline:
                raise self._fail(f"not ready after {self.spec.start_timeout_s:g} s")
            return False
        self.has_weights()
        return True

    def has_weights(self) -> bool:
        """Tells whether the engine has weights to compute with; awake and without any, it takes those that are
        staged."""
        staged = self._staging.version if self._staging is not None else None
        if self.version is None and staged is not None and not self._is_asleep:
            self._load(staged)
        return self.version is not None

    def restart(self) -> None:
        """Ends what is left and starts anew; does not wait. Nothing that it held is answered."""
        self._end()
        self._start()

    def close(self) -> None:
        if self._staging is not None:
            self._staging.detach(self._take_commit)
        self._end(_CLOSE_S if self._is_made else _END_S)
        self._failure = self._failure or self._error("it was closed")

    def _end(self, patience_s: float = 0.0) -> str:
        child, self._child = self._child, None
        return child.end(patience_s) if child is not None else "it was ended before"

    def fileno(self) -> int:
        """Returns a descriptor that is readable when something has come from the process, its end included; -1 without
        one."""
        return -1 if self._child is None else self._child.bell

    def _fail(self, found: str, patience_s: float = 0.0, cause: UserError | None = None) -> UserError:
        """Ends it; the error, which every later call raises, too."""
        said = self._end(patience_s)
        self._failure = cause or self._error(f"{found}; {said}")
        self._ledger.clear()
        self._inbox.clear()
        return self._failure

    def _error(self, found: str) -> EngineFailed:
        return EngineFailed(
            f"the rollout engine {self.name!r} failed",
            found=found,
            remedy="see its last lines; memory and time limits are the usual reasons",
        )

    def _require(self) -> _EngineChild:
        if self._failure is not None:
            raise self._failure
        assert self._child is not None
        return self._child

    # Messages --------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        try:
            self._require().send(message, self.spec.stall_timeout_s)
        except ProcessTimeout as error:
            raise self._fail(str(error)) from None

    def _receive(self, timeout_s: float) -> None:
        """Takes in what it says, waiting at most so long."""
        child = self._require()
        messages = child.receive(timeout_s)
        try:
            for what, value, stats in filter(None, messages):
                self._stats = stats or self._stats
                self._take(what, value)
        except EngineFailed as error:
            raise self._fail(error.found) from error
        self._heard = max(self._heard, child.wire.heard)  # parts of long messages count, too
        if messages and messages[-1] is None:
            raise self._fail("it ended", _END_S)

    def _take(self, what: str, value: Any) -> None:
        if what == "completed":
            for completion in value:
                self._ledger.settle(completion)
                self._inbox.append(completion)
        elif what == "failed":
            self._ledger.drop(value.request_ids)
            self._inbox.append(value)
        elif what == "made":
            self._is_made = True
            self._require().drop_folder()
        elif what == "error" and not self._is_made:
            raise self._fail("", _END_S, cause=value)
        elif what in ("answer", "error") and self._then is not None:
            then, self._then = self._then, None
            self._answer = value
            if what == "answer":
                then()

    def _call(
        self, what: str, *args: Any, then: Callable[[], object] = lambda: None, patience_s: float | None = None
    ) -> Any:
        """Calls ``what`` in the process and returns its answer; ``then`` is called before anything else that it says is
        taken in."""
        if not self._is_made:
            self.wait_ready()
        patience_s = patience_s or self.spec.stall_timeout_s
        self._then, self._answer, self._heard = then, None, time.monotonic()
        self._send((what, args))
        while self._then is not None:
            self._receive(_LOOK_S)
            if self._then is not None and time.monotonic() - self._heard > patience_s:
                raise self._fail(f"no answer to {what!r} within {patience_s:g} s")
        if isinstance(self._answer, UserError):
            raise self._answer
        return self._answer

    # Requests --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._require()
        check_request_ids(requests, self._ledger.held)
        # Answers may follow at once.
        self._ledger.add(requests)
        try:
            self._call("submit", tuple(requests))
        except UserError:
            self._ledger.drop(request.request_id for request in requests)
            raise

    def completed(self, timeout_s: float) -> list[Completion]:
        self._require()
        end = time.monotonic() + timeout_s
        while True:
            self._receive(0.0 if self._inbox else min(_LOOK_S, max(0.0, end - time.monotonic())))
            done: list[Completion] = []
            while self._inbox and not (done and isinstance(self._inbox[0], GenerationError)):
                first = self._inbox.popleft()
                if isinstance(first, GenerationError):
                    raise first
                done.append(first)
            if done:
                return done
            self._check_progress()
            if time.monotonic() >= end:
                return []

    def _check_progress(self) -> None:
        if not self._ledger or self._is_paused:
            return
        if not self.has_weights() and self._staging is not None:
            self._staging.weight_sink().require()
        if time.monotonic() - self._heard > self.spec.stall_timeout_s:
            raise self._fail(f"it has work and said nothing for {self.spec.stall_timeout_s:g} s")

    def cancel(self, request_ids: Iterable[str]) -> None:
        held = [i for i in request_ids if i in self._ledger.held]
        if held:
            self._call("cancel", held, then=lambda: self._ledger.cancel(held))

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        held = [i for i in request_ids if i in self._ledger.held]
        found: dict[str, PartialCompletion] = self._call("generated", held) if held else {}
        return found

    # State -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._call("pause")
        self._is_paused = True

    def resume(self) -> None:
        self.has_weights()
        self._call("resume")
        self._is_paused = False

    def weight_sink(self) -> TensorSink:
        if self._staging is None:
            raise UserError(
                "the rollout engine takes no weights",
                found=f"the engine process {self.name!r} without staged weights",
                remedy="make it with staging=StagedWeights(…)",
            )
        return self._staging.weight_sink()

    def _take_commit(self, version: int) -> None:
        if self._is_asleep:  # it has no room now, and takes them before it goes on
            self.version = None
        elif self._is_made and self._failure is None:
            # Remembered: the sync goes on for the others, and this one raises at its next call.
            with contextlib.suppress(EngineFailed):
                self._load(version)

    def _load(self, version: int) -> None:
        assert self._staging is not None
        self.version = None
        self._call("load", self._staging.handle, version, patience_s=self.spec.start_timeout_s)
        self.version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        if not self._is_asleep:
            self._call("sleep", level, patience_s=self.spec.start_timeout_s)
            self._is_asleep = True
        if level == 2:
            self.version = None

    def wake(self) -> None:
        if self._is_asleep:
            self._call("wake", patience_s=self.spec.start_timeout_s)
            self._is_asleep = False

    def stats(self) -> EngineStats:
        """Returns the counters as of the process's last word, which is at most half a second or a step old."""
        return self._stats


# In the process --------------------------------------------------------------------------------------------


def serve_engine(settings: Mapping[str, Any], wire: MessagePipe) -> None:
    """Makes the engine ``settings["target"]``, and answers until the connection ends.

    Args:
        settings: with the function's ``kwargs``, whether it ``has_weights`` then, and a descriptor for log records.
    """
    os.set_inheritable(settings["stderr"], False)
    if VARIABLE in os.environ:  # this process's own stderr is only shown when it fails
        set_up_from_environment(os.fdopen(settings["stderr"], "w", errors="backslashreplace"))
    else:
        os.close(settings["stderr"])
    faulthandler.enable()
    _log.info("started as process %d on %s", os.getpid(), socket.gethostname())
    engine = _made(wire, settings["target"], settings["kwargs"])
    try:
        _Service(engine, wire, has_weights=settings["has_weights"]).run()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        wire.close()  # first, so that an engine which does not end is noticed
        getattr(engine.engine, "close", bool)()


def _made(wire: MessagePipe, target: str, kwargs: Mapping[str, Any]) -> SteppedEngine:
    module, _, name = target.partition(":")
    gc.disable()  # what is imported stays, and need not be walked now or later
    try:
        make = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        engine = SteppedEngine(make(**kwargs))
    except UserError as error:
        wire.send(("error", error, None))
        raise
    wire.send(("made", None, engine.stats()))
    return engine


class _Service:
    """
    Args:
        has_weights: the engine was made with those that it computes with.
    """

    def __init__(self, engine: SteppedEngine, wire: MessagePipe, *, has_weights: bool) -> None:
        self._engine = engine
        self._wire = wire
        self._has_weights = has_weights
        self._last_word = time.monotonic()
        self._messages = select.poll()
        self._messages.register(wire, select.POLLIN)

    def run(self) -> None:
        while True:
            while self._messages.poll(0 if self._has_weights and self._engine.can_step else None):
                self._answer(*self._wire.receive())
            try:
                done = self._engine.completed(0)
            except GenerationError as error:
                self._say("failed", error)
                continue
            if done:
                self._say("completed", done)
            elif time.monotonic() - self._last_word >= ALIVE_S:
                self._say("alive", None)

    def _answer(self, what: str, args: tuple[Any, ...]) -> None:
        if what == "load":
            # An error ends the process: its weights may be half new.
            self._has_weights = False
            self._engine.engine.update_weights(*args)
            self._has_weights = True
            self._say("answer", None)
            return
        try:
            value = getattr(self._engine, what)(*args)
        except UserError as error:
            self._say("error", error)
            return
        if what == "sleep" and args == (2,):
            self._has_weights = False
        self._say("answer", value)

    def _say(self, what: str, value: Any) -> None:
        self._wire.send((what, value, self._engine.stats()))
        self._last_word = time.monotonic()
