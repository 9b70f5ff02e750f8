"""Puts back what user code that runs in this process changed about it, and tells what that was.

Gradient mode, default dtype, working directory and the like belong to a process, or to a thread of it: what a reward
function or an environment does to them it does to the training that goes on after it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import signal
import socket
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quartet.config.errors import UserError

EXCLUSIVE = threading.RLock()
"""Held by user code while it runs and by a thread that computes while it does: neither meets what the other changes."""


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
    def held(self) -> Iterator[None]:
        """Whatever is changed inside is put back at the end. Random generators are the code's own inside: they go on
        from call to call where it left them, and outside nothing was drawn. Waits for what computes in another thread.

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
            try:
                yield
            except GeneratorExit as error:  # For the code's driver this exception means that it is to end.
                raise RuntimeError("it raised GeneratorExit").with_traceback(error.__traceback__) from error
            finally:
                if os.getpid() != owner:
                    os._exit(1)  # A copy that the code forked, and that came back from it, must not train, too.
                self._keep_random(outside)
                if streams.restored():
                    self._changed["the standard streams"] = None
                for state, value in zip(_STATES, before, strict=True):
                    self._put_back(state, value)

    async def driven(self, work: Awaitable[Any]) -> Any:
        """What ``work`` returns. It is held while it computes, and not while it waits and others compute."""
        return await (_driven(work, self) if inspect.iscoroutine(work) else work)

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
def _driven(work: types.CoroutineType[Any, Any, Any], guard: GlobalStateGuard) -> Generator[Any, Any, Any]:
    """Runs a coroutine from one place where it waits to the next, each time under the guard."""
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        with guard.held():
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


def _put_default_device(device: torch.device) -> None:
    # Naming the CPU would install a mode that was not there before.
    torch.set_default_device(None if device.type == "cpu" else device)


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    kinds = ("cpu", "cuda")
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _put_autocast(values: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, is_enabled, dtype in values:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


def _attributes(name: str, holder: Any, *keys: str) -> _State:
    """The settings that ``holder`` has under ``keys``."""

    def put(values: tuple[Any, ...]) -> None:
        for key, value in zip(keys, values, strict=True):
            setattr(holder, key, value)

    return _State(name, lambda: tuple(getattr(holder, key) for key in keys), put)


_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _kernels() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _KERNELS]


def _put_kernels(values: list[bool]) -> None:
    for kind, is_enabled in zip(_KERNELS, values, strict=True):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_enabled)


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


def _flushes_denormals() -> bool:
    smallest = float("5e-324")
    return smallest * 1.0 == 0.0


# Environment variables are not among them: code sets them for its own libraries, and training reads none while it runs.
_STATES = (
    _State("the gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _State("the inference mode", torch.is_inference_mode_enabled, lambda _: None),  # only its own end ends it
    _State("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _State("the default device", torch.get_default_device, _put_default_device),
    _State("autocast", _autocast, _put_autocast),
    _State("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _State(
        "the use of deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    _State("the precision of float32 products", _products, _put_products),
    _attributes("the settings of cuDNN", torch.backends.cudnn, "benchmark", "deterministic"),
    _attributes("the settings of oneDNN", torch.backends.mkldnn, "enabled", "deterministic"),
    _State("the kernels of attention", _kernels, _put_kernels),
    _State("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _State("the flushing of denormal numbers", _flushes_denormals, torch.set_flush_denormal),
    _State("numpy's handling of errors", np.geterr, lambda handling: np.seterr(**handling)),
    _State("the working directory", _cwd, os.chdir),
    _State("signal handlers", _handlers, _put_handlers),
    _State(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda blocked: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
    ),
    _State("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _State("garbage collection", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    _State("the time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
)


def _numpy_random() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    return state[0], state[1].tobytes(), *state[2:]


def _put_numpy_random(state: tuple[Any, ...]) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


def _torch_random() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _put_torch_random(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _cuda_random() -> list[bytes] | None:
    if not torch.cuda.is_initialized():
        return None
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def _put_cuda_random(states: list[bytes] | None) -> None:
    if states is not None:
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states])


_RANDOM = (
    _State("the generator of `random`", random.getstate, random.setstate),
    _State("numpy's global generator", _numpy_random, _put_numpy_random),
    _State("torch's global generator", _torch_random, _put_torch_random),
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
        found, wanted = os.fstat(fd), os.fstat(other)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
