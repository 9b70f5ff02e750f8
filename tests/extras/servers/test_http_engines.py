"""Engines that are servers under the contract of all rollout engines. The servers are real ones on this machine whose
answers come from the native engine: ours, and one that does what SGLang's documentation says of its own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers.client import OpenAIEngine
from quartet.extras.servers.sglang import PublishedWeights, SGLangEngine
from quartet.rollout.protocol import SteppedEngine
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights

contract: Any = importlib.import_module("engine_contract")
targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")

CODEC = servers.letter_codec(targets.VOCAB)


def remote(url: str, **options: Any) -> RemoteServer:
    retry = RetryConfig(attempts=3, first_wait_s=0.01, longest_wait_s=0.1)
    return RemoteServer(url=url, **{"retry": retry, "timeout_s": 30.0, "concurrency": 8, **options})


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Any]:
    inside = SteppedEngine(targets.native(version=0))
    sizes = {"context": targets.CONTEXT, "vocab_size": targets.VOCAB}
    with servers.openai_server(inside, CODEC, **sizes) as url:
        client = OpenAIEngine(
            remote(url + "/v1"), model="policy", vocab_size=targets.VOCAB, decode=CODEC.decode_completion
        )
        with contextlib.closing(client) as engine:
            yield engine, {"takes_weights": False, "sleeps": False, "drains": True}


@contextlib.contextmanager
def sglang(folder: Path, *, num: int = 1) -> Iterator[Any]:
    model = targets.build_model()
    staging = StagedWeights(model.named_parameters(remove_duplicate=False))
    weights = PublishedWeights(staging, folder)
    with contextlib.ExitStack() as opened:
        engines = []
        for _ in range(num):
            url = opened.enter_context(
                servers.sglang_server(servers.SGLangServer(targets.native(seed=5, version=0), targets.CONTEXT))
            )
            engines.append(
                SGLangEngine(remote(url), vocab_size=targets.VOCAB, decode=CODEC.decode_completion, weights=weights)
            )
        engine = engines[0] if num == 1 else Router(engines, max_outstanding=5)
        opened.callback(engine.close)
        # The positions of a request that goes on are counted anew there.
        yield engine, {"is_seeded": False}


@contextlib.contextmanager
def sglang_routed(folder: Path) -> Iterator[Any]:
    with sglang(folder, num=2) as made:
        yield made


KINDS = {make.__name__: make for make in (server, sglang, sglang_routed)}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = targets.build_model(0), targets.build_model(1)
    with KINDS[request.param](tmp_path_factory.mktemp("weights")) as (engine, expected):
        kind = contract.Kind(engine, models, CODEC.decode_completion, targets.VOCAB, targets.CONTEXT, **expected)
        if kind.takes_weights:
            kind.set_weights(models[0])
        yield kind


class TestHTTPEngines(contract.EngineContract):
    pass
