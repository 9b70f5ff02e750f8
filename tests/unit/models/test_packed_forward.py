"""Packed forward and backward against the unmodified model, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FAMILIES = ("llama", "qwen2", "gemma2")


def _weighted(logits: Tensor) -> Tensor:
    """A scalar that every logit enters with its own weight."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype) * logits).sum()


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
