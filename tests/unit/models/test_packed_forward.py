"""Packed forward and backward against the unmodified model, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FAMILIES = ("llama", "qwen2", "gemma2")


def _plain_logits(model, sequences) -> list[Tensor]:
    return [model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def _weighted(logits: Tensor) -> Tensor:
    """A scalar that every logit enters with its own weight."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype) * logits).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_each_sequence_alone(family, make_twins, sequences, packed_hidden, close):
    twins = make_twins(family)
    with torch.no_grad():
        ours = twins.packed.logits(packed_hidden(twins.packed, sequences))
        close(ours, torch.cat(_plain_logits(twins.plain, sequences)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_each_sequence_alone(family, make_twins, sequences, packed_hidden, tolerances):
    twins = make_twins(family)
    _weighted(twins.packed.logits(packed_hidden(twins.packed, sequences))).backward()
    _weighted(torch.cat(_plain_logits(twins.plain, sequences))).backward()
    atol, rtol = tolerances[torch.float32]
    plain = dict(twins.plain.named_parameters())
    for name, parameter in twins.packed.model.named_parameters():
        expected = plain[name].grad
        # The weighted sum is not normalised: compare on the scale of the parameter's own gradient.
        scale = float(expected.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(parameter.grad / scale, expected / scale, atol=atol, rtol=rtol)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_is_exact(family, make_twins, sequences, packed_hidden, close, monkeypatch):
    # transformers' own eager attention takes its softmax in fp32 whatever the dtype.
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
    twins = make_twins(family, torch.float64)
    ours = twins.packed.logits(packed_hidden(twins.packed, sequences))
    assert ours.dtype == torch.float64
    theirs = torch.cat(_plain_logits(twins.plain, sequences))
    close(ours, theirs)
    _weighted(ours).backward()
    _weighted(theirs).backward()
    plain = dict(twins.plain.named_parameters())
    for name, parameter in twins.packed.model.named_parameters():
        scale = float(plain[name].grad.abs().max())
        # Gemma-2's norms multiply by their weight in fp32, so these gradients are fp32 sums over tokens.
        dtype = torch.float32 if family == "gemma2" and "norm" in name else None
        close(parameter.grad / scale, plain[name].grad / scale, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_sequences_of_a_pack_do_not_matter(family, make_twins, sequences, packed_hidden, close):
    """Batch invariance: alone, in another order and among others, a sequence has the same hidden states."""
    packed = make_twins(family, torch.float64).packed
    with torch.no_grad():
        together = packed_hidden(packed, sequences).split([len(s) for s in sequences])
        backwards = packed_hidden(packed, sequences[::-1]).split([len(s) for s in sequences[::-1]])
        for i, tokens in enumerate(sequences):
            close(together[i], packed_hidden(packed, [tokens]))
            close(together[i], backwards[-1 - i])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_sequences_get_no_gradient(family, make_twins, sequences, packed_hidden):
    """A loss on one sequence does not depend on the tokens of its neighbours."""
    packed = make_twins(family).packed
    seen: dict[str, Tensor] = {}

    def keep(_module, _inputs, output):
        output.retain_grad()
        seen["embeddings"] = output

    handle = packed.model.get_input_embeddings().register_forward_hook(keep)
    lengths = [len(s) for s in sequences]
    _weighted(packed_hidden(packed, sequences).split(lengths)[2]).backward()
    handle.remove()
    gradients = seen["embeddings"].grad[0].split(lengths)
    assert [bool(g.any()) for g in gradients] == [False, False, True, False, False]


def test_the_window_really_cuts(make_twins, packed_hidden, sequences):
    """Guards the tests above: without its window the model gives something else."""
    windowed, wide = make_twins("qwen2").packed, make_twins("qwen2", sliding_window=64).packed
    with torch.no_grad():
        difference = packed_hidden(windowed, sequences) - packed_hidden(wide, sequences)
    lengths = [len(s) for s in sequences]
    changed = [float(d.abs().max()) > 1e-3 for d in difference.split(lengths)]
    assert changed == [True, False, True, False, True], "only sequences longer than 4 tokens feel the window"


def test_bf16_stays_within_the_table(make_twins, sequences, packed_hidden, close):
    """Autocast over fp32 weights: outputs on the scale of the logits, and weights left alone."""
    twins = make_twins("llama", initializer_range=0.02)
    twins.packed.precision = "bf16"
    with torch.no_grad():
        hidden = packed_hidden(twins.packed, sequences)
        logits = twins.packed.logits(hidden)
        close(logits, torch.cat(_plain_logits(twins.plain, sequences)), torch.bfloat16)
    assert logits.dtype == torch.float32
    assert {p.dtype for p in twins.packed.model.parameters()} == {torch.float32}
    exact = twins.plain.get_output_embeddings()(hidden.float())
    assert not torch.equal(logits, exact), "the product must have run in bf16"


def test_bf16_attention_sees_one_dtype(make_twins, sequences, packed_hidden, close):
    """Rotary embeddings leave q and k in fp32 under autocast; windows, groups and soft-caps must not trip over it."""
    for family in FAMILIES:
        twins = make_twins(family, initializer_range=0.02)
        twins.packed.precision = "bf16"
        with torch.no_grad():
            logits = twins.packed.logits(packed_hidden(twins.packed, sequences))
            close(logits, torch.cat(_plain_logits(twins.plain, sequences)), torch.bfloat16)
