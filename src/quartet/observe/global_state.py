"""Keeps the random generators of this process apart from those of user code that runs in it.

A reward function or an environment that draws from ``random``, numpy or torch, or seeds them, changes no number that
training draws. Whatever else it changes about the process stays changed.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import random
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch

EXCLUSIVE = threading.RLock()
"""Held by user code while it runs and by a thread that computes while it does: neither meets the other's generators."""


_here = threading.local()


def current_guarded_code() -> str | None:
    """Returns the piece of user code that this thread runs under a guard; None outside of any."""
    found: str | None = getattr(_here, "what", None)
    return found


class RandomStateGuard:
    """Gives one piece of user code random generators of its own.

    Args:
        what: how warnings and errors call it ("the reward 'x'").
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._drawn: dict[str, None] = {}
        self._own: dict[str, Any] = {}

    @contextlib.contextmanager
    def held(self, spend: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
        """Gives the code in the ``with`` block random generators of its own: they go on from call to call where it left
        them, and outside nothing was drawn. Waits for what computes in another thread.

        Args:
            spend: told the seconds inside, without that wait.
        """
        with EXCLUSIVE:
            outside = {name: get() for name, (get, _) in _RANDOM.items()}
            for name, state in self._own.items():
                _RANDOM[name][1](state)
            outer, _here.what = current_guarded_code(), self._what
            begun = time.monotonic()
            try:
                yield
            except GeneratorExit as error:  # For the code's driver this exception means that it is to end.
                raise RuntimeError("it raised GeneratorExit").with_traceback(error.__traceback__) from error
            finally:
                _here.what = outer
                spend(time.monotonic() - begun)
                self._put_back(outside)

    async def driven(self, work: Awaitable[Any], spend: Callable[[float], None] = lambda seconds: None) -> Any:
        """Returns what ``work`` returns. The guard is held while ``work`` computes, and not while it waits and others
        compute; ``spend`` as in ``held``.
        """
        return await (_driven(work, self, spend) if inspect.iscoroutine(work) else work)

    def warnings(self) -> list[str]:
        """Tells in words what the guarded code drew from so far."""
        if not self._drawn:
            return []
        return [
            f"{self._what} draws from {', '.join(self._drawn)}: training does not notice, but a resumed run draws "
            "other numbers; make a generator from the sample or a seed"
        ]

    def _put_back(self, outside: dict[str, Any]) -> None:
        for name, (get, put) in _RANDOM.items():
            begun, now = self._own.get(name, outside[name]), get()
            if begun is None:
                continue  # CUDA, which has only now begun
            if now != begun:
                self._drawn[name] = None
                self._own[name] = now
            if now != outside[name]:
                put(outside[name])


@types.coroutine
def _driven(
    work: types.CoroutineType[Any, Any, Any], guard: RandomStateGuard, spend: Callable[[float], None]
) -> Generator[Any, Any, Any]:
    """Runs a coroutine from one place where it waits to the next, each time under the guard."""
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        with guard.held(spend):
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
        try:
            step, value = work.send, (yield waits_for)
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # Also that it is cancelled: the code gets to know.
            step, value = work.throw, error


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda_random() -> list[bytes] | None:
    if not torch.cuda.is_initialized():
        return None
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


# Of each generator what gives its state and what sets it. States are compared with ``==``, which arrays cannot be.
_RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the generator of `random`": (random.getstate, random.setstate),
    "numpy's global generator": (
        lambda: pickle.dumps(np.random.get_state()),
        lambda state: np.random.set_state(pickle.loads(state)),
    ),
    "torch's global generator": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(_as_tensor(state)),
    ),
    "torch's generators on CUDA": (
        _cuda_random,
        lambda states: torch.cuda.set_rng_state_all([_as_tensor(state) for state in states or ()]),
    ),
}
