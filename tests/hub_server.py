"""A stand-in for the Hugging Face hub on this machine: the endpoints that fetching and pushing models ask."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from json_server import running

Files = dict[str, bytes]


@dataclass
class Hub:
    """Repositories, and what was asked.

    Attributes:
        branches: repository → branch → its commit.
        commits: commit → files.
        refusal: status, error code and message for every request, or for those whose path holds ``refused``.
        gated: repositories whose files are for those with ``token``.
        sent: repository → branch → files, of what was pushed.
        asked: ``METHOD path``, how often.
    """

    url: str = ""
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    refusal: tuple[int, str, str] | None = None
    refused: str = ""
    gated: set[str] = field(default_factory=set)
    token: str = "hf_secret"
    sent: dict[str, dict[str, Files]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    tokens: set[str | None] = field(default_factory=set)

    def put(self, repo: str, files: Path | Mapping[str, bytes], branch: str = "main") -> str:
        """A commit on a branch, with the files of a directory; its name."""
        found = {p.name: p.read_bytes() for p in files.iterdir()} if isinstance(files, Path) else dict(files)
        digest = hashlib.sha1(repo.encode())
        for name, data in sorted(found.items()):
            digest.update(name.encode() + data)
        self.commits[digest.hexdigest()] = found
        self.branches.setdefault(repo, {})[branch] = digest.hexdigest()
        return digest.hexdigest()

    def downloads(self) -> Counter[str]:
        """How often each file was sent."""
        return Counter(
            {k.rpartition("/")[2]: n for k, n in self.asked.items() if k.startswith("GET") and "/resolve/" in k}
        )

    def files(self, repo: str, revision: str) -> tuple[str, Files] | None:
        commit = self.branches[repo].get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _serve(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0]).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked[f"{self.command} {path}"] += 1
        hub.tokens.add(self.headers.get("Authorization"))
        try:
            if hub.refusal is not None and hub.refused in path:
                raise _Refused(*hub.refusal)
            if path.startswith("api/"):
                data = self._api(path.split("/")[1:], body)
                self._send(200, json.dumps(data).encode())
            else:
                self._send_file(path)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, b"{}", {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = _serve

    def _send_file(self, path: str) -> None:
        owner, name, _, revision, file = path.split("/", 4)
        repo = f"{owner}/{name}"
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise _Refused(403 if self.headers.get("Authorization") else 401, "GatedRepo", "Access is restricted.")
        commit, files = self._revision(repo, revision)
        if file not in files:
            raise _Refused(404, "EntryNotFound")
        tag = hashlib.sha1(files[file]).hexdigest()
        self._send(200, files[file], {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

    def _revision(self, repo: str, revision: str) -> tuple[str, Files]:
        if repo not in self.hub.branches:
            raise _Refused(401, "RepoNotFound")
        found = self.hub.files(repo, revision)
        if found is None:
            raise _Refused(404, "RevisionNotFound")
        return found

    def _api(self, parts: list[str], body: bytes) -> Any:
        hub = self.hub
        if parts == ["repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.created.append(asked)
            hub.sent.setdefault(repo, {"main": {}})
            return {"url": f"{hub.url}/{repo}"}
        if parts[0] != "models":
            return {}
        repo, rest = "/".join(parts[1:3]), parts[3:]
        match rest:
            case [] | ["revision", *_]:
                revision = "/".join(rest[1:]) or "main"
                commit, files = self._revision(repo, revision)
                return {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            case ["tree", revision]:
                _, files = self._revision(repo, revision)
                return [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            case ["branch", branch]:
                hub.sent[repo][branch] = {}
                return {}
            case ["preupload", _]:
                files = json.loads(body)["files"]
                return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            case ["commit", branch]:
                for line in body.splitlines():
                    row = json.loads(line)
                    if row["key"] == "file":
                        hub.sent[repo][branch][row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                return {"commitUrl": f"{hub.url}/{repo}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        raise _Refused(404)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests print nothing."""


@contextmanager
def served() -> Iterator[Hub]:
    """An empty hub, until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as hub.url:
        yield hub
