"""The engine around the objectives: columns, skipped and clipped steps, precision, budgets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quartet.batch.ragged import join_columns
from quartet.config import UserError
from quartet.config.algorithms import PPO, RLOO
from quartet.config.common import OptimConfig
from quartet.train.engine import build_optimizer
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import PairwiseObjective, PolicyObjective, SFTObjective, ValueObjective


def _policy(is_first=True):
    return PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=is_first, max_new_tokens=8)


# Forward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward_token_budget", [13, 30, 10_000])
def test_columns_do_not_depend_on_the_budget(forward_token_budget, batch, make_engine, same):
    needs = ForwardNeeds(logprobs=True, entropies=True, temperature=0.8)
    whole = make_engine().forward(batch, needs)
    cut = make_engine(forward_token_budget=forward_token_budget, logprob_chunk=2).forward(batch, needs)
    assert cut.ids == batch.ids
    same(dict(cut.token), dict(whole.token))
    outside = ~batch.token["loss_mask"]
    assert not bool(cut.token["logprobs"][outside].any() or cut.token["entropies"][outside].any())
    assert bool((cut.token["logprobs"][~outside] < 0).all())
    assert not any(values.requires_grad for values in cut.token.values())
    assert join_columns(batch, cut).token["logprobs"] is cut.token["logprobs"]


def test_columns_follow_the_sequences(batch, make_engine, same):
    """Each sequence alone has, at its leaf, what the whole batch has there."""
    needs = ForwardNeeds(values=True, scores=True, mask="action_mask")
    engine = make_engine("scalar", forward_token_budget=20)
    whole = engine.forward(batch, needs)
    for s in range(len(batch)):
        alone = batch.select([s])
        found = engine.forward(alone, needs)
        here, there = slice(*alone.leaf_span(0)), slice(*batch.leaf_span(s))
        same({"values": found.token["values"][here]}, {"values": whole.token["values"][there]})
        same({"score": found.sequence["scores"][0]}, {"score": whole.sequence["scores"][s]})


class Keeping:
    """An objective that keeps what the training forward gave it."""

    def __init__(self, objective):
        self.objective = objective
        self.needs = objective.needs
        self.atoms = objective.atoms
        self.denominators = objective.denominators
        self.outputs = []

    def loss(self, outputs, batch, denominators, sums):
        self.outputs.append(outputs)
        return self.objective.loss(outputs, batch, denominators, sums)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_forward_equals_forward_bit_for_bit(precision, batch, pairs, make_engine):
    """At equal packing: the reward model's score in its own training, in its evaluation and inside RL, the critic's
    values, the actor's log-probabilities.
    """
    cases = [
        ("scalar", PairwiseObjective(), pairs),
        ("scalar", ValueObjective(PPO(), 6), batch),
        ("causal", _policy(), batch),
        ("causal", SFTObjective(), batch),
    ]
    for kind, objective, data in cases:
        engine = make_engine(kind, torch.float32, precision=precision)
        columns = engine.forward(data, objective.needs)
        alone = forward_only(engine.packed, data, objective.needs, 16384)
        keeping = Keeping(objective)
        engine.train_step(data, keeping)
        (outputs,) = keeping.outputs
        found = {**columns.token, **columns.sequence}
        assert found
        for name, values in found.items():
            trained = getattr(outputs, name)
            assert trained.requires_grad == (name != "entropies"), "the bonus has no weight here"
            assert torch.equal(trained.detach(), values), (kind, name)
            assert torch.equal({**alone.token, **alone.sequence}[name], values)


# Sharing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shared"),
    [({}, True), ({"share_prefixes": False}, False), ({"numerics": "exact"}, True), ({"unsharable": True}, False)],
)
def test_prompts_are_computed_once_where_allowed(options, shared, batch, make_engine, monkeypatch):
    options = dict(options)
    unsharable = options.pop("unsharable", False)
    engine = make_engine(**options)
    engine.packed.shares_prefixes = not unsharable
    tokens, hidden = [], engine.packed.hidden

    def spy(input_ids, *rest):
        tokens.append(len(input_ids))
        return hidden(input_ids, *rest)

    monkeypatch.setattr(engine.packed, "hidden", spy)
    engine.train_step(batch, SFTObjective())
    engine.forward(batch, ForwardNeeds(logprobs=True))
    expected = batch.num_tokens if shared else sum(batch.sequence_lengths())
    assert tokens == [expected, expected]
    assert batch.num_tokens < sum(batch.sequence_lengths())


@pytest.mark.parametrize("kind", ["causal", "scalar"])
@pytest.mark.parametrize("options", [{"share_prefixes": False}, {"activation_checkpointing": True}])
def test_the_update_does_not_depend_on_how_it_is_computed(options, kind, batch, make_engine, gradients, same):
    objective = _policy() if kind == "causal" else ValueObjective(PPO(), 6)
    plain, other = make_engine(kind), make_engine(kind, **options)
    metrics = [engine.train_step(batch, objective) for engine in (plain, other)]
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-10)
    same(gradients(other), gradients(plain))


# Updates -------------------------------------------------------------------------------------------------


def test_learning_rate_follows_the_updates(batch, make_engine):
    optim = {"lr": 0.1, "warmup_steps": 2, "schedule": "linear"}
    engine = make_engine(total_steps=4, optim=optim)
    rates = [engine.train_step(batch, SFTObjective())["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])
    assert engine.num_updates == 4
    assert all(group["lr"] == rates[-1] for group in engine.optimizer.param_groups)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad, batch, make_engine, weights):
    """Weights, optimizer state and learning rate go on as if the step had not been."""
    poisoned = batch.token["advantages"].clone()
    poisoned[batch.token["loss_mask"].nonzero()[-1]] = bad
    engine, untouched = (
        make_engine(optim={"schedule": "linear", "weight_decay": 0.1}, token_budget=20) for _ in range(2)
    )
    for each in (engine, untouched):
        each.train_step(batch, _policy())
    before = weights(engine)
    metrics = engine.train_step(batch.with_token(advantages=poisoned), _policy())
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    assert (engine.num_updates, engine.num_skipped) == (1, 1)
    after = weights(engine)
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert all(p.grad is None for p in engine.packed.model.parameters())
    results = [each.train_step(batch, _policy()) for each in (engine, untouched)]
    assert results[0] == results[1] and results[0]["skipped"] == 0.0
    expected = weights(untouched)
    assert all(torch.equal(values, expected[name]) for name, values in weights(engine).items())


def test_a_step_that_fails_leaves_no_gradient_behind(batch, make_engine, weights):
    """A failure in a later micro-batch: the next step is not the sum of two."""

    class Failing(SFTObjective):
        calls = 0

        def loss(self, outputs, part, denominators, sums):
            Failing.calls += 1
            if Failing.calls == 2:
                raise ValueError("failed on purpose")
            return super().loss(outputs, part, denominators, sums)

    engine, untouched = (make_engine(token_budget=20) for _ in range(2))
    with pytest.raises(ValueError, match="on purpose"):
        engine.train_step(batch, Failing())
    for each in (engine, untouched):
        each.train_step(batch, SFTObjective())
    expected = weights(untouched)
    assert all(torch.equal(values, expected[name]) for name, values in weights(engine).items())


def test_gradients_are_clipped_as_a_whole(batch, make_engine, gradients, same):
    free = make_engine()
    norm = free.train_step(batch, SFTObjective())["grad_norm"]
    grads = gradients(free)
    assert norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in grads.values())), rel=1e-9)
    clipped = make_engine(optim={"max_grad_norm": norm / 4}, token_budget=20)
    assert clipped.train_step(batch, SFTObjective())["grad_norm"] == pytest.approx(norm, rel=1e-9), "the one before"
    # torch divides by the norm + 1e-6.
    share = norm / 4 / (norm + 1e-6)
    same(gradients(clipped), {name: g * share for name, g in grads.items()})


def test_bf16_trains_fp32_masters(batch, make_engine, gradients, weights, same):
    full = make_engine(dtype=torch.float32)
    half = make_engine(dtype=torch.float32, precision="bf16", token_budget=20)
    for engine in (full, half):
        engine.train_step(batch, SFTObjective())
    assert {p.dtype for p in half.packed.model.parameters()} == {torch.float32}
    states = half.optimizer.state.values()
    assert {values.dtype for state in states for values in state.values()} == {torch.float32}
    same(gradients(half), gradients(full), torch.bfloat16)
    exact = gradients(full)
    assert any(not torch.equal(g, exact[name]) for name, g in gradients(half).items()), "it must have run in bf16"
    moved = weights(half)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(moved, moved.bfloat16().float()), "masters are not rounded to bf16"


# Budgets -------------------------------------------------------------------------------------------------


def test_a_sequence_over_the_budget_is_named(batch, make_engine, weights):
    engine = make_engine(token_budget=8, forward_token_budget=8)
    before = weights(engine)
    for call in (
        lambda: engine.train_step(batch, SFTObjective()),
        lambda: engine.forward(batch, ForwardNeeds(logprobs=True)),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert "token_budget" in raised.value.problem
        assert "9" in raised.value.found and "9" in raised.value.remedy
    after = weights(engine)
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_a_trajectory_or_pair_over_the_budget_is_refused_whole(batch, pairs, make_engine):
    """Sequences 1 and 2 (2 and 5 tokens after a prompt of 3) are one trajectory, so a ratio of the trajectory needs
    more than 9 though each sequence fits, and more than 12 where the prompt counts twice. Ratios of tokens do not.
    """
    whole = PolicyObjective(RLOO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)
    make_engine(token_budget=9).train_step(batch, SFTObjective())
    make_engine(token_budget=9).train_step(batch, _policy())
    with pytest.raises(UserError, match="token_budget"):
        make_engine(token_budget=9).train_step(batch, whole)
    make_engine(token_budget=10).train_step(batch, whole)
    with pytest.raises(UserError, match="token_budget"):
        make_engine(token_budget=12, share_prefixes=False).train_step(batch, whole)
    make_engine(token_budget=13, share_prefixes=False).train_step(batch, whole)
    with pytest.raises(UserError, match="token_budget"):
        make_engine("scalar", token_budget=10).train_step(pairs, PairwiseObjective())
    make_engine("scalar", token_budget=11).train_step(pairs, PairwiseObjective())


def test_a_rank_whose_part_of_the_model_does_not_train_has_an_optimizer_that_does_nothing() -> None:
    """As a pipeline stage without adapters: it goes through every update with the others, and its state has the same
    groups."""
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    before = frozen.weight.clone()
    optimizer = build_optimizer(frozen, OptimConfig())
    optimizer.step()
    assert torch.equal(frozen.weight, before) and not optimizer.state
    assert len(optimizer.param_groups) == len(build_optimizer(trained, OptimConfig()).param_groups) == 2
