"""Exact numerics to the bit: packs of any composition, continued sequences, log-probabilities, and the self-check."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models import exact
from quartet.models.attention import AttentionParams, PackedAttention
from quartet.models.exact import (
    MIN_ROWS,
    ExactContext,
    ExactPackedAttention,
    additive_mask,
    decode_attention,
    exact_masked_attention,
    padded_key_length,
)
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.models.packing_probe import check_exact

Build = Callable[..., PreTrainedModel]

DENSE = (
    "llama", "qwen2", "gemma2", "qwen3", "mistral", "gemma3", "gpt_neox", "phi3", "olmo2", "granite", "cohere",
)  # fmt: skip
LENGTHS = (1, 5, 31, 40, 257, 300, 600)
"""Below 16 and 32 tokens, above; one, two and three blocks of 256 keys, two of 512."""


@pytest.fixture(params=["qwen2", "gemma2", "gpt_neox", "cohere"])
def dense(exact_processor: None, request: pytest.FixtureRequest, build_architecture: Build) -> PackedCausalLM:
    return PackedCausalLM(build_architecture(request.param, max_position_embeddings=2048), numerics="exact")


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (length,), generator=generator) for length in LENGTHS]


def run(packed: PackedCausalLM, texts: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states of sequences in one pack."""
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return list(packed.hidden(torch.cat(list(texts)), positions, ExactPackedAttention(lengths)).split(lengths))


def alone(packed: PackedCausalLM, texts: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [run(packed, [text])[0] for text in texts]


# Packs -----------------------------------------------------------------------------------------------------


def test_a_token_has_the_same_bits_in_every_pack(dense: PackedCausalLM, texts: list[Tensor]) -> None:
    expected = alone(dense, texts)
    shuffle = random.Random(0)
    with torch.no_grad():
        for size in (2, 3, 5, 7, 7):
            members = shuffle.sample(range(len(texts)), size)
            for member, states in zip(members, run(dense, [texts[i] for i in members]), strict=True):
                assert torch.equal(states, expected[member]), (size, LENGTHS[member])


def test_a_training_forward_has_the_bits_of_one_without_gradients(dense: PackedCausalLM, texts: list[Tensor]) -> None:
    trained = run(dense, texts)
    assert all(states.requires_grad for states in trained)
    assert all(torch.equal(a, b) for a, b in zip(trained, alone(dense, texts), strict=True))


def test_a_shared_prompt_changes_no_bit(dense: PackedCausalLM, texts: list[Tensor]) -> None:
    """A root of 257 tokens with children of 5 and 300, of which the second forks into 31 and 1."""
    root, first, second, third, last = (texts[i] for i in (4, 1, 5, 2, 0))
    chains = [[root, first], [root, second, third], [root, second, last]]
    expected = alone(dense, [torch.cat(chain) for chain in chains])
    parts = [root, first, second, third, last]
    lengths = [len(part) for part in parts]
    depths = [0, 257, 257, 557, 557]
    positions = torch.cat([torch.arange(n) + depth for n, depth in zip(lengths, depths, strict=True)])
    with torch.no_grad():
        tree = ExactPackedAttention(lengths, [-1, 0, 0, 2, 2])
        root_s, first_s, second_s, third_s, last_s = dense.hidden(torch.cat(parts), positions, tree).split(lengths)
    for chain, states in zip([[root_s, first_s], [root_s, second_s, third_s]], expected[:2], strict=True):
        assert torch.equal(torch.cat(chain), states)
    assert torch.equal(last_s, expected[2][-1:])


@pytest.mark.usefixtures("exact_processor")
def test_activation_checkpointing_keeps_the_bits(build_architecture: Build, texts: list[Tensor]) -> None:
    model = build_architecture("qwen2", max_position_embeddings=2048)
    expected = alone(PackedCausalLM(model, numerics="exact"), texts)
    packed = PackedCausalLM(model, numerics="exact", activation_checkpointing=True)
    trained = run(packed, texts)
    torch.cat(trained).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 9, 290])
def test_gradients_are_those_of_the_fast_attention(window: int | None, softcap: float | None) -> None:
    rule = AttentionParams(0.3, window, softcap)
    lengths, parents = [300, 40, 40, 7, 270, 5], [-1, 0, 0, 2, 2, -1]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    fast = PackedAttention(lengths, parents).attend(0, q, k, v, rule)
    ours = ExactPackedAttention(lengths, parents).attend(0, q, k, v, rule)
    torch.testing.assert_close(ours, fast, atol=1e-10, rtol=1e-9)
    expected = torch.autograd.grad(fast, (q, k, v), weights)
    for actual, other in zip(torch.autograd.grad(ours, (q, k, v), weights), expected, strict=True):
        torch.testing.assert_close(actual, other, atol=1e-10, rtol=1e-9)


# Continuing ------------------------------------------------------------------------------------------------


