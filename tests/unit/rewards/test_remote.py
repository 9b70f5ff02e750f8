"""JSON over HTTP: what is tried again, when it is given up, and what never happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.rewards import HTTPReward, RetryConfig
from quartet.remote.json_client import JSONClient, RemoteError
from quartet.rewards.build import build_reward
from quartet.rewards.judge import reward_client
from quartet.text.pictures import Picture, to_picture

FAST = RetryConfig(attempts=3, first_wait_s=0.01, longest_wait_s=0.05)


def config(url: str, **changes: Any) -> HTTPReward:
    return HTTPReward(**{"url": url, "retry": FAST, "timeout_s": 2.0, **changes})


def post(client: JSONClient, body: Any = None) -> Any:
    return asyncio.run(client.post(body, lambda answer: answer))


def lengths(body: Any) -> tuple[int, Any]:
    return 200, {"scores": [len(text) for text in body["completions"]]}


def score(settings: HTTPReward, completions: list[str], **columns: list[Any]) -> Any:
    reward = build_reward(settings)
    try:
        prompts: list[Any] = ["?"] * len(completions)
        return asyncio.run(reward.score(prompts, completions, columns))
    finally:
        reward.close()


# Retries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_what_may_pass_is_tried_again(serve: Any, status: int) -> None:
    asked = serve(lambda body: (status, {}) if len(asked.bodies) < 3 else (200, "at last"))
    assert post(reward_client(config(asked.url))) == "at last"
    assert len(asked.bodies) == 3


def test_after_all_attempts_it_is_an_error(serve: Any) -> None:
    asked = serve(lambda body: (500, b"oh no"))
    with pytest.raises(RemoteError, match=r"HTTP 500: 'oh no'") as caught:
        post(reward_client(config(asked.url)))
    assert caught.value.kind == "refused" and len(asked.bodies) == 3


@pytest.mark.parametrize("status", [301, 401])
def test_what_will_not_pass_is_not_tried_again(serve: Any, status: int) -> None:
    asked = serve(lambda body: (status, {}, {"Location": "http://elsewhere/"}))
    with pytest.raises(RemoteError, match=f"HTTP {status} to http://elsewhere/"):
        post(reward_client(config(asked.url)))
    assert len(asked.bodies) == 1


def test_silence_ends_at_the_timeout(serve: Any) -> None:
    release = threading.Event()
    asked = serve(lambda body: (release.wait(20), (200, {}))[1])
    start = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer within 0\.2 s") as caught:
        post(reward_client(config(asked.url, timeout_s=0.2)))
    release.set()
    assert caught.value.kind == "silent" and time.monotonic() - start < 5


def test_a_redirect_leads_nowhere(serve: Any) -> None:
    """Least of all to a file of this machine; and what a server writes there is not taken whole."""
    asked = serve(lambda body: (302, {}, {"Location": "file:///etc/passwd" + "x" * 10_000}))
    with pytest.raises(RemoteError, match="HTTP 302 to file:///etc/passwd") as caught:
        post(reward_client(config(asked.url)))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("body", [{("a", "b"): 1}, [{"x": type("Bad", (), {"__str__": lambda self: 1 / 0})()}]])
def test_what_cannot_be_written_is_named(body: Any) -> None:
    with pytest.raises(UserError, match="cannot be sent to a server as JSON"):
        post(reward_client(config("http://localhost")), body)


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RemoteError) as caught:
        post(reward_client(config(f"http://127.0.0.1:{port}")))
    assert caught.value.kind == "unreachable"


def test_the_server_may_say_how_long_to_wait(serve: Any) -> None:
    asked = serve(lambda body: (429, {}, {"Retry-After": "60"}) if len(asked.bodies) == 1 else (200, 1))
    patient = RetryConfig(attempts=2, first_wait_s=0.0, longest_wait_s=0.3)
    start = time.monotonic()
    assert post(reward_client(config(asked.url, retry=patient))) == 1
    assert 0.3 <= time.monotonic() - start < 30, "up to the longest wait of the recipe"


def test_close_ends_a_wait(serve: Any) -> None:
    asked = serve(lambda body: (500, {}))
    client = reward_client(config(asked.url, retry=RetryConfig(attempts=2, first_wait_s=60.0, longest_wait_s=60.0)))
    threading.Timer(0.2, client.close).start()
    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        post(client)
    assert caught.value.kind == "stopped" and time.monotonic() - start < 10


@pytest.mark.parametrize("said", ["9" * 400, "tomorrow"])
def test_a_wait_that_is_no_number_of_seconds_is_not_taken(serve: Any, said: str) -> None:
    asked = serve(lambda body: (503, {}, {"Retry-After": said}) if len(asked.bodies) == 1 else (200, 1))
    assert post(reward_client(config(asked.url))) == 1


# Servers that do not end what they began -------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def read_request(connection: socket.socket) -> None:
    """All of it: what is left unread when a connection closes resets it, and the answer is lost."""
    with connection.makefile("rb") as lines:
        length = 0
        while (line := lines.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        lines.read(length)


@pytest.fixture
def raw() -> Iterator[Callable[..., str]]:
    """``raw(talk)``: the URL of a server that does with each connection what ``talk`` does, once it has a request."""
    servers: list[socket.socket] = []

    def start(talk: Callable[[socket.socket], None]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve_one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                read_request(connection)
                talk(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve_one, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def trickle(first: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.sendall(first)
        for _ in range(400):
            time.sleep(0.05)
            connection.sendall(drop)

    return talk


@pytest.mark.parametrize(
    "talk",
    [
        trickle(HEAD + b"Content-Length: 1000\r\n\r\n", b" "),
        trickle(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        trickle(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "headers", "promises"],
)
def test_a_server_that_trickles_is_as_good_as_silent(raw: Any, talk: Any) -> None:
    once = RetryConfig(attempts=1)
    start = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer within 0\.3 s") as caught:
        post(reward_client(config(raw(talk), timeout_s=0.3, retry=once)))
    assert caught.value.kind == "silent" and time.monotonic() - start < 3


def test_half_an_answer_is_a_broken_connection_and_says_nothing_about_the_samples(raw: Any) -> None:
    url = raw(lambda connection: connection.sendall(HEAD + b'Content-Length: 99\r\n\r\n{"scores": [1'))
    with pytest.raises(RemoteError, match="without sending complete message body") as caught:
        post(reward_client(config(url)))
    assert caught.value.kind == "unreachable"


def test_close_ends_an_attempt_under_way(raw: Any) -> None:
    client = reward_client(config(raw(lambda connection: time.sleep(20)), timeout_s=20.0))
    threading.Timer(0.2, client.close).start()
    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        post(client)
    assert caught.value.kind == "stopped" and time.monotonic() - start < 5


# Connections -----------------------------------------------------------------------------------------------


def test_a_connection_that_the_server_closed_is_no_failure(raw: Any) -> None:
    answered = []

    def once(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: 1\r\n\r\n1")
        answered.append(connection.getpeername())

    client = reward_client(config(raw(once), retry=RetryConfig(attempts=1)))
    for _ in range(3):
        assert post(client) == 1
        time.sleep(0.1)  # The server has closed it, and has not said so before.
    assert len(set(answered)) == 3


def test_nothing_of_the_surroundings_is_taken(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the shell would get the data, and cookies would tell requests of one run from those of another."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    asked = serve(lambda body: (200, body, {"Set-Cookie": "who=you"}))
    client = reward_client(config(asked.url))
    assert [post(client, n) for n in range(2)] == [0, 1]
    assert not any("cookie" in map(str.lower, headers) for headers in asked.headers)


def test_path_and_key(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(lambda body: (200, 1))
    monkeypatch.setenv("REWARD_KEY", "s3cret\n")
    settings = config(asked.url + "/v1/", api_key_env="REWARD_KEY")
    post(reward_client(settings))
    asyncio.run(reward_client(settings).post(None, lambda answer: answer, "/chat/completions"))
    assert asked.paths == ["/v1/", "/v1/chat/completions"]
    assert asked.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(settings) + settings.model_dump_json()


def test_a_key_that_is_not_there_is_named_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_KEY", raising=False)
    settings = config("http://localhost", api_key_env="REWARD_KEY")
    with pytest.raises(UserError, match="REWARD_KEY is not set"):
        reward_client(settings)
    monkeypatch.setenv("REWARD_KEY", "s3cret\nInjected: yes")
    with pytest.raises(UserError, match="not one line") as caught:
        reward_client(settings)
    assert "s3cret" not in str(caught.value)


# Scores ----------------------------------------------------------------------------------------------------


def test_batches_go_out_and_come_back_in_order(serve: Any) -> None:
    def slow_at_first(body: Any) -> tuple[int, Any]:
        time.sleep(0.1 if "x" in body["completions"] else 0.0)
        return lengths(body)

    asked = serve(slow_at_first)
    completions = ["x" * n for n in (1, 2, 3, 4, 5, 6, 7)]
    outcome = score(config(asked.url, batch_size=3), completions, answer=list(range(7)))
    assert outcome.scores == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and not any(outcome.failed)
    batches = sorted(asked.bodies, key=lambda body: body["columns"]["answer"][0])
    assert [body["columns"]["answer"] for body in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert set(batches[0]) == {"prompts", "completions", "columns"}


def test_the_batch_that_the_server_stumbles_over_is_left_out(serve: Any) -> None:
    asked = serve(lambda body: (500, b"crash") if "bad" in body["completions"] else lengths(body))
    outcome = score(config(asked.url, batch_size=2), ["a", "bb", "bad", "dddd"])
    assert outcome.scores == [1.0, 2.0, None, None] and outcome.failed == [False, False, True, True]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"<html>busy</html>", "Expecting value"),
        ({"scores": 1.0}, 'not {"scores"'),
        ({"scores": [1.0, 2.0]}, "2 scores for 1 completions"),
        ({"scores": ["1.0"]}, "'1.0' (str) among the scores"),
        (b'{"scores": [1e39]}', "beyond what float32 holds"),
        ({"scores": [True]}, "True among the scores"),
        (b'{"scores": [NaN]}', "nan among the scores"),
        (b"[" * 100_000, "the answer is"),
    ],
)
def test_malformed_answers_are_named(serve: Any, body: Any, part: str) -> None:
    asked = serve(lambda _: (200, body))
    outcome = score(config(asked.url), ["a"])
    assert outcome.failed == [True]
    (reason,) = outcome.reasons
    assert "malformed" in reason.problem and part in reason.found


def test_stop_makes_a_failure_an_error(serve: Any) -> None:
    asked = serve(lambda body: (404, {}))
    with pytest.raises(UserError, match="'http' gave no score"):
        score(config(asked.url, on_error="stop"), ["a", "b"])


def test_scores_do_not_depend_on_what_failed_on_the_way(serve: Any) -> None:
    seen: Counter[str] = Counter()

    def moody(body: Any) -> Any:
        key = json.dumps(body["completions"])
        seen[key] += 1
        return (503, {}) if seen[key] % 2 else lengths(body)

    completions = [f"{n:0{n}}" for n in range(1, 9)]
    asked = serve(moody)
    outcomes = [score(config(asked.url, batch_size=2), completions) for _ in range(2)]
    assert outcomes[0] == outcomes[1] and not any(outcomes[0].failed)


def test_columns_that_json_does_not_know_go_as_text(serve: Any) -> None:
    import datetime

    asked = serve(lengths)
    score(config(asked.url), ["a\ud800"], day=[datetime.date(2024, 1, 2)])
    assert asked.bodies[0]["columns"] == {"day": ["2024-01-02"]}


def test_servers_get_pictures_as_data_urls(serve: Any) -> None:
    asked = serve(lengths)
    reward = build_reward(config(asked.url))
    content = [{"type": "image", "image": Picture(b"any bytes")}, {"type": "text", "text": "what?"}]
    prompts: list[Any] = [[{"role": "system", "content": "look"}, {"role": "user", "content": content}], "text"]
    asyncio.run(reward.score(prompts, ["a", "b"], {}))
    reward.close()
    system, user = asked.bodies[0]["prompts"][0]
    assert system["content"] == "look" and asked.bodies[0]["prompts"][1] == "text"
    url = {"url": "data:image;base64,YW55IGJ5dGVz"}
    assert user["content"] == [{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]
    assert to_picture(user["content"][0]["image_url"]["url"]).read() == b"any bytes"
