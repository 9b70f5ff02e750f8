"""Puts back what user code that runs in this process changed about it, and tells what that was.

Gradient mode, default dtype, working directory and the like belong to a process, or to a thread of it: what a reward
function or an environment does to them it does to the training that goes on after it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from quartet.config.errors import UserError

EXCLUSIVE = threading.RLock()
"""Held by user code while it runs and by a thread that computes while it does: neither meets what the other changes."""


_here = threading.local()


def guarded_code() -> str | None:
    """The piece of user code that this thread runs under a guard; None outside of any."""
    found: str | None = getattr(_here, "what", None)
    return found


@dataclass(frozen=True)
class _State:
    """Something that can be read and set. Values are compared with ``==``."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


class GlobalStateGuard:
    """Guards this process against one piece of user code.

    Args:
        what: how warnings and errors call it ("the reward 'x'").
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed: dict[str, None] = {}
        self._drawn: dict[str, None] = {}
        self._own_random: dict[str, Any] = {}

    @contextlib.contextmanager
    def held(self, spend: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
        """Whatever is changed inside is put back at the end. Random generators are the code's own inside: they go on
        from call to call where it left them, and outside nothing was drawn. Waits for what computes in another thread.

        Args:
            spend: told the seconds inside, without that wait.

        Raises:
            UserError: something was changed that cannot be put back.
        """
        with EXCLUSIVE:
            owner = os.getpid()
            before = [state.get() for state in _STATES]
            streams = _Streams()
            outside = {generator.name: generator.get() for generator in _RANDOM}
            for generator in _RANDOM:
                if generator.name in self._own_random:
                    generator.put(self._own_random[generator.name])
            outer, _here.what = guarded_code(), self._what
            begun = time.monotonic()
            try:
                yield
            except GeneratorExit as error:  # For the code's driver this exception means that it is to end.
                raise RuntimeError("it raised GeneratorExit").with_traceback(error.__traceback__) from error
            finally:
                if os.getpid() != owner:
                    os._exit(1)  # A copy that the code forked, and that came back from it, must not train, too.
                _here.what = outer
                spend(time.monotonic() - begun)
                self._keep_random(outside)
                if streams.restored():
                    self._changed["the standard streams"] = None
                for state, value in zip(_STATES, before, strict=True):
                    self._put_back(state, value)

    async def driven(self, work: Awaitable[Any], spend: Callable[[float], None] = lambda seconds: None) -> Any:
        """What ``work`` returns. It is held while it computes, and not while it waits and others compute; ``spend`` as
        in ``held``.
        """
        return await (_driven(work, self, spend) if inspect.iscoroutine(work) else work)

    def warnings(self) -> list[str]:
        """What was changed and put back so far, in words."""
        found = []
        if self._changed:
            found.append(f"{self._what} changed {', '.join(self._changed)}; that was put back after each call")
        if self._drawn:
            found.append(
                f"{self._what} draws from {', '.join(self._drawn)}: training does not notice, but a resumed run draws "
                "other numbers; make a generator from the sample or a seed"
            )
        return found

    def _put_back(self, state: _State, value: Any) -> None:
        if state.get() == value:
            return
        self._changed[state.name] = None
        with contextlib.suppress(Exception):  # Whether it worked is seen below.
            state.put(value)
        if state.get() != value:
            raise UserError(
                f"{self._what} changed {state.name}, and it cannot be put back",
                found=f"{state.get()} instead of {value}",
                remedy="leave that alone in code that runs in the trainer's process, or name the function in the "
                "recipe (type: function, target: file.py:name), where it has a process of its own",
            )

    def _keep_random(self, outside: dict[str, Any]) -> None:
        for generator in _RANDOM:
            begun = self._own_random.get(generator.name, outside[generator.name])
            now = generator.get()
            if begun is None:
                continue  # CUDA, which has only now begun
            if now != begun:
                self._drawn[generator.name] = None
                self._own_random[generator.name] = now
            if now != outside[generator.name]:
                generator.put(outside[generator.name])


@types.coroutine
def _driven(
    work: types.CoroutineType[Any, Any, Any], guard: GlobalStateGuard, spend: Callable[[float], None]
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


# What there is ----------------------------------------------------------------------------------------------


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # It was deleted.
        return None


_SIGNALS = [
    getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "CHLD", "PIPE")
]
"""Those that programs give a meaning. All of them would take a third of the guard's time."""


