"""Which rows a step uses, as a pure function of seed and step: a resumed run reads on exactly where it
stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """Sources of rows that follow each other in one data set, and their shares of what is drawn.

    An epoch is as many draws as there are rows in all sources together. Of these a source has its share, rounded to
    whole rows, at least one. Its own rows are gone through in passes, each a new permutation: it begins the next pass
    where the rows of the last have run out, in the middle of an epoch or several epochs later.

    Args:
        sizes: rows of each source.
        weights: in proportion to the shares.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Draws of each source in an epoch."""
        whole = sum(self.weights)
        exact = [len(self) * weight / whole for weight in self.weights]
        found = [int(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda s: (found[s] - exact[s], s))
        for source in by_rest[: len(self) - sum(found)]:
            found[source] += 1
        while 0 in found:
            found[found.index(max(found))] -= 1
            found[found.index(0)] = 1
        return tuple(found)

    def draw(self, seed: int, place: int) -> tuple[int, int]:
        """``(row index, pass)`` of draw number ``place``."""
        epoch, position = divmod(place, len(self))
        rank = int(_permutation(seed, epoch, len(self))[position])
        source = bisect_right(self._ends, rank)
        first = self._ends[source] - self.counts[source]
        size = self.sizes[source]
        number, within = divmod(epoch * self.counts[source] + rank - first, size)
        return sum(self.sizes[:source]) + int(self._pass_order(seed, source, number)[within]), number

    def _pass_order(self, seed: int, source: int, number: int) -> NDArray[np.int32]:
        """``[n]``: the order of a source's rows in one of its passes; of each source two are kept."""
        place, key = (source, number % 2), (seed, number)
        if place not in self._orders or self._orders[place][0] != key:
            self._orders[place] = key, _shuffled([seed, number, source + 1], self.sizes[source])
        return self._orders[place][1]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], tuple[tuple[int, int], NDArray[np.int32]]]:
        return {}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.counts))


def _shuffled(key: list[int], n: int) -> NDArray[np.int32]:
    """``[n]``; 4 bytes per row, where a tuple has 40."""
    return np.random.Generator(np.random.PCG64(key)).permutation(n).astype(np.int32)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> NDArray[np.int32]:
    return _shuffled([seed, epoch], n)


def draw(seed: int, place: int, rows: int | Mixture) -> tuple[int, int]:
    """``(row index, epoch)`` of draw number ``place``; of a mixture the pass of the row's source."""
    if isinstance(rows, Mixture):
        return rows.draw(seed, place)
    epoch, position = divmod(place, rows)
    return int(_permutation(seed, epoch, rows)[position]), epoch


def draws(seed: int, step: int, rows: int | Mixture, batch_size: int) -> list[tuple[int, int]]:
    """``draw`` of each of the step's places; epochs follow each other without a short last batch.

    Args:
        rows: their number, or the sources that they come from.
    """
    if (rows if isinstance(rows, int) else len(rows)) < 1 or batch_size < 1 or step < 0:
        raise ValueError(f"nothing to draw: {rows} rows, {batch_size} per step, step {step}")
    return [draw(seed, place, rows) for place in range(step * batch_size, (step + 1) * batch_size)]


def steps_for(epochs: int, n: int, batch_size: int) -> int:
    """Steps of at least ``epochs`` epochs, in which every row is seen so many times (not so in a mixture)."""
    return -(-epochs * n // batch_size)
