"""What a trainer gives back: where the run is, its figures, the trained models, and the ways to pass them on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.remote.hub import push
from quartet.trainers.run_files import writing


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
        source, target = exported(self.path), Path(path).expanduser()
        with writing(target):
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise UserError(
                    f"{target} is not empty",
                    found="a file" if not target.is_dir() else ", ".join(sorted(p.name for p in target.iterdir())[:5]),
                    remedy="choose a new directory",
                )
            return Path(shutil.copytree(source, target, dirs_exist_ok=True))

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
    for name in ("model", "adapter"):
        if any((run / name).glob("*.safetensors")):
            return run / name
    raise UserError(
        f"{run} holds no exported model or adapter",
        found=", ".join(sorted(p.name for p in run.iterdir())[:8]) if run.is_dir() else "no such directory",
        remedy="name a run that is done; one that was stopped exports its model once it went on to its end (--resume)",
    )
