"""A server of JSON on this machine, for tests of everything that asks one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""Status, body (bytes as they are, anything else as JSON), headers."""


@dataclass
class Asked:
    """What the server got: bodies, headers and the client's port of every request, in order of arrival."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serves in a thread until the block ends; gives the server's address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(answer: Callable[[Any], Answer], port: int = 0) -> Iterator[Asked]:
    """Answers every POST with ``answer(body)``, and every GET with ``answer(None)``."""
    asked = Asked()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            with lock:
                asked.bodies.append(body)
                asked.headers.append(dict(self.headers))
                asked.ports.append(self.client_address[1])
                asked.paths.append(self.path)
            status, content, *more = answer(body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests print nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hung up is part of some tests."""

    with running(Server(("127.0.0.1", port), Handler)) as asked.url:
        yield asked
