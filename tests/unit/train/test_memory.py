"""What happens when memory runs out, and what a step keeps in memory while it does not."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import PPO
from quartet.models.memory import register_derived
from quartet.train.forward import ForwardNeeds
from quartet.train.objectives import PolicyObjective, SFTObjective
from train_fixtures import load_state


def _policy():
    return PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)


def _accelerator():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _host():
    """More than the address space: this is what torch's CPU allocator really raises."""
    torch.empty(1 << 50, dtype=torch.uint8)


def _python():
    raise MemoryError


def _fail_at(packed, monkeypatch, calls, fail):
    """Memory runs out in the given forward passes (from 0)."""
    hidden, count = packed.hidden, iter(range(10_000))

    def failing(*args):
        if next(count) in calls:
            fail()
        return hidden(*args)

    monkeypatch.setattr(packed, "hidden", failing)


# Room for the update -------------------------------------------------------------------------------------


def test_what_the_update_makes_stale_is_gone_before_its_first_pass(batch, make_engine, monkeypatch):
    """Once per update, of this model alone, and of nothing that has ended."""

    class Derived:
        def __init__(self):
            self.dropped = 0

        def drop(self):
            self.dropped += 1

    engine, another = make_engine(), make_engine()
    derived, ended, of_another = Derived(), Derived(), Derived()
    for model, held in ((engine, derived), (engine, ended), (another, of_another)):
        register_derived(model.packed.model, held)
    ended = weakref.ref(ended)
    assert ended() is None
    hidden, seen = engine.packed.hidden, []
    monkeypatch.setattr(engine.packed, "hidden", lambda *args: seen.append(derived.dropped) or hidden(*args))
    engine.forward(batch, ForwardNeeds(logprobs=True))
    assert set(seen) == {0}, "a forward pass changes no weight"
    for number in (1, 2):
        seen.clear()
        engine.train_step(batch, _policy())
        assert set(seen) == {number}
    assert of_another.dropped == 0


# Smaller budget, same update -----------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [_accelerator, _host, _python])
def test_the_update_is_that_of_the_smaller_budget(fail, batch, make_engine, weights, monkeypatch):
    """Memory runs out in the second micro-batch: as if the budget had been the smaller one from the start."""
    engine = make_engine(dtype=torch.float32, token_budget=30)
    _fail_at(engine.packed, monkeypatch, {1}, fail)
    metrics = engine.train_step(batch, _policy())
    assert engine.num_oom == 1
    assert 10 <= engine.budget.tokens <= 15, "half of what the largest micro-batch held; a trajectory has 10 tokens"
    smaller = make_engine(dtype=torch.float32, token_budget=engine.budget.tokens)
    assert metrics == smaller.train_step(batch, _policy())
    assert smaller.num_oom == 0
    expected = weights(smaller)
    assert all(torch.equal(values, expected[name]) for name, values in weights(engine).items())
    assert engine.train_step(batch, _policy()) == smaller.train_step(batch, _policy()), "the budget stays"


def test_in_the_backward(batch, make_engine, weights):
    """Gradients of the micro-batches before the failure do not count twice."""

    class Failing(SFTObjective):
        calls = 0

        def loss(self, outputs, part, denominators, sums):
            Failing.calls += 1
            if Failing.calls == 2:
                outputs.logprobs.register_hook(lambda _: _host())
            return super().loss(outputs, part, denominators, sums)

    engine = make_engine(dtype=torch.float32, token_budget=20)
    metrics = engine.train_step(batch, Failing())
    assert engine.num_oom == 1 and engine.budget.tokens < 20
    smaller = make_engine(dtype=torch.float32, token_budget=engine.budget.tokens)
    assert metrics == smaller.train_step(batch, SFTObjective())
    expected = weights(smaller)
    assert all(torch.equal(values, expected[name]) for name, values in weights(engine).items())


