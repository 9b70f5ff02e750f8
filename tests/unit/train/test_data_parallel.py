"""Several ranks train as one: here threads that meet in memory; ``tests/distributed`` has real processes."""

from __future__ import annotations

import math
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quartet.batch.partition import plan_tree_shares
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import PPO, RLOO, KLConfig
from quartet.config.preference import DPOLoss
from quartet.train.data_parallel import DataParallelGroup, GradientBuckets, RankFailed, fingerprint, shard_batches
from quartet.train.engine import LossTerm
from quartet.train.objectives import PolicyObjective, SFTObjective, ValueObjective
from quartet.train.preference_objectives import PreferenceObjective
from quartet.train.token_budget import num_computed_tokens

PTX = SFTObjective("loss/ptx")


# Ranks in threads ----------------------------------------------------------------------------------------


class Room:
    """Where threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadDataParallelGroup(DataParallelGroup):
    """What a process group does, in memory; everything travels pickled."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank, self.size, self._room = rank, room.size, room

    def gather(self, value):
        self._room.slots[self.rank] = pickle.dumps(value)
        self._room.barrier.wait()
        found = [pickle.loads(slot) for slot in self._room.slots]
        self._room.barrier.wait()
        return found

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        assert all(t.is_contiguous() and t.dtype in (torch.float32, torch.float64) for t in tensors)
        for of_ranks in zip(*self.gather(list(tensors)), strict=True):
            tensor = tensors[0]
            tensor.copy_(torch.stack(list(of_ranks)).sum(0))
            tensors = tensors[1:]


