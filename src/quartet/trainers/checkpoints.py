"""What a run keeps while it trains: checkpoints, of which every worker writes its share, and the rollouts of steps.

The driver writes ``info.json``, and the manifest last. Token ids are written by the writer, the
worker that has them: a step's rollouts, and the groups that are ahead as a share of a checkpoint.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.errors import WorkerDied
from quartet.config import UserError
from quartet.config.strict import is_url
from quartet.data.datasets import PromptItem
from quartet.observe.rollouts import rollout_rows, rollouts_path
from quartet.schedule.group_stream import BufferedGroups
from quartet.schedule.groups import Group, by_group
from quartet.schedule.iteration import all_ended
from quartet.schedule.model_worker import Checkpointed
from quartet.schedule.role_group import RemoteGroup, RoleGroup
from quartet.schedule.rollout_writer import Writer
from quartet.train.checkpoint import Checkpoint, Shares, begin_checkpoint, complete_checkpoint, discard_draft
from quartet.trainers.experience import Experience
from quartet.trainers.run import CHECKPOINT, WRITER, RunDirectory
from quartet.trainers.run_files import writing

T = TypeVar("T")
BUFFERED = "ahead"
"""Name of the writer's share; there is none where nothing is ahead."""
DRAFTS = "drafts_"
"""And a number: the share of an engine that drafts."""
Workers = Mapping[str, RoleGroup[Checkpointed]]
_POLL_S, _LONGEST_POLL_S = 0.005, 0.25
_log = logging.getLogger(__name__)


async def check_storage(run: RunDirectory, workers: Workers) -> None:
    """Of a run at a URL, has machines of Ray that do not see its directory reach it through the store.

    Raises:
        UserError: a worker of any other run does not see it, or it cannot be written to.
    """
    await asyncio.to_thread(run.remote.join, ())
    token = run.path.absolute() / f".seen_{os.getpid()}"
    with writing(token):
        token.mkdir(exist_ok=True)
    try:
        await all_ended([worker.call(Checkpointed.check_sees, token) for worker in workers.values()])
    except UserError:
        groups = [worker.group for worker in workers.values() if isinstance(worker, RemoteGroup)]
        if len(groups) < len(workers) or not is_url(run.recipe.output_dir):
            raise
        await asyncio.to_thread(run.remote.join, groups)
    finally:
        token.rmdir()


async def save(run: RunDirectory, workers: Workers, step: int, info: Mapping[str, Any]) -> None:
    """Saves the state after ``step`` complete steps; it is written in the background, if the recipe does not forbid it.

    The checkpoint before is waited for. What was handed to the run's writer earlier is on disk first, so that a run
    resumed from this one lacks no record. Where a worker dies before its share is written there is no checkpoint of
    this step, and no error: the run meets that death by itself.

    Args:
        workers: by role, those whose state is saved.
        info: JSON values: counters, cursors.

    Raises:
        UserError: this or something before it could not be written; in the background the next call that waits for the
            writer raises it (``save``, ``write_later``, ``drain``, ``finish``, the end of the run).
        WorkerDied: a worker is dead already.
    """
    if not run.writer.has_room(CHECKPOINT):
        with run.recorder.span("checkpoint_wait", step=step - 1, role=WRITER):
            run.writer.wait_for_room(CHECKPOINT)
    draft = run.remote.begin(begin_checkpoint(run.checkpoints.absolute(), step))
    config, background = run.recipe.checkpoint, run.recipe.checkpoint.background
    info = copy.deepcopy({**info, "recipe": run.recipe.model_dump(mode="json")})
    copying = run.recorder.span("checkpoint_snapshot", step=step - 1, role=WRITER) if background else nullcontext()
    try:
        with copying:
            await all_ended(
                [
                    worker.call(Checkpointed.save_checkpoint, draft / role, background=background)
                    for role, worker in workers.items()
                ]
            )
        found = None if background else await _written(run, workers, draft)
    except BaseException:
        discard_draft(draft)
        raise

    def complete() -> None:
        try:
            # The thread that writes has no event loop; the run's own may be waiting for that thread.
            shares = asyncio.run(_written(run, workers, draft)) if background else found
        except BaseException:
            discard_draft(draft)
            raise
        if shares is None:
            discard_draft(draft)
            return
        final = complete_checkpoint(draft, info, shares, keep=config.keep)
        run.callbacks.saved.append((step, run.checkpoints / final.name))
        _log.info("the checkpoint of step %d is complete", step)
        run.remote.saved()

    run.write_later(CHECKPOINT, step, complete)


async def load(workers: Workers, checkpoint: Checkpoint) -> None:
    """Every worker takes up its share.

    Raises:
        UserError: it belongs to another model, or cannot be read.
    """
    path = checkpoint.path.absolute()
    await all_ended([worker.call(Checkpointed.load_checkpoint, path / role) for role, worker in workers.items()])