def test_forward_passes_shrink_their_own_budget(batch, make_engine, monkeypatch):
    engine = make_engine(dtype=torch.float32, forward_token_budget=30)
    _fail_at(engine.packed, monkeypatch, {1}, _accelerator)
    needs = ForwardNeeds(logprobs=True, entropies=True)
    columns = engine.forward(batch, needs)
    assert engine.num_oom == 1
    assert engine.forward_budget.tokens <= 15 and engine.budget.tokens == engine.config.token_budget
    smaller = make_engine(dtype=torch.float32, forward_token_budget=engine.forward_budget.tokens)
    expected = smaller.forward(batch, needs)
    assert columns.token.keys() == expected.token.keys()
    assert all(torch.equal(columns.token[name], values) for name, values in expected.token.items())


def test_at_the_smallest_micro_batch_the_user_is_told(batch, make_engine, weights, monkeypatch):
    engine = make_engine(token_budget=12, name="actor.train")
    before = weights(engine)
    _fail_at(engine.packed, monkeypatch, range(10_000), _host)
    with pytest.raises(UserError) as raised:
        engine.train_step(batch, _policy())
    assert "actor.train.token_budget" in raised.value.problem
    assert "9 tokens" in raised.value.found and "DefaultCPUAllocator" in raised.value.found
    assert "activation_checkpointing" in raised.value.remedy
    after = weights(engine)
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_it_is_said_and_resumed(batch, make_engine, monkeypatch):
    engine = make_engine(token_budget=30, name="critic.train")
    assert engine.warnings == ()
    _fail_at(engine.packed, monkeypatch, {0}, _accelerator)
    engine.train_step(batch, SFTObjective())
    (warning,) = engine.warnings
    assert f"critic.train.token_budget is {engine.budget.tokens} from now on" in warning
    resumed = make_engine(token_budget=30)
    load_state(resumed, engine.state())
    assert (resumed.num_oom, resumed.budget.tokens) == (1, engine.budget.tokens)
    raised = make_engine(token_budget=99)
    load_state(raised, make_engine(token_budget=30).state())
    assert raised.budget.tokens == 99, "what memory did not lower is the recipe's"


# Peak ----------------------------------------------------------------------------------------------------


def _peak_bytes(run):
    """Most bytes that torch held at a time beyond those at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def _many(batch, copies):
    """The batch several times over, with ids and trajectories of its own in each copy."""
    parts = [
        replace(batch, ids=tuple(f"{i}.{name}" for name in batch.ids)).with_sequence(
            trajectory=batch.sequence["trajectory"] + 6 * i
        )
        for i in range(copies)
    ]
    return RaggedBatch.concat(parts)


@pytest.mark.parametrize(("kind", "most"), [("train", 45), ("forward", 22)])
def test_peak_memory_grows_by_columns_alone(kind, most, batch, make_engine):
    """32 times the prompts: some numbers per token more, no activations."""
    peaks, tokens = [], []
    for copies in (1, 32):
        data = _many(batch, copies)
        # One copy's tokens: the largest micro-batch is as large with one copy as with many.
        engine = make_engine(token_budget=36, forward_token_budget=36, logprob_chunk=8)
        objective = PolicyObjective(PPO(), 6 * copies, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)
        engine.train_step(data, objective)
        runs = {
            "train": lambda e=engine, d=data, o=objective: e.train_step(d, o),
            "forward": lambda e=engine, d=data: e.forward(d, ForwardNeeds(logprobs=True, entropies=True)),
        }
        peaks.append(_peak_bytes(runs[kind]))
        tokens.append(data.num_tokens)
    added = (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])
    assert peaks[0] / 36 > 5 * most, "bytes per token of a micro-batch"
    assert added < most, "bytes per token"


@pytest.mark.parametrize("share", [False, True])
def test_only_rows_with_a_label_reach_the_head(share, batch, make_engine, monkeypatch):
    engine = make_engine(share_prefixes=share)
    rows, token_logprobs = [], engine.packed.token_logprobs

    def spy(hidden, labels, **options):
        rows.append(hidden.shape[0])
        return token_logprobs(hidden, labels, **options)

    monkeypatch.setattr(engine.packed, "token_logprobs", spy)
    engine.train_step(batch, SFTObjective())
    engine.forward(batch, ForwardNeeds(logprobs=True))
    expected = int(batch.token["loss_mask"].sum())
    assert rows == [expected, expected] and expected < batch.num_tokens