def ranks(size: int, work: Callable[[DataParallelGroup], Any]) -> list[Any]:
    """``work(dp_group)`` on every rank at once: results, or the exceptions that were raised."""
    room, results = Room(size), [None] * size

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(ThreadDataParallelGroup(rank, room))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def done(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def policy(is_first=False, **config):
    return PolicyObjective(PPO(**config), 6, 0.9, kl_coef=0.2, is_first=is_first, max_new_tokens=8)


@pytest.fixture(scope="module")
def shown():
    """Six demonstrations of 3 to 8 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 8, 5, 4, 8, 6)
    rows = [torch.randint(31, (n,), generator=generator).tolist() for n in lengths]
    mask = torch.tensor([t >= 1 for n in lengths for t in range(n)])
    return RaggedBatch.from_sequences(rows, [f"d{i}" for i in range(6)], token={"loss_mask": mask})


@pytest.fixture(scope="module")
def answers(pairs):
    generator = torch.Generator().manual_seed(11)
    reference = -6 - 4 * torch.rand(len(pairs), generator=generator, dtype=torch.float64)
    return pairs.with_token(loss_mask=pairs.sequence_index() >= 0).with_sequence(ref_logprobs=reference)


# Sharing out ---------------------------------------------------------------------------------------------

trees = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=0, max_size=6
)


def _tree(groups) -> RaggedBatch:
    responses = [[[1] * n for n in lengths] for _, lengths in groups]
    ids = [str(i) for i in range(sum(len(lengths) for _, lengths in groups))]
    return RaggedBatch.from_groups([[2] * n for n, _ in groups], responses, ids)


@given(trees, st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_every_atom_is_dealt_out_once_and_shares_are_alike(groups, num_shares, share, size):
    batch = _tree(groups)
    atoms = [list(range(s, min(s + size, len(batch)))) for s in range(0, len(batch), size)]
    shares = plan_tree_shares(batch, atoms, num_shares, share=share)
    assert len(shares) == num_shares
    assert sorted(a for part in shares for a in part) == list(range(len(atoms)))
    assert all(part == sorted(part) for part in shares)
    costs = [num_computed_tokens(batch, [s for a in part for s in atoms[a]], share=share) for part in shares]
    largest = max((num_computed_tokens(batch, atom, share=share) for atom in atoms), default=0)
    everything = sum(num_computed_tokens(batch, atom, share=share) for atom in atoms)
    assert max(costs) <= everything / num_shares + largest
    if len(atoms) >= num_shares and not share:
        assert max(costs) - min(costs) <= largest


def test_a_group_is_cut_where_that_evens_out_more_than_its_prompt_costs():
    """Eight responses of 50 tokens: with a prompt of 10 two ranks take four each; with one of 1000 one takes all."""
    short, long = _tree([(10, [50] * 8)]), _tree([(1000, [1] * 2)])
    assert sorted(map(len, plan_tree_shares(short, [[s] for s in range(8)], 2, share=True))) == [4, 4]
    costs = [num_computed_tokens(long, part, share=True) for part in plan_tree_shares(long, [[0], [1]], 2, share=True)]
    assert max(costs) <= 1002
    three = _tree([(4, [20] * 4)] * 3)
    parts = plan_tree_shares(three, [[s] for s in range(12)], 2, share=True)
    assert max(num_computed_tokens(three, part, share=True) for part in parts) <= 132, "a group in two halves"


def test_the_idlest_rank_gets_the_largest_piece_of_the_next_batch():
    one = RaggedBatch.from_sequences([[1] * 9])
    pieces = shard_batches([(one, [[0]]), (one, [[0]]), (one, [[0]])], 2, share=True)
    counts = [[len(piece.sequences) for piece in of_rank] for of_rank in pieces]
    assert sorted(map(sum, counts)) == [1, 2]
    assert [sum(of_batch) for of_batch in zip(*counts, strict=True)] == [1, 1, 1]
    uneven = RaggedBatch.from_sequences([[1] * 5, [1] * 3, [1] * 3])
    pieces = shard_batches([(uneven, [[0], [1], [2]])] * 2, 2, share=True)
    tokens = [sum(len(uneven.token_ids(s)) for piece in of_rank for s in piece.sequences) for of_rank in pieces]
    assert tokens == [11, 11], "6 and 5, then 5 and 6"


def test_atoms_keep_their_members():
    batch = RaggedBatch.from_sequences([[1] * n for n in (3, 9, 4, 2, 7)])
    atoms = [[4, 0], [1], [3, 2]]
    found = set()
    for (piece,) in shard_batches([(batch, atoms)], 2, share=False):
        found |= {tuple(piece.sequences[s] for s in atom) for atom in piece.atoms}
    assert found == {(4, 0), (1,), (3, 2)}


# Updates -------------------------------------------------------------------------------------------------

KL_LOSS = KLConfig(coef=0.2, estimator="k3", place="loss")
CASES = {
    "sft": lambda: SFTObjective(),
    "policy-first": lambda: policy(is_first=True),
    **{
        f"policy-{aggregation}": lambda a=aggregation: policy(aggregation=a, kl=KL_LOSS, entropy_coef=0.1)
        for aggregation in (
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
        )
    },
    "whole-trajectories": lambda: PolicyObjective(RLOO(), 6, 1.0, kl_coef=0.0, is_first=False, max_new_tokens=8),
    "value": lambda: ValueObjective(PPO(), 6),
    "pairs": lambda: PreferenceObjective(DPOLoss(beta=0.5, label_smoothing=0.1)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_the_update_is_that_of_one_process(name, size, batch, answers, make_engine, gradients, weights, same):
    objective, data = CASES[name](), answers if name == "pairs" else batch
    kind = "scalar" if name == "value" else "causal"
    budget = {"token_budget": 20} if size == 2 else {}
    alone = make_engine(kind, **budget)
    expected = [alone.train_step(data, objective) for _ in range(2)]

    def work(dp_group):
        engine = make_engine(kind, dp_group=dp_group, **budget)
        first = engine.train_step(data, objective)
        found = gradients(engine)
        return first, engine.train_step(data, objective), found, weights(engine)

    fresh = make_engine(kind, **budget)
    fresh.train_step(data, objective)
    for first, second, found, after in done(ranks(size, work)):
        assert first == pytest.approx(expected[0], rel=1e-9, abs=1e-10)
        assert second == pytest.approx(expected[1], rel=1e-9, abs=1e-10)
        same(found, gradients(fresh))
        same(after, weights(alone))


def test_replicas_are_equal_to_the_bit_and_so_are_their_states(batch, make_engine):
    def work(dp_group):
        engine = make_engine(dtype=torch.float32, dp_group=dp_group, token_budget=20)
        metrics = [engine.train_step(batch, policy()) for _ in range(3)]
        return metrics, engine.state()

    (metrics, state), *others = done(ranks(3, work))
    for other_metrics, other in others:
        assert other_metrics == metrics
        _equal(other, state)

    def resumed(dp_group):
        engine = make_engine(dtype=torch.float32, dp_group=dp_group, token_budget=20)
        engine.load_state(pickle.loads(pickle.dumps(state)))
        return engine.train_step(batch, policy()), engine.state()

    def went_on(dp_group):
        engine = make_engine(dtype=torch.float32, dp_group=dp_group, token_budget=20)
        for _ in range(3):
            engine.train_step(batch, policy())
        return engine.train_step(batch, policy()), engine.state()

    expected = done(ranks(3, went_on))[0]
    for found in done(ranks(3, resumed)):
        assert found[0] == expected[0]
        _equal(found[1], expected[1])


def _equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            _equal(actual[key], value)
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def test_every_rank_computes_its_share_alone(batch, make_engine):
    """The whole is computed, by nobody in full."""
    tokens = [0, 0]

    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        hidden = engine.packed.hidden

        def spy(ids, *rest):
            tokens[dp_group.rank] += len(ids)
            return hidden(ids, *rest)

        engine.packed.hidden = spy
        engine.train_step(batch, SFTObjective())

    done(ranks(2, work))
    assert batch.num_tokens <= sum(tokens) < 1.3 * batch.num_tokens
    assert abs(tokens[0] - tokens[1]) <= 8


def test_a_rank_with_nothing_to_do_takes_part(batch, shown, make_engine, weights, same):
    """One sequence for three ranks, and a term of one sequence, which another rank takes."""
    one, other = batch.select([3]), shown.select([1])
    alone = make_engine()
    expected = alone.train_step(one, policy(is_first=True), [LossTerm(other, PTX, 0.3)])
    parts = []

    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        compute = engine.packed.hidden
        engine.packed.hidden = lambda *args: parts.append(dp_group.rank) or compute(*args)
        return engine.train_step(one, policy(is_first=True), [LossTerm(other, PTX, 0.3)]), weights(engine)

    for metrics, after in done(ranks(3, work)):
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-10)
        same(after, weights(alone))
    assert len(parts) == len(set(parts)) == 2


def test_terms_are_shared_out_as_well(batch, shown, make_engine, gradients, same):
    alone = make_engine(token_budget=14)
    also = [LossTerm(shown, PTX, 0.3)]
    expected = alone.train_step(batch, policy(), also)

    def work(dp_group):
        engine = make_engine(dp_group=dp_group, token_budget=14)
        return engine.train_step(batch, policy(), also), gradients(engine)

    for metrics, found in done(ranks(2, work)):
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-10)
        same(found, gradients(alone))


def test_a_gradient_that_is_not_finite_is_skipped_by_all(batch, make_engine, weights):
    poisoned = batch.token["advantages"].clone()
    poisoned[batch.token["loss_mask"].nonzero()[-1]] = float("inf")

    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        before = weights(engine)
        metrics = engine.train_step(batch.with_token(advantages=poisoned), policy())
        assert all(torch.equal(values, before[name]) for name, values in weights(engine).items())
        again = engine.train_step(batch, policy())
        return metrics["skipped"], engine.num_updates, engine.num_skipped, again["skipped"]

    assert done(ranks(2, work)) == [(1.0, 1, 1, 0.0)] * 2


# Gradients -----------------------------------------------------------------------------------------------


def test_large_and_small_gradients_and_other_dtypes(monkeypatch):
    """In place, in a bucket, and through fp32; some that one rank or nobody has."""
    monkeypatch.setattr("quartet.train.data_parallel.IN_PLACE_BYTES", 64)
    shapes = [((40,), torch.float32), ((3,), torch.float32), ((50,), torch.bfloat16), ((), torch.float64)]
    shapes += [((5, 7), torch.float32), ((2,), torch.float32), ((4,), torch.float32)]

    def work(dp_group):
        generator = torch.Generator().manual_seed(dp_group.rank)
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
        for i, parameter in enumerate(parameters):
            if i == 6 or (i == 5 and dp_group.rank == 0):
                continue
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameters[4].grad = torch.randn((7, 5), generator=generator).T
        own = [None if p.grad is None else p.grad.clone() for p in parameters]
        buckets = GradientBuckets(parameters)
        buckets.add_up(dp_group, dp_group.gather(buckets.present))
        return own, [p.grad for p in parameters]

    (first, summed), (second, other) = done(ranks(2, work))
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if i == 6:
            assert summed[i] is None and other[i] is None
            continue
        expected = b if a is None else (a.double() + b.double()).to(a.dtype)
        assert summed[i].dtype == expected.dtype
        torch.testing.assert_close(summed[i], expected)
        assert torch.equal(summed[i], other[i])


def test_parameters_without_a_gradient_are_not_decayed(batch, make_engine, weights):
    """As in one process, AdamW leaves a parameter alone that had no gradient."""

    def work(dp_group):
        engine = make_engine(dp_group=dp_group, optim={"weight_decay": 0.5})
        extra = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        engine.optimizer.add_param_group({"params": [extra], "weight_decay": 0.5})
        engine.train_step(batch, SFTObjective())
        return extra.detach(), weights(engine)["lm_head.weight"]

    for extra, _ in done(ranks(2, work)):
        assert torch.equal(extra, torch.ones(3, 3, dtype=torch.float64))


# Failures ------------------------------------------------------------------------------------------------


def _fail_on(engine, rank, dp_group, calls, fail):
    hidden, count = engine.packed.hidden, iter(range(10_000))

    def failing(*args):
        if next(count) in calls and dp_group.rank == rank:
            fail()
        return hidden(*args)

    engine.packed.hidden = failing


def _no_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("call", [0, 1])
def test_where_memory_runs_out_on_one_all_start_over(call, batch, make_engine, weights):
    def work(dp_group):
        engine = make_engine(dtype=torch.float32, dp_group=dp_group, token_budget=13)
        _fail_on(engine, 1, dp_group, {call}, _no_memory)
        metrics = engine.train_step(batch, policy())
        return metrics, engine.num_oom, engine.budget.tokens, weights(engine)

    found = done(ranks(2, work))
    assert found[0][:3] == found[1][:3] and found[0][1] == 1
    tokens = found[0][2]
    assert tokens < 13

    def smaller(dp_group):
        engine = make_engine(dtype=torch.float32, dp_group=dp_group, token_budget=tokens)
        return engine.train_step(batch, policy()), 0, 0, weights(engine)

    expected = done(ranks(2, smaller))
    for rank in range(2):
        assert found[rank][0] == expected[rank][0]
        assert all(torch.equal(found[rank][3][name], values) for name, values in expected[rank][3].items())


def test_memory_that_never_suffices_is_said_by_all(batch, make_engine):
    def work(dp_group):
        engine = make_engine(dp_group=dp_group, token_budget=12, name="actor.train")
        _fail_on(engine, 0, dp_group, range(10_000), _no_memory)
        engine.train_step(batch, policy())

    for error in ranks(2, work):
        assert isinstance(error, UserError) and "actor.train.token_budget" in error.problem
        assert "rank 0 of 2" in error.found


def test_an_atom_above_the_budget_is_said_by_all(batch, make_engine):
    results = ranks(
        2, lambda dp_group: make_engine(dp_group=dp_group, token_budget=8).train_step(batch, SFTObjective())
    )
    assert all(isinstance(error, UserError) for error in results)
    assert len({str(error) for error in results}) == 1


class Failing(SFTObjective):
    """Fails where it is told to, on one rank."""

    def __new__(cls, *_: Any) -> Failing:
        return super().__new__(cls)

    def __init__(self, place: str, fails: bool) -> None:
        super().__init__()
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "fails", fails)

    def _fail(self, place: str) -> None:
        if self.fails and self.place == place:
            raise ValueError(f"no {place}\nand more lines")

    def atoms(self, batch):
        self._fail("atoms")
        return super().atoms(batch)

    def denominators(self, batch):
        self._fail("denominators")
        return super().denominators(batch)

    def loss(self, outputs, batch, denominators, sums):
        self._fail("loss")
        return super().loss(outputs, batch, denominators, sums)


@pytest.mark.parametrize("place", ["atoms", "denominators", "loss", "step"])
def test_a_rank_that_fails_tells_the_others(place, batch, make_engine, weights):
    """And the ranks can go on together where nothing was changed."""

    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        step = engine.optimizer.step
        if place == "step" and dp_group.rank == 1:
            engine.optimizer.step = lambda: (_ for _ in ()).throw(ValueError("no step"))
        with pytest.raises(ValueError if dp_group.rank == 1 else RankFailed) as raised:
            engine.train_step(batch, Failing(place, dp_group.rank == 1))
        engine.optimizer.step = step
        after = engine.train_step(batch, SFTObjective()) if place != "step" else {}
        return str(raised.value), after

    (first, after), (own, _), (third, _) = done(ranks(3, work))
    assert own.startswith(f"no {place}")
    assert first == third == f"another rank failed in this update: rank 1 of 3: ValueError: no {place}"
    if place != "step":
        alone = make_engine().train_step(batch, SFTObjective())
        assert after == pytest.approx(alone, rel=1e-9)


def test_a_library_that_gives_up_is_noticed_too(batch, make_engine):
    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        _fail_on(engine, 0, dp_group, {0}, lambda: sys.exit("no licence"))
        with pytest.raises(SystemExit if dp_group.rank == 0 else RankFailed) as raised:
            engine.train_step(batch, SFTObjective())
        return str(raised.value)

    assert done(ranks(2, work)) == [
        "no licence",
        "another rank failed in this update: rank 0 of 2: SystemExit: no licence",
    ]


@pytest.mark.parametrize("what", ["weights", "batch", "budget", "updates", "terms"])
def test_ranks_that_begin_differently_are_refused(what, batch, shown, make_engine, weights):
    def work(dp_group):
        odd = dp_group.rank == 1
        engine = make_engine(dp_group=dp_group, token_budget=40 if what == "budget" and odd else 50)
        if what == "weights" and odd:
            with torch.no_grad():
                engine.packed.model.lm_head.weight[0, 0] += 1e-9
        if what == "updates" and odd:
            engine.num_updates = 1
        data = batch.select(range(1, 7)) if what == "batch" and odd else batch
        also = [LossTerm(shown, PTX)] if what == "terms" and odd else []
        before = weights(engine)
        with pytest.raises(RuntimeError, match="began an update differently") as raised:
            engine.train_step(data, SFTObjective(), also)
        assert all(torch.equal(values, before[name]) for name, values in weights(engine).items())
        return str(raised.value)

    first, second = done(ranks(2, work))
    assert first == second
    named = {"budget": "train.token_budget", "updates": "number of updates", "terms": "batch 1", "batch": "batch 0"}
    assert f"differently: {named.get(what, what)} of rank 0" in first


def test_replicas_that_come_apart_are_noticed(batch, make_engine):
    def work(dp_group):
        engine = make_engine(dp_group=dp_group)
        engine.train_step(batch, SFTObjective())
        before = dp_group.add_up
        if dp_group.rank == 1:
            dp_group.add_up = lambda tensors: before(tensors) or [t.mul_(1.5) for t in tensors]
        engine.train_step(batch, SFTObjective())

    for error in ranks(2, work):
        assert isinstance(error, RuntimeError) and "come apart" in str(error)


def test_a_fingerprint_tells_one_bit():
    model = nn.Linear(5, 3)
    parameters = list(model.parameters())
    before = fingerprint(parameters)
    assert fingerprint(parameters) == before
    with torch.no_grad():
        model.weight[2, 2] = math.nextafter(float(model.weight[2, 2]), 9.0) + 1e-7
    assert fingerprint(parameters) != before
