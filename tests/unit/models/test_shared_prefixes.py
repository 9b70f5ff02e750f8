"""A shared prompt is computed once, and nothing else changes: loss and every gradient against copied prompts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM
from quartet.models.packing import pack

FAMILIES = ("llama", "qwen2", "gemma2")


def _batch(lengths, parents, leaves) -> RaggedBatch:
    generator = torch.Generator().manual_seed(3)
    return RaggedBatch(
        input_ids=torch.randint(61, (sum(lengths),), generator=generator),
        segment_lengths=lengths,
        parents=parents,
        leaves=leaves,
        ids=tuple(str(s) for s in leaves),
    )


BATCHES = {
    # Responses of different, equal and single length.
    "group": _batch((9, 5, 1, 5, 7), (-1, 0, 0, 0, 0), (1, 2, 3, 4)),
    "prompt_of_one_token": _batch((1, 4, 1, 6), (-1, 0, 0, 0), (1, 2, 3)),
    "two_groups_and_a_sequence": _batch((6, 3, 3, 6, 2, 8, 5), (-1, 0, 0, -1, 3, 3, -1), (5, 1, 6, 2, 4)),
    # Turns: a root (5) with a fork (4) of which one turn (3) forks again, an only child behind an only child (2, 6),
    # and a segment that no sequence needs.
    "forked_turns": _batch(
        (5, 4, 3, 2, 2, 6, 7, 3, 2, 6), (-1, 0, 1, 2, 2, 1, 0, 0, 7, 8), (3, 9, 4, 5)
    ),
}  # fmt: skip


def _norm(module: nn.Module, offset: float, hidden: Tensor) -> Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return (offset + module.weight) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def _in_fp64(model: nn.Module) -> nn.Module:
    """transformers' norms round to fp32 inside, which would turn differences of 1e-16 into 1e-8."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, float(type(module).__name__.startswith("Gemma")))
    return model


def _results(packed: PackedCausalLM, batch: RaggedBatch, *, share: bool) -> dict[str, Tensor]:
    """A loss into which every log-probability and entropy enters with its own weight, and all gradients."""
    layout = pack(batch, share=share)
    hidden = packed.hidden(layout.input_ids, layout.position_ids, layout.attention())
    own = batch.sequence_index() >= 0
    for s in range(len(batch)):
        if len(batch.chain(s)) == 1:
            own[batch.leaf_span(s)[0]] = False
    rows, labels, targets = layout.predicted(own)
    logprobs, entropies = packed.token_logprobs(hidden[rows], labels, temperature=0.8, chunk=6, entropy=True)
    assert entropies is not None
    weights = torch.linspace(-1, 1, 2 * batch.num_tokens, dtype=hidden.dtype)
    values = torch.cat([layout.scatter(logprobs, targets), layout.scatter(entropies, targets)])
    loss = (weights * values).sum()
    packed.model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in packed.model.named_parameters()}
    assert all(bool(g.any()) for g in gradients.values())
    return {"values": values.detach(), "loss": loss.detach(), **gradients}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float) -> None:
    """Each on its own scale: the loss is not normalised."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        scale = max(float(theirs.abs().max()), 1e-3)
        torch.testing.assert_close(
            found[name] / scale, theirs / scale, atol=atol, rtol=rtol, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("recompute", [False, True, "selective"], ids=["kept", "recomputed", "selective"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_unshared_ones_in_fp64(family, name, recompute, make_model):
    packed = PackedCausalLM(_in_fp64(make_model(family, torch.float64)), activation_checkpointing=recompute)
    shared = _results(packed, BATCHES[name], share=True)
    _assert_equal(shared, _results(packed, BATCHES[name], share=False), 1e-12, 1e-11)


@pytest.mark.parametrize("name", BATCHES)
def test_hidden_computes_each_needed_token_once(name, make_model):
    batch = BATCHES[name]
    packed = PackedCausalLM(make_model("llama"))
    rows: dict[bool, set[int]] = {True: set(), False: set()}
    for share, seen in rows.items():
        handles = [
            layer.register_forward_hook(lambda _m, _i, out, seen=seen: seen.add(out.shape[1]))
            for layer in [packed.model.get_input_embeddings(), *(layer.mlp for layer in packed.model.model.layers)]
        ]
        layout = pack(batch, share=share)
        packed.hidden(layout.input_ids, layout.position_ids, layout.attention())
        for handle in handles:
            handle.remove()
    needed = {k for s in range(len(batch)) for k in batch.chain(s)}
    assert rows[True] == {sum(batch.segment_lengths[k] for k in needed)}
    assert rows[False] == {sum(batch.sequence_lengths())}


def test_responses_do_not_see_each_other(make_model):
    """Another sibling's tokens change nothing, and its loss reaches the prompt but not the siblings."""
    batch = BATCHES["group"]
    packed = PackedCausalLM(make_model("llama", torch.float64))
    layout = pack(batch)
    embedded: dict[str, Tensor] = {}

    def keep(_module, _inputs, output):
        output.retain_grad()
        embedded["rows"] = output

    handle = packed.model.get_input_embeddings().register_forward_hook(keep)
    hidden = packed.hidden(layout.input_ids, layout.position_ids, layout.attention())
    handle.remove()
    pieces = hidden.split(layout.lengths)
    pieces[2].square().sum().backward()
    gradients = embedded["rows"].grad[0].split(layout.lengths)
    assert [bool(g.any()) for g in gradients] == [True, False, True, False, False]
    changed = layout.input_ids.clone()
    changed[sum(layout.lengths[:3])] += 1
    with torch.no_grad():
        others = packed.hidden(changed, layout.position_ids, layout.attention()).split(layout.lengths)
    assert [torch.equal(a, b) for a, b in zip(pieces, others, strict=True)] == [True, True, True, False, True]
