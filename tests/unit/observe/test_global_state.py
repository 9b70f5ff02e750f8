"""What user code changes about this process is put back and told."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config import UserError
from quartet.observe.global_state import GlobalStateGuard

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "the gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "the default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "the default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "torch's number of threads": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "the use of deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "the precision of float32 products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "the settings of cuDNN": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "the settings of oneDNN": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "the kernels of attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "anomaly detection": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "the flushing of denormal numbers": (
        lambda: torch.set_flush_denormal(True),
        lambda: (torch.tensor(1e-45) * 1.0).item(),
    ),
    "numpy's handling of errors": (lambda: np.seterr(all="raise"), np.geterr),
    "the working directory": (lambda: os.chdir("/"), os.getcwd),
    "signal handlers": (
        lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)],
        lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    ),
    "blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ),
    "which warnings are errors": (lambda: warnings.simplefilter("error"), lambda: [*warnings.filters]),
    "the recursion limit": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "garbage collection": (gc.disable, gc.isenabled),
    "the time limit of sockets": (lambda: socket.setdefaulttimeout(0.1), socket.getdefaulttimeout),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_put_back_and_told_once(name: str) -> None:
    change, look = CHANGES[name]
    guard, before = GlobalStateGuard("the reward 'x'"), look()
    for _ in range(2):
        with guard.held():
            change()
            assert look() != before
        assert look() == before
    assert guard.warnings() == [f"the reward 'x' changed {name}; that was put back after each call"]


PRECISIONS = {
    "of all": torch.backends,
    "on CPUs": torch.backends.mkldnn,
    "of products on CPUs": torch.backends.mkldnn.matmul,
    "of products on CUDA": torch.backends.cuda.matmul,
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_that_torch_has_several_settings_for_are_put_back(name: str) -> None:
    """Each of them makes torch's own question for the one that it had first an error."""
    guard, before = GlobalStateGuard("the reward 'x'"), torch.get_float32_matmul_precision()
    settings = [place.fp32_precision for place in PRECISIONS.values()]
    with guard.held():
        PRECISIONS[name].fp32_precision = "tf32"
        with GlobalStateGuard("inside").held():
            pass
    assert [place.fp32_precision for place in PRECISIONS.values()] == settings
    assert torch.get_float32_matmul_precision() == before
    assert "the precision of float32 products" in guard.warnings()[0]


def test_what_is_changed_before_an_error_is_put_back_too() -> None:
    guard = GlobalStateGuard("the reward 'x'")
    with pytest.raises(ZeroDivisionError), guard.held():
        torch.set_grad_enabled(False)
        raise ZeroDivisionError
    assert torch.is_grad_enabled() and "gradient mode" in guard.warnings()[0]


