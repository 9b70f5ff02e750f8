"""What a trainer gives back: where the run is, its figures, the trained models, and the ways to pass them on."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.config.common import ModelConfig, TrainConfig
from quartet.config.jobs import jobs, recipes
from quartet.config.nearest import has_older_model
from quartet.config.plugins import load
from quartet.config.recipe import RLRecipe
from quartet.config.supervised import SupervisedRecipe
from quartet.models.loading import load_causal_lm, save_causal_lm, save_scalar_model
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.remote.hub import push
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import Checkpoint, Share, find_checkpoint, step_of
from quartet.train.state import MODEL, check_fit, model_tensors, shapes_of
from quartet.trainers.input_sources import resolve_model, resolve_scalar_model, resolve_tokenizer
from quartet.trainers.run_files import MARKER, check_written, job_of, read_json, write_digests, writing


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
        return _copy(exported(self.path), Path(path))

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
        source = exported(self.path)
        return push(source, repo_id, private=private, token=token, revision=revision, message=commit_message)


def exported(run: Path) -> Path:
    """The directory that the run in ``run`` has exported: ``model``, or ``adapter`` where it is alone.

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
    with writing(target):
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


def export(
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
        root, step = path.parent, step_of(path)
    if step is None and _has_model(path):
        check_written(path / "model")
        return _copy(path / "model", target), None
    with tempfile.TemporaryDirectory() as empty:
        _copy(Path(empty), target)  # refuses one that is not empty before anything is computed
    checkpoint = find_checkpoint(root, step)
    warning = _write_checkpoint(checkpoint, target.expanduser(), base, trust_remote_code)
    with writing(target):
        write_digests(target.expanduser())
    return target.expanduser(), warning


def model_directory(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> str:
    """The model directory that ``name`` means, once its weights were compared with their digests where it has some.

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
        return str(export(path, None, Path(folder.name) / "model", trust_remote_code=trust_remote_code)[0])
    found = path if (path / "config.json").is_file() else path / "model"
    check_written(found)
    return str(found) if found.is_dir() else name


def _has_model(run: Path) -> bool:
    return any((run / "model").glob("*.safetensors")) and not has_older_model(run)


def _is_checkpoint(path: Path) -> bool:
    return step_of(path) is not None and (path / "info.json").is_file()


def _write_checkpoint(checkpoint: Checkpoint, target: Path, base: str | None, trust_remote_code: bool) -> str | None:
    saved, commits = checkpoint.info.get("recipe"), _commits(checkpoint.path.parent.parent)
    recipe = recipes()[saved["job"]](**saved) if isinstance(saved, dict) and saved.get("job") in jobs() else None
    if isinstance(recipe, RLRecipe):
        section, train, key, share = recipe.actor.model, recipe.actor.train, "actor.model", "actor"
    elif isinstance(recipe, SupervisedRecipe) and jobs()[recipe.job].is_supervised:
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
    with writing(target):
        if not isinstance(packed, PackedScalarModel):
            return save_causal_lm(packed, codec.tokenizer, target, eos_ids=codec.eos_ids)
        # Which tokens the data have is not known here, so that none of them pads.
        seen = torch.ones(packed.vocab_size, dtype=torch.bool)
        warning = save_scalar_model(packed, codec.tokenizer, target, seen=seen, eos_ids=codec.eos_ids)
        if (beside := jobs()[job_of(recipe)].beside) is not None:
            load(beside)(recipe, target)
        return warning


def _commits(run: Path) -> Mapping[str, str]:
    """Of the run's models on the hub, by their keys."""
    try:
        return dict(read_json(run / MARKER).get("commits", {}))
    except (UserError, ValueError, AttributeError):
        return {}


def _trained_model(
    recipe: RLRecipe | SupervisedRecipe, section: ModelConfig, train: TrainConfig, share: Path
) -> tuple[PackedCausalLM | PackedScalarModel, TextCodec]:
    """The model of a checkpoint's share, whatever ranks wrote it, with its adapters if it has any."""
    packed: PackedCausalLM | PackedScalarModel
    if isinstance(recipe, SupervisedRecipe) and recipe.is_scalar:
        model, generation = resolve_scalar_model(section, None, seed=recipe.seed)
        packed = PackedScalarModel(model)
    else:
        model = resolve_model(section, None, load_causal_lm, "model")
        packed, generation = PackedCausalLM(model), model.generation_config
    saved = Share(share)
    if train.lora is not None:
        packed.adapt(train.lora.model_copy(update={"export": "merged"}), seed=recipe.seed)
        assert packed.adapters is not None, "just put in"
        packed.adapters.check_base(saved.rest())
    live = model_tensors(model.state_dict() if packed.adapters is None else packed.adapters.trained)
    check_fit(
        shapes_of(live),
        {name: shape for name, shape in saved.shapes.items() if name.startswith(MODEL)},
        "name the model that the run began with: quartet export RUN DIR --model BASE",
    )
    saved.read_into(live)
    return packed, TextCodec.of(resolve_tokenizer(section, None), generation)
