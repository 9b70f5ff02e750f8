import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.partition import deal, plan_tree_micro_batches
from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 7))
def test_items_are_dealt_out_to_within_one_item(costs, num_parts):
    parts = deal(costs, num_parts)
    assert len(parts) == num_parts and sorted(i for part in parts for i in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert deal(tuple(costs), num_parts) == parts


def test_dealt_by_hand():
    assert deal([6, 5, 4, 3, 2], 3) == [[0], [1, 4], [2, 3]]
    assert deal([5], 3) == [[0], [], []]
    assert sorted(deal([0, 0, 4], 3)) == [[0], [1], [2]], "items of no cost fill empty parts first"


# Trees -----------------------------------------------------------------------------------------------------------


def group_batch(prompts: list[int], responses: list[list[int]]) -> RaggedBatch:
    """Groups of the given token counts; ids are ``<group>.<member>``."""
    return RaggedBatch.from_groups(
        [[1] * n for n in prompts],
        [[[2] * n for n in members] for members in responses],
        [f"{g}.{i}" for g, members in enumerate(responses) for i in range(len(members))],
    )


@st.composite
def tree_batches(draw: st.DrawFn) -> RaggedBatch:
    """Forests up to four deep, leaves in any order, now and then a segment that nobody needs."""
    num_inner = draw(st.integers(1, 5))
    parents = [draw(st.integers(-1, k - 1)) for k in range(num_inner)]
    num_leaves = draw(st.integers(1, 14))
    parents += [draw(st.integers(-1, num_inner - 1)) for _ in range(num_leaves)]
    lengths = [draw(st.integers(1, 15)) for _ in parents]
    return RaggedBatch(
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        segment_lengths=tuple(lengths),
        parents=tuple(parents),
        leaves=tuple(draw(st.permutations(range(num_inner, num_inner + num_leaves)))),
        ids=tuple(str(s) for s in range(num_leaves)),
    )


def computed(batch: RaggedBatch, sequences, share: bool = True) -> int:
    """Tokens of a pass, from what a selection stores."""
    part = batch.select(sequences)
    return part.num_tokens if share else sum(part.sequence_lengths())


def plan_tree(batch, budget, share=True, atoms=None, key="actor.train.token_budget"):
    atoms = [[s] for s in range(len(batch))] if atoms is None else atoms
    return plan_tree_micro_batches(batch, atoms, budget, share=share, budget_key=key)


@given(tree_batches(), st.integers(75, 160), st.booleans())
def test_no_tree_part_computes_more_than_the_budget(batch, budget, share):
    plan = plan_tree(batch, budget, share)
    assert sorted(s for part in plan for s in part) == list(range(len(batch)))
    assert all(part == sorted(part) for part in plan) and plan == sorted(plan)
    assert all(computed(batch, part, share) <= budget for part in plan)
    assert plan == plan_tree(batch, budget, share)


@given(tree_batches(), st.integers(75, 160))
def test_trees_stay_whole_where_they_fit(batch, budget):
    trees: dict[int, set[int]] = {}
    for s in range(len(batch)):
        trees.setdefault(batch.chain(s)[0], set()).add(s)
    plan = plan_tree(batch, budget)
    for members in trees.values():
        touched = [members & set(part) for part in plan if members & set(part)]
        if computed(batch, sorted(members)) <= budget:
            assert touched == [members]
        else:
            assert len(touched) > 1


@given(tree_batches(), st.integers(75, 160), st.data())
def test_atoms_stay_together(batch, budget, data):
    """Atoms of up to two sequences, of one tree or of two."""
    order = data.draw(st.permutations(range(len(batch))))
    atoms = [list(order[i : i + 2]) for i in range(0, len(order), 2)]
    if any(computed(batch, atom) > budget for atom in atoms):
        with pytest.raises(UserError, match=r"actor\.train\.token_budget"):
            plan_tree(batch, budget, atoms=atoms)
        return
    plan = plan_tree(batch, budget, atoms=atoms)
    assert sorted(s for part in plan for s in part) == list(range(len(batch)))
    assert all(computed(batch, part) <= budget for part in plan)
    assert all(sum(set(atom) <= set(part) for part in plan) == 1 for atom in atoms)


@given(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(50, 120))
def test_a_group_is_cut_into_few_equal_runs(prompt, responses, budget):
    batch = group_batch([prompt], [responses])
    loads = [computed(batch, part) for part in plan_tree(batch, budget)]
    assert all(prompt < load <= budget for load in loads)
    room = budget - prompt
    # A run is full when no further response of at most 20 tokens fits.
    assert len(loads) <= max(1, -(-sum(responses) // max(room - 19, 1)))
    # Equal to within two members: a run above the mean by more could have passed one on.
    assert max(loads) <= (sum(responses) / len(loads)) + prompt + 2 * max(responses)


def test_trees_by_hand():
    # Two groups of 10 + 3·2 = 16 tokens and one of 4 + 2 = 6; unshared they would cost 36, 36 and 6.
    batch = group_batch([10, 10, 4], [[2, 2, 2], [2, 2, 2], [2]])
    assert plan_tree(batch, 32) == [[0, 1, 2, 6], [3, 4, 5]]
    assert plan_tree(batch, 38) == [[0, 1, 2, 3, 4, 5, 6]]
    # 16 do not fit 15: each group becomes two runs of 14 and 12.
    assert plan_tree(batch, 15) == [[0, 1], [2], [3, 4], [5], [6]]
    # The unshared plan: sequences of 12 tokens, one of 6.
    assert plan_tree(batch, 24, share=False) == [[0, 4], [1, 5], [2, 6], [3]]


def test_a_large_group_is_cut_evenly():
    # 10 + 9·5 = 55 tokens under 30: filling up would leave 4, 4 and 1 members.
    assert plan_tree(group_batch([10], [[5] * 9]), 30) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_forked_tree_is_cut_along_its_branches():
    """Root (10) with two forks (10 each) of two leaves (1 each), the leaves stored crosswise."""
    batch = RaggedBatch(
        input_ids=torch.zeros(34, dtype=torch.int64),
        segment_lengths=(10, 10, 10, 1, 1, 1, 1),
        parents=(-1, 0, 0, 1, 2, 1, 2),
        leaves=(3, 4, 5, 6),
        ids=("a", "b", "c", "d"),
    )
    assert plan_tree(batch, 34) == [[0, 1, 2, 3]]
    assert plan_tree(batch, 33) == [[0, 2], [1, 3]]


def test_pairs_count_their_prompt_once():
    batch = group_batch([10, 10], [[3, 4], [5, 5]])
    pairs = [[0, 1], [2, 3]]
    assert plan_tree(batch, 20, atoms=pairs) == [[0, 1], [2, 3]]
    assert plan_tree(batch, 37, atoms=pairs) == [[0, 1, 2, 3]]
    with pytest.raises(UserError) as caught:
        plan_tree(batch, 19, atoms=pairs, key="train.token_budget")
    assert caught.value.problem == "sequences that must stay together are longer than train.token_budget"
    assert caught.value.found == "sequences '1.0', '1.1' of 20 tokens, train.token_budget=19"
    assert caught.value.remedy == "raise train.token_budget to at least 20 or shorten the sequences"
    with pytest.raises(UserError, match="stay together"):
        plan_tree(batch, 29, atoms=pairs, share=False)


def test_atoms_across_groups_keep_both_together():
    batch = group_batch([10, 10], [[1, 1], [1, 1]])
    assert plan_tree(batch, 24, atoms=[[0], [1, 2], [3]]) == [[0, 1, 2, 3]]
    assert plan_tree(batch, 23, atoms=[[0], [1, 2], [3]]) == [[0, 1, 2], [3]]


def test_a_sequence_above_the_budget_names_the_key_to_raise():
    batch = group_batch([10, 10], [[3, 9], [12]])
    for share in (True, False):
        with pytest.raises(UserError) as caught:
            plan_tree(batch, 18, share=share, key="critic.train.token_budget")
        assert caught.value.problem == "a sequence is longer than critic.train.token_budget"
        assert caught.value.found == "sequence '0.1' of 19 tokens, critic.train.token_budget=18"
        assert caught.value.remedy == "raise critic.train.token_budget to at least 22 or shorten the sequences"


@pytest.mark.parametrize("atoms", [[[0]], [[0], [1], [1]], [[0], [1], []]])
def test_atoms_that_are_no_partition(atoms):
    with pytest.raises(ValueError, match="each of the 2 sequences once"):
        plan_tree(group_batch([1], [[1, 1]]), 10, atoms=atoms)


def test_no_sequence_no_part():
    assert plan_tree(RaggedBatch.from_sequences([]), 10) == []


def test_large_batches_are_planned_at_once():
    batch = group_batch([100] * 100, [[10 + (g * i) % 7 for i in range(32)] for g in range(100)])
    plan = plan_tree(batch, 1000)
    assert max(computed(batch, part) for part in plan) <= 1000
    assert len(plan) <= 110