class Continued(ExactContext):
    """The next ``size`` tokens of each sequence, after all before them: a decode step, or a chunk of a prompt."""

    def __init__(self, stored: dict[int, list[list[Tensor]]], depths: list[int], size: int, extra: int) -> None:
        self.stored = stored
        self.depths = depths
        self.size = size
        self.num_keys = padded_key_length(max(depths) + size + extra)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        num = len(self.depths)
        both = self.stored.setdefault(layer, [[k.new_zeros(k.shape[1], 0, k.shape[3])] * num for _ in (k, v)])
        for stored, new in zip(both, (k, v), strict=True):
            parts = new[0].split(self.size, 1)
            stored[:] = [torch.cat([a, b], 1) for a, b in zip(stored, parts, strict=False)]
        keys, values = (
            torch.stack([F.pad(x, (0, 0, 0, self.num_keys - x.shape[1])) for x in stored]) for stored in both
        )
        wanted = q[0, :, : num * self.size].unflatten(1, (num, self.size)).transpose(0, 1)
        positions = torch.tensor(self.depths).unsqueeze(1) + torch.arange(max(self.size, MIN_ROWS))
        if self.size == 1:
            mask = additive_mask(positions[:, :1], self.num_keys, rule, q.dtype).unsqueeze(1)
            out = decode_attention(wanted.squeeze(2), keys, values, mask, rule).unsqueeze(2)
        else:
            mask = additive_mask(positions, self.num_keys, rule, q.dtype).unsqueeze(1)
            rows = F.pad(wanted, (0, 0, 0, max(0, MIN_ROWS - self.size)))
            out = exact_masked_attention(rows, keys, values, mask, rule)[:, :, : self.size]
        packed = out.transpose(0, 1).flatten(1, 2)
        return F.pad(packed, (0, 0, 0, q.shape[2] - packed.shape[1])).unsqueeze(0)


@pytest.mark.parametrize(("size", "num_chunks", "extra"), [(100, 6, 0), (7, 12, 900)])
def test_a_prompt_in_chunks_has_the_bits_of_a_whole_one(
    dense: PackedCausalLM, size: int, num_chunks: int, extra: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(61, (num_chunks * size,), generator=generator) for _ in range(3)]
    expected = alone(dense, texts)
    stored: dict[int, list[list[Tensor]]] = {}
    with torch.no_grad():
        for depth in range(0, len(texts[0]), size):
            ids = torch.cat([text[depth : depth + size] for text in texts])
            positions = torch.arange(depth, depth + size).repeat(3)
            states = dense.hidden(ids, positions, Continued(stored, [depth] * 3, size, extra)).split(size)
            for found, whole in zip(states, expected, strict=True):
                assert torch.equal(found, whole[depth : depth + size]), depth


def test_decode_steps_have_the_bits_of_a_prefill(dense: PackedCausalLM) -> None:
    """Across the steps at which more keys are handed to the kernel: 32, 64, 256 and 512."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(61, (560,), generator=generator) for _ in range(2)]
    expected = alone(dense, texts)
    stored: dict[int, list[list[Tensor]]] = {}
    with torch.no_grad():
        for start, stop in ((0, 28), (28, 36), (36, 252), (252, 260), (260, 508), (508, 516)):
            size = 1 if stop - start == 8 else stop - start
            for depth in range(start, stop, size):
                ids = torch.cat([text[depth : depth + size] for text in texts])
                context = Continued(stored, [depth] * 2, size, 0)
                states = dense.hidden(ids, torch.arange(depth, depth + size).repeat(2), context).split(size)
                for found, whole in zip(states, expected, strict=True):
                    assert torch.equal(found, whole[depth : depth + size]), depth


@pytest.mark.usefixtures("exact_processor")
@pytest.mark.parametrize("size", [64, 96, 128])
def test_attention_of_real_head_sizes(size: int) -> None:
    """Single queries against those of a whole sequence, where products are long enough to be cut up."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 700, size, generator=generator) for heads in (4, 2, 2))
    keys, values = (F.pad(x, (0, 0, 0, padded_key_length(700) - 700)) for x in (k, v))
    rules = (AttentionParams(size**-0.5), AttentionParams(size**-0.5, 300), AttentionParams(size**-0.5, None, 20.0))
    for rule in rules:
        whole = ExactPackedAttention([700]).attend(0, q, k, v, rule)
        for position in (0, 200, 256, 299, 450, 511, 512, 699):
            for num_keys in (padded_key_length(position + 1), padded_key_length(700)):
                mask = additive_mask(torch.tensor([[position]]), num_keys, rule, q.dtype).unsqueeze(1)
                row = decode_attention(q[:, :, position], keys[:, :, :num_keys], values[:, :, :num_keys], mask, rule)
                assert torch.equal(row, whole[:, :, position]), (rule, position, num_keys)


