"""Episodes of several turns by servers: they are those of the engine in the trainer's process."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

import torch

from quartet.config.engines import NativeEngineConfig
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.text.tokenizer import TextCodec
from served_episodes import STEPS, check_episodes, run, said  # noqa: F401 - a fixture

servers: Any = importlib.import_module("http_engines")


def test_servers_that_are_asked_over_http(run: Any, causal_lm: Any, tokenizer: Any) -> None:  # noqa: F811
    """Their arithmetic is not that of another batch to the last bit; tokens are drawn with the same numbers, as long as
    nothing breaks requests off: rollout has a pool of its own.
    """
    placement = {"type": "separated", "actor": {}, "rollout": {}}
    here, _, _ = run("here", NativeEngineConfig(max_running=5), "fast", placement=placement)
    codec, made = TextCodec.of(tokenizer), []
    with ExitStack() as opened:
        for seed in (1, 2):
            packed = PackedCausalLM(causal_lm(seed))
            inside = NativeEngine(packed, owns_weights=True, decode=codec.decode_completion, version=0, max_running=5)
            server = servers.SGLangServer(inside, packed.model.config.max_position_embeddings)
            made.append((opened.enter_context(servers.sglang_server(server)), server))
        engine = SGLangEngineConfig(urls=tuple(url for url, _ in made), weights="distributed", lease_s=60.0)
        there, model, rows = run("there", engine, "fast", placement=placement)
    check_episodes(here)
    assert [said(record) for record in there] == [said(record) for record in here]
    for one, other in zip(there, here, strict=True):
        logprobs = [torch.tensor(record.columns["rollout_logprobs"]) for record in (one, other)]
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
        assert one.rewards == other.rewards
    assert rows[-1]["agreement/canary_diff"] < 1e-5
    for _, server in made:
        assert int(server.weight_version) == STEPS
        own = dict(server.engine.packed.model.named_parameters())
        assert all(torch.equal(own[name], value) for name, value in model.named_parameters())
    # An episode's turns are asked where its earlier ones were, with all of their tokens.
    asked = [[body["input_ids"] for path, body in server.asked if path == "/generate"] for _, server in made]
    longest = max((ids for of_one in asked for ids in of_one), key=len)
    assert any(longest[: len(ids)] == ids and len(ids) < len(longest) for of_one in asked for ids in of_one)
