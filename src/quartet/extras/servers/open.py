"""From what a recipe says of servers to engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.extras.servers.config import ServerEngineConfig, SGLangEngineConfig
from quartet.extras.servers.openai import OpenAIEngine
from quartet.extras.servers.published import PublishedWeights
from quartet.extras.servers.sglang import SGLangEngine
from quartet.extras.servers.sglang_group import GroupWeights
from quartet.models.directories import checkpoint_shapes
from quartet.trainers.engines import Policy


def server_engines(config: ServerEngineConfig, policy: Policy) -> list[OpenAIEngine]:
    """Makes an engine for each address."""
    return [OpenAIEngine(server, model=config.model, **_text(policy)) for server in config.servers]


def sglang_engines(config: SGLangEngineConfig, policy: Policy) -> list[SGLangEngine]:
    """Makes an engine for each address, and the way of new weights to it.

    Raises:
        UserError: adapters are trained.
    """
    if policy.lora is not None:
        raise UserError(
            "sglang takes whole models here, not adapters",
            found="actor.train.lora",
            remedy="leave lora out, or use another rollout.engine",
        )
    ways = _ways(config, policy)
    return [
        SGLangEngine(server, weights=way, **_text(policy)) for server, way in zip(config.servers, ways, strict=True)
    ]


def _text(policy: Policy) -> dict[str, Any]:
    return {"vocab_size": policy.vocab_size, "decode": policy.decode}


def _ways(config: SGLangEngineConfig, policy: Policy) -> Sequence[PublishedWeights | GroupWeights | None]:
    """By which new weights come to each server."""
    if policy.staging is None:
        return [None] * len(config.urls)
    if config.weights == "distributed":
        options: dict[str, Any] = {"num_workers": config.tensor_parallel_size, "device": policy.device}
        shapes = checkpoint_shapes(Path(policy.path))
        return [GroupWeights(policy.staging, server, shapes=shapes, **options) for server in config.servers]
    assert config.weights_directory is not None, "training needs one, see cross_checks"
    shared = PublishedWeights(policy.staging, Path(config.weights_directory), Path(policy.path))
    return [shared] * len(config.urls)
