"""Becomes an engine's process: started by :mod:`quartet.rollout.process`, maybe with another interpreter.

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
from typing import Any

from quartet.config import UserError
from quartet.observe.logs import VARIABLE, set_up_from_environment
from quartet.processes import Wire
from quartet.rollout.protocol import GenerationError
from quartet.rollout.stepped import SteppedEngine

_log = logging.getLogger("quartet.rollout.process")
ALIVE_S = 0.5
"""Most seconds without a word, but for a step that takes longer."""


def serve(settings: Mapping[str, Any], wire: Wire) -> None:
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


def _made(wire: Wire, target: str, kwargs: Mapping[str, Any]) -> SteppedEngine:
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

    def __init__(self, engine: SteppedEngine, wire: Wire, *, has_weights: bool) -> None:
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
