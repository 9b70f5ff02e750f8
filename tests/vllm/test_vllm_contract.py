"""vLLM under the contract of all rollout engines, in a process and routed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.rollout.process import EngineProcess
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.text.tokenizer import TextCodec

contract: Any = importlib.import_module("engine_contract")


@pytest.fixture(scope="module", params=["process", "routed"])
def kind(
    request: pytest.FixtureRequest, save_model: Any, engine_spec: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    paths: list[Path] = [save_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in (0, 1)]
    models = tuple(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths)
    staging = StagedWeights(models[0].named_parameters(remove_duplicate=False))
    engine = EngineProcess(engine_spec(paths[0], version=None, max_num_seqs=8), staging)
    decode = TextCodec.from_pretrained(paths[0]).decode_completion
    with contextlib.closing(engine if request.param == "process" else Router([engine])) as made:
        engine.wait_ready() if made is engine else None
        kind = contract.Kind(made, models, decode, models[0].config.vocab_size, 512)
        kind.set_weights(models[0])
        yield kind
    staging.close()


class TestVLLM(contract.EngineContract):
    pass