def test_other_filters_of_warnings_may_stay() -> None:
    """As modules add them that are imported late."""
    guard = GlobalStateGuard("the reward 'x'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with guard.held():
            warnings.filterwarnings("ignore", message="of a module")
        warnings.warn("of a module", stacklevel=1)
        with guard.held(), pytest.raises(UserWarning):
            warnings.warn("another", stacklevel=1)
    assert guard.warnings() == []


def test_code_that_changes_nothing_is_not_mentioned() -> None:
    guard = GlobalStateGuard("the reward 'x'")
    with guard.held():
        assert torch.zeros(2).sum() == 0
    assert guard.warnings() == []


def test_what_cannot_be_put_back_stops_the_run() -> None:
    guard, kept = GlobalStateGuard("the reward 'x'"), torch.inference_mode()
    try:
        with (
            pytest.raises(UserError, match="changed the inference mode, and it cannot be put back") as caught,
            guard.held(),
        ):
            kept.__enter__()
        assert "name the function in the recipe" in caught.value.remedy
    finally:
        kept.__exit__(None, None, None)


DRAWS: dict[str, Callable[[], Any]] = {
    "the generator of `random`": random.random,
    "numpy's global generator": np.random.rand,
    "torch's global generator": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_beside_training(name: str) -> None:
    """The code draws what it would draw alone, call after call, and training what it would draw without it."""
    draw = DRAWS[name]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    alone = [draw() for _ in range(4)]
    seed()
    guard, inside, outside = GlobalStateGuard("the reward 'x'"), [], []
    for _ in range(4):
        with guard.held():
            inside.append(draw())
        outside.append(draw())
    assert inside == alone == outside and len(set(alone)) == 4
    (warning,) = guard.warnings()
    assert f"draws from {name}" in warning and "resumed" in warning


def test_a_generator_that_the_code_seeds_is_not_that_of_training() -> None:
    guard = GlobalStateGuard("the reward 'x'")
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with guard.held():
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
    assert torch.equal(torch.rand(3), wanted)


def test_streams_are_put_back() -> None:
    code = """
import io, os, sys
from quartet.observe.global_state import GlobalStateGuard
guard = GlobalStateGuard("the reward 'x'")
def close(): sys.stdout.close()
def close_descriptor(): os.close(1)
def redirect(): os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def replace(): sys.stdout = io.StringIO()
def both(): sys.stdout.close(); sys.stderr.close(); sys.stdin = None
for change in (close, close_descriptor, redirect, replace, both):
    with guard.held():
        change()
    print(change.__name__, flush=True)
    os.system("echo program")
print(sys.stdin.read(), guard.warnings())
"""
    done = subprocess.run([sys.executable, "-c", code], input="input", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ("close", "close_descriptor", "redirect", "replace", "both")
    assert lines[:-1] == [line for name in names for line in (name, "program")]
    assert lines[-1] == "input [\"the reward 'x' changed the standard streams; that was put back after each call\"]"


def test_streams_that_are_no_files_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As notebooks have them."""
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    with GlobalStateGuard("the reward 'x'").held():
        sys.stdout = sys.__stdout__
    assert sys.stdout is notebook


def test_a_forked_copy_that_comes_back_ends() -> None:
    code = """
import os
from quartet.observe.global_state import GlobalStateGuard
with GlobalStateGuard("the reward 'x'").held():
    os.fork()
os.wait()
print("once", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("once\n", 0), done.stderr


def test_outside_of_the_main_thread_everything_but_signals_is_held() -> None:
    def work() -> None:
        with guard.held():
            torch.set_default_dtype(torch.float64)

    guard = GlobalStateGuard("the reward 'x'")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.get_default_dtype() == torch.float32 and "default dtype" in guard.warnings()[0]


# Code that waits ------------------------------------------------------------------------------------------


def test_async_code_is_held_while_it_computes_and_not_while_others_do(tmp_path: Path) -> None:
    guard, seen = GlobalStateGuard("the reward 'x'"), []

    async def work() -> str:
        for _ in range(3):
            torch.set_grad_enabled(False)
            os.chdir("/")
            await asyncio.sleep(0)
            assert torch.is_grad_enabled(), "a step begins with what is outside"
        return "done"

    async def train() -> None:
        for _ in range(5):
            seen.append((torch.is_grad_enabled(), os.getcwd()))
            torch.set_num_threads(1)
            await asyncio.sleep(0)

    async def both() -> str:
        done, _ = await asyncio.gather(guard.driven(work()), train())
        return done

    here = os.getcwd()
    assert asyncio.run(both()) == "done"
    assert seen == [(True, here)] * 5
    assert guard.warnings() == [
        "the reward 'x' changed the gradient mode, the working directory; that was put back after each call"
    ]


def test_async_code_hears_errors_and_cancellation() -> None:
    guard, heard = GlobalStateGuard("the reward 'x'"), []

    async def work() -> str:
        try:
            await failing()
        except ZeroDivisionError:
            heard.append("error")
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            heard.append("timeout")
        try:
            await asyncio.sleep(60)
        finally:
            heard.append("cancelled")
        return "never"

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def cancelled() -> None:
        task = asyncio.create_task(guard.driven(work()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert heard == ["error", "timeout", "cancelled"]


def test_what_is_no_coroutine_is_awaited_all_the_same() -> None:
    async def wait() -> int:
        future = asyncio.get_running_loop().create_future()
        future.set_result(3)
        return await GlobalStateGuard("the reward 'x'").driven(future)

    assert asyncio.run(wait()) == 3
