"""Metrics of an update as sums over its micro-batches, so that cutting does not change them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainSums:
    """``MetricSums`` in numbers: a name without a weight is a sum, not a mean."""

    totals: Mapping[str, float]
    weights: Mapping[str, float]
    maxima: Mapping[str, float]


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    value = value.detach().to(torch.float64)
    sums[name] = sums[name] + value if name in sums else value


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class MetricSums:
    """Means with their weights, and maxima, collected without waiting for the device."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds the values under the boolean ``mask``, or all of them, to the mean called ``name``."""
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        weight = mask.to(torch.float64)
        self.add(name, (values.detach().to(torch.float64).masked_fill(~mask, 0.0) * weight).sum(), weight.sum())

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        _add(self._totals, name, total)
        _add(self._weights, name, weight)

    def total(self, name: str, value: Tensor) -> None:
        """Adds to a sum over micro-batches (a loss already divided by its global denominator)."""
        _add(self._totals, name, value)

    def maximum(self, name: str, values: Tensor, mask: Tensor) -> None:
        if not values.numel():
            return
        value = values.detach().to(torch.float64).masked_fill(~mask, float("-inf")).max()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def plain(self) -> PlainSums:
        """Returns the sums as numbers, which travel; waits for the device."""
        return PlainSums(
            *({name: float(value) for name, value in of.items()} for of in (self._totals, self._weights, self._maxima))
        )

    @classmethod
    def joined(cls, parts: Iterable[PlainSums]) -> MetricSums:
        """Joins the sums of all parts; a part may lack names that others have."""
        sums = cls()
        for part in parts:
            for name, total in part.totals.items():
                if name in part.weights:
                    sums.add(name, _number(total), _number(part.weights[name]))
                else:
                    sums.total(name, _number(total))
            for name, value in part.maxima.items():
                sums.maximum(name, _number(value), torch.tensor(True))
        return sums

    def results(self) -> dict[str, float]:
        found = {}
        for name, total in self._totals.items():
            weight = self._weights.get(name)
            if weight is None:
                found[name] = float(total)
            elif float(weight) > 0:
                found[name] = float(total / weight)
        # Below everything where no value was under its mask, which is not asked for sooner: that would wait.
        maxima = {name: float(value) for name, value in self._maxima.items()}
        return found | {name: value for name, value in maxima.items() if value != -math.inf}
