"""From stored tokens to packed rows and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.ragged import RaggedBatch
from quartet.models.packing import pack
from quartet.train.forward import ForwardNeeds, forward_only, forward_packed


@pytest.fixture(scope="module")
def forked() -> RaggedBatch:
    """A tree: root (3) with a fork (2) that has two leaves (1, 4), a leaf of the root (2), and a sequence alone (5)."""
    lengths = (3, 2, 2, 1, 4, 5)
    total = sum(lengths)
    mask = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    return RaggedBatch(
        input_ids=torch.arange(total) + 10,
        segment_lengths=lengths,
        parents=(-1, 0, 0, 1, 1, -1),
        leaves=(4, 2, 3, 5),
        ids=("long", "short", "one", "alone"),
        token={"loss_mask": mask},
    )


def test_predicted_rows_by_hand(forked):
    """A segment's first token is predicted from the last token of its parent."""
    expected = {
        True: ([14, 16, 5, 6, 7, 9, 10, 11], [13, 15, 2, 5, 4, 8, 9, 10]),
        False: ([5, 6, 14, 16, 7, 9, 10, 11], [2, 5, 13, 15, 4, 8, 9, 10]),
    }
    for share, (stored, before) in expected.items():
        packed = pack(forked, share=share)
        rows, labels, targets = packed.predicted(forked.token["loss_mask"])
        assert targets.tolist() == stored
        assert labels.tolist() == [10 + t for t in stored]
        assert packed.source[rows].tolist() == before
        scattered = packed.scatter(targets.double(), targets)
        assert scattered.tolist() == [float(t) if forked.token["loss_mask"][t] else 0.0 for t in range(17)]


@pytest.mark.parametrize("share", [True, False])
def test_last_rows(share, forked):
    packed = pack(forked, share=share)
    assert packed.source[packed.last_rows()].tolist() == [11, 6, 7, 16]


@pytest.mark.parametrize("share", [True, False])
def test_first_token_cannot_be_predicted(share):
    batch = RaggedBatch.from_sequences([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="nothing stands before it"):
        pack(batch, share=share).predicted(torch.tensor([False, True, True, False]))


@st.composite
def _trees(draw: st.DrawFn) -> RaggedBatch:
    num_inner = draw(st.integers(1, 4))
    parents = [draw(st.integers(-1, k - 1)) for k in range(num_inner)]
    num_leaves = draw(st.integers(1, 6))
    parents += [draw(st.integers(-1, num_inner - 1)) for _ in range(num_leaves)]
    lengths = [draw(st.integers(1, 4)) for _ in parents]
    leaves = draw(st.permutations(range(num_inner, num_inner + num_leaves)))
    return RaggedBatch(
        input_ids=torch.arange(sum(lengths)) + 100,
        segment_lengths=tuple(lengths),
        parents=tuple(parents),
        leaves=tuple(leaves),
        ids=tuple(str(s) for s in range(num_leaves)),
    )


@given(_trees())
def test_a_shared_pack_holds_every_needed_segment_once(batch: RaggedBatch):
    packed = pack(batch)
    needed = {k for s in range(len(batch)) for k in batch.chain(s)}
    assert packed.input_ids.shape[0] == sum(batch.segment_lengths[k] for k in needed)
    pieces = packed.input_ids.split(list(packed.lengths))
    ends = torch.tensor(packed.lengths).cumsum(0) - 1
    positions = packed.position_ids.split(list(packed.lengths))
    for s, leaf in enumerate(packed.leaves):
        chain = [leaf]
        while packed.parents[chain[0]] >= 0:
            chain.insert(0, packed.parents[chain[0]])
        assert torch.cat([pieces[i] for i in chain]).tolist() == batch.token_ids(s)
        assert torch.cat([positions[i] for i in chain]).tolist() == list(range(len(batch.token_ids(s))))
        before = [-1, *(int(ends[i]) for i in chain[:-1])]
        assert [int(packed.previous[ends[i] - packed.lengths[i] + 1]) for i in chain] == before
    # Building the context checks the depth-first order.
    assert packed.attention().tree.longest == max(batch.sequence_lengths())
    assert torch.equal(packed.owned, batch.sequence_index()[packed.source] >= 0)


@given(_trees())
def test_a_copied_pack_holds_whole_sequences(batch: RaggedBatch):
    packed = pack(batch, share=False)
    assert sorted(packed.leaves) == list(range(len(batch)))
    assert list(packed.lengths) == sorted(packed.lengths)
    pieces = packed.input_ids.split(list(packed.lengths))
    for s, leaf in enumerate(packed.leaves):
        assert pieces[leaf].tolist() == batch.token_ids(s)
    mine = batch.sequence_index()
    # Every leaf token is owned by exactly one packed row, ancestors by none.
    counts = torch.bincount(packed.source[packed.owned], minlength=batch.num_tokens)
    assert torch.equal(counts, (mine >= 0).long())
    sequence_of_segment = torch.tensor(packed.leaves).argsort()
    sequence_of_row = sequence_of_segment.repeat_interleave(torch.tensor(packed.lengths))
    assert torch.equal(mine[packed.source[packed.owned]], sequence_of_row[packed.owned])


def test_values_land_on_the_right_stored_tokens(forked, make_twins, close):
    """Log-probabilities and entropies of a forked tree against each sequence alone in the unmodified model."""
    twins = make_twins("gemma2")
    batch = RaggedBatch(
        **{**_fields(forked), "input_ids": torch.randint(61, (17,), generator=torch.Generator().manual_seed(1))}
    )
    needs = ForwardNeeds(logprobs=True, entropies=True, temperature=0.7)
    found = forward_only(twins.packed, batch, needs, token_budget=12, logprob_chunk=3)
    logprobs, entropies = torch.zeros(17), torch.zeros(17)
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        with torch.no_grad():
            logits = twins.plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / 0.7
        every = logits.log_softmax(-1)
        for back in range(1, stop - start + 1):
            if batch.token["loss_mask"][stop - back]:
                logprobs[stop - back] = every[-back - 1, ids[-back]]
                entropies[stop - back] = -(every[-back - 1].exp() * every[-back - 1]).sum()
    close(found.token["logprobs"], logprobs)
    close(found.token["entropies"], entropies)


def test_values_are_of_the_state_before_the_token(forked, make_scalar, close):
    """``values[t] = V(state before token t)``: the score of the sequence cut right before t."""
    twins = make_scalar("llama")
    needs = ForwardNeeds(values=True, scores=True)
    with torch.no_grad():
        found = forward_packed(twins.packed, forked, needs, logprob_chunk=1024)
        assert found.values is not None and found.scores is not None

        def score(ids: list[int]) -> torch.Tensor:
            return twins.plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0]

        expected = torch.zeros(17)
        for s in range(len(forked)):
            start, stop = forked.leaf_span(s)
            ids = forked.token_ids(s)
            for t in range(start, stop):
                if forked.token["loss_mask"][t]:
                    expected[t] = score(ids[: len(ids) - (stop - t)])
        close(found.values, expected)
        close(found.scores, torch.stack([score(forked.token_ids(s)) for s in range(len(forked))]))


def _fields(batch: RaggedBatch) -> dict[str, Any]:
    names = ("input_ids", "segment_lengths", "parents", "leaves", "ids", "token")
    return {name: getattr(batch, name) for name in names}
