"""Several losses in one update: each over a batch of its own, cut for itself, added with its weight."""

from __future__ import annotations

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import PPO
from quartet.train.engine import LossTerm
from quartet.train.objectives import PolicyObjective, SFTObjective

COEF = 0.3
PTX = SFTObjective("loss/ptx")


def _policy():
    return PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)


@pytest.fixture(scope="module")
def shown():
    """Six demonstrations of 3 to 8 tokens, the first one or two of which are prompt."""
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 8, 5, 4, 8, 6)
    rows = [torch.randint(31, (n,), generator=generator).tolist() for n in lengths]
    mask = torch.tensor([t >= 1 + n % 2 for n in lengths for t in range(n)])
    return RaggedBatch.from_sequences(rows, [f"d{i}" for i in range(6)], token={"loss_mask": mask})


@pytest.mark.parametrize("token_budget", [10_000, 12])
def test_the_gradient_is_the_sum_of_both(token_budget, batch, shown, make_engine, gradients, same):
    def of(data, objective, also=()):
        engine = make_engine(token_budget=token_budget)
        engine.train_step(data, objective, also)
        return gradients(engine)

    policy, sft = of(batch, _policy()), of(shown, SFTObjective())
    both = of(batch, _policy(), [LossTerm(shown, PTX, COEF)])
    same(both, {name: policy[name] + COEF * sft[name] for name in policy})
    assert any(float((both[name] - policy[name]).abs().max()) > 1e-3 for name in policy), "the term is felt"
    twice = of(batch, _policy(), [LossTerm(shown, PTX, COEF / 2), LossTerm(shown, PTX, COEF / 2)])
    same(twice, both)


def test_the_policys_own_metrics_stay_as_they_are(batch, shown, make_engine):
    alone = make_engine().train_step(batch, _policy())
    mixed = make_engine().train_step(batch, _policy(), [LossTerm(shown, PTX, COEF)])
    demonstrations = make_engine().train_step(shown, PTX)
    assert mixed.pop("loss/ptx") == demonstrations["loss/ptx"], "before its coefficient"
    assert mixed.pop("grad_norm") != alone.pop("grad_norm")
    assert mixed == alone


def test_each_term_is_cut_for_itself_and_never_above_the_budget(batch, shown, make_engine, monkeypatch):
    def cut(data, objective, also=()):
        engine = make_engine(token_budget=14)
        tokens, hidden = [], engine.packed.hidden
        monkeypatch.setattr(engine.packed, "hidden", lambda ids, *rest: tokens.append(len(ids)) or hidden(ids, *rest))
        engine.train_step(data, objective, also)
        return tokens

    both = cut(batch, _policy(), [LossTerm(shown, PTX, COEF)])
    assert both == cut(batch, _policy()) + cut(shown, PTX)
    assert max(both) <= 14 and len(both) > 5


def test_where_memory_runs_out_all_terms_are_done_again(batch, shown, make_engine, weights, monkeypatch):
    """It runs out in the demonstrations: the policy's gradients of the failed attempt do not count twice."""
    engine = make_engine(dtype=torch.float32, token_budget=30)
    hidden, calls = engine.packed.hidden, iter(range(10_000))
    whole = make_engine(dtype=torch.float32, token_budget=30)
    num_policy = []
    counted = whole.packed.hidden
    monkeypatch.setattr(whole.packed, "hidden", lambda *a: num_policy.append(1) or counted(*a))
    whole.train_step(batch, _policy())

    def failing(*args):
        if next(calls) == len(num_policy):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return hidden(*args)

    monkeypatch.setattr(engine.packed, "hidden", failing)
    also = [LossTerm(shown, PTX, COEF)]
    metrics = engine.train_step(batch, _policy(), also)
    assert engine.num_oom == 1 and engine.budget.tokens <= 15
    smaller = make_engine(dtype=torch.float32, token_budget=engine.budget.tokens)
    assert metrics == smaller.train_step(batch, _policy(), also)
    expected = weights(smaller)
    assert all(torch.equal(values, expected[name]) for name, values in weights(engine).items())
