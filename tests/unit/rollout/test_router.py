"""The router: nothing lost, nothing twice, whatever engines do; who gets what; how evenly they end."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.config import UserError
from quartet.rollout import router as router_module
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    EngineStats,
    FinishReason,
    GenerationError,
    PartialCompletion,
    Request,
    RequestsRefused,
    SamplingParams,
)
from quartet.rollout.router import Router
from quartet.weights.sink import TensorSink

targets: Any = importlib.import_module("engine_targets")


class Clock:
    now = 0


class FakeEngine:
    """One token of each of the first ``num_slots`` requests at every look; its answers end after ``length_of`` tokens.

    Args:
        clock: counts looks, over all engines that share it.
        starts: whether it starts anew when it is asked to.
        fails_to: methods that fail, always.
    """

    def __init__(self, num_slots: int = 4, *, clock: Clock | None = None, fails_to: Sequence[str] = ()) -> None:
        self.num_slots = num_slots
        self.fails_to = fails_to
        self.clock = clock or Clock()
        self.now = 0
        self.is_dead = self.is_paused = self.is_closed = False
        self.starts_in = 0
        self.num_starts = 1
        self.most_held = 0
        self.taken: list[Request] = []
        self.calls: list[str] = []
        self.held: dict[str, tuple[Request, int]] = {}
        self.ready: list[Completion] = []
        self.made = 0

    def _check(self, what: str) -> None:
        self.calls.append(what)
        if self.is_dead or what in self.fails_to:
            raise EngineFailed("the fake engine failed", found=f"it is dead (asked to {what})", remedy="none")

    def submit(self, requests: Sequence[Request]) -> None:
        self._check("submit")
        if bad := [request for request in requests if max(request.prompt_ids) > 60]:
            raise UserError("unknown token", found=bad[0].request_id, remedy="none")
        assert not {request.request_id for request in requests} & self.held.keys()
        self.now = max(self.now, self.clock.now)
        self.taken += requests
        self.held.update((request.request_id, (request, 0)) for request in requests)
        self.most_held = max(self.most_held, len(self.held))

    def completed(self, timeout_s: float) -> list[Completion]:
        self._check("complete")
        done, self.ready = self.ready, []
        if not self.is_paused and self.held:
            self.now += 1
            self.clock.now = max(self.clock.now, self.now)
            for request, number in list(self.held.values())[: self.num_slots]:
                self.made += 1
                self.held[request.request_id] = request, number + 1
                if number + 1 >= length_of(request):
                    done.append(self._end(request, FinishReason.STOP))
        if failed := [made.request_id for made in done if made.request_id.startswith("nan")]:
            self.ready = [made for made in done if made.request_id not in failed]
            raise GenerationError("not finite", failed)
        return done

    def _end(self, request: Request, reason: FinishReason) -> Completion:
        _, number = self.held.pop(request.request_id)
        ids = (7,) * number
        return Completion(request.request_id, request.group, ids, (-1.0,) * number, (0,) * number, reason)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._check("cancel")
        self.ready += [self._end(self.held[i][0], FinishReason.CANCELLED) for i in request_ids if i in self.held]

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        return {i: PartialCompletion((7,) * self.held[i][1], (), ()) for i in request_ids}

    def pause(self) -> None:
        self._check("pause")
        self.is_paused = True

    def resume(self) -> None:
        self._check("resume")
        self.is_paused = False

    def weight_sink(self) -> TensorSink:
        raise UserError("it takes no weights", found="a fake engine", remedy="none")

    def sleep(self, level: Literal[1, 2]) -> None:
        self._check("sleep")

    def wake(self) -> None:
        self._check("wake")

    def stats(self) -> EngineStats:
        return EngineStats(generated_tokens=self.made, num_running=len(self.held))

    def close(self) -> None:
        self.is_closed = True

    def kill(self) -> None:
        self.is_dead, self.held, self.ready = True, {}, []


class Restartable(FakeEngine):
    """Ready after some looks."""

    def restart(self) -> None:
        self.calls.append("restart")
        self.held, self.ready, self.made, self.starts_in = {}, [], 0, 3
        self.is_dead = self.is_paused = False
        self.num_starts += 1

    def is_ready(self) -> bool:
        self._check("is_ready")
        self.starts_in -= 1
        return self.starts_in < 0


def length_of(request: Request) -> int:
    return min(request.sampling.seed, request.sampling.max_new_tokens)


def ask(
    name: str, length: int = 3, *, group: str | None = None, most: int = 10, prompt: int = 2, **more: Any
) -> Request:
    return Request(name, group or name, (5,) * prompt, SamplingParams(max_new_tokens=most, seed=length), **more)


def group_of(name: str, size: int, length: int = 3, **more: Any) -> list[Request]:
    return [ask(f"{name}-{i}", length, group=name, **more) for i in range(size)]


def drain(router: Router, number: int) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(100_000):
        if len(done) >= number:
            break
        done += router.completed(0)
    assert router.completed(0) == []
    return done


@contextlib.contextmanager
def routed(engines: Sequence[Any], **options: Any) -> Iterator[Router]:
    router = Router(engines, **options)
    try:
        yield router
    finally:
        router.close()


def where(engines: Sequence[FakeEngine]) -> list[list[str]]:
    return [[request.request_id for request in engine.taken] for engine in engines]


# None lost, none twice -------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_every_request_is_answered_once_whatever_happens(seed: int) -> None:
    """Engines die and pause at random; requests are cancelled, and their ids used again."""
    draw = random.Random(seed)
    engines: list[FakeEngine] = [Restartable(draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]
    asked: Counter[str] = Counter()
    may_cancel: Counter[str] = Counter()
    answered: list[Completion] = []
    failed: Counter[str] = Counter()

    def look(router: Router) -> None:
        try:
            answered.extend(router.completed(0))
        except GenerationError as error:
            failed.update(error.request_ids)

    with routed(engines, max_outstanding=draw.randint(1, 12), max_restarts=10_000) as router:
        for _ in range(draw.randint(1, 80)):
            match draw.randint(0, 7):
                case 0 | 1 | 2:
                    name = f"{draw.choice(['nan', 'r'])}{draw.randint(0, 8)}"
                    unit = group_of(name, draw.randint(1, 6), draw.randint(1, 9), session=draw.choice([None, "s"]))
                    held = router._ledger.held
                    if not any(request.request_id in held for request in unit):
                        router.submit(unit)
                        asked.update(request.request_id for request in unit)
                    else:
                        with pytest.raises(UserError, match="in use"):
                            router.submit(unit)
                case 3:
                    ids = [i for i in router._ledger.held if draw.random() < 0.3]
                    may_cancel.update(ids)
                    router.cancel([*ids, "never heard of"])
                case 4:
                    draw.choice(engines).kill()
                case 5:
                    router.pause()
                    look(router)
                    router.resume()
                case _:
                    look(router)
        for _ in range(2000):
            if not router._ledger.held and answered_all(asked, answered, failed):
                break
            look(router)
        assert router.completed(0) == []
        assert Counter(made.request_id for made in answered) + failed == asked
        cancelled = Counter(made.request_id for made in answered if made.finish_reason is FinishReason.CANCELLED)
        assert cancelled <= may_cancel
        for made in answered:
            assert made.finish_reason is FinishReason.CANCELLED or len(made.token_ids) > 0
        assert not any(engine.held for engine in engines)
        assert router.stats().num_waiting == 0


def answered_all(asked: Counter[str], answered: Sequence[Completion], failed: Counter[str]) -> bool:
    return sum(asked.values()) == len(answered) + sum(failed.values())


def test_processes_killed_at_random_lose_and_double_nothing() -> None:
    draw = random.Random(0)
    specs = [targets.spec("engine_faults:scripted", kwargs={"step_s": 0.002}, name=f"engine {i}") for i in range(3)]
    engines = [EngineProcess(spec) for spec in specs]
    asked = [request for g in range(60) for request in group_of(f"g{g}", 4, most=draw.randint(1, 60))]
    done: list[Completion] = []
    with routed(engines, max_outstanding=16, max_restarts=50) as router:
        router.submit(asked)
        kills, end = 0, time.monotonic() + 60
        while len(done) < len(asked):
            assert time.monotonic() < end
            done += router.completed(0.05)
            child = draw.choice(engines)._child
            if kills < 8 and len(done) >= 25 * kills and child is not None:
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
        assert router.completed(0.2) == []
        assert Counter(made.request_id for made in done) == Counter(request.request_id for request in asked)
        most = {request.request_id: request.sampling.max_new_tokens for request in asked}
        assert all(len(made.token_ids) == most[made.request_id] for made in done)
        assert router.restarts >= 4
        assert router.rerouted > 0


# Engines that fail -----------------------------------------------------------------------------------------


def test_requests_of_a_failed_engine_go_elsewhere_from_the_start_before_others() -> None:
    engines = [FakeEngine(), FakeEngine()]
    with routed(engines, max_outstanding=4) as router:
        router.submit([*group_of("a", 4, 5), *group_of("b", 4, 5), *group_of("c", 4, 5), *group_of("d", 4, 5)])
        router.completed(0)
        engines[0].kill()
        done = drain(router, 16)
        assert [made.group for made in done] == [name for name in "bacd" for _ in range(4)]
        assert all(made.token_ids == (7,) * 5 for made in done)
        assert (router.rerouted, router.restarts) == (4, 0)
        assert engines[0].is_closed


def test_restarts_are_bounded_and_then_every_reason_is_told() -> None:
    engines = [Restartable(fails_to=["complete"]), Restartable(fails_to=["submit"])]
    with routed(engines, max_restarts=2) as router:
        router.submit([ask("r")])
        with pytest.raises(EngineFailed) as caught:
            drain(router, 1)
        assert "engine 0: it is dead (asked to complete); engine 1: it is dead (asked to submit)" in caught.value.found
        assert router.restarts == 4
        assert [engine.num_starts for engine in engines] == [3, 3]
        assert all(engine.is_closed for engine in engines)
        for call in (lambda: router.submit([ask("s")]), lambda: router.completed(0)):
            with pytest.raises(EngineFailed, match="no rollout engine is left"):
                call()


@pytest.mark.parametrize("healthy_s", [0.0, 600.0])
def test_failures_are_forgotten_once_an_engine_was_up_for_long(
    healthy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "_HEALTHY_S", healthy_s)
    engine = Restartable()
    with routed([engine], max_restarts=2) as router:
        for number in range(1, 5):
            engine.kill()
            router.completed(0)
            if number == 3 and healthy_s:
                with pytest.raises(EngineFailed, match="no rollout engine is left"):
                    router.completed(0)
                return
            while not router._in_state("up"):
                router.completed(0)
        assert router.restarts == 4 and not healthy_s


def test_an_engine_that_answers_nonsense_is_out() -> None:
    class Doubling(FakeEngine):
        def completed(self, timeout_s: float) -> list[Completion]:
            return [made for made in super().completed(timeout_s) for _ in range(2)]

    class Inventing(FakeEngine):
        def completed(self, timeout_s: float) -> list[Completion]:
            return [replace(made, request_id="invented") for made in super().completed(timeout_s)]

    engines = [Doubling(), Inventing(), FakeEngine()]
    with routed(engines) as router:
        router.submit([ask(f"r{i}") for i in range(6)])
        done = drain(router, 6)
        assert sorted(made.request_id for made in done) == [f"r{i}" for i in range(6)]
        assert [engine.is_closed for engine in engines] == [True, True, False]


def test_one_without_weights_gets_nothing_and_one_that_cannot_take_them_is_started_anew() -> None:
    class Fed(Restartable):
        """Has weights after some looks, but fails to take them before it was started anew."""

        num_asked = 0

        def has_weights(self) -> bool:
            self.num_asked += 1
            if self.num_starts == 1 and self.num_asked == 3:
                raise EngineFailed("it failed", found="weights that it cannot take", remedy="none")
            return self.num_starts > 1

        def weight_sink(self) -> TensorSink:
            return TensorSink([("weight", torch.zeros(1))], version=0)

    engine = Fed()
    with routed([engine]) as router:
        router.submit([ask("r")])
        assert engine.taken == []
        drain(router, 1)
        assert (engine.num_starts, router.restarts) == (2, 1)


def test_one_that_dies_asleep_is_started_when_the_others_wake() -> None:
    engines = [Restartable(), Restartable()]
    with routed(engines) as router:
        router.pause()
        engines[1].kill()
        router.sleep(2)
        router.completed(0)
        assert "restart" not in engines[1].calls
        router.wake()
        router.resume()
        assert engines[1].num_starts == 2
        assert [call for call in engines[0].calls if call in ("pause", "sleep", "wake", "resume")] == [
            "pause", "sleep", "wake", "resume",
        ]  # fmt: skip


def test_a_failed_start_closes_all() -> None:
    engines = [EngineProcess(targets.spec(f"engine_faults:{name}", kwargs=kwargs, name=name))
               for name, kwargs in (("scripted", {}), ("fails_at_start", {"how": "user error"}))]  # fmt: skip
    with pytest.raises(UserError, match="this engine cannot be had"):
        Router(engines)
    assert all(engine._child is None for engine in engines)


# Who gets what ---------------------------------------------------------------------------------------------


def test_the_engine_with_the_fewest_tokens_to_come_is_next() -> None:
    engines = [FakeEngine(), FakeEngine()]
    with routed(engines) as router:
        router.submit([ask("long", 100, most=100), ask("short", 40, most=40), ask("prompt", prompt=30)])
        assert where(engines) == [["long"], ["short", "prompt"]]


def test_sessions_stay_where_they_were_while_there_is_room() -> None:
    engines = [FakeEngine(), FakeEngine()]
    with routed(engines, max_outstanding=3) as router:
        router.submit([ask("a", session="s"), ask("b", session="t")])
        drain(router, 2)
        router.submit([ask("c", session="t"), ask("d", session="t"), ask("e", session="s"), ask("a", group="a")])
        assert where(engines) == [["a", "e", "a"], ["b", "c", "d"]]
        router.submit([ask("f", session="t"), ask("g", session="t")])
        assert where(engines) == [["a", "e", "a", "g"], ["b", "c", "d", "f"]]
        drain(router, 6)
        router.submit([ask("h", session="t")])
        assert where(engines)[0][-1] == "h", "it follows where its session went"


def test_what_is_outstanding_is_bounded_and_groups_stay_together() -> None:
    engines = [FakeEngine() for _ in range(3)]
    with routed(engines, max_outstanding=10) as router:
        router.submit([request for g in range(40) for request in group_of(f"g{g}", 4, 1 + g % 7)])
        assert [len(engine.held) for engine in engines] == [12, 12, 12]
        drain(router, 160)
        assert all(engine.most_held <= 13 for engine in engines), "a group more than the limit, less one"
        groups = [{request.group for request in engine.taken} for engine in engines]
        assert sum(map(len, groups)) == 40


# Joining, leaving, refusals, state -------------------------------------------------------------------------


def test_refused_requests_change_nothing() -> None:
    engines = [FakeEngine(), FakeEngine()]
    bad = replace(ask("bad"), prompt_ids=(99,))
    with routed(engines, max_outstanding=2) as router:
        with pytest.raises(UserError, match="unknown token"):
            router.submit([ask("a"), ask("b"), bad, ask("c"), ask("d"), ask("e")])
        assert [router.completed(0) for _ in range(5)] == [[]] * 5
        assert not any(engine.held for engine in engines)
        router.submit([ask("a"), ask("b"), ask("c"), ask("d"), ask("e"), bad])
        done: list[Completion] = []
        with pytest.raises(RequestsRefused, match="unknown token") as caught:
            for _ in range(20):
                done += router.completed(0)
        assert caught.value.request_ids == ("bad",)
        done += drain(router, 5 - len(done))
        assert {made.request_id for made in done} == set("abcde")
        router.submit([replace(bad, prompt_ids=(1,))])


def test_cancelled_in_the_queue_or_running_they_come_back_once() -> None:
    engine = FakeEngine()
    with routed([engine], max_outstanding=2) as router:
        router.submit([ask(name, 9) for name in "abcd"])
        for _ in range(3):
            assert router.completed(0) == []
        router.cancel(["a", "d", "never heard of"])
        router.submit([ask("a", 1)])
        done = [*router.completed(0)]
        done += drain(router, 5 - len(done))
        ends = sorted((made.request_id, len(made.token_ids), made.finish_reason.value) for made in done)
        assert ends == [
            ("a", 1, "stop"),
            ("a", 3, "cancelled"),
            ("b", 9, "stop"),
            ("c", 9, "stop"),
            ("d", 0, "cancelled"),
        ]


def test_stats_are_sums_and_outlast_restarts() -> None:
    engines = [Restartable(), Restartable()]
    with routed(engines) as router:
        router.submit([ask("a", 5), ask("b", 5)])
        drain(router, 2)
        engines[0].kill()
        router.submit([ask("c", 5), ask("d", 5)])
        drain(router, 2)
        assert router.stats().generated_tokens == 20
        assert (router.stats().num_running, router.stats().num_waiting) == (0, 0)
