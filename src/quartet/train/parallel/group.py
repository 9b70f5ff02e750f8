"""The ranks of a role, and how they tell each other plain values and failures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

T = TypeVar("T")

_num_gathers: Counter[str] = Counter()
"""By process group: its ranks gather in the same order."""
_COMING_S = 2.0
"""A rank that lives comes to a gather so soon after another one has failed there."""


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

    def gather(self, value: T, *, within: timedelta | None = None) -> list[T]:
        """Every rank's ``value``, in the order of the ranks.

        Args:
            within: how long the others may take to call it, too, from now on; the process group's time limit before.

        Raises:
            RankFailed: a rank is gone or does not answer.
        """
        found: list[Any] = [None] * self.size
        store, group = _get_default_store(), self.process_group or dist.group.WORLD
        assert group is not None
        # Each rank signs in the store, so that one that does not come can be named.
        number = _num_gathers[group.group_name] = _num_gathers[group.group_name] + 1
        sign, former = (f"quartet/{group.group_name}/{n}" for n in (number, number - 1))
        try:
            store.set(f"{sign}/{self.rank}", "")
            if within is not None:
                _set_pg_timeout(within, group)
            dist.all_gather_object(found, value, group=self.process_group)
            store.delete_key(f"{former}/{self.rank}")  # All have come to this one.
        except RuntimeError as error:
            raise RankFailed(f"{self._silent(sign)}: {error}", self.ranks) from error
        return found

    def _silent(self, sign: str) -> str:
        """Who did not come to a gather, in words."""
        store, deadline = _get_default_store(), time.monotonic() + _COMING_S
        silent: list[str] = []
        with suppress(RuntimeError):  # The process that has the store may be gone: what it said last counts.
            while (silent := [str(n) for n in range(self.size) if not store.check([f"{sign}/{n}"])]) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.05)
        if silent:
            return f"no answer of rank {', '.join(silent)} of {self.size}"
        return f"the other ranks of {self.size} cannot be reached any more"
