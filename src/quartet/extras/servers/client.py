"""A rollout engine that is a server: requests go out over HTTP, each is answered once, wrong answers are found.

::

    submit ──► waiting ──► flying (at most ``concurrency``) ──► ended ──► completed
                  ▲            │
                  └── broken off in a pause, with the tokens it has

Connections, retries and time limits are ``JSONClient``'s, whose thread puts finished answers into a queue. Everything
else happens in the caller's thread. What a server's requests and answers look like is a subclass's.

What the answer of a server must be. Every fault is a ValueError, after which the server is asked again.

Engine ``server``: OpenAI's completions, as vLLM and ``quartet serve`` extend them by token ids.
"""

from __future__ import annotations

import abc
import math
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait as wait_readable
from typing import Any, Literal, TypeVar

from quartet.config import UserError
from quartet.config.rewards import RemoteServer
from quartet.extras.servers.config import ServerEngineConfig
from quartet.remote.json_client import JSONClient, RemoteError
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    EngineStats,
    FinishReason,
    PartialCompletion,
    Request,
    RequestsRefused,
    UnfinishedRequest,
    check_request_ids,
)
from quartet.rollout.scheduler import Decode, check_request
from quartet.trainers.engines import EnginePolicy
from quartet.weights.sink import TensorSink

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What a server generated for a request. ``ended``: why; None where it broke off and can go on from here."""

    token_ids: list[int]
    logprobs: list[float]
    ended: Literal["stop", "length"] | None


Ended = tuple[Part, FinishReason | None, int | None]
"""What was generated, why it ended (None: it goes on), and where in the text a stop string stands."""


def ending(
    said: Literal["stop", "length"] | None, token_ids: Sequence[int], request: Request, decode: Decode | None
) -> tuple[FinishReason | None, int | None]:
    """Tells why all of a request's tokens end where they do, and the ``text_end`` of a stop string.

    Args:
        said: by the server; None: they do not.

    Raises:
        ValueError: they cannot end there.
    """
    if said is None:
        return None, None
    sampling = request.sampling
    if any(token in sampling.stop_token_ids for token in token_ids[:-1]):
        raise ValueError(f"it goes on after a stop token, to {len(token_ids)} tokens")
    if token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP, None
    if sampling.stop_strings and decode is not None:
        text = decode(request.prompt_ids, token_ids)
        places = [place for string in sampling.stop_strings if (place := text.find(string)) >= 0]
        if places:
            return FinishReason.STOP_STRING, min(places)
    if said == "stop":
        raise ValueError(f"it stopped after {len(token_ids)} tokens, where nothing stops it")
    return FinishReason.LENGTH, None


def agreed(read: Callable[[Any], T], answer: Any) -> T:
    """Returns ``read`` of what a server said; raises ValueError where that has not the agreed form."""
    try:
        return read(answer)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks what was asked for ({type(error).__name__}: {error})") from None


def check_columns(part: Part, vocab_size: int) -> None:
    """Raises ValueError where these are no tokens of the model with their log-probabilities."""
    if len(part.token_ids) != len(part.logprobs):
        raise ValueError(f"{len(part.logprobs)} log-probabilities of {len(part.token_ids)} tokens")
    if part.ended is not None and not part.token_ids:
        raise ValueError("no tokens")
    wrong = [token for token in part.token_ids if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{wrong[0]!r} among the token ids of a model of {vocab_size}")
    # Rounding may leave a little above 0 of a certain token.
    odd = [p for p in part.logprobs if not (isinstance(p, float | int) and -math.inf < p <= 1e-3)]
    if odd:
        raise ValueError(f"{odd[0]!r} among the log-probabilities")


_REFUSED = (400, 413, 422)
"""Of HTTP: what was asked is at fault."""
LARGEST_SEED = (1 << 63) - 1
"""Servers keep seeds in signed 64 bits."""


@dataclass(eq=False)
class _Held(UnfinishedRequest):
    answer: Future[Ended] = field(default_factory=Future)

    def take(self, part: Part, version: int) -> None:
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += [version] * len(part.token_ids)


class HTTPEngine(abc.ABC):
    """A ``RolloutEngine``.

    Args:
        server: where it is, how patiently and how often it is asked, how many requests are under way at a time.
        vocab_size: of the model that is served.
        decode: a codec's ``decode_completion``, needed for stop strings.
        version: policy version of the weights that it has.
        restart_timeout_s: most seconds that a server which went away may take to come back.
    """

    path: str
    models_path: str
    break_off_s: float | None = None
    """Most seconds that a pause waits for the next answer; later ones are not taken. None: as long as it takes."""

    def __init__(
        self,
        server: RemoteServer,
        *,
        vocab_size: int,
        decode: Decode | None = None,
        version: int | None = 0,
        restart_timeout_s: float = 300.0,
    ) -> None:
        self.server, self.version = server, version
        self._vocab_size, self._decode, self._restart_timeout_s = vocab_size, decode, restart_timeout_s
        self._client = JSONClient(server)
        self._context: int | None = None
        self._is_paused = False
        self._patient_until_s = -math.inf
        self._answers: queue.SimpleQueue[_Held] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._forget()
        self._probe: Future[int | None] | None = self._ask_models()

    def _forget(self) -> None:
        self._stats, self._client.num_retries = EngineStats(), 0
        self._held: dict[str, _Held] = {}  # what flies, waits, or has come and was not looked at
        self._waiting: deque[_Held] = deque()
        self._flying: dict[str, _Held] = {}
        self._ended: list[Completion] = []
        self._refused: list[RequestsRefused] = []
        self._failure: EngineFailed | None = None

    # The dialect ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def body(self, request: Request, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Makes what is asked for the next ``max_tokens`` of a request that has ``token_ids``."""

    @abc.abstractmethod
    def part(self, answer: Any, request: Request) -> Part:
        """Reads what the answer says; raises ValueError, KeyError, IndexError or TypeError where it is none."""

    def check_models(self, models: dict[str, int | None]) -> int | None:
        """Returns the context's length, of the served models' by name. Raises ValueError where it is not among them."""
        return next(iter(models.values()), None)

    def break_off(self) -> None:  # noqa: B027 - there is nothing to tell the server
        """Has what is flying end soon, in a pause. By default it ends when it is complete."""

    # Whether it is there ----------------------------------------------------------------------------------

    def _ask_models(self) -> Future[int | None]:
        def read(answer: Any) -> int | None:
            return self.check_models({model["id"]: model.get("max_model_len") for model in answer["data"]})

        probe: Future[int | None] = self.control(self.models_path, None, read, method="GET")
        probe.add_done_callback(self._rings)
        return probe

    def control(self, path: str, body: Any, read: Any = lambda answer: answer, *, method: str = "POST") -> Future[Any]:
        """Asks the server beside the requests that are under way."""
        return self._client.start(body, partial(agreed, read), path, method=method, has_slot=False)

    def is_ready(self) -> bool:
        """Tells whether the server answers.

        Raises:
            EngineFailed: it did not in time, or serves another model.
        """
        return self._is_ready(0.0)

    def wait_ready(self) -> None:
        """Waits until the server answers; errors as of ``is_ready``."""
        while not self._is_ready(None):
            pass

    def _is_ready(self, timeout_s: float | None) -> bool:
        if self._probe is None:
            return True
        if timeout_s is not None and not self._probe.done():
            return False
        self._drain()
        try:
            self._context = self._probe.result(timeout_s)
        except RemoteError as error:
            if not error.again or time.monotonic() > self._patient_until_s:
                raise self._failed(error) from error
            self._probe = self._ask_models()
            return False
        self._probe = None
        return True

    def has_weights(self) -> bool:
        return self.version is not None

    def restart(self) -> None:
        """Forgets what it held and waits for the server, which whoever runs it starts anew."""
        for held in self._flying.values():
            held.answer.cancel()
        self._forget()
        self._is_paused = False
        self._patient_until_s = time.monotonic() + self._restart_timeout_s
        self._probe = self._ask_models()

    def _failed(self, error: UserError) -> EngineFailed:
        return EngineFailed(error.problem, found=error.found, remedy=error.remedy)

    # Requests ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self.wait_ready()
        self._raise_failure()
        for request in requests:
            check_request(request, context=self._context, vocab_size=self._vocab_size, decodes=self._decode is not None)
        check_request_ids(requests, self._held)
        self._held |= {request.request_id: _Held(request) for request in requests}
        self._waiting.extend(self._held[request.request_id] for request in requests)
        self._dispatch()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _may_ask(self) -> bool:
        return not self._is_paused and self.version is not None

    def _dispatch(self) -> None:
        while self._waiting and self._may_ask and len(self._flying) < self.server.concurrency:
            held = self._waiting.popleft()
            self._flying[held.request.request_id] = held
            room = held.request.sampling.max_new_tokens
            if self._context is not None:
                room = min(room, self._context - len(held.request.prompt_ids))
            body = self.body(held.request, held.token_ids, room - len(held.token_ids))
            held.answer = self._client.start(body, partial(self._read, held), self.path)
            held.answer.add_done_callback(partial(self._arrived, held))

    def _arrived(self, held: _Held, _: Future[Ended]) -> None:
        self._answers.put(held)
        self._rings()

    def _rings(self, *_: object) -> None:
        with suppress(OSError):  # It rings already, or nobody listens any more.
            self._ring.send(b".")

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def _read(self, held: _Held, answer: Any) -> Ended:
        """Raises ValueError where this cannot be the answer; the server is asked again then."""
        part = agreed(partial(self.part, request=held.request), answer)
        if part.ended is None and not self._is_paused:
            raise ValueError("the server broke it off")
        check_columns(part, self._vocab_size)
        token_ids = [*held.token_ids, *part.token_ids]
        return part, *ending(part.ended, token_ids, held.request, self._decode)

    def completed(self, timeout_s: float) -> list[Completion]:
        if self._flying and not (self._ended or self._refused or self._failure):
            wait_readable([self._bell], timeout_s)
        self._collect()
        self._dispatch()
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        if self._refused:
            raise self._refused.pop(0)
        self._raise_failure()
        if self._waiting and self.version is None and not self._is_paused:
            self.weight_sink().require()
        return []

    def _collect(self) -> None:
        """Takes the answers that have come."""
        self._drain()
        with suppress(queue.Empty):
            while True:
                held = self._answers.get_nowait()
                request_id = held.request.request_id
                # Else it was cancelled, or is on its way again.
                if self._flying.get(request_id) is held and held.answer.done():
                    del self._flying[request_id]
                    self._settle(held)

    def _settle(self, held: _Held) -> None:
        try:
            part, reason, held.text_end = held.answer.result()
        except RemoteError as error:
            if error.status in _REFUSED:
                self._refused.append(RequestsRefused(error, [held.request.request_id]))
                del self._held[held.request.request_id]
            else:
                self._failure = self._failed(error)
            return
        held.take(part, self.version or 0)
        self._stats.generated_tokens += len(part.token_ids)
        if reason is None:
            self._waiting.appendleft(held)
        else:
            self._end(held, reason)

    def _end(self, held: _Held, reason: FinishReason) -> None:
        del self._held[held.request.request_id]
        self._ended.append(held.completion(reason))

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._collect()
        for held in [self._held[i] for i in dict.fromkeys(request_ids) if i in self._held]:
            if self._flying.pop(held.request.request_id, None) is None:
                self._waiting.remove(held)
            held.answer.cancel()  # closes the connection
            self._end(held, FinishReason.CANCELLED)

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        """Returns nothing: answers come whole."""
        return {}

    # Pauses -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        self.break_off()
        while self._flying:
            flying = [held.answer for held in self._flying.values()]
            came, _ = wait(flying, self.break_off_s, FIRST_COMPLETED)
            self._collect()
            if not came:
                break
        late = list(self._flying.values())
        for held in late:
            held.answer.cancel()
        self._flying.clear()
        self._waiting.extendleft(reversed(late))

    def resume(self) -> None:
        self._is_paused = False
        self._dispatch()

    def weight_sink(self) -> TensorSink:
        raise UserError(
            "this engine takes no weights",
            found=f"the server {self.server.url}",
            remedy="use rollout.engine.type native, vllm or sglang for a policy that is trained",
        )

    def sleep(self, level: Literal[1, 2]) -> None:  # noqa: B027
        """Does nothing: the server's memory is not this run's affair."""

    def wake(self) -> None:  # noqa: B027
        """Does nothing, as ``sleep``."""

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            policy_version=self.version or 0,
            num_running=len(self._flying),
            num_waiting=len(self._waiting),
            num_retries=self._client.num_retries,
        )

    def fileno(self) -> int:
        """Returns a descriptor that is readable where ``completed(0)`` may have something."""
        return self._bell.fileno()

    def close(self) -> None:
        self._client.close()
        self._bell.close()
        self._ring.close()


