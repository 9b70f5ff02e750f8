"""`quartet serve` as a program: what it prints, how it ends, and what it does when its engine dies."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from quartet.config.rewards import RemoteServer
from quartet.extras.servers.client import OpenAIEngine
from quartet.rollout.protocol import Request, SamplingParams

targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")

START_S = 90.0


class Program:
    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        self.files = {name: folder / f"{time.monotonic_ns()}.{name}" for name in ("out", "err")}
        command = [sys.executable, "-m", "quartet", "serve", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        with self.files["out"].open("wb") as out, self.files["err"].open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def said(self, name: str) -> str:
        return self.files[name].read_text(encoding="utf-8")

    def url(self) -> str:
        """Once it serves."""
        end = time.monotonic() + START_S
        while not (found := re.search(r"serving policy at (http://127\.0\.0\.1:\d+)/v1\n", self.said("out"))):
            assert self.process.poll() is None and time.monotonic() < end, self.said("err")
            time.sleep(0.05)
        return found[1]

    def ends(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def children(self) -> list[int]:
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "policy"
    targets.build_model().save_pretrained(folder)
    servers.letter_codec(targets.VOCAB).tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def make(*words: str, **variables: str) -> Program:
        started.append(Program(tmp_path, "--model", str(model), *words, **variables))
        return started[-1]

    yield make
    for program in started:
        with suppress(ProcessLookupError):
            program.process.kill()
        program.process.wait()


def post(url: str, **body: Any) -> httpx2.Response:
    with httpx2.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        return http.post("/v1/completions", json={"model": "policy", "prompt": "HELLO", "seed": 1, **body})


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_serves_survives_its_engine_and_ends_cleanly(start: Callable[..., Program]) -> None:
    program = start("--port", "0", "max_running=4", "--grace-s", "0.5")
    url = program.url()
    first = post(url, max_tokens=20, return_token_ids=True).json()["choices"][0]["token_ids"]
    # As an engine of type `server`.
    server = RemoteServer(url=f"{url}/v1", timeout_s=60.0, concurrency=8)
    with closing(OpenAIEngine(server, model="policy", vocab_size=targets.VOCAB)) as engine:
        sampling = SamplingParams(max_new_tokens=20, seed=1, stop_token_ids=(targets.VOCAB - 1,))
        engine.submit([Request(f"r{n}", "g", (7, 4, 11, 11, 14), sampling) for n in range(6)])
        done = []
        while len(done) < 6:
            done += engine.completed(1.0)
    assert {made.token_ids for made in done} == {tuple(first)}
    # The engine's process dies; the server starts another one, and nobody is left without an answer.
    (child,) = program.children()
    answers: list[httpx2.Response] = []
    asking = [threading.Thread(target=lambda: answers.append(post(url, max_tokens=80, n=8))) for _ in range(3)]
    for thread in asking:
        thread.start()
    os.kill(child, signal.SIGKILL)
    for thread in asking:
        thread.join(START_S)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert all(len(answer.json()["choices"]) == 8 for answer in answers)
    assert post(url, max_tokens=20, return_token_ids=True).json()["choices"][0]["token_ids"] == first
    with httpx2.Client(base_url=url) as http:
        metrics = http.get("/metrics").text
    assert "quartet_engine_num_restarts 1" in metrics
    # SIGTERM while requests run: they have a second.
    (child,) = program.children()
    ends: list[int] = []
    late = threading.Thread(target=lambda: ends.append(post(url, max_tokens=90, n=256, ignore_eos=True).status_code))
    late.start()
    time.sleep(0.3)
    begin = time.monotonic()
    program.process.send_signal(signal.SIGTERM)
    assert program.ends(15) == 0, program.said("err")
    assert time.monotonic() - begin < 10
    late.join()
    assert ends == [503]
    assert program.said("err") == ""
    assert is_gone(child)


OWN = """
from transformers import {base}Config, {base}ForCausalLM
class OwnConfig({base}Config):
    model_type = "own"
class OwnForCausalLM({base}ForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_the_model_runs_where_it_is_trusted(
    start: Callable[..., Program], model: Path, tmp_path: Path
) -> None:
    """The server reads its config, the engine's process its weights."""
    own = tmp_path / "policy"
    shutil.copytree(model, own)
    config = json.loads((own / "config.json").read_text())
    base = config["architectures"][0].removesuffix("ForCausalLM")
    (own / "own.py").write_text(OWN.format(base=base))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto}
    (own / "config.json").write_text(json.dumps(config))
    words = ("--model", str(own), "--port", "0")
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    refused = start(*words, **cache)
    assert refused.ends(START_S) == 2 and "--trust-remote-code" in refused.said("err")
    assert not (tmp_path / "modules").exists()
    asked = {"max_tokens": 20, "return_token_ids": True}
    one, other = (start(*given, **cache) for given in (("--port", "0"), (*words, "--trust-remote-code")))
    tokens = [post(program.url(), **asked).json()["choices"][0]["token_ids"] for program in (one, other)]
    assert tokens[0] == tokens[1]
