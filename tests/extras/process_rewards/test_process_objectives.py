"""The loss of step labels against a slow reference (plain model, plain loops), and under every way to cut a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.extras.process_rewards.trainer import STEP_NEEDS, StepObjective
from quartet.train.forward import ForwardNeeds
from unshared import unshared


@pytest.fixture(scope="module")
def steps(batch) -> RaggedBatch:
    """Seven answers to three prompts; steps end at first, middle and last tokens, one answer has no labelled step."""
    generator = torch.Generator().manual_seed(11)
    owner = batch.sequence_index()
    mask = (torch.rand(batch.num_tokens, generator=generator) < 0.4) & (owner >= 0) & (owner != 3)
    for s in (0, 2):
        mask[batch.leaf_span(s)[0]] = True
        mask[batch.leaf_span(s)[1] - 1] = True
    labels = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64)
    labels = torch.where(labels < 0.3, 0.0, torch.where(labels > 0.7, 1.0, labels)) * mask
    return batch.with_token(step_mask=mask, step_labels=labels)


def logits_of(model, batch: RaggedBatch) -> dict[int, Tensor]:
    """The scalar head on the hidden state of every marked token itself, one sequence at a time."""
    found = {}
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        outputs = model.score(hidden).squeeze(-1)
        for t in range(start, stop):
            if batch.token["step_mask"][t]:
                found[t] = outputs[len(ids) - (stop - t)]
    return found


def one_step(make_engine, gradients, weights, data: RaggedBatch, **config):
    engine = make_engine("scalar", **{"token_budget": 10_000, **config})
    metrics = engine.train_step(data, StepObjective())
    return metrics, gradients(engine), weights(engine)


@pytest.fixture(scope="module")
def whole(steps, make_engine, gradients, weights):
    return one_step(make_engine, gradients, weights, steps)


def check(found, whole, same) -> None:
    for mine, theirs in zip(found[1:], whole[1:], strict=True):
        same(mine, theirs)
    assert found[0].keys() == whole[0].keys()
    assert all(found[0][name] == pytest.approx(value, abs=1e-10) for name, value in whole[0].items())


def test_step_scores_are_read_at_the_token_itself(steps, make_engine, make_model) -> None:
    """Unlike values, which are read before it; at the last token they are the sequence's score."""
    engine = make_engine("scalar")
    found = engine.forward(steps, STEP_NEEDS).token["step_scores"]
    expected = logits_of(make_model("scalar", torch.float64), steps)
    for t in range(steps.num_tokens):
        assert float(found[t]) == pytest.approx(float(expected.get(t, torch.tensor(0.0)).detach()), abs=1e-10), t
    scores = engine.forward(steps, ForwardNeeds(scores=True)).sequence["scores"]
    ends = [steps.leaf_span(s)[1] - 1 for s in (0, 2)]
    torch.testing.assert_close(found[ends], scores[[0, 2]], atol=1e-10, rtol=1e-10)


def test_step_scores_of_a_root_sequence_may_stand_on_its_first_token(make_engine, make_model) -> None:
    """Nothing has to stand before a token whose own state is read."""
    batch = RaggedBatch.from_sequences([[3, 4, 5]], ["a"])
    batch = batch.with_token(step_mask=torch.tensor([True, False, True]))
    found = make_engine("scalar").forward(batch, STEP_NEEDS).token["step_scores"]
    expected = logits_of(make_model("scalar", torch.float64), batch)
    assert found.tolist() == pytest.approx([float(expected[0].detach()), 0.0, float(expected[2].detach())], abs=1e-10)


def test_equals_the_slow_reference(steps, whole, make_model, same) -> None:
    model = make_model("scalar", torch.float64)
    logits = logits_of(model, steps)
    labels = {t: float(steps.token["step_labels"][t]) for t in logits}
    losses = [-(labels[t] * x.sigmoid().log() + (1 - labels[t]) * (-x).sigmoid().log()) for t, x in logits.items()]
    loss = torch.stack(losses).mean()
    loss.backward()
    metrics, grads, _ = whole
    same(grads, {name: p.grad for name, p in model.named_parameters()})
    assert metrics["loss/process_reward"] == pytest.approx(float(loss.detach()), abs=1e-10)
    right = [(float(x.detach()) > 0) == (labels[t] > 0.5) for t, x in logits.items()]
    assert metrics["process_reward/accuracy"] == pytest.approx(sum(right) / len(right))
    assert min(map(len, (logits, set(labels.values())))) > 4, "hard and soft labels, several steps"


@pytest.mark.parametrize("token_budget", [16, 24, 40])
def test_micro_batches_change_nothing(steps, whole, token_budget, make_engine, gradients, weights, same) -> None:
    check(one_step(make_engine, gradients, weights, steps, token_budget=token_budget), whole, same)


@pytest.mark.parametrize("share", [True, False])
def test_sharing_prompts_changes_nothing(steps, whole, share, make_engine, gradients, weights, same) -> None:
    flat = unshared(steps)
    assert flat.num_tokens > steps.num_tokens
    data = steps if not share else flat
    check(one_step(make_engine, gradients, weights, data, token_budget=24, share_prefixes=share), whole, same)


def test_no_labelled_step_leaves_the_gradient_zero(steps, make_engine) -> None:
    bare = steps.with_token(step_mask=torch.zeros(steps.num_tokens, dtype=torch.bool))
    metrics = make_engine("scalar").train_step(bare, StepObjective())
    assert metrics["grad_norm"] == 0.0 and metrics["loss/process_reward"] == 0.0
    assert "process_reward/accuracy" not in metrics


def test_a_coin_toss_costs_ln_2(steps, make_engine, make_model) -> None:
    engine = make_engine("scalar")
    with torch.no_grad():
        engine.packed.head.weight.zero_()
    metrics = engine.train_step(steps, StepObjective())
    assert metrics["loss/process_reward"] == pytest.approx(math.log(2), abs=1e-10)
    assert metrics["process_reward/accuracy"] == 0.5, "a logit of exactly 0 is right by half"
