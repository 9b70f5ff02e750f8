"""What the driver asks of the writer: a step's rollouts, and the groups that are ahead as a share of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.errors import WorkerDied
from quartet.data.datasets import PromptItem
from quartet.schedule.groups import Group, by_group
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.stream import Ahead
from quartet.schedule.writer import Writer
from quartet.train.checkpoint import Checkpoint
from quartet.trainers import checkpoints
from quartet.trainers.advantages import Experience
from quartet.trainers.run import RunDirectory

AHEAD = "ahead"
"""Name of the writer's share; there is none where nothing is ahead."""


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
        run.write_later("write_rollouts", step, lambda: asyncio.run(_finished(writer, step)))
    else:
        with run.recorder.span("write_rollouts", step=step - 1, role="writer"):
            await writing


async def _finished(writer: RoleGroup[Writer], step: int) -> None:
    try:
        await checkpoints.told(lambda: writer.call(Writer.finish_rollouts, step))
    except WorkerDied:
        return  # which the run meets by itself


async def hold_ahead(writer: RoleGroup[Writer], ahead: Ahead[Group]) -> bool:
    """Hands the writer what its share of the next checkpoint is; False where that is nothing."""
    if not ahead.groups and not ahead.rejected:
        return False
    groups = list(ahead.groups.values())
    batch = RaggedBatch.concat([group.made() for group in groups]) if groups else None
    await writer.call(Writer.hold_ahead, batch, [group.prompt.prompt for group in groups], ahead.rejected)
    return True


async def restored_ahead(
    writer: RoleGroup[Writer], checkpoint: Checkpoint, item: Callable[[int], PromptItem]
) -> Ahead[Group] | None:
    """The groups that were ahead, which a resumed run neither loses nor repeats; None where there were none.

    Args:
        item: the data set's item of a stream index.

    Raises:
        UserError: an item has other tokens now, or an earlier version saved the groups.
    """
    if AHEAD not in checkpoint.parts and not (checkpoint.path / AHEAD).is_dir():
        return None
    await checkpoints.load({AHEAD: writer}, checkpoint)
    indices, rejected = await writer.call(Writer.loaded_ahead)
    if not indices:
        return Ahead({}, tuple(rejected))
    items = {index: item(index) for index in indices}
    prompts, names = [i.prompt for i in items.values()], [i.prompt_id for i in items.values()]
    batch = await writer.leave(Writer.release_ahead, prompts, names)
    groups = {index: Group.of(index, items[index], made) for index, made in by_group(batch).items()}
    return Ahead(groups, tuple(rejected))
