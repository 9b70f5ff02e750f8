"""Checkpoints of a run: every worker writes its share, the driver its own small parts, and the manifest last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from quartet.cluster.errors import WorkerDied
from quartet.schedule.checkpointed import Checkpointed
from quartet.schedule.role_group import RoleGroup
from quartet.train.checkpoint import Checkpoint, Shares, discard_draft
from quartet.trainers.run import RunDirectory, writing

T = TypeVar("T")
Workers = Mapping[str, RoleGroup[Checkpointed]]
_POLL_S, _LONGEST_POLL_S = 0.005, 0.25


async def check_storage(run: RunDirectory, workers: Workers) -> None:
    """
    Raises:
        UserError: a worker does not see the run's directory, or it cannot be written to.
    """
    token = run.path.absolute() / f".seen_{os.getpid()}"
    with writing(token):
        token.mkdir(exist_ok=True)
    try:
        await _all({role: worker.call(Checkpointed.check_sees, token) for role, worker in workers.items()})
    finally:
        token.rmdir()


async def save(
    run: RunDirectory, workers: Workers, step: int, parts: Mapping[str, Any], info: Mapping[str, Any]
) -> None:
    """Saves the state after ``step`` complete steps; it is written in the background, if the recipe does not forbid it.

    Where a worker dies before its share is written there is no checkpoint of this step, and no error: the run meets
    that death by itself.

    Args:
        workers: by role, those whose state is saved.
        parts, info: as of ``RunDirectory.complete_checkpoint``.

    Raises:
        UserError: this or something before it could not be written.
        WorkerDied: a worker is dead already.
    """
    draft = run.begin_checkpoint(step)
    background = run.recipe.checkpoint.background
    copying = run.recorder.span("checkpoint_snapshot", step=step - 1, role="writer") if background else nullcontext()
    try:
        with copying:
            await _all(
                {
                    role: worker.call(Checkpointed.save_checkpoint, draft / role, background=background)
                    for role, worker in workers.items()
                }
            )
        found = None if background else await _written(workers, draft)
    except BaseException:
        discard_draft(draft)
        raise
    shares: Callable[[], Shares | None]
    # In the thread that writes, which has no event loop; the run's own may be waiting for that thread.
    shares = (lambda: asyncio.run(_written(workers, draft))) if background else (lambda: found)
    run.complete_checkpoint(draft, step, parts, info, shares)


async def load(workers: Workers, checkpoint: Checkpoint) -> None:
    """Every worker takes up its share.

    Raises:
        UserError: it belongs to another model, or cannot be read.
    """
    path = checkpoint.path.absolute()
    await _all({role: worker.call(Checkpointed.load_checkpoint, path / role) for role, worker in workers.items()})


async def _written(workers: Workers, draft: Path) -> Shares | None:
    """Digests of all shares once they are written; None where one never will be."""
    try:
        found = await _all({role: _files(worker, draft / role) for role, worker in workers.items()})
    except WorkerDied:
        return None
    return found if all(found.values()) else None


async def _files(worker: RoleGroup[Checkpointed], directory: Path) -> Any:
    return await told(lambda: worker.call(Checkpointed.finish_checkpoint, directory))


async def told(ask: Callable[[], Awaitable[T | None]]) -> T:
    """What ``ask`` tells, asked again and again until it is something."""
    pause_s = _POLL_S
    while (found := await ask()) is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return found


async def _all(calls: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """The results by the same names; all have ended before the first error is raised."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(calls, results, strict=True))
