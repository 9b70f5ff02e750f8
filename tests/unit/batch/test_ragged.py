"""Every operation of a ragged batch against an obvious reference: sequences as plain lists of tokens."""

import copy
import dataclasses
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.ragged import RaggedBatch
from unshared import rows_of


@dataclass
class Forest:
    """What a batch was built from, in lists."""

    tokens: list[list[int]]  # per segment
    parents: list[int]
    leaves: list[int]

    def chain(self, leaf):
        return [] if leaf < 0 else [*self.chain(self.parents[leaf]), leaf]

    def flat(self, per_token, s):
        """Entries of a token field along sequence s, ancestors first."""
        starts = [sum(len(t) for t in self.tokens[:k]) for k in range(len(self.tokens))]
        chain = self.chain(self.leaves[s])
        return [per_token[starts[k] + i] for k in chain for i in range(len(self.tokens[k]))]


def build(forest: Forest) -> RaggedBatch:
    lengths = [len(tokens) for tokens in forest.tokens]
    num_tokens, num_sequences = sum(lengths), len(forest.leaves)
    in_leaf = [k in forest.leaves for k, n in enumerate(lengths) for _ in range(n)]
    return RaggedBatch(
        input_ids=torch.tensor([t for tokens in forest.tokens for t in tokens], dtype=torch.int64),
        segment_lengths=tuple(lengths),
        parents=tuple(forest.parents),
        leaves=tuple(forest.leaves),
        ids=tuple(f"s{s}" for s in range(num_sequences)),
        token={
            "logprobs": -torch.arange(num_tokens, dtype=torch.float32),
            "hidden": torch.arange(2.0 * num_tokens).view(num_tokens, 2),
            "loss_mask": torch.tensor(in_leaf, dtype=torch.bool),
        },
        sequence={"score": torch.arange(num_sequences, dtype=torch.float32)},
        objects={"answer": tuple({"text": f"answer {s}"} for s in range(num_sequences))},
    )


@st.composite
def forests(draw, min_sequences=0):
    """Trees of depth up to 3: prompts, turns forking from them, turns forking from those."""
    parents, depth = [], []
    for k in range(draw(st.integers(min_sequences and 1, 8))):
        candidates = [-1] + [p for p in range(k) if depth[p] < 3]
        parent = draw(st.sampled_from(candidates))
        parents.append(parent)
        depth.append(1 if parent < 0 else depth[parent] + 1)
    childless = [k for k in range(len(parents)) if k not in parents]
    leaves = draw(st.permutations(childless)) if childless else []
    # Some segments may belong to no sequence.
    leaves = leaves[: draw(st.integers(min_sequences, len(leaves)))]
    tokens = [draw(st.lists(st.integers(0, 50), min_size=1, max_size=4)) for _ in parents]
    return Forest(tokens, parents, list(leaves))


def rows(batch: RaggedBatch) -> list[dict]:
    """A batch as one dictionary per sequence; two batches are the same if these are."""
    found = []
    for s in range(len(batch)):
        stored = rows_of(batch, s)
        found.append(
            {
                "id": batch.ids[s],
                "tokens": batch.token_ids(s),
                "logprobs": batch.token["logprobs"][stored].tolist(),
                "hidden": batch.token["hidden"][stored].tolist(),
                "mask": batch.token["loss_mask"][slice(*batch.leaf_span(s))].tolist(),
                "score": batch.sequence["score"][s].item(),
                "answer": batch.objects["answer"][s],
            }
        )
    return found


# Reading -------------------------------------------------------------------------------------------------


@given(forests())
def test_views_match_the_lists(forest):
    batch = build(forest)
    flat_tokens = [t for tokens in forest.tokens for t in tokens]
    assert len(batch) == len(forest.leaves)
    assert batch.num_tokens == len(flat_tokens)
    assert batch.sequence_lengths() == [len(forest.flat(flat_tokens, s)) for s in range(len(batch))]
    owner = [
        forest.leaves.index(k) if k in forest.leaves else -1 for k, tokens in enumerate(forest.tokens) for _ in tokens
    ]
    assert batch.sequence_index().tolist() == owner
    assert batch.sequence_index().dtype == torch.int64
    for s, leaf in enumerate(forest.leaves):
        assert batch.token_ids(s) == forest.flat(flat_tokens, s)
        assert list(batch.chain(s)) == forest.chain(leaf)
        start, stop = batch.leaf_span(s)
        assert batch.input_ids[start:stop].tolist() == forest.tokens[leaf]


def test_an_empty_batch_works_throughout():
    empty = RaggedBatch.from_sequences([])
    assert len(empty) == empty.num_tokens == 0
    assert empty.sequence_index().tolist() == [] and empty.sequence_lengths() == []
    assert len(empty.select([])) == len(RaggedBatch.concat([empty, empty])) == 0
    full = RaggedBatch.from_sequences([[1, 2]])
    assert RaggedBatch.concat([empty, full]).token_ids(0) == [1, 2]


# Cutting and joining -------------------------------------------------------------------------------------


