"""What a run keeps while it trains: checkpoints, of which every worker writes its share, and the rollouts of steps.

The driver writes ``info.json``, and the manifest last. Token ids are written by the writer, the
worker that has them: a step's rollouts, and the groups that are ahead as a share of a checkpoint.

What a trainer gives back: where the run is, its figures, the trained models, and the ways to pass them on.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.errors import WorkerDied
from quartet.config import UserError
from quartet.config.common import ModelConfig, TrainConfig
from quartet.config.plugins import all_jobs, load_object, recipe_classes
from quartet.config.recipe import RLRecipe
from quartet.config.run import SupervisedRecipe
from quartet.config.strict import is_url
from quartet.data.datasets import PromptItem
from quartet.models.loading import load_causal_lm, save_causal_lm, save_scalar_model
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.observe.rollouts import rollout_rows, rollouts_path
from quartet.remote.hub import upload_folder
from quartet.schedule.clock import gather_all
from quartet.schedule.groups import BufferedGroups, PromptGroup, split_by_group
from quartet.schedule.model_worker import Checkpointed, RolloutWriter
from quartet.schedule.role_group import RemoteGroup, RoleGroup
from quartet.text.loading import has_older_model
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import (
    Checkpoint,
    CheckpointShare,
    Shares,
    begin_checkpoint,
    checkpoint_step,
    complete_checkpoint,
    delete_path,
    find_checkpoint,
)
from quartet.train.state import MODEL, check_state_fits, model_tensors, tensor_shapes
from quartet.trainers.experience import Experience
from quartet.trainers.input_sources import (
    connect_pictures,
    feature_store,
    open_pictures,
    resolve_model,
    resolve_scalar_model,
    resolve_tokenizer,
)
from quartet.trainers.run import CHECKPOINT, WRITER, RunDirectory
from quartet.trainers.run_files import (
    MARKER,
    naming_write_errors,
    noted_budgets,
    read_json,
    recipe_job,
    verify_model_digests,
    write_digests,
)

T = TypeVar("T")
BUFFERED = "ahead"
"""Name of the writer's share; there is none where nothing is ahead."""
DRAFTS = "drafts_"
"""And a number: the share of an engine that drafts."""
Workers = Mapping[str, RoleGroup[Checkpointed]]
_POLL_S, _LONGEST_POLL_S = 0.005, 0.25
_log = logging.getLogger(__name__)


async def check_storage(run: RunDirectory, workers: Workers) -> None:
    """Checks that every worker sees the run's directory; of a run at a URL, has machines of Ray that do not see it
    reach it through the store.

    Raises:
        UserError: a worker of any other run does not see it, or it cannot be written to.
    """
    await asyncio.to_thread(run.remote.join, ())
    token = run.path.absolute() / f".seen_{os.getpid()}"
    with naming_write_errors(token):
        token.mkdir(exist_ok=True)
    try:
        await gather_all([worker.call(Checkpointed.check_sees, token) for worker in workers.values()])
    except UserError:
        groups = [worker.group for worker in workers.values() if isinstance(worker, RemoteGroup)]
        if len(groups) < len(workers) or not is_url(run.recipe.output_dir):
            raise
        await asyncio.to_thread(run.remote.join, groups)
    finally:
        token.rmdir()


