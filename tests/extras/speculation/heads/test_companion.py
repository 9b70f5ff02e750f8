"""Companion training: heads learn from the hidden states of their trunk's own updates, which stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import PPO
from quartet.config.common import OptimConfig
from quartet.extras.speculation.config import HeadTraining
from quartet.extras.speculation.head_trainer import (
    HIDDEN,
    Companion,
    CompanionWorker,
    HeadTrainer,
    Watched,
    future_labels,
)
from quartet.extras.speculation.heads import MedusaHeads
from quartet.schedule.model_worker import TrainWorker, UpdateSpec
from quartet.train.engine import LossTerm, TrainEngine
from quartet.train.metrics import MetricSums
from quartet.train.objectives import PolicyObjective, SFTObjective

Make = Callable[..., TrainEngine[Any]]
OPTIM = OptimConfig(lr=1e-2)


def _policy() -> PolicyObjective:
    return PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)


def _companion(engine: TrainEngine[Any], *, shared: bool = True, **values: Any) -> Companion:
    heads = MedusaHeads(engine.packed, 2, shared_head=shared)
    for n, parameter in enumerate(heads.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(n))
    return Companion(engine, heads, HeadTraining(optim=OPTIM, **values), seed=3)


def _updates(batch: RaggedBatch, first: int = 0) -> list[UpdateSpec]:
    return [UpdateSpec((0, 1, 2, 3, 4), _policy(), first), UpdateSpec((5, 6, 3), _policy(), first + 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("token_budget", [10_000, 14])
def test_the_trunk_learns_as_without_heads_to_the_bit(
    make_engine: Make, batch: RaggedBatch, token_budget: int, dtype: torch.dtype
) -> None:
    plain, beside = (make_engine(token_budget=token_budget, dtype=dtype) for _ in range(2))
    worker = CompanionWorker(beside, None, _companion(beside, shared=False))
    heads = copy.deepcopy(list(worker.companion.heads.parameters()))
    for step in range(2):
        without = TrainWorker(plain).update(batch, _updates(batch, 2 * step))
        assert worker.update(batch, _updates(batch, 2 * step)) == without
        assert worker.train_drafter()["heads/loss"] > 0
    for ours, theirs in zip(plain.packed.model.parameters(), beside.packed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and theirs.grad is None
    assert not any(torch.equal(a, b) for a, b in zip(heads, worker.companion.heads.parameters(), strict=True))


@pytest.mark.parametrize("token_budget", [10_000, 14])
def test_the_states_are_those_of_the_pass_at_the_drawn_positions(
    make_engine: Make, batch: RaggedBatch, token_budget: int
) -> None:
    engine = make_engine(token_budget=token_budget)
    before = engine.forward(batch, HIDDEN).token["hidden"]
    watched = _companion(engine, tokens_per_step=6).watch(batch, _policy(), 1)
    other = RaggedBatch.from_sequences([[1, 2, 3]], ["other"], token={"loss_mask": torch.tensor([False, True, True])})
    engine.train_step(batch, watched, [LossTerm(other, SFTObjective("loss/ptx"), 0.1)])
    assert len(watched.rows) == 6 and bool(watched.is_here.all()) and not watched.states.requires_grad
    torch.testing.assert_close(watched.states, before[watched.rows], rtol=1e-10, atol=1e-12)
    labels = future_labels(batch, 2)
    assert bool((labels[watched.rows, 0] >= 0).all())


def test_what_a_pass_left_before_it_ran_out_of_memory_does_no_harm(
    make_engine: Make, batch: RaggedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(token_budget=14)
    before = engine.forward(batch, HIDDEN).token["hidden"]
    watched, loss, calls = _companion(engine).watch(batch, _policy(), 1), Watched.loss, 0

    def failing(self: Watched, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = loss(self, *args)
        if calls == 2:
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(Watched, "loss", failing)
    engine.train_step(batch, watched)
    assert engine.num_oom == 1 and bool(watched.is_here.all())
    torch.testing.assert_close(watched.states, before[watched.rows], rtol=1e-10, atol=1e-12)


def test_an_update_is_that_of_a_trainer_of_heads_alone(make_engine: Make, batch: RaggedBatch) -> None:
    engine = make_engine()
    companion = _companion(engine)
    alone = copy.deepcopy(companion.heads.state_dict())
    hidden = engine.forward(batch, HIDDEN).token["hidden"]
    watched = companion.watch(batch, _policy(), 1)
    engine.train_step(batch, watched)
    companion.keep(watched)
    figures = companion.learn()
    heads = MedusaHeads(engine.packed, 2)  # with the LM head as it is after the trunk's update
    heads.load_state_dict(alone)
    slow, sums = HeadTrainer(heads, OPTIM, total_steps=10), MetricSums()
    slow.learn(hidden, future_labels(batch, 2), watched.rows, sums)
    assert figures["heads/loss"] == pytest.approx(sums.results()["loss"], rel=1e-10)
    assert figures["heads/tokens"] == len(watched.rows) == int((future_labels(batch, 2)[:, 0] >= 0).sum())
    for name, values in heads.state_dict().items():
        torch.testing.assert_close(companion.heads.state_dict()[name], values, rtol=1e-8, atol=1e-10)
    assert companion.learn() == {}, "of a step without updates"


def test_a_worker_goes_on_from_its_checkpoint(make_engine: Make, batch: RaggedBatch, tmp_path: Any) -> None:
    def worker() -> CompanionWorker:
        engine = make_engine(dtype=torch.float32)
        return CompanionWorker(engine, None, _companion(engine, tokens_per_step=5))

    whole, first, second = worker(), worker(), worker()
    for step in range(4):
        whole.update(batch, _updates(batch, 2 * step))
        whole.train_drafter()
    for step in range(2):
        first.update(batch, _updates(batch, 2 * step))
        first.train_drafter()
    first.save_checkpoint(tmp_path / "actor", background=False)
    second.load_checkpoint(tmp_path / "actor")
    for step in (2, 3):
        second.update(batch, _updates(batch, 2 * step))
        second.train_drafter()
    ours, theirs = dict(whole.sent_weights()), dict(second.sent_weights())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {name for name in ours if name.startswith("medusa.")} == {
        f"medusa.blocks.{k}.layers.0.weight" for k in (0, 1)
    }
    assert second.companion.trainer.state()["rest"] == whole.companion.trainer.state()["rest"]
