"""Workers whose state is a share of a run's checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from quartet.cluster.dispatch import Custom, dispatch
from quartet.cluster.layout import Layout
from quartet.config import UserError
from quartet.observe.digests import FileDigest
from quartet.train.checkpoint import Share, ShareWriter
from quartet.train.state import Shape


def _with_rank(layout: Layout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, {**kwargs, "rank": rank}) for rank in range(layout.world_size)]


def same_for_all(layout: Layout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, kwargs)] * layout.world_size


def _all_files(layout: Layout, found: list[dict[str, FileDigest] | None]) -> dict[str, FileDigest] | None:
    """Of all ranks together: None until all have theirs, empty where one never will."""
    if any(files is None for files in found):
        return None
    return {name: digest for files in found for name, digest in (files or {}).items()} if all(found) else {}


class Checkpointed(ABC):
    """A worker that writes its share of a checkpoint itself, and reads it; what several have the first one writes."""

    _writer: ShareWriter | None = None

    def check_sees(self, directory: Path) -> None:
        """
        Args:
            directory: which the driver has made.

        Raises:
            UserError: this process does not see it.
        """
        if not directory.is_dir():
            raise UserError(
                "a worker does not see the run's directory",
                found=f"{directory}, made by the driver, is not there on the worker's machine",
                remedy="set output_dir to a directory on storage that all machines share, where workers write their "
                "checkpoints and models themselves, or on Ray to a URL (s3://…)",
            )

    @dispatch(Custom(_with_rank, lambda layout, found: None))
    def save_checkpoint(self, directory: Path, *, background: bool, rank: int = 0) -> None:
        """Writes this rank's part of the state into the new ``directory``; with ``background`` from a copy, while the
        worker goes on.

        Raises:
            UserError: it could not be written; in the background ``finish_checkpoint`` raises that.
        """
        self.check_sees(directory.parent)
        if self._writer is None:
            self._writer = ShareWriter()
        self._writer.begin(directory, self.checkpoint_state(), background=background, rank=rank)

    @dispatch(Custom(same_for_all, _all_files))
    def finish_checkpoint(self, directory: Path) -> dict[str, FileDigest] | None:
        """Digests of the files in ``directory`` once they are written, until then None; does not wait.

        Empty where this process has not begun that share.
        """
        return self._writer.finish(directory) if self._writer is not None else {}

    def load_checkpoint(self, directory: Path) -> None:
        """Takes up a share, in every replica.

        Raises:
            UserError: it is not there, cannot be read or belongs to another model.
        """
        self.check_sees(directory.parent)
        share = Share(directory)
        with self.loading(share.shapes, share.rest()) as live:
            share.read_into(live)

    @abstractmethod
    def checkpoint_state(self) -> dict[str, Any]:
        """The state, named as in ``train.state``."""

    @abstractmethod
    def loading(
        self, saved: Mapping[str, Shape], rest: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """As ``TrainEngine.loading``."""