async def load_drafts(engines: Sequence[RoleGroup[Checkpointed]], checkpoint: Checkpoint) -> None:
    """As ``load``; as many engines as there are now share what there was, as drafts change no answer."""
    path = checkpoint.path.absolute()
    num_saved = len(list(path.glob(f"{DRAFTS}*")))
    if num_saved:
        shares = [path / f"{DRAFTS}{i % num_saved}" for i in range(len(engines))]
        pairs = zip(engines, shares, strict=True)
        await all_ended([engine.call(Checkpointed.load_checkpoint, share) for engine, share in pairs])


async def bring(run: RunDirectory, group: RoleGroup[Any], *paths: Path) -> None:
    """Brings what the group's first worker has written into the run's directory to the driver's machine."""
    if isinstance(group, RemoteGroup):
        node = group.group.processes[group.rank or 0].node
        await asyncio.to_thread(run.remote.bring, node, [path.absolute() for path in paths])


async def _written(run: RunDirectory, workers: Workers, draft: Path) -> Shares | None:
    """Digests of all shares once they are written and on the driver's machine; None where one never will be."""
    asked = [partial(worker.call, Checkpointed.finish_checkpoint, draft / role) for role, worker in workers.items()]
    try:
        found = dict(zip(workers, await all_ended([told(ask) for ask in asked]), strict=True))
        if not all(found.values()):
            return None
        run.remote.gather(draft, found)
    except WorkerDied:
        return None
    return found


async def told(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Polls ``ask`` until its result is not None, and returns that."""
    pause_s = _POLL_S
    while (found := await ask()) is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return found


# Rollouts, and groups that are ahead -----------------------------------------------------------------------


async def write_rollouts(run: RunDirectory, writer: RoleGroup[Writer], step: int, experience: Experience) -> None:
    """Has every token of the step written, in the background if the recipe does not forbid it.

    Checkpoints that are saved later are complete only after it. A worker that dies meanwhile takes the step's
    checkpoint with it, so that the step is done again.

    Raises:
        UserError: it could not be written; in the background as ``RunDirectory.write_later`` raises.
    """
    batches = [batch for batch in (experience.batch, experience.greedy) if batch is not None]
    directory, background = run.path.absolute() / "rollouts", run.recipe.checkpoint.background
    writing = writer.call(Writer.write_rollouts, directory, step, batches, background=background)
    if background:
        await writing
        run.write_later("write_rollouts", step, lambda: asyncio.run(_finished(run, writer, step)))
    else:
        with run.recorder.span("write_rollouts", step=step - 1, role="writer"):
            await writing
        await bring(run, writer, rollouts_path(directory, step))
        _show_samples(run, step)


async def _finished(run: RunDirectory, writer: RoleGroup[Writer], step: int) -> None:
    with suppress(WorkerDied):  # which the run meets by itself
        await told(partial(writer.call, Writer.finish_rollouts, step))
        await bring(run, writer, rollouts_path(run.path / "rollouts", step))
        _show_samples(run, step)


def _show_samples(run: RunDirectory, step: int) -> None:
    run.tracker.samples(step, "samples/rollouts", partial(rollout_rows, run.path / "rollouts", step))


async def hold_buffered(writer: RoleGroup[Writer], buffered: BufferedGroups[Group]) -> bool:
    """Hands the writer the groups to save with the next checkpoint; False where there are none."""
    if not buffered.groups and not buffered.rejected:
        return False
    groups = list(buffered.groups.values())
    batch = RaggedBatch.concat([group.made() for group in groups]) if groups else None
    await writer.call(Writer.hold_buffered, batch, [group.prompt.prompt for group in groups], buffered.rejected)
    return True


async def restored_buffered(
    writer: RoleGroup[Writer], checkpoint: Checkpoint, item: Callable[[int], PromptItem]
) -> BufferedGroups[Group] | None:
    """The groups that were ahead, which a resumed run neither loses nor repeats; None where there were none.

    Args:
        item: the data set's item of a stream index.

    Raises:
        UserError: an item has other tokens now.
    """
    if not (checkpoint.path / BUFFERED).is_dir():
        return None
    await load({BUFFERED: writer}, checkpoint)
    indices, rejected = await writer.call(Writer.loaded_buffered)
    if not indices:
        return BufferedGroups({}, tuple(rejected))
    items = {index: item(index) for index in indices}
    prompts, names = [i.prompt for i in items.values()], [i.prompt_id for i in items.values()]
    batch = await writer.leave(Writer.release_buffered, prompts, names)
    groups = {index: Group.of(index, items[index], made) for index, made in by_group(batch).items()}
    return BufferedGroups(groups, tuple(rejected))
