"""Tiny random models of every architecture that the tests prove, for the forward's tests and the engine's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from architectures import ARCHITECTURES, SHORT_SIDE, build

BuildArchitecture = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def build_architecture() -> BuildArchitecture:
    """``build_architecture(name, seed=…, dtype=…, **config)``: a tiny causal LM."""
    return build


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    """The name of each architecture in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of real models and data."""
    folder = os.environ.get("QUARTET_REALDATA")
    if not folder:
        pytest.skip("QUARTET_REALDATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def short_side() -> int:
    return SHORT_SIDE
