"""What these tests share with those of models and engines."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

import architectures
from layout_fixtures import close  # noqa: F401
from tiny_engines import *  # noqa: F403 - fixtures


@pytest.fixture(scope="session")
def build_architecture() -> Callable[..., PreTrainedModel]:
    """``build_architecture(name, seed=…, dtype=…, **config)``: a tiny causal LM."""
    return architectures.build