async def save_checkpoint(run: RunDirectory, workers: Workers, step: int, info: Mapping[str, Any]) -> None:
    """Saves the state after ``step`` complete steps; it is written in the background, if the recipe does not forbid it.

    The checkpoint before is waited for. What was handed to the run's writer earlier is on disk first, so that a run
    resumed from this one lacks no record. Where a worker dies before its share is written there is no checkpoint of
    this step, and no error: the run meets that death by itself.

    Args:
        workers: by role, those whose state is saved.
        info: JSON values: counters, cursors.

    Raises:
        UserError: this or something before it could not be written; in the background the next call that waits for the
            writer raises it (``save_checkpoint``, ``write_later``, ``drain``, ``finish``, the end of the run).
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
            await gather_all(
                [
                    worker.call(Checkpointed.save_checkpoint, draft / role, background=background)
                    for role, worker in workers.items()
                ]
            )
        found = None if background else await _written(run, workers, draft)
    except BaseException:
        delete_path(draft)
        raise

    def complete() -> None:
        try:
            # The thread that writes has no event loop; the run's own may be waiting for that thread.
            shares = asyncio.run(_written(run, workers, draft)) if background else found
        except BaseException:
            delete_path(draft)
            raise
        if shares is None:
            delete_path(draft)
            return
        final = complete_checkpoint(draft, info, shares, keep=config.keep)
        run.callbacks.saved.append((step, run.checkpoints / final.name))
        _log.info("the checkpoint of step %d is complete", step)
        run.remote.saved()

    run.write_later(CHECKPOINT, step, complete)


async def load_states(workers: Workers, checkpoint: Checkpoint) -> None:
    """Has every worker take up its share.

    Raises:
        UserError: it belongs to another model, or cannot be read.
    """
    path = checkpoint.path.absolute()
    await gather_all([worker.call(Checkpointed.load_checkpoint, path / role) for role, worker in workers.items()])


async def load_drafts(engines: Sequence[RoleGroup[Checkpointed]], checkpoint: Checkpoint) -> None:
    """Has every engine take up its share as ``load_states`` does; as many engines as there are now share what there
    was, as drafts change no answer."""
    path = checkpoint.path.absolute()
    num_saved = len(list(path.glob(f"{DRAFTS}*")))
    if num_saved:
        shares = [path / f"{DRAFTS}{i % num_saved}" for i in range(len(engines))]
        pairs = zip(engines, shares, strict=True)
        await gather_all([engine.call(Checkpointed.load_checkpoint, share) for engine, share in pairs])


async def lower_budgets(run: Path, workers: Mapping[str, RoleGroup[Any]]) -> None:
    """Has every worker, by role, take over what is noted for it: more than its checkpoint may know.

    Raises:
        UserError: the notes are damaged.
    """
    noted = noted_budgets(run)
    for role in workers.keys() & {budget.role for budget in noted}:
        own = [budget for budget in noted if budget.role == role]
        await workers[role].call(Checkpointed.lower_budgets, own)


async def bring_to_driver(run: RunDirectory, group: RoleGroup[Any], *paths: Path) -> None:
    """Brings what the group's first worker has written into the run's directory to the driver's machine."""
    if isinstance(group, RemoteGroup):
        node = group.group.processes[group.rank or 0].node
        await asyncio.to_thread(run.remote.bring, node, [path.absolute() for path in paths])


async def _written(run: RunDirectory, workers: Workers, draft: Path) -> Shares | None:
    """Returns the digests of all shares once they are written and on the driver's machine; None where one never will
    be."""
    asked = [partial(worker.call, Checkpointed.finish_checkpoint, draft / role) for role, worker in workers.items()]
    try:
        found = dict(zip(workers, await gather_all([poll(ask) for ask in asked]), strict=True))
        if not all(found.values()):
            return None
        run.remote.gather(draft, found)
    except WorkerDied:
        return None
    return found


