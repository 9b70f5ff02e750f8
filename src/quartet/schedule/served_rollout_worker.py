"""The worker of a rollout role whose engines generate at their own pace, in processes or on servers of their own.

A call of ``run_steps`` submits, and waits until a group has ended or a slice of time is over. Where the engines share
devices with other roles they are paused between such calls; elsewhere they go on. New weights come in a pause.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.cluster import OffloadConfig
from quartet.rollout.paced import PacedEngine
from quartet.rollout.protocol import Completion, EngineStats, GenerationError, Request
from quartet.rollout.router import Progress, Router
from quartet.schedule.canary import CanaryProbe
from quartet.schedule.leases import LeaseMode
from quartet.schedule.offloadable import Offloadable
from quartet.schedule.request_store import AnyRequest, FinishedRequest, PromptRequest
from quartet.schedule.rollout_worker import EngineOutputs, RolloutWorker
from quartet.text.tokenizer import TextCodec
from quartet.train.offload import Moved, Offload, Store


class ServedRolloutWorker(RolloutWorker, Offloadable):
    """
    Args:
        weight_bytes: of the policy in all engines.
        lease_s: longest call of ``run_steps``.
        shares_devices: other roles compute on the engines' devices between two leases.
        sleep_level: how deeply they sleep while the memory is others'.
        close: ends what was made for the engines.
    """

    engine: PacedEngine

    def __init__(
        self,
        router: Router,
        codec: TextCodec,
        *,
        weight_bytes: int,
        lease_s: float,
        shares_devices: bool,
        sleep_level: Literal[1, 2],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._router = router
        super().__init__(PacedEngine(router, lease_s), codec)
        self._weight_bytes, self._lease_s = weight_bytes, lease_s
        self._shares_devices, self._sleep_level = shares_devices, sleep_level
        self._close = close
        self._lease_end = 0.0
        self._is_paused = self._is_asleep = False
        self._canary_of: tuple[CanaryProbe, Request, Completion] | None = None
        self._is_proven = True  # since the last canary no engine was woken
        self._starts = 0  # of engines, before that

    def close(self) -> None:
        self._router.close()
        self._close()

    # Generation ------------------------------------------------------------------------------------------

    def begin(self) -> EngineStats:
        stats = super().begin()
        self.engine.step_s = 0.0
        while self.engine.has_work:  # what ended before it was cancelled: its name may be asked for again
            with contextlib.suppress(GenerationError):
                if not self.engine.step():
                    break
        return stats

    def run_steps(self, submit: Sequence[AnyRequest], cancel: Sequence[str], num_steps: int) -> EngineOutputs:
        """As any rollout worker's; ``num_steps`` above 0 is one slice of time."""
        if not num_steps:
            return super().run_steps(submit, cancel, 0)
        self._resume()
        others = self._prove()
        self._lease_end = time.monotonic() + self._lease_s
        outputs = super().run_steps(submit, cancel, 1 << 30)
        self._yield_devices()
        return replace(outputs, ended=(*others, *outputs.ended), steps_left=0)

    def _may_step(self) -> bool:
        self.engine.step_s = self._lease_end - time.monotonic()
        return self.engine.step_s > 0 and self.engine.has_work

    def stop_running(self) -> EngineOutputs:
        self._resume()  # a paused engine hands nothing over
        return super().stop_running()

    def answers(self, requests: Sequence[PromptRequest], indices: Sequence[int]) -> RaggedBatch:
        self._resume()
        self._prove()
        found = super().answers(requests, indices)
        self._yield_devices()
        return found

    def answers_by_engine(self, asked: PromptRequest) -> dict[str, RaggedBatch]:
        found = dict[str, RaggedBatch]()
        for name in self._router.usable():
            self._router.pin(asked.request_ids[0], name)
            found[name] = self.answers([asked], [0])
        return found

    def _resume(self) -> None:
        self.engine.step_s = self._lease_s
        if self._is_paused:
            self._router.resume()
            self._is_paused = False

    def _pause(self) -> None:
        if not self._is_paused:
            self._router.pause()
            self._is_paused = True

    def _yield_devices(self) -> None:
        if self._shares_devices:
            self._pause()

    def progress(self) -> Progress:
        return self._router.progress()

    # The canary ------------------------------------------------------------------------------------------

    def run_canary(self, probe: CanaryProbe, name: str) -> EngineOutputs:
        self._resume()
        outputs = super().run_canary(probe, name)
        self._yield_devices()
        return outputs

    def _answers_of_engines(
        self, request: Request, probe: CanaryProbe | None = None
    ) -> tuple[list[Completion], list[FinishedRequest]]:
        self._starts = self._router.starts
        answers, others = super()._answers_of_engines(request)
        if probe is not None:
            self._canary_of = probe, request, answers[0]
        self._is_proven = True
        return answers, others

    def _ask_engines(self, request: Request) -> Sequence[str]:
        asked = self._router.probe(request)
        self.engine.note(asked)
        return asked

    def _prove(self) -> list[FinishedRequest]:
        """Asks the canary again where an engine was woken or started since; returns what else ended meanwhile.

        Raises:
            UserError: an engine answers otherwise than before.
        """
        if self._canary_of is None or (self._is_proven and self._starts == self._router.starts):
            return []
        probe, request, before = self._canary_of
        answers, others = self._answers_of_engines(request)
        for answer in answers:
            difference = _difference(answer, before)
            if not difference <= probe.tolerance:
                raise UserError(
                    "a rollout engine that was woken or started anew computes with other weights than before",
                    found=f"log-probabilities of the canary prompt differ by {difference:.3g}, more than "
                    f"{probe.tolerance:.3g}, at version {before.versions[-1]}",
                    remedy="set rollout.engine.sleep_level: 1; where it is 1, the engine lost weights and said nothing",
                )
        return others

    # Weights and memory ----------------------------------------------------------------------------------

    def before_weights(self) -> None:
        self._pause()  # until something is to be generated
        self._canary_of = None

    def make_offloadable(self, config: OffloadConfig) -> None:
        """The engines keep by themselves what leaves the devices."""

    def sizes(self) -> dict[LeaseMode, int]:
        """Bytes of weights; what the engines take beside them for their caches is the recipe's to bound."""
        return {"generate": self._weight_bytes}

    def onload(self, mode: LeaseMode) -> Moved:
        began = time.perf_counter()
        if not self._is_asleep:
            return Moved(0, 0, 0.0)
        self._router.wake()
        self._is_asleep = self._is_proven = False
        return Moved(self._weight_bytes, -self._weight_bytes, time.perf_counter() - began)

    def offload(self) -> Moved:
        began = time.perf_counter()
        if self._is_asleep:
            return Moved(0, 0, 0.0)
        self._pause()
        self._router.sleep(self._sleep_level)
        self._is_asleep = True
        return Moved(self._weight_bytes, self._weight_bytes, time.perf_counter() - began)

    def stop_offloading(self) -> None:
        """The engines end with the run."""

    def _offload(self, store: Store) -> Offload:
        raise AssertionError("engines move their own parts")


def _difference(one: Completion, other: Completion) -> float:
    """Largest between the log-probabilities of two greedy answers, up to where their tokens differ, in nats."""
    largest = 0.0
    for a, b, x, y in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False):
        largest = max(largest, abs(x - y))
        if a != b:
            break
    return largest