@given(forests(), st.randoms(use_true_random=False))
def test_select_keeps_the_chosen_rows(forest, random):
    batch = build(forest)
    indices = random.sample(range(len(batch)), random.randint(0, len(batch)))
    selected = batch.select(indices)
    expected = rows(batch)
    assert rows(selected) == [expected[s] for s in indices]
    needed = {k for s in indices for k in forest.chain(forest.leaves[s])}
    assert selected.num_tokens == sum(len(forest.tokens[k]) for k in needed), "an ancestor is stored once"


@given(forests(), st.integers(1, 4))
def test_cut_then_concat_is_the_identity(forest, num_parts):
    batch = build(forest)
    parts = [[s for s in range(len(batch)) if s * num_parts // len(batch) == p] for p in range(num_parts)]
    assert rows(RaggedBatch.concat([batch.select(part) for part in parts])) == rows(batch)


@given(forests(), forests())
def test_concat_puts_rows_behind_each_other(first, second):
    left, right = build(first), build(second)
    right = dataclasses.replace(right, ids=tuple("other" + i for i in right.ids))
    joined = RaggedBatch.concat([left, right])
    assert rows(joined) == rows(left) + rows(right)
    assert joined.num_tokens == left.num_tokens + right.num_tokens


def test_negative_indices_count_from_the_end_and_others_are_refused():
    batch = build(Forest([[1], [2], [3]], [-1, -1, -1], [0, 1, 2]))
    assert rows(batch.select([-1, 0])) == rows(batch.select([2, 0]))
    with pytest.raises(IndexError):
        batch.select([3])
    with pytest.raises(ValueError, match="at most one sequence"):
        batch.select([1, 1])


# Fields --------------------------------------------------------------------------------------------------


@given(forests())
def test_with_and_pop_are_inverse(forest):
    batch = build(forest)
    token, sequence = torch.zeros(batch.num_tokens), torch.ones(len(batch))
    grown = batch.with_token(a=token).with_sequence(b=sequence).with_objects(c=["x"] * len(batch))
    assert "a" not in batch.token and "b" not in batch.sequence and "c" not in batch.objects
    for name, expected in (("a", token), ("b", sequence), ("c", ("x",) * len(batch))):
        grown, found = grown.pop(name)
        assert found is expected or found == expected
    assert set(grown.token) == set(batch.token) and rows(grown) == rows(batch)
    with pytest.raises(KeyError):
        batch.pop("missing")


@given(forests())
def test_moving_pickling_and_copying_keep_everything(forest):
    batch = build(forest)
    for other in (batch.to("cpu"), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert rows(other) == rows(batch)
        assert (other.parents, other.leaves) == (batch.parents, batch.leaves)


# Immutability --------------------------------------------------------------------------------------------


def test_nothing_can_be_written_into_a_batch():
    lengths, fields, answers = [1, 2], {"x": torch.zeros(3)}, ["a", "b"]
    batch = RaggedBatch(
        torch.zeros(3, dtype=torch.int64), lengths, [-1, -1], [0, 1], ["0", "1"], fields, {}, {"answer": answers}
    )
    lengths.append(7)
    fields["y"] = torch.zeros(1)
    answers.append("c")
    assert batch.segment_lengths == (1, 2) and set(batch.token) == {"x"} and batch.objects["answer"] == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.ids = ()
    for family in (batch.token, batch.sequence, batch.objects):
        with pytest.raises(TypeError):
            family["x"] = torch.zeros(3)


# Validation ----------------------------------------------------------------------------------------------

GOOD = {
    "input_ids": torch.tensor([1, 2, 3]),
    "segment_lengths": (1, 1, 1),
    "parents": (-1, 0, 0),
    "leaves": (1, 2),
    "ids": ("a", "b"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.tensor([1, 2])}, "segments hold 3 tokens"),
        ({"input_ids": torch.tensor([1.0, 2.0, 3.0])}, "must be int64"),
        ({"segment_lengths": (2, 0, 1)}, "at least one token"),
        ({"parents": (-1, 2, 0)}, "before its child"),
        ({"leaves": (1, 1)}, "at most one sequence"),
        ({"leaves": (1, 3)}, "out of range"),
        ({"leaves": (0, 2)}, r"leaves \[0\] are parents"),
        ({"ids": ("a", "a")}, "as many distinct ids"),
        ({"token": {"x": torch.zeros(2)}}, "token field 'x'"),
        ({"objects": {"x": ("one",)}}, "object field 'x'"),
    ],
)
def test_malformed_batches_are_refused(change, message):
    RaggedBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        RaggedBatch(**{**GOOD, **change})


def test_concat_refuses_nothing_and_different_fields():
    with pytest.raises(ValueError, match="nothing to concatenate"):
        RaggedBatch.concat([])
    left, right = RaggedBatch.from_sequences([[1]], ["a"]), RaggedBatch.from_sequences([[1]], ["b"])
    with pytest.raises(ValueError, match="sequence fields differ"):
        RaggedBatch.concat([left, right.with_sequence(score=torch.zeros(1))])
    with pytest.raises(ValueError, match="distinct ids"):
        RaggedBatch.concat([left, left])
