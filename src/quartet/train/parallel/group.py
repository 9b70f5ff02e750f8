"""The ranks of a role, and how they tell each other plain values and failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankFailed(Exception):
    """Another rank failed, or cannot be reached any more; this rank's model took no part in it."""

    is_echo = True
    """Among failures of several ranks the other rank's is reported first."""


class DataParallelGroup:
    """The data ranks of one role.

    Args:
        group: their process group; the default group where it is None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def of_world(cls) -> DataParallelGroup:
        """All ranks of the default process group."""
        return cls()

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in the order of the ranks.

        Raises:
            RankFailed: a rank is gone.
        """
        found: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankFailed(f"the other ranks of {self.size} cannot be reached any more: {error}") from error
