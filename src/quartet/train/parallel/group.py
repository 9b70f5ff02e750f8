"""The ranks of a role, and how they tell each other plain values and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankFailed(Exception):
    """Another rank failed, or cannot be reached any more; this rank's model took no part in it.

    Args:
        known_to: the ranks that are not to be told again.
    """

    is_echo = True
    """Among failures of several ranks the other rank's is reported first."""

    def __init__(self, message: str, known_to: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.known_to = tuple(known_to)


def is_broken_collective(error: BaseException) -> bool:
    """Whether another rank is the cause: a collective failed with torch's own types of errors, or gloo's, which is a
    plain RuntimeError."""
    return isinstance(error, RankFailed | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class DataParallelGroup:
    """The data ranks of one role.

    Args:
        group: their process group; the default group where it is None.

    Attributes:
        ranks: their numbers in the default group.
        is_reporting: a failure of this rank will be told to the others by what has called what runs now.
    """

    is_reporting = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = list(range(self.size)) if group is None else dist.get_process_group_ranks(group)

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
            raise RankFailed(
                f"the other ranks of {self.size} cannot be reached any more: {error}", self.ranks
            ) from error
