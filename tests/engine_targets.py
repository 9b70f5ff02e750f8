"""What runs inside of engine processes in tests: the native engine with tiny models, and engines that misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.process_child import EngineSpec
from quartet.rollout.process_native import NativeProcessEngine
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, Request

VOCAB = 61
CONTEXT = 96


def build_model(seed: int = 0, *, is_tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config).eval()


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def spec(target: str = "native", *, environment: dict[str, str] | None = None, **options: Any) -> EngineSpec:
    """Of a function of this module, which the process finds beside the package."""
    kwargs = options.pop("kwargs", {})
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    return EngineSpec(
        f"engine_targets:{target}", kwargs, environment=variables, **{"start_timeout_s": 120.0, **options}
    )


def native(seed: int = 0, *, is_tied: bool = False, version: int | None = None, **options: Any) -> NativeProcessEngine:
    packed = PackedCausalLM(build_model(seed, is_tied=is_tied))
    options = {"max_running": 8, **options}
    return NativeProcessEngine(packed, owns_weights=True, decode=decode, version=version, **options)


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
            "few logprobs": [replace(right, logprobs=right.logprobs[1:])],
            "many versions": [replace(right, versions=(*right.versions, 0))],
            "foreign version": [replace(right, versions=(*right.versions[1:], 99))],
            "too many": [_completion_of(right, len(right.token_ids) + 1)],
            "other group": [replace(right, group="another")],
            "cancels": [replace(right, finish_reason=FinishReason.CANCELLED)],
        }
        return wrong.get(self.fault, [right])

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._held:
                self._ready.append(_completion(*self._held.pop(request_id), FinishReason.CANCELLED))

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if self.fault == "fails to load" and version >= self.after:
            raise RuntimeError("the planted error of an update")
        self._stats.policy_version = version

    def stats(self) -> EngineStats:
        return replace(self._stats, num_running=len(self._held))


def _completion(request: Request, versions: Sequence[int], reason: FinishReason) -> Completion:
    number = len(versions)
    ids, logprobs = (7,) * number, (-1.0,) * number
    return Completion(request.request_id, request.group, ids, logprobs, tuple(versions), reason)


def _completion_of(right: Completion, number: int) -> Completion:
    return replace(right, token_ids=(7,) * number, logprobs=(-1.0,) * number, versions=(0,) * number)


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
    """Prints more than is kept."""
    for number in range(20_000):
        print(f"line {number} " + "x" * 60)
    sys.stdout.flush()
    return Scripted("raises")


def has_a_child(file: str) -> Scripted:
    """Starts a process of its own, whose number it writes down."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(str(child.pid), encoding="utf-8")
    return Scripted(step_s=0.05)
