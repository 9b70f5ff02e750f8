"""Batches whose token ids are elsewhere: what is done to an outline and then filled is what is done to the batch."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quartet.batch import RaggedBatch


@st.composite
def trees(draw: Any, name: str = "") -> RaggedBatch:
    """Up to four levels of segments, every one needed by a sequence, in an order of their own."""
    parents: list[int] = []
    for k in range(draw(st.integers(1, 9))):
        parents.append(draw(st.integers(-1, k - 1)))
    leaves = draw(st.permutations([k for k in range(len(parents)) if k not in parents]))
    lengths = [draw(st.integers(1, 5)) for _ in parents]
    num_tokens = sum(lengths)
    return RaggedBatch(
        input_ids=torch.tensor(draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))),
        segment_lengths=tuple(lengths),
        parents=tuple(parents),
        leaves=tuple(leaves),
        ids=tuple(f"{name}{s}" for s in range(len(leaves))),
        token={"logprobs": -torch.arange(float(num_tokens))},
        sequence={"score": torch.arange(float(len(leaves)))},
        objects={"text": tuple(f"text {s}" for s in range(len(leaves)))},
    )


def assert_same(a: RaggedBatch, b: RaggedBatch) -> None:
    assert (a.ids, a.segment_lengths, a.parents, a.leaves) == (b.ids, b.segment_lengths, b.parents, b.leaves)
    assert torch.equal(a.input_ids, b.input_ids) and a.input_ids.dtype == torch.int64
    assert torch.equal(a.token["logprobs"], b.token["logprobs"])
    assert torch.equal(a.sequence["score"], b.sequence["score"])
    assert dict(a.objects) == dict(b.objects) and a.elsewhere == b.elsewhere


def holds_no_ids(batch: RaggedBatch) -> bool:
    """The ids are -1, and a view of one element whatever their number."""
    one = batch.input_ids.untyped_storage().nbytes() == 8
    return not batch.has_ids and one and bool((batch.input_ids == -1).all())


@given(st.data())
def test_what_is_done_to_an_outline_and_filled_is_what_is_done_to_the_batch(data: Any) -> None:
    full = [data.draw(trees(f"{b}.")) for b in range(data.draw(st.integers(1, 3)))]
    references = [object() for _ in full]
    outlines = [batch.outline([reference]) for batch, reference in zip(full, references, strict=True)]
    assert all(map(holds_no_ids, outlines))
    picks = [data.draw(st.permutations(range(len(batch)))) for batch in full]
    picks = [pick[: data.draw(st.integers(0, len(pick)))] for pick in picks]
    wanted = RaggedBatch.concat([batch.select(pick) for batch, pick in zip(full, picks, strict=True)])
    joined = RaggedBatch.concat([batch.select(pick) for batch, pick in zip(outlines, picks, strict=True)])
    assert holds_no_ids(joined) and joined.elsewhere == tuple(references)
    order = data.draw(st.permutations(range(len(joined))))
    joined, wanted = joined.select(order), wanted.select(order)
    assert holds_no_ids(joined)
    sources = [batch.bare() for batch in full]
    assert_same(joined.filled(sources), wanted)
    assert_same(joined.filled([RaggedBatch.concat(sources)]), wanted)


def batch_of(num_tokens: int = 4) -> RaggedBatch:
    prompt, answers = [7] * num_tokens, [[1, 2], [3]]
    return RaggedBatch.from_groups([prompt], [answers], ["a", "b"], token={"x": torch.zeros(num_tokens + 3)})


def test_an_outline_is_small_wherever_it_goes() -> None:
    full = batch_of(100_000)
    outline = full.outline(["here"])
    assert len(pickle.dumps(outline)) < len(pickle.dumps(full)) - 700_000
    there = pickle.loads(pickle.dumps(outline))
    assert holds_no_ids(there) and there.elsewhere == ("here",)
    assert torch.equal(there.filled([full]).input_ids, full.input_ids)
    assert holds_no_ids(there.to("cpu")) and holds_no_ids(there.without_objects())


def test_the_first_source_that_has_a_sequence_gives_it_and_more_are_ignored() -> None:
    first = RaggedBatch.from_sequences([[1, 2]], ids=["a"])
    more = RaggedBatch.from_sequences([[8, 8], [3]], ids=["a", "b"])
    wanted = RaggedBatch.from_sequences([[0], [0, 0]], ids=["b", "a"]).outline(["here"])
    assert wanted.filled([first, more]).input_ids.tolist() == [3, 1, 2]
    assert first.filled([more]) is first


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (RaggedBatch.from_sequences([[1, 2]], ids=["other"]), "no source has the token ids of sequence 'a'"),
        (RaggedBatch.from_sequences([[7, 7, 7, 7, 1, 2]], ids=["a"]), r"'a' has segments of \[4, 2\] tokens"),
        (batch_of(3), r"'a' has segments of \[4, 2\] tokens, in its source \[3, 2\]"),
        (batch_of().outline(["there"]), "are elsewhere"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(source: RaggedBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of().outline(["here"]).filled([source])


def test_nothing_reads_the_ids_of_an_outline() -> None:
    outline = batch_of().outline(["here"])
    with pytest.raises(ValueError, match="fill it before"):
        outline.token_ids(0)
    with pytest.raises(ValueError, match="cannot be joined"):
        RaggedBatch.concat([outline.select([0]), batch_of().select([1])])
    with pytest.raises(ValueError, match="found no reference"):
        batch_of().outline([])
    with pytest.raises(IndexError):
        torch.nn.Embedding(10, 2)(outline.input_ids)
