"""The engines of this project under the contract of all rollout engines: in this thread, in a process, and routed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from quartet.rollout.engine import load_engine
from quartet.rollout.process import EngineProcess, EngineSpec
from quartet.rollout.protocol import RolloutEngine, SteppedEngine
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.rollout.step_attention import PlainAttentionBackend
from quartet.text.tokenizer import TextCodec

contract: Any = importlib.import_module("engine_contract")
targets: Any = importlib.import_module("engine_targets")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(targets.VOCAB - 1)} | {"<eos>": targets.VOCAB - 1}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def staged(model: PreTrainedModel) -> StagedWeights:
    return StagedWeights(model.named_parameters(remove_duplicate=False))


def in_thread(path: Path) -> RolloutEngine:
    return SteppedEngine(load_engine(str(path), max_running=8))


def plain_operations(path: Path) -> RolloutEngine:
    """Those of devices other than the CPU."""
    return SteppedEngine(targets.native(version=0, contexts=PlainAttentionBackend()))


def in_process(path: Path) -> RolloutEngine:
    spec = EngineSpec("quartet.rollout.engine:load_engine", {"path": str(path), "max_running": 8})
    return EngineProcess(spec, staged(targets.build_model()))


def routed_in_thread(path: Path) -> RolloutEngine:
    return Router([SteppedEngine(targets.native(version=0))], max_outstanding=5)


def routed_processes(path: Path) -> RolloutEngine:
    weights = staged(targets.build_model())
    specs = [targets.spec(name=f"engine {number}") for number in range(2)]
    return Router([EngineProcess(spec, weights) for spec in specs], max_outstanding=5)


KINDS = {make.__name__: make for make in (in_thread, plain_operations, in_process, routed_in_thread, routed_processes)}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models, path = (targets.build_model(0), targets.build_model(1)), tmp_path_factory.mktemp("model")
    models[0].save_pretrained(path)
    tokenizer().save_pretrained(path)
    with contextlib.closing(KINDS[request.param](path)) as engine:
        is_read = request.param in ("in_thread", "in_process")  # with the tokenizer of its directory
        decode = TextCodec.from_pretrained(path).decode_completion if is_read else lambda _, ids: targets.decode(ids)
        kind = contract.Kind(engine, models, decode, targets.VOCAB, targets.CONTEXT)
        kind.set_weights(models[0])
        yield kind
    engine.close()  # a second time


class TestEngineKinds(contract.EngineContract):
    pass
