"""An OpenAI-compatible server over any rollout engine: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``,
``/health``, ``/metrics``.

What the server answers: OpenAI's objects with vLLM's further keys (``token_ids``, ``prompt_token_ids``), whole or as a
stream of deltas.

The thread that drives a blocking engine for an event loop: requests in, events out.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import signal
import socket
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from quartet.config import UserError
from quartet.config.errors import describe_error
from quartet.extras.serve.bodies import AnyBody, ChatBody, CompletionBody, ModelLimits, requests_of
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    FinishReason,
    GenerationError,
    PartialCompletion,
    Request,
    RequestsRefused,
    RolloutEngine,
)
from quartet.text.tokenizer import TextCodec

_REASONS = {FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
_INCOMPLETE = "\ufffd"


@dataclass
class Choice:
    """One answer as it grows: what of it was said already, and tokens seen, some of which may wait for their text."""

    index: int
    request: Request
    num_tokens: int = 0
    num_seen: int = 0
    text: str = ""
    is_new: bool = True


class Answers:
    """Makes the objects of one HTTP request.

    Args:
        name: of the answer, ``cmpl-…`` or ``chatcmpl-…``.
    """

    def __init__(self, name: str, body: AnyBody, codec: TextCodec, requests: Sequence[Request]) -> None:
        self._name, self._body, self._codec = name, body, codec
        self._is_chat = isinstance(body, ChatBody)
        self._created = int(time.time())
        self.choices = {request.request_id: Choice(i, request) for i, request in enumerate(requests)}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the answer, not streamed."""
        done = sorted(completions, key=lambda c: self.choices[c.request_id].index)
        choices = [self._choice(self.choices[c.request_id], c) for c in done]
        return {**self._head(""), "choices": choices, "usage": self.usage(completions)}

    def chunk(self, request_id: str, tokens: PartialCompletion | Completion) -> dict[str, Any] | None:
        """Returns what is new of a choice, as an event of a stream; None where nothing is."""
        choice = self.choices[request_id]
        if not isinstance(tokens, Completion) and len(tokens.token_ids) == choice.num_seen:
            return None
        choice.num_seen = len(tokens.token_ids)
        return {**self._head(".chunk"), "choices": [self._choice(choice, tokens, is_delta=True)]}

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompts = {choice.request.group: len(choice.request.prompt_ids) for choice in self.choices.values()}
        num_prompt, num_new = sum(prompts.values()), sum(len(c.token_ids) for c in completions)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {"id": self._name, "object": kind, "created": self._created, "model": self._body.model}

    def _choice(
        self, choice: Choice, tokens: PartialCompletion | Completion, *, is_delta: bool = False
    ) -> dict[str, Any]:
        """Moves ``choice`` on."""
        reason, text_end = None, None
        if isinstance(tokens, Completion):
            reason, text_end = tokens.finish_reason, tokens.text_end
        text, num_tokens = self._grown(choice, tokens.token_ids, reason, text_end), len(tokens.token_ids)
        said: dict[str, Any] = {"index": choice.index, **self._said(choice, text, is_delta=is_delta), "logprobs": None}
        if self._body.wants_logprobs:
            pieces = self._codec.completion_pieces(choice.request.prompt_ids, tokens.token_ids)
            ends = list(accumulate(map(len, pieces)))
            if reason is None:  # a token comes with its text
                num_tokens = max(choice.num_tokens, bisect_right(ends, len(choice.text)))
            elif text_end is not None:
                pieces = [piece[: max(0, len(piece) - end + text_end)] for piece, end in zip(pieces, ends, strict=True)]
            said["logprobs"] = self._logprobs(tokens, pieces, slice(choice.num_tokens, num_tokens))
        new = slice(choice.num_tokens, num_tokens)
        said["finish_reason"] = None if reason is None else _REASONS.get(reason, "stop")
        if self._body.return_token_ids:
            said["token_ids"] = list(tokens.token_ids[new])
            if choice.is_new:
                said["prompt_token_ids"] = list(choice.request.prompt_ids)
        choice.num_tokens, choice.is_new = num_tokens, False
        return said

    def _grown(
        self, choice: Choice, token_ids: Sequence[int], reason: FinishReason | None, text_end: int | None
    ) -> str:
        """Returns the text behind what was said already, as far as it is settled."""
        text = self._codec.decode_completion(choice.request.prompt_ids, token_ids)
        if reason is None:
            # Half a character, or what may turn out to begin a stop string.
            held = max((len(string) - 1 for string in choice.request.sampling.stop_strings), default=0)
            text = text.rstrip(_INCOMPLETE)
            text = text[: len(text) - held] if held else text
            if not text.startswith(choice.text):
                return ""
        elif text_end is not None:
            text = text[:text_end]
        new = text[len(choice.text) :]
        choice.text += new
        return new

    def _said(self, choice: Choice, text: str, *, is_delta: bool) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        role = {"role": "assistant"} if choice.is_new else {}
        return {"delta" if is_delta else "message": {**role, "content": text}}

    def _logprobs(self, tokens: PartialCompletion | Completion, texts: Sequence[str], new: slice) -> dict[str, Any]:
        logprobs = list(tokens.logprobs[new])
        if self._is_chat:
            pairs = zip(texts[new], logprobs, strict=True)
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in pairs
            ]
            return {"content": content, "refusal": None}
        offsets = [0, *accumulate(map(len, texts))][:-1][new]
        return {"tokens": texts[new], "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


T = TypeVar("T")
Event = tuple[str, "Completion | PartialCompletion | UserError"]
"""A request's id, and its end, what it has so far, or why it has no end."""
_SLICE_S = 0.01
"""For so long the engine is waited for while requests may come."""
_IDLE_S = 0.5
"""Between two looks at an engine without work; one that died is started anew meanwhile."""


class EngineThread:
    """
    Args:
        engine: used by this thread alone from now on.

    Attributes:
        failure: why it answers nothing any more.
        held: requests without an end.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, asyncio.Queue[Event]] = {}
        self._streams: set[str] = set()
        self.failure: EngineFailed | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        return len(self._listeners)

    def ask(self, requests: Sequence[Request], *, stream: bool = False) -> asyncio.Queue[Event]:
        """Submits requests: every one has one end among the events, and with ``stream`` what it has so far now and
        then.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        ids = [request.request_id for request in requests]
        self._listeners.update(dict.fromkeys(ids, events))

        def submit() -> None:
            try:
                self._engine.submit(requests)
            except UserError as error:
                if isinstance(error, EngineFailed):
                    raise
                self._tell(ids, error)
            else:
                self._streams.update(ids if stream else ())

        self._do(submit)
        if self.failure is not None:  # maybe just now, and then nobody else tells
            self._hand_over(ids, self.failure)
        return events

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Drops requests that nobody waits for any more."""
        left = [each for each in request_ids if self._listeners.pop(each, None) is not None]
        if left:
            self._do(lambda: self._drop(left))

    def give_up(self, error: UserError) -> None:
        """Ends all that is under way with ``error``."""
        ids = [*self._listeners]
        self._hand_over(ids, error)
        self._do(lambda: self._drop(ids))

    async def call(self, function: Callable[[RolloutEngine], T]) -> T:
        """Calls ``function`` of the engine, in its thread."""
        if self.failure is not None:
            raise self.failure
        result: Future[T] = Future()
        self._do(lambda: result.set_result(function(self._engine)))
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Ends the thread; the engine stays."""
        self._commands.put(None)
        self._thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        if self.failure is None:
            self._commands.put(command)

    # In the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._collect()
        except EngineFailed as error:
            self._fail(error)
        except BaseException as error:
            remedy = "report it; the server's standard error has the traceback"
            self._fail(EngineFailed("the engine's thread broke", found=describe_error(error), remedy=remedy))
            raise

    def _fail(self, error: EngineFailed) -> None:
        """Tells all who wait that the engine failed: nobody waits for an end that does not come."""
        self.failure = error
        self._tell([*self._listeners.copy()], error)

    def _obey(self) -> bool:
        """Does what it was told to; tells whether the thread goes on."""
        is_idle = not self._listeners
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(is_idle, _IDLE_S)
                if command is None:
                    return False
                command()
                is_idle = False
        return True

    def _collect(self) -> None:
        try:
            completions = self._engine.completed(_SLICE_S if self._listeners else 0.0)
        except GenerationError as error:
            self._tell(error.request_ids, error)
            return
        for completion in completions:
            self._tell([completion.request_id], completion)
        if self._streams:
            for request_id, tokens in self._engine.generated([*self._streams]).items():
                self._tell([request_id], tokens)

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._streams.difference_update(request_ids)
        self._engine.cancel(request_ids)

    def _tell(self, request_ids: Sequence[str], event: Any) -> None:
        if not isinstance(event, PartialCompletion):
            self._streams.difference_update(request_ids)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._hand_over, request_ids, event)

    def _hand_over(self, request_ids: Sequence[str], event: Any) -> None:
        for request_id in request_ids:
            if (events := self._listeners.get(request_id)) is not None:
                events.put_nowait((request_id, event))
                if not isinstance(event, PartialCompletion):
                    del self._listeners[request_id]


