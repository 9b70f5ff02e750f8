"""Engines without a model that misbehave, for engine processes in tests. Imports no torch, so they start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, GenerationError, PartialCompletion, Request

VOCAB = 61


class Scripted:
    """A step engine without a model: one token 7 a step for each request; ``fault`` says what it does wrong.

    Args:
        step_s: a step takes so long.
        after: requests that it answers first as it should.
    """

    def __init__(self, fault: str = "", *, step_s: float = 0.002, after: int = 0) -> None:
        self.fault = fault
        self.step_s = step_s
        self.after = after
        self._held: dict[str, tuple[Request, list[int]]] = {}
        self._ready: list[Completion] = []
        self._stats = EngineStats()

    def submit(self, requests: Sequence[Request]) -> None:
        if self.fault == "refuses" or any(max(request.prompt_ids) >= VOCAB for request in requests):
            raise UserError("a prompt holds tokens the model does not have", found="them", remedy="others")
        self._held.update((request.request_id, (request, [])) for request in requests)

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._ready)

    def step(self) -> list[Completion]:
        is_faulty = self.after <= 0
        if self.fault == "raises" and is_faulty:
            raise RuntimeError("the planted error of a step")
        if self.fault == "not finite" and is_faulty and self._held:
            request_id = next(iter(self._held))
            del self._held[request_id]
            raise GenerationError(f"logits of request {request_id!r}", [request_id])
        if self.fault == "stops" and is_faulty:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60 if self.fault == "is late" and is_faulty else self.step_s)
        done, self._ready = self._ready, []
        for request, versions in list(self._held.values()):
            versions.append(self._stats.policy_version)
            self._stats.generated_tokens += 1
            if len(versions) == request.sampling.max_new_tokens:
                del self._held[request.request_id]
                done += self._answers(_completion(request, versions, FinishReason.LENGTH), is_faulty=is_faulty)
                self.after -= 1
        return done

    def _answers(self, right: Completion, *, is_faulty: bool) -> list[Completion]:
        if not is_faulty:
            return [right]
        wrong = {
            "twice": [right, right],
            "unknown": [replace(right, request_id="never heard of")],
            "cancels": [replace(right, finish_reason=FinishReason.CANCELLED)],
        }
        return wrong.get(self.fault, [right])

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._held:
                self._ready.append(_completion(*self._held.pop(request_id), FinishReason.CANCELLED))

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        held = {i: tuple(self._held[i][1]) for i in request_ids if i in self._held}
        return {i: PartialCompletion((7,) * len(each), (-1.0,) * len(each), each) for i, each in held.items()}

    def update_weights(self, source: Iterable[tuple[str, Any]] | None, version: int) -> None:
        if self.fault == "fails to load" and version >= self.after:
            raise RuntimeError("the planted error of an update")
        self._stats.policy_version = version

    def stats(self) -> EngineStats:
        return replace(self._stats, num_running=len(self._held))


def _completion(request: Request, versions: Sequence[int], reason: FinishReason) -> Completion:
    number = len(versions)
    ids, logprobs = (7,) * number, (-1.0,) * number
    return Completion(request.request_id, request.group, ids, logprobs, tuple(versions), reason)


def scripted(fault: str = "", **options: Any) -> Scripted:
    return Scripted(fault, **options)


def fails_at_start(how: str) -> Scripted:
    if how == "user error":
        raise UserError("this engine cannot be had", found="a planted reason", remedy="nothing")
    if how == "exit":
        print("the planted last words", file=sys.stderr)
        os._exit(3)
    if how == "hang":
        print("the planted last words", file=sys.stderr)
        time.sleep(60)
    raise RuntimeError("the planted error of a start")


def talks() -> Scripted:
    """Prints more than is shown."""
    for number in range(2000):
        print(f"line {number} " + "x" * 60)
    sys.stdout.flush()
    return Scripted("raises")


class LeavesANote(Scripted):
    """Also finds a module of the package that nobody has loaded yet, though the link to it is gone."""

    file = ""

    def close(self) -> None:
        import quartet.extras.quickstart.recipes  # noqa: F401

        Path(self.file).write_text("closed", encoding="utf-8")


def leaves_a_note(file: str, fault: str) -> LeavesANote:
    engine = LeavesANote(fault)
    engine.file = file
    return engine


def has_a_child(file: str) -> Scripted:
    """Starts a process of its own; writes down the numbers of both."""
    child = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
    return Scripted(step_s=0.05)
