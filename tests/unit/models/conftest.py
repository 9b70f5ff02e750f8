"""Tiny random models, each with an unmodified twin, and a tokenizer with chosen special tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from quartet.models.attention import PackedAttention
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel

VOCAB = 61


@dataclass
class Twins:
    """A packed model and its unmodified copy."""

    packed: PackedCausalLM
    plain: PreTrainedModel


@pytest.fixture(scope="session")
def make_model(build_architecture: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """``make_model(family, dtype=…, seed=…, **config)``: a tiny causal LM."""

    def make(
        family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
    ) -> PreTrainedModel:
        return build_architecture(family, dtype=dtype, seed=seed, **options)

    return make


@pytest.fixture(scope="session")
def make_twins(make_model: Callable[..., PreTrainedModel]) -> Callable[..., Twins]:
    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Twins:
        plain = make_model(family, dtype, **options)
        return Twins(PackedCausalLM(copy.deepcopy(plain)), plain)

    return make


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Shorter and longer than every window; two of equal length share a kernel call."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (9, 1, 13, 3, 9)]


@pytest.fixture(scope="session")
def packed_hidden() -> Callable[[PackedModel, Sequence[Sequence[int]]], Tensor]:
    """Hidden states of sequences in one pack, in the given order."""

    def run(packed: PackedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor([token for tokens in sequences for token in tokens])
        positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
        return packed.hidden(ids, positions, PackedAttention([len(tokens) for tokens in sequences]))

    return run


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """``make_tokenizer(num_ids, **special)``: token ``t<i>`` has id i; texts are such tokens between spaces."""

    def make(num_ids: int = VOCAB, **special: str) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_ids)}, unk_token="t0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, **special)

    return make


@pytest.fixture
def close(tolerances: dict[torch.dtype, tuple[float, float]]) -> Callable[..., None]:
    """Agreement within the table, at the lower precision of the two."""

    def check(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
        atol, rtol = tolerances[dtype]
        torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)

    return check


@dataclass
class ScalarTwins:
    """A packed scalar model and its unmodified copy (one sequence at a time: it has no pad id)."""

    packed: PackedScalarModel
    plain: PreTrainedModel


@pytest.fixture(scope="session")
def make_scalar(make_model: Callable[..., PreTrainedModel]) -> Callable[..., ScalarTwins]:
    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> ScalarTwins:
        plain = scalar_model_from(make_model(family, **options), seed=1).to(dtype)
        # Larger than drawn, so that a wrong row shows.
        torch.nn.init.normal_(plain.score.weight, generator=torch.Generator().manual_seed(2))
        return ScalarTwins(PackedScalarModel(copy.deepcopy(plain)), plain)

    return make