_KEEP_ALIVE_S = 75
_LOOK_S = 0.1
_END_S = 5
"""For answers that say that the server ends."""
_ENDS = EngineFailed("the server ends", found="a signal", remedy="ask another one, or this one once it is back")


@dataclass(frozen=True)
class ServerSettings:
    """
    Attributes:
        name: under which the model is served.
        max_requests: answers under way and waiting, beyond which requests are turned away (HTTP 429).
        api_key: that a client must send; None: nobody is asked for one.
        grace_s: for what is under way when the server is to end.
    """

    name: str
    limits: ModelLimits
    max_requests: int = 1024
    api_key: str | None = None
    grace_s: float = 5.0


class Refused(Exception):
    """An answer in OpenAI's form that says no."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        self.status = status
        self.error = {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(error: UserError) -> Refused:
    if isinstance(error, RequestsRefused):
        error = error.error
    if isinstance(error, EngineFailed):
        return Refused(503, str(error), "service_unavailable_error", "engine_failed")
    if isinstance(error, GenerationError):
        return Refused(500, str(error), "server_error", "generation_failed")
    return Refused(400, str(error), "invalid_request_error")


class Server:
    """The application, within an event loop. ``engine`` is used by a thread of its own from now on."""

    def __init__(self, engine: RolloutEngine, codec: TextCodec, settings: ServerSettings) -> None:
        self._codec, self._settings = codec, settings
        self._created = int(time.time())
        self.engine = EngineThread(engine)
        routes = [
            Route("/v1/completions", partial(self._answered, kind=CompletionBody, prefix="cmpl"), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answered, kind=ChatBody, prefix="chatcmpl"), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: Any = {Refused: _as_response, HTTPException: _as_response}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    # What is there ----------------------------------------------------------------------------------------

    async def _models(self, http: HTTPRequest) -> Response:
        self._authorize(http)
        return JSONResponse({"object": "list", "data": [self._about_model()]})

    async def _model(self, http: HTTPRequest) -> Response:
        self._authorize(http)
        self._check_model(http.path_params["name"])
        return JSONResponse(self._about_model())

    def _about_model(self) -> dict[str, Any]:
        settings = self._settings
        model = {"id": settings.name, "object": "model", "created": self._created, "owned_by": "quartet"}
        return {**model, "max_model_len": settings.limits.context}

    def _check_model(self, name: str) -> None:
        if name != self._settings.name:
            problem = f"the model {name!r} is not served here; {self._settings.name!r} is"
            raise Refused(404, problem, "invalid_request_error", "model_not_found")

    async def _health(self, http: HTTPRequest) -> Response:
        if self.engine.failure is not None:
            raise _refusal(self.engine.failure)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, http: HTTPRequest) -> Response:
        try:
            stats = asdict(await self.engine.call(lambda engine: engine.stats()))
        except EngineFailed as error:
            raise _refusal(error) from None
        lines = [f"quartet_requests_held {self.engine.held}"]
        lines += [f"quartet_engine_{name} {value}" for name, value in stats.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # Completions ------------------------------------------------------------------------------------------

    async def _answered(self, http: HTTPRequest, kind: type[AnyBody], prefix: str) -> Response:
        try:
            return await self._answer(http, kind, f"{prefix}-{uuid.uuid4().hex}")
        except UserError as error:
            raise _refusal(error) from error
        except ClientDisconnect:
            raise _gone_away() from None

    async def _answer(self, http: HTTPRequest, kind: type[AnyBody], name: str) -> Response:
        self._authorize(http)
        kind_of_data = http.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind_of_data != "application/json":  # which pages of other sites cannot send without this server's leave
            problem = f"a request is JSON (Content-Type: application/json), not {kind_of_data!r}"
            raise Refused(415, problem, "invalid_request_error")
        data = await http.body()
        # In a thread: others are answered while a long prompt is tokenised.
        body, requests = await asyncio.to_thread(self._read, data, kind, name)
        if self.engine.failure is not None:
            raise self.engine.failure
        if self.engine.held + len(requests) > self._settings.max_requests:
            problem = f"{self.engine.held} answers are under way; at most {self._settings.max_requests} are"
            raise Refused(429, problem, "rate_limit_error", "too_many_requests")
        answers = Answers(name, body, self._codec, requests)
        if body.stream:
            return StreamingResponse(self._stream(body, answers, requests), media_type="text/event-stream")
        return JSONResponse(answers.whole(await self._all(http, requests, self.engine.ask(requests))))

    def _read(self, data: bytes, kind: type[AnyBody], name: str) -> tuple[AnyBody, list[Request]]:
        """Reads from the body what the engine is to do; errors as of ``_answer``."""
        body = kind(**_json_of(data))
        self._check_model(body.model)
        return body, requests_of(body, name, self._codec, self._settings.limits)

    async def _all(
        self, http: HTTPRequest, requests: Sequence[Request], events: asyncio.Queue[Event]
    ) -> list[Completion]:
        """Raises Refused where the client has gone; nobody reads that."""

        async def ends() -> list[Completion]:
            found = [(await events.get())[1] for _ in requests]
            for each in found:
                if isinstance(each, UserError):
                    raise each
            return [each for each in found if isinstance(each, Completion)]

        ended, gone = asyncio.create_task(ends()), asyncio.create_task(_gone(http))
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            raise _gone_away()
        finally:
            ended.cancel()
            gone.cancel()
            self.engine.cancel([request.request_id for request in requests])

    async def _stream(self, body: AnyBody, answers: Answers, requests: Sequence[Request]) -> AsyncIterator[str]:
        completions: list[Completion] = []
        events = self.engine.ask(requests, stream=True)
        try:
            while len(completions) < len(requests):
                request_id, event = await events.get()
                if isinstance(event, UserError):
                    yield _event(_refusal(event).error)
                    return
                if isinstance(event, Completion):
                    completions.append(event)
                if (chunk := answers.chunk(request_id, event)) is not None:
                    yield _event(chunk)
            if body.stream_options.include_usage:
                yield _event(answers.usage_chunk(completions))
            yield "data: [DONE]\n\n"
        finally:
            # Also when the client has gone.
            self.engine.cancel([request.request_id for request in requests])

    def _authorize(self, http: HTTPRequest) -> None:
        key, sent = self._settings.api_key, http.headers.get("Authorization", "").encode("latin-1")
        if key is not None and not hmac.compare_digest(sent, f"Bearer {key}".encode()):
            raise Refused(
                401, "the key in Authorization is missing, or wrong", "authentication_error", "invalid_api_key"
            )


def _gone_away() -> Refused:
    return Refused(499, "the client has gone", "client_closed_request")


def _json_of(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {error}", "invalid_request_error") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is not a JSON object", "invalid_request_error")
    return {name: value for name, value in body.items() if value is not None}


async def _gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n"


async def _as_response(http: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, str(error.detail), "invalid_request_error")
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.error, error.status, headers)


# The process -------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that is bound; port 0 takes any that is free.

    Raises:
        UserError: it is in use, or not this machine's.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            "the server cannot listen there",
            found=f"{host}:{port}: {error}",
            remedy="name another --port (0 takes any that is free) or --host, or end what listens there",
        ) from None


def run(engine: RolloutEngine, codec: TextCodec, settings: ServerSettings, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; what is under way then has ``grace_s``. In the main thread.

    Raises:
        EngineFailed: the engine cannot go on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # which uvicorn raises once more when it has ended by them
        signal.signal(number, lambda *_: None)
    asyncio.run(_serve(engine, codec, settings, bound))


async def _serve(engine: RolloutEngine, codec: TextCodec, settings: ServerSettings, bound: socket.socket) -> None:
    server = Server(engine, codec, settings)
    config = uvicorn.Config(
        server.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(settings.grace_s) + _END_S,
    )
    uvicorns = uvicorn.Server(config)

    async def end_in_time() -> None:
        while not uvicorns.should_exit:
            uvicorns.should_exit = server.engine.failure is not None
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(settings.grace_s)
        server.engine.give_up(_ENDS)

    watch = asyncio.create_task(end_in_time())
    try:
        await uvicorns.serve(sockets=[bound])
    finally:
        watch.cancel()
        server.engine.close()
    if server.engine.failure is not None:
        raise server.engine.failure