def _put_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _handlers() -> list[Any] | None:
    """None outside of the main thread, where no handler can be set."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return [signal.getsignal(number) for number in _SIGNALS]


def _put_autocast(kind: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(kind, value[0])
    torch.set_autocast_dtype(kind, value[1])


def _several(name: str, keys: Sequence[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> _State:
    """Settings that there are under each of ``keys``."""

    def put_all(values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            put(key, value)

    return _State(name, lambda: [get(key) for key in keys], put_all)


def _attributes(name: str, holder: Any, *keys: str) -> _State:
    return _several(name, keys, partial(getattr, holder), partial(setattr, holder))


class _WarningFilters(list[Any]):
    """Equal where the same warnings are errors: modules that are imported late add other filters, which may stay."""

    def _errors(self) -> list[Any]:
        return [each for each in self if each[0] == "error"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _WarningFilters) and self._errors() == other._errors()


def _put_warning_filters(filters: list[Any]) -> None:
    with warnings.catch_warnings():  # whose end tells the interpreter that filters have changed
        pass
    warnings.filters[:] = filters  # type: ignore[index]


# What covers others comes before them.
_PRODUCTS = [
    ("generic", "all"),
    *((kind, of) for kind in ("mkldnn", "cuda") for of in ("all", "matmul", "conv", "rnn")),
]


def _products() -> tuple[str | None, list[str]]:
    """The one setting that torch had first, None where it does not say what holds now, and those it has now."""
    try:
        first = torch.get_float32_matmul_precision()
    except RuntimeError:  # One of the others has been set already.
        first = None
    return first, [torch._C._get_fp32_precision_getter(*place) for place in _PRODUCTS]


def _put_products(values: tuple[str | None, list[str]]) -> None:
    if values[0] is not None:
        torch.set_float32_matmul_precision(values[0])
    for place, precision in zip(_PRODUCTS, values[1], strict=True):
        if torch._C._get_fp32_precision_getter(*place) != precision:
            torch._C._set_fp32_precision_setter(*place, precision)


# Environment variables are not among them: code sets them for its own libraries, and training reads none while it runs.
_STATES = (
    _State("the gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _State("the inference mode", torch.is_inference_mode_enabled, lambda _: None),  # only its own end ends it
    _State("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _State(
        "the default device",
        torch.get_default_device,
        # Naming the CPU would install a mode that was not there before.
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    _several(
        "autocast",
        ("cpu", "cuda"),
        lambda kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        _put_autocast,
    ),
    _State("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _State(
        "the use of deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    _State("the precision of float32 products", _products, _put_products),
    _attributes("the settings of cuDNN", torch.backends.cudnn, "benchmark", "deterministic"),
    _attributes("the settings of oneDNN", torch.backends.mkldnn, "enabled", "deterministic"),
    _several(
        "the kernels of attention",
        ("flash", "mem_efficient", "math", "cudnn"),
        lambda kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")(),
        lambda kind, is_on: getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_on),
    ),
    _State("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _State("the flushing of denormal numbers", lambda: float("5e-324") * 1.0 == 0.0, torch.set_flush_denormal),
    _State("numpy's handling of errors", np.geterr, lambda handling: np.seterr(**handling)),
    _State("the working directory", _cwd, os.chdir),
    _State("signal handlers", _handlers, _put_handlers),
    _State(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda blocked: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
    ),
    _State("which warnings are errors", lambda: _WarningFilters(warnings.filters), _put_warning_filters),
    _State("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _State("garbage collection", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    _State("the time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda_random() -> list[bytes] | None:
    if not torch.cuda.is_initialized():
        return None
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def _put_cuda_random(states: list[bytes] | None) -> None:
    if states is not None:
        torch.cuda.set_rng_state_all([_as_tensor(state) for state in states])


_RANDOM = (
    _State("the generator of `random`", random.getstate, random.setstate),
    _State(
        "numpy's global generator",  # as bytes, since arrays cannot be compared with ==
        lambda: pickle.dumps(np.random.get_state()),
        lambda state: np.random.set_state(pickle.loads(state)),
    ),
    _State(
        "torch's global generator",
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(_as_tensor(state)),
    ),
    _State("torch's generators on CUDA", _cuda_random, _put_cuda_random),
)


class _Streams:
    """Standard input, output and error as they are when this is made: Python's objects, and the descriptors."""

    _NAMES = ("stdin", "stdout", "stderr")

    def __init__(self) -> None:
        self._objects = [(name, getattr(sys, name)) for name in self._NAMES]
        self._were_closed = [_is_closed(stream) for _, stream in self._objects]
        self._saved = [_duplicate(fd) for fd in range(3)]

    def restored(self) -> bool:
        """Whether anything had to be put back."""
        is_changed = False
        for fd, copy in enumerate(self._saved):
            if copy is None:
                continue
            if not _same_file(fd, copy):
                is_changed = True
                os.dup2(copy, fd)
            os.close(copy)
        for fd, ((name, stream), was_closed) in enumerate(zip(self._objects, self._were_closed, strict=True)):
            if _is_closed(stream) and not was_closed:
                is_changed = True
                stream = open(fd, "r" if fd == 0 else "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
                stream.reconfigure(line_buffering=True)
            if getattr(sys, name) is not stream:
                is_changed = True
                setattr(sys, name, stream)
        return is_changed


def _is_closed(stream: Any) -> bool:
    return bool(getattr(stream, "closed", False))


def _duplicate(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # It is closed, as daemons have it.
        return None


def _same_file(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False
