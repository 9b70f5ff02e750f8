"""JSON over HTTP with retries and back-off: servers of rewards, judges and engines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Literal, TypeVar

import httpx2

from quartet.config.errors import UserError, describe_error
from quartet.config.rewards import RemoteServer

MAX_ANSWER_BYTES = 16 << 20
_JITTER = random.Random()  # of its own: no other random numbers depend on it
_AGAIN = {408, 425, 429, 500, 502, 503, 504}

T = TypeVar("T")
Kind = Literal["unreachable", "silent", "refused", "malformed", "stopped"]


class RemoteError(UserError):
    """No usable answer. ``kind`` says why: ``unreachable`` (no connection, or it broke), ``silent`` (no whole answer in
    time), ``refused`` (an HTTP status), ``malformed`` (no such answer as agreed), ``stopped`` (the run ends).
    ``again``: another attempt may succeed, after ``wait_s`` where the server says so.
    """

    problem_of = "the server {name!r} gave no answer ({kind})"
    remedy_of = "see that it runs and that the url is its own"

    def __init__(
        self,
        name: str,
        kind: Kind,
        text: str,
        *,
        again: bool = False,
        wait_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(self.problem_of.format(name=name, kind=kind), found=text, remedy=self.remedy_of)
        self.kind, self.again, self.wait_s, self.status = kind, again, wait_s, status


class JSONClient:
    """Exchanges JSON with a server. Requests have an event loop in a thread of their own, so that they go on while the
    caller's is busy, and a caller may come from one loop after the other.

    Args:
        config: where, how patiently, how often, how many at a time.
        name: of the server, in messages.
        error: what is raised where there is no answer.

    Raises:
        UserError: the variable that should hold the key is not set.
    """

    def __init__(self, config: RemoteServer, *, name: str = "", error: type[RemoteError] = RemoteError) -> None:
        self._config, self._name, self._error_type = config, name or config.url, error
        self._slots = asyncio.Semaphore(config.concurrency)
        self._is_closed = False
        self.num_retries = 0
        """Attempts beyond the first one of a request."""
        own = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        self._client = httpx2.AsyncClient(
            headers={**own, **_authorization(config, self._name)},
            verify=ssl.create_default_context(),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=None,  # The whole attempt has one: a server that sends a byte now and then is silent, too.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None),
            trust_env=False,
        )

    async def post(self, body: Any, read: Callable[[Any], T], path: str = "") -> T:
        """Does what ``start`` does, and waits for it."""
        return await asyncio.wrap_future(self.start(body, read, path))

    def start(
        self, body: Any, read: Callable[[Any], T], path: str = "", *, method: str = "POST", has_slot: bool = True
    ) -> Future[T]:
        """Starts a request, for ``read`` of the answer's JSON, which raises ValueError where the answer is not as
        agreed. Cancelling it closes the connection.

        Args:
            path: added to the URL's path.
            has_slot: it waits until fewer than ``concurrency`` requests are under way.

        Raises (when it is waited for):
            RemoteError: no such answer after all attempts.
            UserError: ``body`` holds what cannot be written as JSON, not even as text.
        """
        url = self._config.url.rstrip("/") + path if path else self._config.url
        call = _Call(method, url, b"" if method == "GET" else _as_json(body))
        return asyncio.run_coroutine_threadsafe(self._run(call, read, has_slot), self._loop)

    def close(self) -> None:
        """Ends waits between attempts, attempts under way, and the connections."""
        if "_loop" in vars(self) and not self._is_closed:
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()

        def run() -> None:
            loop.run_forever()
            loop.close()

        threading.Thread(target=run, name=f"http-{self._name}", daemon=True).start()
        return loop

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._client.aclose()
        self._loop.stop()

    async def _run(self, call: _Call, read: Callable[[Any], T], has_slot: bool) -> T:
        try:
            async with self._slots if has_slot else nullcontext():
                return await self._patiently(call, read)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise self._error("stopped", "the run ends") from None

    async def _patiently(self, call: _Call, read: Callable[[Any], T]) -> T:
        retry = self._config.retry
        wait_s = retry.first_wait_s
        attempts_left = retry.attempts
        while True:
            attempts_left -= 1
            try:
                return await self._attempt(call, read)
            except RemoteError as error:
                if not attempts_left or not error.again:
                    raise
                # Many workers must not come back at the same moment.
                usual_s = wait_s * _JITTER.uniform(0.5, 1.0)
                next_s = min(usual_s if error.wait_s is None else error.wait_s, retry.longest_wait_s)
            self.num_retries += 1
            await asyncio.sleep(next_s)
            wait_s = min(wait_s * 2, retry.longest_wait_s)

    async def _attempt(self, call: _Call, read: Callable[[Any], T]) -> T:
        status, headers, text = await self._exchange(call)
        if status != 200:
            place = f" to {headers['Location'][:200]}" if "Location" in headers else ""
            wait_s = _seconds(headers.get("Retry-After"))
            why = f"HTTP {status}{place}: {_excerpt(text)}"
            raise self._error("refused", why, again=status in _AGAIN, wait_s=wait_s, status=status)
        try:
            return read(json.loads(text))
        except (ValueError, RecursionError) as error:
            # A proxy's page, or a language model that answered otherwise than asked: it may do better.
            raise self._error("malformed", f"{error}; the answer is {_excerpt(text)}", again=True) from error

    async def _exchange(self, call: _Call) -> tuple[int, httpx2.Headers, bytes]:
        seconds, text = self._config.timeout_s, bytearray()
        request = self._client.stream(call.method, call.url, content=call.data)
        try:
            async with asyncio.timeout(seconds), request as response:
                async for part in response.aiter_raw():
                    text += part
                    if len(text) > MAX_ANSWER_BYTES:
                        raise self._error("malformed", f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        except TimeoutError as error:
            raise self._error("silent", f"no answer within {seconds} s", again=True) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # What the system said of it.
                cause = cause.__cause__
            raise self._error("unreachable", f"{type(cause).__name__}: {cause}", again=True) from error
        return response.status_code, response.headers, bytes(text)

    def _error(self, kind: Kind, text: str, **more: Any) -> RemoteError:
        return self._error_type(self._name, kind, text, **more)


@dataclass(frozen=True)
class _Call:
    method: str
    url: str
    data: bytes


def _as_json(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
    except Exception as error:  # An object's own __str__ may raise anything.
        raise UserError(
            "the data cannot be sent to a server as JSON",
            found=describe_error(error),
            remedy="keep plain values in the columns: text, numbers, lists, objects with text as keys",
        ) from error


def _authorization(config: RemoteServer, name: str) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(
            f"there is no key for the server {name!r}",
            found=f"the environment variable {config.api_key_env} is {'not one line of ASCII' if key else 'not set'}",
            remedy=f"export {config.api_key_env}=…, or name another variable in api_key_env",
        )
    return {"Authorization": f"Bearer {key}"}


def _seconds(text: str | None) -> float | None:
    """Reads Retry-After in seconds; its other form, a date, is not understood and the usual wait holds."""
    return float(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def _excerpt(text: bytes) -> str:
    shown = text[:200].decode("utf-8", errors="replace")
    return repr(shown + ("…" if len(text) > 200 else ""))