async def poll(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Polls ``ask`` until its result is not None, and returns that."""
    pause_s = _POLL_S
    while (found := await ask()) is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return found


# Rollouts, and groups that are ahead -----------------------------------------------------------------------


async def write_rollouts(
    run: RunDirectory, writer: RoleGroup[RolloutWriter], step: int, experience: Experience
) -> None:
    """Has every token of the step written, in the background if the recipe does not forbid it.

    Checkpoints that are saved later are complete only after it. A worker that dies meanwhile takes the step's
    checkpoint with it, so that the step is done again.

    Raises:
        UserError: it could not be written; in the background as ``RunDirectory.write_later`` raises.
    """
    batches = [batch for batch in (experience.batch, experience.greedy) if batch is not None]
    directory, background = run.path.absolute() / "rollouts", run.recipe.checkpoint.background
    writing = writer.call(RolloutWriter.write_rollouts, directory, step, batches, background=background)
    if background:
        await writing
        run.write_later("write_rollouts", step, lambda: asyncio.run(_finished(run, writer, step)))
    else:
        with run.recorder.span("write_rollouts", step=step - 1, role="writer"):
            await writing
        await bring_to_driver(run, writer, rollouts_path(directory, step))
        _show_samples(run, step)


async def _finished(run: RunDirectory, writer: RoleGroup[RolloutWriter], step: int) -> None:
    with suppress(WorkerDied):  # which the run meets by itself
        await poll(partial(writer.call, RolloutWriter.finish_rollouts, step))
        await bring_to_driver(run, writer, rollouts_path(run.path / "rollouts", step))
        _show_samples(run, step)


def _show_samples(run: RunDirectory, step: int) -> None:
    run.tracker.samples(step, "samples/rollouts", partial(rollout_rows, run.path / "rollouts", step))


async def save_buffered_groups(writer: RoleGroup[RolloutWriter], buffered: BufferedGroups) -> bool:
    """Hands the writer the groups to save with the next checkpoint; False where there are none."""
    if not buffered.groups and not buffered.rejected:
        return False
    groups = list(buffered.groups.values())
    batch = RaggedBatch.concat([group.made() for group in groups]) if groups else None
    await writer.call(RolloutWriter.hold_buffered, batch, [group.prompt.prompt for group in groups], buffered.rejected)
    return True


async def restore_buffered_groups(
    writer: RoleGroup[RolloutWriter], checkpoint: Checkpoint, item: Callable[[int], PromptItem]
) -> BufferedGroups | None:
    """Returns the groups that were ahead, which a resumed run neither loses nor repeats; None where there were none.

    Args:
        item: the data set's item of a stream index.

    Raises:
        UserError: an item has other tokens now.
    """
    if not (checkpoint.path / BUFFERED).is_dir():
        return None
    await load_states({BUFFERED: writer}, checkpoint)
    indices, rejected = await writer.call(RolloutWriter.loaded_buffered)
    if not indices:
        return BufferedGroups({}, tuple(rejected))
    items = {index: item(index) for index in indices}
    prompts, names = [i.prompt for i in items.values()], [i.prompt_id for i in items.values()]
    batch = await writer.leave(RolloutWriter.release_buffered, prompts, names)
    groups = {index: PromptGroup.of(index, items[index], made) for index, made in split_by_group(batch).items()}
    return BufferedGroups(groups, tuple(rejected))


@dataclass(frozen=True)
class TrainResult:
    """Where a training run is, and what ``summary.json`` holds.

    Args:
        load_model, load_critic: give the trained models; no critic where the job trains none.
    """

    path: Path
    summary: dict[str, Any]
    load_model: Callable[[], PreTrainedModel]
    load_critic: Callable[[], PreTrainedModel] | None = None

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model: the object trained in this process, or what a worker wrote, loaded when first asked for.

        Raises:
            UserError: what a worker wrote is not there any more, or only its adapters were saved.
        """
        return self.load_model()

    @cached_property
    def critic(self) -> PreTrainedModel | None:
        """The trained critic, where the method has one; as ``model``."""
        return self.load_critic() if self.load_critic is not None else None

    def save_pretrained(self, path: str | Path) -> Path:
        """Copies the exported model, its tokenizer and its model card to ``path``, a new directory or an empty one.

        Raises:
            UserError: there is something already, it cannot be written, or the run's export is gone.
        """
        return _copy(exported_directory(self.path), Path(path))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Uploads the exported model, its tokenizer and its model card to the hub; returns the commit's address.

        Args:
            repo_id: ``owner/name``, or ``name`` for the account that is logged in; made where there is none.
            private: of a new repository; as the account has it when left out.
            token: the one that is logged in (``HF_TOKEN``, ``hf auth login``) when left out; kept nowhere.
            revision: a branch, made where there is none; the main one when left out.

        Raises:
            UserError: the hub refuses it or cannot be reached, or the run's export is gone.
        """
        source = exported_directory(self.path)
        return upload_folder(source, repo_id, private=private, token=token, revision=revision, message=commit_message)


def exported_directory(run: Path) -> Path:
    """Returns the directory that the run in ``run`` has exported: ``model``, or ``adapter`` where it is alone.

    Raises:
        UserError: there is none.
    """
    for name in () if has_older_model(run) else ("model", "adapter"):
        if any((run / name).glob("*.safetensors")):
            return run / name
    raise UserError(
        f"{run} holds no exported model or adapter of its last step",
        found=", ".join(sorted(p.name for p in run.iterdir())[:8]) if run.is_dir() else "no such directory",
        remedy="name a run that is done; one that was stopped exports its model once it went on to its end (--resume)",
    )


def _copy(source: Path, target: Path) -> Path:
    target = target.expanduser()
    with naming_write_errors(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(
                f"{target} is not empty",
                found="a file" if not target.is_dir() else ", ".join(sorted(p.name for p in target.iterdir())[:5]),
                remedy="choose a new directory",
            )
        shutil.copytree(source, target, dirs_exist_ok=True)
        write_digests(target)
    return target


# From a run or a checkpoint to a model -----------------------------------------------------------------------


def export_model(
    source: str | Path,
    step: int | None,
    target: Path,
    base: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Path, str | None]:
    """Writes a Hugging Face directory of a run, of the checkpoint of one of its steps, or of a checkpoint's path.

    Args:
        step: None: the run's exported model, or where it has none the newest checkpoint.
        base: the model that the run began with, where that is not where its recipe says, or came from Python.
        trust_remote_code: run Python code that comes with that model; whoever wrote the run may not decide it here.

    Returns:
        The directory, and a warning for its users.

    Raises:
        UserError: ``target`` is not empty, or nothing can be made of the source.
    """
    path = Path(source).expanduser()
    root = path / "checkpoints"
    if _is_checkpoint(path):
        root, step = path.parent, checkpoint_step(path)
    if step is None and _has_model(path):
        verify_model_digests(path / "model")
        return _copy(path / "model", target), None
    with tempfile.TemporaryDirectory() as empty:
        _copy(Path(empty), target)  # refuses one that is not empty before anything is computed
    checkpoint = find_checkpoint(root, step)
    warning = _write_checkpoint(checkpoint, target.expanduser(), base, trust_remote_code)
    with naming_write_errors(target):
        write_digests(target.expanduser())
    return target.expanduser(), warning


def model_directory(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> str:
    """Returns the model directory that ``name`` means, once its weights were compared with their digests where it has
    some.

    Of a run that is the model it has exported, or where there is none yet that of its newest checkpoint; of
    ``RUN/checkpoints/step_N`` the model of that step. What is made of a checkpoint is gone when this process ends.
    Anything else, such as a name of the hub, stays as it is, with its revision if it has one.

    Raises:
        UserError: weights have changed since they were written, or a checkpoint cannot be used.
    """
    if revision is not None:
        return f"{name}@{revision}"
    path = Path(name).expanduser()
    is_run = (path / MARKER).is_file() and not (path / "config.json").is_file()
    if (is_run and not _has_model(path)) or _is_checkpoint(path):
        folder = tempfile.TemporaryDirectory(prefix="quartet-export-")
        atexit.register(folder.cleanup)
        return str(export_model(path, None, Path(folder.name) / "model", trust_remote_code=trust_remote_code)[0])
    found = path if (path / "config.json").is_file() else path / "model"
    verify_model_digests(found)
    return str(found) if found.is_dir() else name


def _has_model(run: Path) -> bool:
    return any((run / "model").glob("*.safetensors")) and not has_older_model(run)


def _is_checkpoint(path: Path) -> bool:
    return checkpoint_step(path) is not None and (path / "info.json").is_file()


def _write_checkpoint(checkpoint: Checkpoint, target: Path, base: str | None, trust_remote_code: bool) -> str | None:
    saved, commits = checkpoint.info.get("recipe"), _commits(checkpoint.path.parent.parent)
    recipe = (
        recipe_classes()[saved["job"]](**saved) if isinstance(saved, dict) and saved.get("job") in all_jobs() else None
    )
    if isinstance(recipe, RLRecipe):
        section, train, key, share = recipe.actor.model, recipe.actor.train, "actor.model", "actor"
    elif isinstance(recipe, SupervisedRecipe) and all_jobs()[recipe.job].is_supervised:
        section, train, key, share = recipe.model, recipe.train, "model", "engine"
    else:
        raise UserError(
            "no model can be made of this checkpoint",
            found=f"{checkpoint.path}, job {saved.get('job') if isinstance(saved, dict) else 'unknown'}",
            remedy="name a run of sft, reward-model, process-reward, preference or rl",
        )
    if base is not None:
        section = ModelConfig(path=base) if section is None else section.model_copy(update={"path": base})
    elif section is not None:
        names = {name: commits[f"{key}.{name}"] for name in ("path", "tokenizer") if f"{key}.{name}" in commits}
        section = section.model_copy(update={**names, **({"revision": None} if names else {})})
    if section is None:
        raise UserError(
            "the run does not say which model it began with",
            found=f"a model was passed from Python, and {key} is not set",
            remedy="name a directory with its config and tokenizer: quartet export RUN DIR --model BASE",
        )
    section = section.model_copy(update={"trust_remote_code": trust_remote_code})
    packed, codec = _trained_model(recipe, section, train, checkpoint.path / share)
    with naming_write_errors(target):
        if not isinstance(packed, PackedScalarModel):
            return save_causal_lm(packed, codec.tokenizer, target, eos_ids=codec.eos_ids)
        # Which tokens the data have is not known here, so that none of them pads.
        seen = torch.ones(packed.vocab_size, dtype=torch.bool)
        warning = save_scalar_model(packed, codec.tokenizer, target, seen=seen, eos_ids=codec.eos_ids)
        if (beside := all_jobs()[recipe_job(recipe)].beside) is not None:
            load_object(beside)(recipe, target)
        return warning


def _commits(run: Path) -> Mapping[str, str]:
    """Returns the commits of the run's models on the hub, by their keys."""
    try:
        return dict(read_json(run / MARKER).get("commits", {}))
    except (UserError, ValueError, AttributeError):
        return {}


def _trained_model(
    recipe: RLRecipe | SupervisedRecipe, section: ModelConfig, train: TrainConfig, share: Path
) -> tuple[PackedCausalLM | PackedScalarModel, TextCodec]:
    """Loads the model of a checkpoint's share, whatever ranks wrote it, with its adapters if it has any."""
    packed: PackedCausalLM | PackedScalarModel
    if isinstance(recipe, SupervisedRecipe) and recipe.is_scalar:
        model, generation = resolve_scalar_model(section, None, seed=recipe.seed)
        packed = PackedScalarModel(model)
    else:
        model = resolve_model(section, None, load_causal_lm, "model")
        packed, generation = PackedCausalLM(model), model.generation_config
    saved = CheckpointShare(share)
    if train.lora is not None:
        packed.adapt(train.lora.model_copy(update={"export": "merged"}), seed=recipe.seed)
        assert packed.adapters is not None, "just put in"
        packed.adapters.check_base(saved.rest())
    live = model_tensors(model.state_dict() if packed.adapters is None else packed.adapters.trained)
    check_state_fits(
        tensor_shapes(live),
        {name: shape for name, shape in saved.shapes.items() if name.startswith(MODEL)},
        "name the model that the run began with: quartet export RUN DIR --model BASE",
    )
    saved.read_into(live)
    pictures = open_pictures(section, model, None, recipe.pictures)
    codec = TextCodec.of(resolve_tokenizer(section, None), generation, pictures)
    connect_pictures(packed, feature_store(codec))  # whose processor is exported, too
    return packed, codec
