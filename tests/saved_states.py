"""Runs that save without a model: a worker whose state is what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from quartet.schedule.model_worker import Checkpointed
from quartet.schedule.role_group import LocalGroup
from quartet.train.checkpoint import Checkpoint, CheckpointShare
from quartet.train.state import REST
from quartet.trainers import checkpoints
from quartet.trainers.run import RunDirectory


class State(Checkpointed):
    """
    Args:
        rest: plain values and tensors.
    """

    def __init__(self, rest: dict[str, Any]) -> None:
        self._rest = rest

    def checkpoint_state(self) -> dict[str, Any]:
        return {REST: self._rest}

    def loading(self, saved: Any, rest: Any) -> AbstractContextManager[Any]:
        raise NotImplementedError


def save(run: RunDirectory, step: int, rest: dict[str, Any], info: Mapping[str, Any] | None = None) -> None:
    """Saves ``rest`` as the state of the role ``engine``."""
    asyncio.run(checkpoints.save_checkpoint(run, {"engine": LocalGroup(State(rest))}, step, info or {}))


def saved(found: Checkpoint) -> dict[str, Any]:
    """What ``save_checkpoint`` was given."""
    return CheckpointShare(found.path / "engine").rest()
