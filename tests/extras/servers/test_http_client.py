"""Engines that are servers: every request is answered once, whatever servers and connections do."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers.client import OpenAIEngine
from quartet.rollout.protocol import Completion, EngineFailed, FinishReason, GenerationError, Request, SamplingParams
from quartet.rollout.router import Router

json_server: Any = importlib.import_module("json_server")

VOCAB, CONTEXT = 100, 64
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": CONTEXT}]}
FAST = RetryConfig(attempts=4, first_wait_s=0.01, longest_wait_s=0.05)


def right(body: dict[str, Any]) -> dict[str, Any]:
    """Counts on from the prompt's last token."""
    ids = [(body["prompt"][-1] + 1 + n) % VOCAB for n in range(body["max_tokens"])]
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
    }
    return {"choices": [choice]}


def engine_at(url: str, **options: Any) -> OpenAIEngine:
    server = {"url": url + "/v1", "retry": FAST, "timeout_s": 5.0, "concurrency": 8}
    names = {"model", "vocab_size", "decode", "version"}
    own = {"model": "policy", "vocab_size": VOCAB, **{name: options.pop(name) for name in names & options.keys()}}
    return OpenAIEngine(RemoteServer(**{**server, **options}), **own)


def ask(name: str, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Request:
    return Request(name, name, prompt, SamplingParams(**{"max_new_tokens": 4, **sampling}))


def collect(engine: Any, number: int, seconds: float = 20.0) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    end = time.monotonic() + seconds
    while len(done) < number:
        assert time.monotonic() < end, f"{sorted(done)} of {number}"
        for completion in engine.completed(0.2):
            assert completion.request_id not in done, "answered twice"
            done[completion.request_id] = completion
    assert engine.completed(0.05) == []
    return done


def served(answer: Callable[[dict[str, Any]], Any], port: int = 0) -> Any:
    """``answer(body)`` of completions is a status and a body, or a body."""

    def all_of(body: Any) -> Any:
        found = MODELS if body is None else answer(body)
        return found if isinstance(found, tuple) else (200, found)

    return json_server.served(all_of, port)


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The right answer with another value or two."""

    def spoil(body: dict[str, Any]) -> dict[str, Any]:
        answer = right(body)
        for name, change in changes.items():
            answer["choices"][0][name] = change(answer["choices"][0].get(name))
        return answer

    return spoil


def twice(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": right(body)["choices"] * 2}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "two answers": (twice, "2 answers to one request"),
    "no token ids": (changed(token_ids=lambda ids: None), "does not know return_token_ids"),
    "few logprobs": (
        changed(logprobs=lambda p: {"token_logprobs": p["token_logprobs"][1:]}),
        "3 log-probabilities of 4",
    ),
    "another prompt": (changed(prompt_token_ids=lambda ids: [0, *ids]), "the answer to another prompt"),
    "no such token": (changed(token_ids=lambda ids: [*ids[1:], VOCAB]), "100 among the token ids"),
    "NaN": (changed(logprobs=lambda p: {"token_logprobs": [float("nan")] * 4}), "nan among the log-probabilities"),
    "stops for nothing": (changed(finish_reason=lambda r: "stop"), "stopped after 4 tokens, where nothing stops it"),
    "not JSON": (lambda body: (200, b"<html>"), "malformed"),
}
"""What no server should say, and what is said of it."""


# Retries ---------------------------------------------------------------------------------------------------


def test_every_request_is_answered_once_whatever_goes_wrong_on_the_way() -> None:
    faults: list[Callable[[dict[str, Any]], Any]] = [
        *(spoil for spoil, _ in WRONG.values()),
        *(lambda body, status=status: (status, {}) for status in (408, 429, 500, 502, 503, 504)),
        lambda body: (time.sleep(1.0), right(body))[1],  # late
    ]
    seen: Counter[int] = Counter()

    def answer(body: dict[str, Any]) -> Any:
        number = body["prompt"][0]
        seen[number] += 1
        return faults[number % len(faults)](body) if seen[number] == 1 + number % 2 else right(body)

    with served(answer) as asked, closing(engine_at(asked.url, timeout_s=0.6)) as engine:
        engine.submit([ask(f"r{n}", (n, n)) for n in range(60)])
        done = collect(engine, 60)
        for n in range(60):
            assert done[f"r{n}"].token_ids == tuple(n + 1 + k for k in range(4))
            assert done[f"r{n}"].logprobs == (-0.5,) * 4
        # Faults come at first attempts of even numbers, and would at second ones of odd numbers.
        assert engine.stats().num_retries == 30 == sum(seen.values()) - 60


@pytest.mark.parametrize("fault", WRONG)
def test_answers_that_stay_wrong_end_the_engine_with_their_reason(fault: str) -> None:
    spoil, said = WRONG[fault]
    with served(spoil) as asked, closing(engine_at(asked.url)) as engine:
        engine.submit([ask("r")])
        with pytest.raises(EngineFailed, match=said):
            collect(engine, 1)
        with pytest.raises(EngineFailed, match=said):
            engine.submit([ask("s")])
        assert engine.stats().num_retries == 3
        # A restart forgets it.
        engine.restart()
        engine.wait_ready()
        assert engine.completed(0.0) == []


def test_refused_requests_end_alone_and_say_why() -> None:
    def answer(body: dict[str, Any]) -> Any:
        return (400, {"error": {"message": "too hot"}}) if body["temperature"] > 2 else right(body)

    with served(answer) as asked, closing(engine_at(asked.url)) as engine:
        engine.submit([ask("a"), ask("hot", temperature=9.0), ask("b")])
        done: list[str] = []
        with pytest.raises(GenerationError, match="too hot") as refused:
            while True:
                done += [made.request_id for made in engine.completed(0.2)]
        assert refused.value.request_ids == ("hot",)
        while len(done) < 2:
            done += [made.request_id for made in engine.completed(5.0)]
        assert sorted(done) == ["a", "b"]
        assert engine.stats().num_retries == 0
        engine.submit([ask("hot")])  # the id is free
        assert list(collect(engine, 1)) == ["hot"]


# Connections, pressure -------------------------------------------------------------------------------------


def test_a_cancelled_request_is_answered_once_and_its_id_is_free_at_once() -> None:
    with served(lambda body: (time.sleep(0.3), right(body))[1]) as asked:
        with closing(engine_at(asked.url, concurrency=1)) as engine:
            engine.submit([ask("flying"), ask("waiting"), ask("stays", (20,))])
            engine.cancel(["flying", "waiting", "never heard of"])
            engine.submit([ask("flying", (40,))])
            done: list[Completion] = []
            while len(done) < 4:
                done += engine.completed(0.2)
            time.sleep(0.5)  # for late answers
            assert engine.completed(0.0) == []
        reasons = Counter((made.request_id, made.finish_reason) for made in done)
        assert reasons == {
            ("flying", FinishReason.CANCELLED): 1,
            ("waiting", FinishReason.CANCELLED): 1,
            ("stays", FinishReason.LENGTH): 1,
            ("flying", FinishReason.LENGTH): 1,
        }
        assert [made.token_ids[0] for made in done if made.request_id == "flying" and made.token_ids] == [41]


def test_a_pause_completes_what_is_under_way_and_sends_nothing_more() -> None:
    with ExitStack() as opened:
        asked = opened.enter_context(served(lambda body: (time.sleep(0.1), right(body))[1]))
        engine = opened.enter_context(closing(engine_at(asked.url, concurrency=2)))
        engine.submit([ask(f"r{n}") for n in range(5)])
        engine.pause()
        engine.pause()
        assert len(engine.completed(0.0)) == 2
        assert engine.completed(0.3) == [] and len([body for body in asked.bodies if body]) == 2
        engine.submit([ask("later")])
        assert engine.completed(0.2) == []
        engine.resume()
        assert sorted(collect(engine, 4)) == ["later", "r2", "r3", "r4"]


# Servers that are not there --------------------------------------------------------------------------------


def test_it_takes_no_weights_and_asks_as_agreed() -> None:
    with served(right) as asked, closing(engine_at(asked.url)) as engine:
        with pytest.raises(UserError, match="takes no weights"):
            engine.weight_sink()
        with pytest.raises(UserError, match="no room"):
            engine.submit([ask("r", (1,) * CONTEXT)])
        sampling = SamplingParams(0.5, 0.9, 7, 0.1, 99, (50,), (), seed=(1 << 64) - 1)
        engine.submit([Request("r", "g", (1,) * 60, sampling, session="talk")])
        collect(engine, 1)
        body = asked.bodies[-1]
        wanted = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "stop_token_ids": [50],
            "seed": (1 << 63) - 1,
        }
        wanted |= {"max_tokens": 4, "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "session_id": "talk"}
        assert {name: body[name] for name in wanted} == wanted
        assert asked.paths == ["/v1/models", "/v1/completions"]


def test_a_server_that_dies_is_waited_for_and_its_requests_are_answered_by_others() -> None:
    is_dead = threading.Event()

    def slow(body: dict[str, Any]) -> Any:
        time.sleep(0.05)
        return right(body)

    def mortal(body: dict[str, Any]) -> Any:
        if is_dead.is_set():
            raise ConnectionAbortedError  # of a connection that was kept
        return slow(body)

    with ExitStack() as opened:
        stays = opened.enter_context(served(slow))
        first = ExitStack()
        dies = first.enter_context(served(mortal))
        port = int(dies.url.rpartition(":")[2])
        router = Router([engine_at(each.url, concurrency=4) for each in (stays, dies)])
        opened.callback(router.close)
        router.submit([ask(f"r{n}", (n,)) for n in range(40)])
        done = router.completed(5.0)
        is_dead.set()
        threading.Thread(target=first.close).start()
        while len(done) < 40:
            done += router.completed(1.0)
        assert sorted(made.request_id for made in done) == sorted(f"r{n}" for n in range(40))
        assert all(made.token_ids[0] == int(made.request_id[1:]) + 1 for made in done)
        assert (router.restarts, router.rerouted > 0) == (1, True)
        # It comes back at the same address, and is asked again.
        back = opened.enter_context(served(slow, port))
        end = time.monotonic() + 10
        for number in itertools.count():
            router.submit([ask(f"again{number}"), ask(f"more{number}")])
            collect(router, 2)
            if any(back.bodies):
                break
            assert time.monotonic() < end


def test_threads_and_sockets_end_with_the_engine() -> None:
    before = threading.active_count()
    with served(right) as asked:
        engine = engine_at(asked.url)
        engine.submit([ask("r")])
        collect(engine, 1)
        engine.close()
        engine.close()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    yield
    assert not failed, failed
