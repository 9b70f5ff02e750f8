"""JSON over HTTP: connections that are used again, retries with back-off, a circuit breaker.

Waits are a function of a seed, the request and the attempt, so that many workers do not come back at the same moment
and a run waits as it did before. These functions wait; call them in threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

from quartet.config.errors import UserError
from quartet.config.foreign import described
from quartet.config.rewards import BreakerConfig, RemoteSource, RetryConfig

MAX_ANSWER_BYTES = 16 << 20
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_CONTENT = {400, 413, 422, 500}

Kind = Literal["unreachable", "silent", "refused", "malformed", "resting", "stopped"]


class RemoteError(Exception):
    """No usable answer. ``kind`` says why: ``unreachable`` (no connection, or it broke), ``silent`` (no whole answer in
    time), ``refused`` (an HTTP status), ``malformed`` (no such answer as agreed), ``resting`` (the circuit breaker is
    open), ``stopped`` (the run ends). ``again``: another attempt may succeed, after ``wait_s`` where the server says
    so; ``about_content``: what was sent may be at fault, not the server.
    """

    def __init__(
        self, kind: Kind, text: str, *, again: bool = False, wait_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.again = again
        self.wait_s = wait_s
        self.about_content = kind == "malformed" or status in _CONTENT


class CircuitBreaker:
    """Opens after so many failed attempts in a row; then nothing is tried for a while, and then one request is.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, config: BreakerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_again_s = 0.0

    def check(self) -> None:
        """Raises RemoteError (resting) while the breaker is open."""
        with self._lock:
            if self._failures < self._config.failures:
                return
            now = self._clock()
            if now < self._closed_again_s:
                left = self._closed_again_s - now
                raise RemoteError("resting", f"{self._failures} failures in a row; not tried for {left:.0f} s more")
            # One goes ahead; the others wait for how it fares.
            self._closed_again_s = now + self._config.rest_s

    def note(self, *, answered: bool) -> None:
        with self._lock:
            if answered:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._config.failures:
                self._closed_again_s = self._clock() + self._config.rest_s


