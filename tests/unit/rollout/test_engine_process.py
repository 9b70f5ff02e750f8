"""An engine in a process of its own: whatever becomes of that, there is an error that says so, and nothing is left."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Completion, EngineFailed, FinishReason, GenerationError, Request, SamplingParams
from quartet.rollout.vllm import start

targets: Any = importlib.import_module("engine_targets")
SOON_S = 20.0


@contextlib.contextmanager
def process(fault: str = "", *, target: str = "scripted", **options: Any) -> Iterator[EngineProcess]:
    kwargs = options.pop("kwargs", {"fault": fault})
    engine = EngineProcess(targets.spec(f"engine_faults:{target}", kwargs=kwargs, **options))
    try:
        yield engine
    finally:
        engine.close()


def ask(name: str = "r", max_new_tokens: int = 5) -> Request:
    return Request(name, name, (5, 9, 2), SamplingParams(max_new_tokens=max_new_tokens))


def wait_for(engine: EngineProcess, number: int = 1) -> list[Completion]:
    done: list[Completion] = []
    end = time.monotonic() + SOON_S
    while len(done) < number and time.monotonic() < end:
        done += engine.completed(0.2)
    return done


def pid_of(engine: EngineProcess) -> int:
    assert engine._child is not None
    return engine._child.pid


def is_gone(pid: int) -> bool:
    """Also not waiting to be asked for its status."""
    end = time.monotonic() + SOON_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# Answers that cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("twice", "'r' as length"),
        ("unknown", "'never heard of' as"),
        ("cancels", "'r' as cancelled"),
        ("raises", "the planted error of a step"),
    ],
)
def test_an_engine_that_answers_nonsense_has_failed(fault: str, found: str) -> None:
    with process(fault, kwargs={"fault": fault, "after": 1}) as engine:
        engine.submit([ask("fine", 3)])
        assert wait_for(engine) == [Completion("fine", "fine", (7,) * 3, (-1.0,) * 3, (0,) * 3, FinishReason.LENGTH)]
        pid = pid_of(engine)
        with pytest.raises(EngineFailed, match=found):
            engine.submit([ask()])
            wait_for(engine)
        assert is_gone(pid)
        for call in (lambda: engine.submit([ask("s")]), lambda: engine.completed(0), engine.pause):
            with pytest.raises(EngineFailed, match=found):
                call()
        engine.restart()
        engine.submit([ask("again", 3)])
        assert [made.request_id for made in wait_for(engine)] == ["again"]


def test_an_error_about_some_requests_leaves_the_others() -> None:
    with process("not finite", kwargs={"fault": "not finite", "after": 1}) as engine:
        engine.submit([ask("short", 3), ask("bad", 20), ask("bad too", 20)])
        assert [made.request_id for made in wait_for(engine)] == ["short"]
        for name in ("bad", "bad too"):
            with pytest.raises(GenerationError) as caught:
                wait_for(engine)
            assert caught.value.request_ids == (name,)
        engine.submit([ask("bad", 2)])  # its id is free


# Processes that end or stand still -------------------------------------------------------------------------


def test_killed_in_mid_generation_it_fails_at_once_and_answers_again_after_a_restart() -> None:
    with process(kwargs={"step_s": 0.01}) as engine:
        engine.submit([ask("r", 10_000)])
        assert engine.completed(0.1) == []
        pid = pid_of(engine)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineFailed, match="SIGKILL"):
            wait_for(engine)
        assert time.monotonic() - start < 2.0
        assert is_gone(pid)
        engine.restart()
        engine.wait_ready()
        engine.submit([ask("r", 4)])
        assert len(wait_for(engine)[0].token_ids) == 4


@pytest.mark.parametrize("fault", ["stops", "is late"])
def test_one_that_stands_still_is_ended(fault: str) -> None:
    with process(fault, stall_timeout_s=1.0) as engine:
        engine.submit([ask()])
        pid = pid_of(engine)
        with pytest.raises(EngineFailed, match="said nothing for 1 s"):
            wait_for(engine)
        assert is_gone(pid)


def test_one_that_is_stopped_does_not_hold_up_a_submission_or_a_call() -> None:
    """Neither one that it could take no more of, nor one that it does not answer."""
    many = [replace(ask(f"r{i}"), prompt_ids=tuple(range(i, i + 500))) for i in range(1000)]
    for call in (lambda engine: engine.submit(many), lambda engine: engine.pause()):
        with process(stall_timeout_s=1.0) as engine:
            engine.wait_ready()
            os.kill(pid_of(engine), signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineFailed, match="within 1 s"):
                call(engine)
            assert time.monotonic() - start < 5.0


def test_it_lives_while_it_computes_or_rests_for_longer_than_the_limit() -> None:
    with process(kwargs={"step_s": 0.05}, stall_timeout_s=0.9) as engine:
        engine.submit([ask("r", 30)])
        assert len(wait_for(engine)[0].token_ids) == 30
        engine.submit([ask("s", 10)])
        engine.pause()
        time.sleep(1.0)
        assert engine.completed(0.1) == []
        engine.resume()
        assert len(wait_for(engine)[0].token_ids) == 10


# Starts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("exit", "exit status 3; its last lines:\nthe planted last words"),
        ("raise", "RuntimeError: the planted error of a start"),
        ("hang", r"not ready after 1 s(.|\n)*the planted last words"),
    ],
)
def test_a_failed_start_says_why(how: str, found: str) -> None:
    seconds = 1.0 if how == "hang" else SOON_S
    options: dict[str, Any] = {"kwargs": {"how": how}, "start_timeout_s": seconds}
    with process(target="fails_at_start", **options) as engine, pytest.raises(EngineFailed, match=found):
        engine.wait_ready()


def test_what_cannot_be_found_is_named() -> None:
    with pytest.raises(EngineFailed, match="no/such/python"):
        EngineProcess(replace(targets.spec(), python="/no/such/python"))
    with process(target="nothing") as engine, pytest.raises(EngineFailed, match="no attribute 'nothing'"):
        engine.wait_ready()


def test_of_what_it_prints_the_end_is_shown() -> None:
    with process(target="talks", kwargs={}) as engine:
        engine.submit([ask()])
        with pytest.raises(EngineFailed) as caught:
            wait_for(engine)
        assert "the planted error of a step" in str(caught.value)
        assert "line 1990 " in str(caught.value)
        assert len(str(caught.value)) < 5000


# Nothing is left -------------------------------------------------------------------------------------------


def test_nothing_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, file, thread or process, whether it was closed, failed, or was started anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    note = tmp_path / "numbers"

    def cycle() -> None:
        with process(target="has_a_child", kwargs={"file": str(note)}) as engine:
            for way in (engine.restart, engine.close):
                engine.wait_ready()
                pids = [int(text) for text in note.read_text(encoding="utf-8").split()]
                way()
                assert is_gone(pids[0])
                assert _ends(pids[1])

    cycle()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)
    assert os.listdir(tmp_path) == ["numbers"]


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Killed, with no time to say anything, while the engine computes; and so does what the engine started."""
    note = tmp_path / "numbers"
    program = (
        "import os, signal, sys\n"
        "from quartet.rollout.process import EngineProcess, EngineSpec\n"
        "from quartet.rollout.protocol import Request, SamplingParams\n"
        "engine = EngineProcess(EngineSpec('engine_faults:has_a_child', {'file': sys.argv[1]}))\n"
        "engine.submit([Request('r', 'r', (1,), SamplingParams(max_new_tokens=10**6))])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(Path(targets.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program, str(note)], env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert all(_ends(int(pid)) for pid in note.read_text(encoding="utf-8").split())
    assert os.listdir(tmp_path) == ["numbers"]


def test_an_engine_is_closed_in_order_whether_it_is_not_needed_or_raises(tmp_path: Path) -> None:
    for fault in ("", "raises"):
        note = tmp_path / (fault or "closed")
        with process(target="leaves_a_note", kwargs={"file": str(note), "fault": fault}) as engine:
            engine.wait_ready()
            if fault:
                engine.submit([ask("r")])
                with pytest.raises(EngineFailed, match="the planted error of a step"):
                    engine.completed(SOON_S)
        assert note.read_text(encoding="utf-8") == "closed"


def _ends(pid: int) -> bool:
    """A process of which nothing runs any more; whoever adopted it may not have asked for its status."""
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.31.0", True), ("0.32.4+cpu", True), ("0.32rc1", True), ("0.30.9", False), ("0.33.0", False), ("1.31", False)],
)
def test_a_version_of_vllm_outside_the_window_is_named(
    version: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "version_of", lambda name: version)
    if is_taken:
        return start._check_version()
    with pytest.raises(UserError) as caught:
        start._check_version()
    assert f"vLLM {version} in " in caught.value.found and "vllm >= 0.31, < 0.33" in caught.value.remedy
