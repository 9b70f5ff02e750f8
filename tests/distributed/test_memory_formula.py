"""The formula of docs/benchmarks.md beside the tensors of a real update."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from live_memory import Way, peaks_of_updates
from rank_forks import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CHUNK = 64
OF_TOKENS = {"layers": 3, "hidden": 64, "inner": 176, "heads": 8, "kv_heads": 8, "vocab": 256}
"""Activations of 768 tokens or more take most."""
OF_WEIGHTS = {"layers": 12, "hidden": 128, "inner": 352, "heads": 8, "kv_heads": 4, "vocab": 1024, "tied": True}
"""Of 32 tokens weights, gradients, and what is gathered and summed."""
CASES: list[tuple[dict[str, Any], int, Any, bool]] = [
    (OF_TOKENS, 768, True, False),
    (OF_TOKENS, 768, "selective", False),
    (OF_TOKENS, 2048, True, True),  # so many, because attention's kernel takes 1.5 MiB for itself in bf16
    (OF_WEIGHTS, 32, True, False),
]
"""Shape, tokens, recomputation, bf16."""


@pytest.fixture
def footprints(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("footprints")


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2)], ids=str)
def test_tensors_of_an_update_take_what_the_formula_says(footprints: Any, sizes: tuple[int, int, int, int]) -> None:
    """Not more, and not much less: of a few layers the formula counts gradients of all when one is still gathered."""
    ways = [llama(footprints.Shape(**shape), *rest) for shape, *rest in CASES]
    mesh, stages = dict(zip(footprints.SIZES, sizes, strict=True)), sizes[3]
    found = run_ranks(math.prod(sizes), peaks_of_updates, mesh, ways, CHUNK)
    for (shape, tokens, recompute, bf16), live in zip(CASES, map(max, zip(*found, strict=True)), strict=True):
        how = footprints.How(*sizes, bf16, str(recompute).lower(), tokens, tokens, stages, CHUNK, ordered=True)
        formula = sum(footprints.training(footprints.Shape(**shape), how).values())
        assert 0.8 < live / formula < 1.01, (recompute, bf16, shape)


def llama(shape: Any, tokens: int, recompute: Any, bf16: bool) -> Way:
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
    }
    return sizes, tokens, recompute, bf16