class JSONClient:
    """Posts JSON to paths under one URL.

    Args:
        config: where, how patiently, how often.
        path: added to the URL's path.

    Raises:
        UserError: the variable that should hold the key is not set.
    """

    def __init__(self, config: RemoteSource, path: str = "") -> None:
        parts = urlsplit(config.url)
        assert parts.hostname is not None, "checked by the recipe"
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        self._path = (parts.path.rstrip("/") if path else parts.path or "/") + path
        self._timeout_s, self._retry = config.timeout_s, config.retry
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **_authorization(config)}
        self._breaker = CircuitBreaker(config.breaker)
        self._idle: list[_Connection] = []
        self._in_use: set[_Connection] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def post(self, body: Any, read: Callable[[Any], Any]) -> Any:
        """``read`` of the answer's JSON, which raises ValueError where the answer is not as agreed.

        Raises:
            RemoteError: no such answer after all attempts.
            UserError: ``body`` holds what cannot be written as JSON, not even as text.
        """
        try:
            data = json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", errors="replace")
        except Exception as error:  # An object's own __str__ may raise anything.
            raise UserError(
                "the data cannot be sent to a server as JSON",
                found=described(error),
                remedy="keep plain values in the columns: text, numbers, lists, objects with text as keys",
            ) from error
        waits = waits_s(self._retry, data)
        while True:
            self._breaker.check()
            try:
                return self._attempt(data, read)
            except RemoteError as error:
                wait_s = next(waits, None)
                if wait_s is None or not error.again:
                    raise
                if error.wait_s is not None:
                    wait_s = min(error.wait_s, self._retry.longest_wait_s)
            if self._stopped.wait(wait_s):
                raise RemoteError("stopped", "the run ends")

    def close(self) -> None:
        """Ends waits between attempts, attempts under way, and the connections."""
        self._stopped.set()
        with self._lock:
            idle, self._idle = self._idle, []
            in_use = list(self._in_use)
        for connection in in_use:
            connection.break_off()
        for connection in idle:
            connection.close()

    # One attempt -----------------------------------------------------------------------------------------

    def _attempt(self, data: bytes, read: Callable[[Any], Any]) -> Any:
        try:
            status, headers, text = self._exchange(data)
        except RemoteError:
            self._breaker.note(answered=False)
            raise
        if status in _AGAIN:
            self._breaker.note(answered=False)
            wait_s = _seconds(headers.get("Retry-After"))
            raise RemoteError("refused", f"HTTP {status}: {_excerpt(text)}", again=True, wait_s=wait_s, status=status)
        self._breaker.note(answered=True)
        if status != 200:
            place = f" to {headers['Location'][:200]}" if "Location" in headers else ""
            raise RemoteError("refused", f"HTTP {status}{place}: {_excerpt(text)}", status=status)
        try:
            return read(json.loads(text))
        except (ValueError, RecursionError) as error:
            # A proxy's page, or a language model that answered otherwise than asked: it may do better.
            raise RemoteError("malformed", f"{error}; the answer is {_excerpt(text)}", again=True) from error

    def _exchange(self, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = self._take()
        is_used = connection.wire is not None
        try:
            try:
                return self._send(connection, data)
            except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
                if not is_used or connection.is_broken_off:
                    raise
                # The server had closed it while it was idle: no failure, only an old connection.
                connection.close()
                return self._send(connection, data)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a name that no host can have
            connection.close()
            if isinstance(error, TimeoutError) or connection.is_broken_off:
                raise RemoteError("silent", f"no answer within {self._timeout_s} s", again=True) from error
            raise RemoteError("unreachable", f"{type(error).__name__}: {error}", again=True) from error
        finally:
            with self._lock:
                self._in_use.discard(connection)

    def _send(self, connection: _Connection, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        with connection.broken_off_after(self._timeout_s):
            connection.request("POST", self._path, data, self._headers)
            response = connection.getresponse()
            text = response.read(MAX_ANSWER_BYTES + 1)
        if connection.is_broken_off:
            raise TimeoutError
        if len(text) > MAX_ANSWER_BYTES:
            connection.close()
            raise RemoteError("malformed", f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if response.length:
            raise http.client.IncompleteRead(text, response.length)
        if response.isclosed() and not response.will_close:
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()
        return response.status, response.headers, text

    def _take(self) -> _Connection:
        kind = _TLSConnection if self._is_tls else _Connection
        with self._lock:
            connection = self._idle.pop() if self._idle else kind(self._host, self._port, timeout=self._timeout_s)
            self._in_use.add(connection)
        return connection


class _Connection(http.client.HTTPConnection):
    """``wire`` is its socket, also while only an answer still reads from it; None before the first request."""

    wire: socket.socket | None = None
    is_broken_off = False

    def connect(self) -> None:
        super().connect()
        if self.is_broken_off:
            raise TimeoutError
        self.wire = self.sock
        # Headers and body go out as two writes; without this the second waits for the first's acknowledgement.
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def break_off(self) -> None:
        """From another thread: whoever reads or writes gets an error, and no request is sent again."""
        self.is_broken_off = True
        if self.wire is not None:
            with contextlib.suppress(OSError):
                # Not the method of a TLS socket, which would take the encryption away under a reader's feet.
                socket.socket.shutdown(self.wire, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def broken_off_after(self, seconds: float) -> Iterator[None]:
        """The limit of the whole exchange. A socket's own timeout counts silence alone: a server that sends a byte now
        and then would hold a thread for ever.
        """
        timer = threading.Timer(seconds, self.break_off)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class _TLSConnection(_Connection, http.client.HTTPSConnection):
    pass


def waits_s(config: RetryConfig, request: bytes) -> Iterator[float]:
    """Seconds before the second attempt, the third, …; ends after the last."""
    for n in range(config.attempts - 1):
        jitter = random.Random(f"{config.seed} {zlib.crc32(request)} {n}").uniform(0.5, 1.0)
        yield min(config.first_wait_s * 2.0 ** min(n, 64), config.longest_wait_s) * jitter


def _authorization(config: RemoteSource) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(
            f"the reward {config.name!r} has no key for its server",
            found=f"the environment variable {config.api_key_env} is {'not one line of ASCII' if key else 'not set'}",
            remedy=f"export {config.api_key_env}=…, or name another variable in api_key_env",
        )
    return {"Authorization": f"Bearer {key}"}


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not understood and the usual wait holds."""
    return float(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def _excerpt(text: bytes) -> str:
    shown = text[:200].decode("utf-8", errors="replace")
    return repr(shown + ("…" if len(text) > 200 else ""))
