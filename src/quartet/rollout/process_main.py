"""Becomes an engine's process: run by :mod:`quartet.rollout.process`, maybe with another interpreter.

One thread takes messages and computes: between two steps it looks for messages, and without work it waits for them.
A message is ``(what, arguments)``, its answer ``("answer" | "error", value, stats)``. Between these it says by itself:
``made``, ``completed`` (completions), ``failed`` (a GenerationError), ``alive``. Any other error ends the process,
and so does the end of the connection.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from quartet.config import UserError
from quartet.observe.logs import VARIABLE, set_up_from_environment
from quartet.rewards.subprocess_main import end_with_trainer, leave_signals_to_the_trainer
from quartet.rollout.protocol import GenerationError
from quartet.rollout.stepped import SteppedEngine

_log = logging.getLogger("quartet.rollout.process")
ALIVE_S = 0.5
"""Most seconds without a word, but for a step that takes longer."""


def main() -> None:
    wire, lifeline, stderr = (int(text) for text in sys.argv[1:])
    del sys.argv[1:]
    for descriptor in (wire, lifeline, stderr):
        os.set_inheritable(descriptor, False)
    if VARIABLE in os.environ:  # this process's own stderr is only shown when it fails
        set_up_from_environment(os.fdopen(stderr, "w", errors="backslashreplace"))
    else:
        os.close(stderr)
    end_with_trainer(lifeline)
    leave_signals_to_the_trainer()
    faulthandler.enable()
    _log.info("started as process %d on %s", os.getpid(), socket.gethostname())
    connection = Connection(wire)
    target, kwargs, has_weights = connection.recv()
    engine = _made(connection, target, kwargs)
    try:
        _Service(engine, connection, has_weights=has_weights).run()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        connection.close()  # first, so that an engine which does not end is noticed
        getattr(engine.engine, "close", bool)()


def _made(connection: Connection, target: str, kwargs: Mapping[str, Any]) -> SteppedEngine:
    module, _, name = target.partition(":")
    gc.disable()  # what is imported stays, and need not be walked now or later
    try:
        make = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        engine = SteppedEngine(make(**kwargs))
    except UserError as error:
        connection.send(("error", error, None))
        raise
    connection.send(("made", None, engine.stats()))
    return engine


class _Service:
    """
    Args:
        has_weights: the engine was made with those that it computes with.
    """

    def __init__(self, engine: SteppedEngine, connection: Connection, *, has_weights: bool) -> None:
        self._engine = engine
        self._connection = connection
        self._has_weights = has_weights
        self._last_word = time.monotonic()
        # ``Connection.poll`` would make one of these at every step.
        self._messages = select.poll()
        self._messages.register(connection, select.POLLIN)

    def run(self) -> None:
        while True:
            while self._messages.poll(0 if self._has_weights and self._engine.can_step else None):
                self._answer(*self._connection.recv())
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
        self._connection.send((what, value, self._engine.stats()))
        self._last_word = time.monotonic()


if __name__ == "__main__":
    main()
