"""The engines of this project under the contract of all rollout engines: in this thread, in a process, and routed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import RolloutEngine
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.rollout.stepped import SteppedEngine

contract: Any = importlib.import_module("engine_contract")
targets: Any = importlib.import_module("engine_targets")


def staged(model: PreTrainedModel) -> StagedWeights:
    return StagedWeights(model.named_parameters(remove_duplicate=False))


def in_thread() -> RolloutEngine:
    return SteppedEngine(targets.native())


def in_process() -> RolloutEngine:
    return EngineProcess(targets.spec(), staged(targets.build_model()))


def routed_in_thread() -> RolloutEngine:
    return Router([SteppedEngine(targets.native(version=0))], max_outstanding=5)


def routed_processes() -> RolloutEngine:
    weights = staged(targets.build_model())
    specs = [targets.spec(name=f"engine {number}") for number in range(2)]
    return Router([EngineProcess(spec, weights) for spec in specs], max_outstanding=5, policy="least_tokens")


KINDS = {make.__name__: make for make in (in_thread, in_process, routed_in_thread, routed_processes)}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    models = targets.build_model(0), targets.build_model(1)
    with contextlib.closing(KINDS[request.param]()) as engine:
        kind = contract.Kind(engine, models, targets.decode, targets.VOCAB, targets.CONTEXT)
        kind.set_weights(models[0])
        yield kind
    engine.close()  # a second time


class TestEngineKinds(contract.EngineContract):
    pass