class OpenAIEngine(HTTPEngine):
    """A frozen model behind an OpenAI base url (``…/v1``). In a pause, requests that the server has are completed.

    Args:
        model: the name under which it is served.
        version: what its completions name as the policy version.
    """

    path = "/completions"
    models_path = "/models"

    def __init__(
        self, server: RemoteServer, *, model: str, vocab_size: int, decode: Decode | None = None, version: int = 0
    ) -> None:
        self._model = model
        super().__init__(server, vocab_size=vocab_size, decode=decode, version=version)

    def check_models(self, models: dict[str, int | None]) -> int | None:
        if self._model not in models:
            raise ValueError(f"it serves {', '.join(map(repr, models))}, not {self._model!r}")
        return models[self._model]

    def body(self, request: Request, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        asked: dict[str, Any] = {
            "model": self._model,
            "prompt": [*request.prompt_ids, *token_ids],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed & LARGEST_SEED,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            # Only what the request names ends it, not the model's own end-of-text.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,  # stop strings are looked for in the text that we have
        }
        return asked if request.session is None else {**asked, "session_id": request.session}

    def part(self, answer: Any, request: Request) -> Part:
        choices = answer["choices"]
        if len(choices) != 1:
            raise ValueError(f"{len(choices)} answers to one request")
        choice = choices[0]
        if choice.get("token_ids") is None:
            raise ValueError("no token ids: the server does not know return_token_ids (vLLM has it from 0.10.2 on)")
        read = choice.get("prompt_token_ids")
        if read is not None and tuple(read) != request.prompt_ids:
            raise ValueError(f"the answer to another prompt, of {len(read)} tokens")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"it ended by {choice['finish_reason']!r}")
        return Part(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])


def server_engines(config: ServerEngineConfig, policy: EnginePolicy) -> list[OpenAIEngine]:
    """Makes an engine for each address."""
    return [
        OpenAIEngine(server, model=config.model, vocab_size=policy.vocab_size, decode=policy.decode)
        for server in config.servers
    ]
