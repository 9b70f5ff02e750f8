"""Mistakes on the command line of `quartet serve`, said before an engine starts."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quartet.extras.serve.server
import quartet.trainers.engines
from quartet.cli.main import add_plugins, app
from quartet.config import UserError

targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")

add_plugins()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "policy"
    targets.build_model().save_pretrained(folder)
    servers.letter_codec(targets.VOCAB).tokenizer.save_pretrained(folder)
    return folder


def said(model: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--model", str(model), *words])
    assert isinstance(result.exception, UserError), (result.exception, result.output)
    return str(result.exception)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--host", "203.0.113.7"], "203.0.113.7:8000"),
        (["max_runing=4"], "did you mean 'max_running'"),
        (["type=vllm", "cache_tokens=4"], "cache_tokens"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes(model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str) -> None:
    monkeypatch.setattr(quartet.trainers.engines, "open_engine", lambda *args: pytest.fail("an engine was started"))
    assert expected in said(model, "--port", "0", *words) if "--host" not in words else expected in said(model, *words)


def test_a_port_in_use_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quartet.trainers.engines, "open_engine", lambda *args: pytest.fail("an engine was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = said(model, "--port", str(port))
    assert f"127.0.0.1:{port}" in message and "in use" in message and "--port" in message


def test_what_is_served(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def close(self) -> None:
            closed.append(True)

    made: list[Any] = []
    ran: list[Any] = []
    closed: list[bool] = []
    monkeypatch.setattr(quartet.trainers.engines, "open_engine", lambda *args: made.append(args) or Engine())
    monkeypatch.setattr(quartet.extras.serve.server, "run", lambda *args: ran.append(args))
    monkeypatch.setenv("SERVE_KEY", "s3cret")
    words = ["--port", "0", "--api-key-env", "SERVE_KEY", "type=vllm", "max_model_len=64", "--device", "cpu"]
    result = CliRunner().invoke(app, ["serve", "--model", str(model), *words])
    assert result.exit_code == 0 and "s3cret" not in result.output
    assert result.output.startswith("serving policy at http://127.0.0.1:")
    ((config, policy),) = made
    assert (config.max_model_len, policy.path, policy.precision) == (64, str(model), "fp32")
    ((_, codec, settings, bound),) = ran
    assert (settings.name, settings.api_key) == ("policy", "s3cret")
    assert (settings.limits.context, settings.limits.vocab_size) == (64, targets.VOCAB)
    assert codec.decode([7, 8]) == "HI"
    assert closed == [True] and bound.fileno() == -1
