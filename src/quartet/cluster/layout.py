"""Which ranks of a group work on the same data, and which of them answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from quartet.config.errors import UserError

DATA = "data"


@dataclass(frozen=True)
class Layout:
    """Ranks as a mesh of named axes, outermost first; the last axis varies fastest, as in a torch ``DeviceMesh``.

    Along ``data`` every rank has a part of the batch of its own. Along all other axes (``tensor``, ``context``, …)
    ranks work on the same part, and the first of them answers. Eight ranks as ``data=2, tensor=4``::

        rank      0  1  2  3   4  5  6  7
        part      0  0  0  0   1  1  1  1
        answers   x            x
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"an axis stands twice: {names}")
        if any(size < 1 for _, size in self.axes):
            raise ValueError(f"every axis needs at least one rank, found {dict(self.axes)}")

    @classmethod
    def fit(cls, world_size: int, sizes: Mapping[str, int] | None = None) -> Layout:
        """The layout of ``world_size`` ranks with axes of these sizes; ``data`` takes what is left, outermost.

        Raises:
            UserError: the sizes do not divide the number of processes.
        """
        given = {name: size for name, size in (sizes or {}).items() if name != DATA}
        within = math.prod(given.values())
        data = (sizes or {}).get(DATA, max(world_size // within, 1))
        if data * within != world_size:
            product = " × ".join(f"{name} {size}" for name, size in {DATA: data, **given}.items())
            below, above = world_size // within * within, -(-world_size // within) * within
            nearest = f"{below} or {above}" if below and below != above else f"{above}"
            raise UserError(
                "the sizes of a layout do not make up the number of its processes",
                found=f"{world_size} processes, {product} = {data * within}",
                remedy=f"use {nearest} processes, or sizes whose product divides {world_size}",
            )
        return cls(((DATA, data), *given.items()))

    @cached_property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @cached_property
    def parts(self) -> int:
        """How many parts a batch is split into."""
        return self.size(DATA)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 where there is no such axis."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """Per rank the part it works on."""
        return tuple(self.coordinates(rank).get(DATA, 0) for rank in range(self.world_size))

    @cached_property
    def answering(self) -> tuple[int, ...]:
        """Per part the rank that answers for it."""
        chosen: dict[int, int] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            part = at.pop(DATA, 0)
            if not any(at.values()):
                chosen[part] = rank
        return tuple(chosen[part] for part in range(self.parts))