@pytest.mark.usefixtures("exact_processor")
@pytest.mark.parametrize("name", ["gemma2"])
@pytest.mark.parametrize("unsplit", [0, 96])
def test_a_processor_that_splits_shorter_sums(
    unsplit: int, name: str, build_architecture: Build, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last blocks are then filled up sooner; the bits stay those of whole blocks."""
    packed = PackedCausalLM(build_architecture(name, max_position_embeddings=2048), numerics="exact")
    expected = alone(packed, texts)
    monkeypatch.setattr(exact, "max_keys_summed_at_once", lambda: unsplit)
    assert padded_key_length(40) == (512 if unsplit == 0 else 64)
    assert padded_key_length(128) == 512
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(run(packed, texts), expected, strict=True))
    check_exact(packed)


# Log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.usefixtures("exact_processor")
def test_log_probabilities_do_not_depend_on_chunks_or_rows(
    name: str, temperature: float, build_architecture: Build
) -> None:
    """As the sampler takes them from a row's logits, whatever else is in the batch."""
    packed = PackedCausalLM(build_architecture(name, vocab_size=1009, hidden_size=256), numerics="exact")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 256, generator=generator)
    labels = torch.randint(1009, (100,), generator=generator)
    scaled = torch.cat([packed.logits(row) for row in hidden.split(1)]) / temperature
    expected = (scaled - scaled.logsumexp(-1, keepdim=True)).gather(1, labels.unsqueeze(1)).squeeze(1)
    for chunk in (1, 17, 33, 64, 1024):
        for rows in (1, 15, 16, 33, 100):
            found, _ = packed.token_logprobs(hidden[:rows], labels[:rows], temperature=temperature, chunk=chunk)
            assert torch.equal(found, expected[:rows]), (chunk, rows)


# The self-check --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact_processor")
@pytest.mark.parametrize("name", DENSE)
def test_dense_architectures_pass_the_check(name: str, build_architecture: Build) -> None:
    check_exact(PackedCausalLM(build_architecture(name, max_position_embeddings=2048), numerics="exact"))


def test_loading_runs_the_check(build_architecture: Build) -> None:
    torch.set_num_threads(2)
    with pytest.raises(UserError, match="numerics: exact cannot be had here") as caught:
        packed_causal_lm(build_architecture("llama"), numerics="exact")
    assert "2 threads" in caught.value.found
    assert "threads: 1" in caught.value.remedy


def test_settings_that_rule_it_out(build_architecture: Build) -> None:
    with pytest.raises(UserError, match="bf16 products"):
        check_exact(PackedCausalLM(build_architecture("llama"), "bf16", numerics="exact"))
    with pytest.raises(UserError, match=r"parameters of \['torch.float64'\]"):
        check_exact(PackedCausalLM(build_architecture("llama", dtype=torch.float64), numerics="exact"))
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM has experts"):
        check_exact(PackedCausalLM(build_architecture("qwen3_moe"), numerics="exact"))


@pytest.fixture
def wide(sensitive_kernels: None, build_architecture: Build) -> PackedCausalLM:
    """An intermediate size that is no multiple of 32, and sums long enough to show their order."""
    model = build_architecture(
        "qwen3", hidden_size=256, head_dim=128, intermediate_size=300, max_position_embeddings=2048
    )
    return PackedCausalLM(model, numerics="exact")


def planted_rows(monkeypatch: pytest.MonkeyPatch, packed: PackedCausalLM) -> None:
    monkeypatch.setattr(packed, "_row_step", 1)


def planted_few_rows(monkeypatch: pytest.MonkeyPatch, packed: PackedCausalLM) -> None:
    monkeypatch.setattr(exact, "MIN_ROWS", 4)


def planted_keys(monkeypatch: pytest.MonkeyPatch, packed: PackedCausalLM) -> None:
    monkeypatch.setattr(exact, "max_keys_summed_at_once", lambda: 512)


def planted_product(monkeypatch: pytest.MonkeyPatch, packed: PackedCausalLM) -> None:
    """As two threads or another library would do: the sum of many rows in another order."""
    former = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[-2] < 500:
            return former(x, weight, bias)
        half = weight.shape[1] // 2
        return former(x[..., :half], weight[:, :half], bias) + former(x[..., half:], weight[:, half:])

    monkeypatch.setattr(F, "linear", linear)


@pytest.mark.parametrize(
    ("plant", "equality"),
    [
        (planted_rows, "batch invariance"),
        (planted_few_rows, "batch invariance"),
        (planted_keys, "batch invariance"),
        (planted_product, "batch invariance"),
    ],
)
def test_the_check_finds(
    plant: Callable[[pytest.MonkeyPatch, PackedCausalLM], None],
    equality: str,
    wide: PackedCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_exact(wide)
    plant(monkeypatch, wide)
    with pytest.raises(UserError, match=f"{equality} does not hold on this processor"):
        check_exact(wide)


def test_the_check_compares_the_trainers_log_probabilities(
    wide: PackedCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = wide.token_logprobs

    def nudged(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies = former(*args, **options)  # type: ignore[arg-type]
        return torch.nextafter(logprobs, torch.zeros_like(logprobs)), entropies

    monkeypatch.setattr(wide, "token_logprobs", nudged)
    with pytest.raises(UserError, match="log-probabilities = sampler's does not hold"):
        check_exact(wide)
