"""Random token layouts, shared by the tests of estimators and losses."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quartet.algorithms.losses import Aggregation, LossTokens, aggregation_denominators
from quartet.algorithms.segments import masked_owner


@dataclass
class Layout:
    """Owners interleaved, with unowned tokens, masked tokens and owners without any token."""

    owner: Tensor
    mask: Tensor
    num_owners: int

    @property
    def num_tokens(self) -> int:
        return self.owner.shape[0]

    @property
    def acting(self) -> Tensor:
        """The owner of each masked token, -1 for others."""
        return masked_owner(self.owner, self.mask)

    def tokens_of(self, n: int) -> list[int]:
        """Positions of the masked tokens of owner n, in time order."""
        return [t for t in range(self.num_tokens) if self.owner[t] == n and self.mask[t]]

    def normal(self, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(self.num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            dtype
        )

    def tokens(
        self, aggregation: Aggregation = "token_mean", own: Tensor | slice = slice(None), norm: float | None = None
    ) -> LossTokens:
        """Those of a micro-batch that has the tokens ``own``."""
        denominators = aggregation_denominators(self.mask, self.owner, self.num_owners, norm=norm)
        return LossTokens(self.mask[own], self.owner[own], denominators, aggregation)

    def poisoned(self, values: Tensor, poison: float) -> Tensor:
        """``values`` with ``poison`` wherever a token does not count."""
        return torch.where(self.mask & (self.owner >= 0), values, poison)


@pytest.fixture(scope="session")
def make_layout() -> Callable[[int, int, int], Layout]:
    def make(seed: int, num_tokens: int = 60, num_owners: int = 7) -> Layout:
        generator = torch.Generator().manual_seed(seed)
        owner = torch.randint(-1, num_owners, (num_tokens,), generator=generator)
        mask = torch.rand(num_tokens, generator=generator) < 0.7
        # The last owner is fully masked and the one before it has no token at all.
        mask &= owner != num_owners - 1
        owner = torch.where(owner == num_owners - 2, 0, owner)
        return Layout(owner, mask, num_owners)

    return make


@pytest.fixture
def close(tolerances: dict[torch.dtype, tuple[float, float]]) -> Callable[[Tensor, Tensor], None]:
    """Asserts agreement within the table, at the lower precision of the two; dtypes may differ."""

    def check(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        if dtype is None:
            dtype = max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
        atol, rtol = tolerances[dtype]
        torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)

    return check


@pytest.fixture
def unchanged() -> Callable[..., None]:
    """Runs a function and asserts that it left its tensor arguments as they were."""

    def check(function: Callable[..., object], *arguments: object, **options: object) -> None:
        values = [*arguments, *options.values()]
        values += [x for a in values if isinstance(a, LossTokens) for x in (a.loss_mask_T, a.owner_T)]
        tensors = [a for a in values if isinstance(a, Tensor)]
        copies = [t.detach().clone() for t in tensors]
        versions = [t._version for t in tensors]
        function(*arguments, **options)
        for tensor, copy, version in zip(tensors, copies, versions, strict=True):
            assert tensor._version == version
            torch.testing.assert_close(tensor.detach(), copy, atol=0, rtol=0, equal_nan=True)

    return check
