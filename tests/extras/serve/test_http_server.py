"""The OpenAI-compatible server: what it answers, streams, refuses and cancels. Answers come from the native engine."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest

from quartet.data.formats import prompts as prompts_of
from quartet.data.readers import DataRow
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    FinishReason,
    GenerationError,
    Request,
    SamplingParams,
    SteppedEngine,
)
from quartet.text.templates import with_template
from quartet.text.tokenizer import TextCodec

targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")

CODEC = servers.letter_codec(targets.VOCAB)
EOS = targets.VOCAB - 1
MESSAGES = [{"role": "user", "content": "HI"}]
JSON = {"Content-Type": "application/json"}


class Slow(SteppedEngine):
    """Takes a moment for every step, so that there is time to go away."""

    step_s = 0.0

    def completed(self, timeout_s: float) -> list[Completion]:
        time.sleep(self.step_s)
        return super().completed(0.0)


class Client:
    def __init__(self, url: str, engine: Slow) -> None:
        self.url, self.engine = url, engine
        self.http = httpx2.Client(base_url=url, timeout=20.0, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json={"model": "policy", **body})

    def complete(self, prompt: Any = "HELLO", **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **{"prompt": prompt, "max_tokens": 12, "seed": 1, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, **body: Any) -> list[Any]:
        """What a stream says; ``None`` for its end."""
        with self.http.stream("POST", path, json={"model": "policy", "stream": True, **body}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return [None if line == "[DONE]" else json.loads(line) for line in lines]

    def metric(self, name: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in self.http.get("/metrics").text.splitlines())
        return float(lines[name])

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)


@contextmanager
def served(
    engine: Any = None, *, context: int = targets.CONTEXT, codec: TextCodec = CODEC, **settings: Any
) -> Iterator[Client]:
    inside = (
        Slow(NativeEngine(targets.native().packed, max_running=8, decode=CODEC.decode_completion))
        if engine is None
        else engine
    )
    with ExitStack() as opened:
        sizes = {"context": context, "vocab_size": targets.VOCAB}
        url = opened.enter_context(servers.openai_server(inside, codec, **sizes, **settings))
        client = Client(url, inside)
        opened.callback(client.http.close)
        yield client


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    with served() as made:
        yield made


@pytest.fixture
def client(shared: Client) -> Client:
    shared.engine.step_s = 0.0
    return shared


def alone(prompt: tuple[int, ...], **sampling: Any) -> Completion:
    """What the native engine makes of it."""
    engine = NativeEngine(targets.native().packed, decode=CODEC.decode_completion)
    params = SamplingParams(**{"max_new_tokens": 12, "seed": 1, "stop_token_ids": (EOS,), **sampling})
    engine.submit([Request("r", "r", prompt, params)])
    while True:
        if done := engine.step():
            return done[0]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(CODEC.encode_prompt(text))


# What it answers -------------------------------------------------------------------------------------------


def test_token_ids_logprobs_and_versions_are_the_engines(client: Client) -> None:
    answer = client.complete(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, logprobs=0, return_token_ids=True)
    made = alone(ids_of("HELLO"), temperature=0.7, top_p=0.9, top_k=20, min_p=0.01)
    (choice,) = answer["choices"]
    assert tuple(choice["token_ids"]) == made.token_ids
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(made.logprobs, abs=1e-5)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == list(range(12))
    assert choice["prompt_token_ids"] == list(ids_of("HELLO"))
    assert choice["text"] == CODEC.decode_completion((), made.token_ids)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert (answer["object"], answer["model"]) == ("text_completion", "policy")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("AB", ["AB"]),
        (["AB", "CDE"], ["AB", "CDE"]),
        ([0, 1], ["AB"]),
        ([[0, 1], [2, 3, 4]], ["AB", "CDE"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompts_of_every_form(client: Client, prompt: Any, prompts: list[str]) -> None:
    answer = client.complete(prompt, n=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    for index, choice in enumerate(answer["choices"]):
        # Choice k of a prompt has seed + k.
        assert tuple(choice["token_ids"]) == alone(ids_of(prompts[index // 2]), seed=1 + index % 2).token_ids
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == sum(lengths)


def test_what_ends_an_answer(client: Client) -> None:
    free = alone(ids_of("HELLO"), max_new_tokens=30)
    text = CODEC.decode_completion((), free.token_ids)
    wanted = text[6:9]
    (choice,) = client.complete(max_tokens=30, stop=[wanted, "!!"], return_token_ids=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(wanted)], "stop")
    assert tuple(choice["token_ids"]) == free.token_ids[: text.index(wanted) + 3]
    assert client.complete(max_tokens=30, stop=wanted)["choices"][0]["text"] == choice["text"]
    token = free.token_ids[5]
    (choice,) = client.complete(max_tokens=30, stop_token_ids=[token], return_token_ids=True)["choices"]
    assert tuple(choice["token_ids"]) == free.token_ids[: free.token_ids.index(token) + 1]
    assert choice["finish_reason"] == "stop"


def test_end_of_text_ends_an_answer_unless_it_is_ignored(client: Client) -> None:
    for seed in range(60):
        free = alone(ids_of("HELLO"), max_new_tokens=60, seed=seed, stop_token_ids=())
        if EOS in free.token_ids:
            break
    place = free.token_ids.index(EOS)
    ask = {"max_tokens": 60, "seed": seed, "return_token_ids": True}
    (choice,) = client.complete(**ask)["choices"]
    assert tuple(choice["token_ids"]) == free.token_ids[: place + 1]
    assert choice["finish_reason"] == "stop"
    assert chr(ord("A") + EOS) not in choice["text"]
    assert tuple(client.complete(ignore_eos=True, **ask)["choices"][0]["token_ids"]) == free.token_ids


def test_chat_goes_through_the_models_template(client: Client) -> None:
    messages = [{"role": "system", "content": "BE"}, {"role": "user", "content": [{"type": "text", "text": "HI"}]}]
    ask = {"messages": messages, "seed": 3, "max_completion_tokens": 9, "logprobs": True, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", **ask).json()
    prompt = ids_of("<s>BE<u>HI<a>")
    made = alone(prompt, seed=3, max_new_tokens=9)
    (choice,) = answer["choices"]
    assert tuple(choice["prompt_token_ids"]) == prompt
    assert tuple(choice["token_ids"]) == made.token_ids
    assert choice["message"] == {"role": "assistant", "content": CODEC.decode_completion((), made.token_ids)}
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert found == pytest.approx(made.logprobs, abs=1e-5)
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    # Without a length, up to the end of the context.
    whole = client.post("/v1/chat/completions", messages=messages, ignore_eos=True).json()
    assert whole["usage"]["total_tokens"] == targets.CONTEXT


TOOL = {"type": "function", "function": {"name": "LOOK"}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if thinking is defined and not thinking %}QUIET{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Any]]:
    """A server whose template reads tools and ``thinking``, and what ``quartet rl`` makes of a row for the model."""
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(TOOL_TEMPLATE)

    def trained_on(row: dict[str, Any], variables: dict[str, Any]) -> list[int]:
        codec = TextCodec(with_template(CODEC.tokenizer, str(file), variables))
        (item,) = prompts_of([DataRow(row, "rows.jsonl", 1)]).items
        return codec.encode_prompt(item.prompt)

    with served(codec=TextCodec(with_template(CODEC.tokenizer, str(file), {}))) as client:
        yield client, trained_on


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "LOOK", "arguments": {"A": 1}}}]}


@pytest.mark.parametrize(
    ("row", "variables", "shown"),
    [
        ({"messages": MESSAGES}, {}, "[u]HI[a]"),
        ({"messages": MESSAGES}, {"thinking": False}, "[u]HI[a]QUIET"),
        ({"messages": MESSAGES, "tools": [TOOL]}, {"thinking": True}, "LOOK"),
        ({"messages": MESSAGES, "tools": [{**TOOL, "function": {"name": "LOOK", "parameters": None}}]}, {}, "LOOK"),
        ({"messages": [*MESSAGES, CALL, {"role": "tool", "tool_call_id": "c1", "content": "SEEN"}]}, {}, "[t]SEEN"),
    ],
    ids=["plain", "variable", "both", "null key", "call and result"],
)
def test_tools_and_variables_are_rendered_as_in_training(
    with_tools: Any, row: dict[str, Any], variables: dict[str, Any], shown: str
) -> None:
    client, trained_on = with_tools
    ask = {**row, "chat_template_kwargs": variables} if variables else row
    (choice,) = client.post("/v1/chat/completions", max_tokens=3, return_token_ids=True, **ask).json()["choices"]
    assert choice["prompt_token_ids"] == trained_on(row, variables)
    assert shown in CODEC.decode(choice["prompt_token_ids"], skip_special=False)
    assert set(choice["message"]) == {"role", "content"}, "the text as it is: no calls are looked for in it"


# Streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(client: Client, n: int) -> None:
    ask = {"prompt": "HELLO", "max_tokens": 40, "seed": 1, "n": n, "logprobs": 0, "return_token_ids": True}
    whole = client.post("/v1/completions", **ask).json()
    client.engine.step_s = 0.01
    *events, last, end = client.events("/v1/completions", stream_options={"include_usage": True}, **ask)
    assert end is None
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert len(parts) > 3, "it came at once"
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        logprobs = [p for part in parts for p in part["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert ["prompt_token_ids" in part for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]


def test_no_part_of_a_stop_string_is_streamed(client: Client) -> None:
    client.engine.step_s = 0.005
    text = CODEC.decode_completion((), alone(ids_of("HELLO"), max_new_tokens=30).token_ids)
    wanted = text[16:22]
    ask = {"prompt": "HELLO", "max_tokens": 30, "seed": 1, "stop": [wanted], "logprobs": 0}
    events = client.events("/v1/completions", **ask)[:-1]
    assert len(events) > 3
    said = [event["choices"][0]["logprobs"] for event in events]
    whole = client.post("/v1/completions", **ask).json()["choices"][0]["logprobs"]
    assert [offset for part in said for offset in part["text_offset"]] == whole["text_offset"]
    assert [token for part in said for token in part["tokens"]] == whole["tokens"]
    assert "".join(whole["tokens"]) == text[: text.index(wanted)]
    assert "".join(event["choices"][0]["text"] for event in events) == text[: text.index(wanted)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_chat_is_streamed_as_deltas(client: Client) -> None:
    client.engine.step_s = 0.005
    ask = {"messages": [{"role": "user", "content": "HI"}], "seed": 3, "max_tokens": 30}
    *events, end = client.events("/v1/chat/completions", **ask)
    assert end is None and {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    whole = client.post("/v1/chat/completions", **ask).json()["choices"][0]["message"]["content"]
    assert "".join(delta["content"] for delta in deltas) == whole


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"prompt": "A", "tempreature": 1}, 400, "did you mean 'temperature'"),
        ("completions", {"prompt": "A", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "A" * (targets.CONTEXT + 1)}, 400, "no room"),
        ("completions", {"prompt": "A", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": ["A"] * 200, "n": 2}, 400, "too much"),
        ("completions", {"prompt": ""}, 400, "no tokens"),
        ("completions", {"prompt": [1, targets.VOCAB]}, 400, "tokens the model does not have"),
        ("completions", {"prompt": [5] * targets.CONTEXT}, 400, "no room"),
        ("completions", {"prompt": "A", "logit_bias": {"1": 5}}, 400, "logit_bias"),
        ("completions", {"prompt": "A", "model": "gpt-4"}, 404, "'policy' is"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 5}, 400, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "A" * 200}]}, 400, "no room"),
        ("embeddings", {"input": "A"}, 404, "Not Found"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict | str) else None,
)
def test_refusals_have_openais_form(client: Client, path: str, body: dict[str, Any], status: int, said: str) -> None:
    for stream in (False, True):
        response = client.post(f"/v1/{path}", **({"stream": True} if stream else {}), **body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and said in error["message"]
        assert error["type"] == "invalid_request_error"
    assert client.metric("quartet_requests_held") == 0


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(client: Client, data: bytes) -> None:
    response = client.http.post("/v1/completions", content=data, headers=JSON)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


def test_only_json_is_answered(client: Client) -> None:
    """Which a form on a page of another site cannot send."""
    body = json.dumps({"model": "policy", "prompt": "A"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "text/plain; a=application/json", ""):
        response = client.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.http.post("/v1/completions", content=body, headers=kind).status_code == 200


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with served(api_key="s3cret") as client:
        odd = {b"Authorization": "Bearer s3crét".encode()}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, odd):
            response = client.http.post("/v1/completions", json={"model": "policy", "prompt": "A"}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert client.http.get("/v1/models", headers=headers).status_code == 401
        assert client.http.get("/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert client.http.get("/health").status_code == 200


def test_more_requests_than_may_wait_are_turned_away() -> None:
    with served(max_requests=4) as client:
        client.engine.step_s = 0.02
        with httpx2.Client(base_url=client.url, timeout=20.0) as other:
            ask = {"model": "policy", "prompt": "HELLO", "max_tokens": 60, "ignore_eos": True, "n": 4}
            first = threading.Thread(target=lambda: other.post("/v1/completions", json=ask))
            first.start()
            client.until(lambda: client.metric("quartet_requests_held") == 4)
            response = client.post("/v1/completions", prompt="A")
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert response.json()["error"]["type"] == "rate_limit_error"
            client.engine.step_s = 0.0
            first.join()
        assert client.post("/v1/completions", prompt="A").status_code == 200


# Clients that go, engines that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_client_that_has_gone_are_cancelled(client: Client, stream: bool) -> None:
    client.engine.step_s = 0.05
    ask = {"prompt": "HELLO", "max_tokens": 80, "ignore_eos": True, "n": 3, "stream": stream}
    body = {"model": "policy", **ask}
    with ExitStack() as opened:
        gone = opened.enter_context(httpx2.Client(base_url=client.url, timeout=0.4))
        if stream:
            next(opened.enter_context(gone.stream("POST", "/v1/completions", json=body)).iter_lines())
        else:
            with pytest.raises(httpx2.TimeoutException):
                gone.post("/v1/completions", json=body)
    client.until(lambda: client.metric("quartet_requests_held") == 0)
    client.until(lambda: client.metric("quartet_engine_num_running") == 0)
    assert client.engine.engine.stats().generated_tokens > 0
    client.engine.step_s = 0.0
    assert client.complete()["choices"][0]["finish_reason"] == "length"


def test_a_failure_of_one_request_is_its_own() -> None:
    class Failing(Slow):
        def completed(self, timeout_s: float) -> list[Completion]:
            done = super().completed(timeout_s)
            bad = [made for made in done if len(made.token_ids) == 7]
            if bad:
                raise GenerationError("planted", [made.request_id for made in bad])
            return done

    with served(Failing(NativeEngine(targets.native().packed, decode=CODEC.decode_completion))) as client:
        response = client.post("/v1/completions", prompt="A", max_tokens=7, ignore_eos=True)
        assert response.status_code == 500 and "planted" in response.json()["error"]["message"]
        events = client.events("/v1/completions", prompt="A", max_tokens=7, ignore_eos=True)
        assert events[-1]["error"]["code"] == "generation_failed"
        assert client.post("/v1/completions", prompt="A", max_tokens=8, ignore_eos=True).status_code == 200
        assert client.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "fault",
    [EngineFailed("no engine is left", found="planted", remedy="none"), RuntimeError("planted")],
    ids=["failed", "bug"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_for_good_answers_everybody(fault: Exception) -> None:
    class Failing(Slow):
        def completed(self, timeout_s: float) -> list[Completion]:
            if self.engine.has_work:
                time.sleep(0.1)
                raise fault
            return []

    with served(Failing(NativeEngine(targets.native().packed, decode=CODEC.decode_completion))) as client:
        for _ in range(2):
            response = client.post("/v1/completions", prompt="A", n=2)
            assert response.status_code == 503 and "planted" in response.json()["error"]["message"]
        assert client.http.get("/health").status_code == 503
        assert client.http.get("/metrics").status_code == 503
        assert client.http.get("/v1/models").status_code == 200


def test_many_clients_at_once_get_their_own_answers(client: Client) -> None:
    import concurrent.futures

    def work(number: int) -> bool:
        with httpx2.Client(base_url=client.url, timeout=30.0) as http:
            body = {"model": "policy", "prompt": [number], "max_tokens": 10, "seed": number, "return_token_ids": True}
            (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        return choice["prompt_token_ids"] == [number] and choice["token_ids"] == list(expected[number].token_ids)

    expected = {n: alone((n,), seed=n, max_new_tokens=10) for n in range(24)}
    assert {made.finish_reason for made in expected.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert all(pool.map(work, range(24)))
