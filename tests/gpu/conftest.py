"""What the tests of one CUDA device share. They are skipped where there is none.

``QUARTET_TEST_DEVICE=cpu`` runs on the CPU what can run there, to test the tests.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


def _ensure_packages() -> None:
    # pytest's importlib mode puts no folder of ours on the path.
    path = Path(__file__).parents[2] / "benchmarks" / "gpu" / "packages.py"
    spec = importlib.util.spec_from_file_location("packages", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ensure_packages()


DEVICE = torch.device(os.environ.get("QUARTET_TEST_DEVICE", "cuda"))
if DEVICE.type == "cpu" or torch.cuda.is_available():
    _ensure_packages()

from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 1000
COMMON = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.05, pad_token_id=0, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def _qwen2() -> PreTrainedModel:
    """Tied embeddings; the last two of four layers see 40 tokens."""
    own = dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=40, max_window_layers=2)
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, **own))


def _gemma2() -> PreTrainedModel:
    """Alternating windows of 30 tokens, soft-capped scores and logits, heads of 24."""
    own = dict(
        head_dim=24, query_pre_attn_scalar=24, sliding_window=30, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, attn_implementation="eager",
    )  # fmt: skip
    return Gemma2ForCausalLM(Gemma2Config(**COMMON, **own))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {"llama": _llama, "qwen2": _qwen2, "gemma2": _gemma2}


@dataclass(frozen=True)
class Tiny:
    """How to make a small random model on the tested device; equal names and seeds give equal weights."""

    device: torch.device

    def model(self, family: str = "llama", seed: int = 0, device: torch.device | None = None) -> PreTrainedModel:
        torch.manual_seed(seed)
        return FAMILIES[family]().eval().to(device or self.device)

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(1, VOCAB, (length,), generator=generator).tolist())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs one CUDA device; run by make test-gpu")


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; skips where it is missing."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if DEVICE.type != "cuda" and "cuda" in request.fixturenames:
        pytest.skip("tests what only a CUDA device has")
    return DEVICE


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For tests of what only a CUDA device has."""
    return device


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """fp32 products in fp32: tf32 keeps ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@pytest.fixture
def tiny(device: torch.device) -> Tiny:
    return Tiny(device)


@pytest.fixture
def close(tolerances: dict[torch.dtype, tuple[float, float]]) -> Callable[..., None]:
    """Agreement within the table of tolerances, for the lower precision of the two."""

    def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
        atol, rtol = tolerances[dtype]
        torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=atol, rtol=rtol)

    return check


@pytest.fixture
def walked_mask() -> Callable[[Sequence[int], Sequence[int], int | None], torch.Tensor]:
    """``[T, T]`` bool of a packed tree, by listing each token's ancestors."""

    def make(lengths: Sequence[int], parents: Sequence[int], window: int | None) -> torch.Tensor:
        starts = [sum(lengths[:s]) for s in range(len(lengths))]
        mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
        for segment, length in enumerate(lengths):
            chain = [segment]
            while parents[chain[-1]] >= 0:
                chain.append(parents[chain[-1]])
            tokens = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in reversed(chain)])
            for i in range(length):
                seen = tokens[: len(tokens) - length + i + 1]
                mask[starts[segment] + i, seen if window is None else seen[-window:]] = True
        return mask

    return make
