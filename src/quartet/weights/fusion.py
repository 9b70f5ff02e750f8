"""Fused projections: one weight here that is several there.

The wire always carries the parts. A parameter that fuses them is shown as views of its rows, at whichever end it is
fused: splitting at the source and merging in the sink then copy nothing, and the digests of both ends are of the same
tensors, whatever either of them fuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from quartet.weights.errors import WeightSyncError


@dataclass(frozen=True)
class FusedProjection:
    """Parts that stand one below the other along dimension 0.

    Attributes:
        whole: the module's name where it is fused, one component of the dotted name: ``"qkv_proj"``.
        parts: the names of its parts, from the first row on.
        shares: how many rows each has, up to a common factor: ``(8, 2, 2)`` for 8 query and 2 key-value heads.
    """

    whole: str
    parts: tuple[str, ...]
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.shares) or min(self.shares, default=0) < 1:
            raise ValueError(f"{self.whole}: parts {self.parts} with shares {self.shares}; needed one above 0 for each")

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """
        Raises:
            WeightSyncError: its rows do not divide by the shares.
        """
        rows, shares = (tensor.shape[0] if tensor.dim() else 0), sum(self.shares)
        if rows % shares:
            raise WeightSyncError(
                f"the fused projection {self.whole!r} does not split as it was said to",
                found=f"{name!r} with {rows} rows for {shares} shares {self.shares}",
                remedy="give the shares of this model: of query, key and value heads, say",
                tensor=name,
            )
        sizes = [share * rows // shares for share in self.shares]
        for part, view in zip(self.parts, tensor.split(sizes), strict=True):
            yield ".".join(part if component == self.whole else component for component in name.split(".")), view


GATE_UP = FusedProjection("gate_up_proj", ("gate_proj", "up_proj"), (1, 1))


def qkv(num_heads: int, num_key_value_heads: int) -> FusedProjection:
    shares = (num_heads, num_key_value_heads, num_key_value_heads)
    return FusedProjection("qkv_proj", ("q_proj", "k_proj", "v_proj"), shares)


def split_fused(named: Iterable[tuple[str, Tensor]], fused: Sequence[FusedProjection]) -> Iterator[tuple[str, Tensor]]:
    """``named`` with the parts of every fused parameter, weights and biases alike, as views in its place."""
    for name, tensor in named:
        rule = next((rule for rule in fused if rule.whole in name.split(".")), None)
        if rule is None:
            yield name, tensor
        else:
            yield from rule.split(name, tensor)
