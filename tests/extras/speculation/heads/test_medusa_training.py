"""Training of Medusa heads: which token each guesses, what the loss is, and that the trunk stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import OptimConfig
from quartet.extras.speculation import head_trainer
from quartet.extras.speculation.head_trainer import HIDDEN, HeadTrainer, future_labels
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.train.forward import forward_only

Make = Callable[..., Any]
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=1e6)


def _batch() -> RaggedBatch:
    """A prompt with two answers, one answer with a foreign token within, and one that is a sequence by itself."""
    responses = [[[11, 12, 13, 14], [21, 22]], [[31, 3, 32, 33, 34]], [[1]]]
    batch = RaggedBatch.from_groups([[5, 6, 7], [8, 9], [2, 4]], responses, ["a", "b", "c", "d"])
    mask = batch.sequence_index() >= 0
    mask[(batch.input_ids == 3).nonzero()] = False
    return batch.with_token(loss_mask=mask)


def test_labels_are_the_tokens_that_follow_within_an_answer() -> None:
    batch = _batch()
    labels = dict(zip(batch.input_ids.tolist(), future_labels(batch, 3).tolist(), strict=True))
    none = [-1, -1, -1]
    assert labels == {
        **{prompt: none for prompt in (5, 6, 7, 8, 9, 2, 4)},
        **{11: [12, 13, 14], 12: [13, 14, -1], 13: [14, -1, -1], 14: none, 21: [22, -1, -1], 22: none},
        **{31: none, 3: none, 32: [33, 34, -1], 33: [34, -1, -1], 34: none, 1: none},
    }


@pytest.fixture
def trunk(make_model: Make) -> PackedCausalLM:
    return PackedCausalLM(make_model("causal", torch.float64))


@pytest.fixture
def batch() -> RaggedBatch:
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(31, (length,), generator=draw).tolist() for length in (9, 3, 12, 5)]
    groups = [[s[2:], [*s[3:], 4]] for s in sequences]
    found = RaggedBatch.from_groups([s[:2] for s in sequences], groups, [str(n) for n in range(8)])
    return found.with_token(loss_mask=found.sequence_index() >= 0)


def _trainer(trunk: PackedCausalLM, *, shared: bool = True) -> HeadTrainer:
    return HeadTrainer(MedusaHeads(trunk, 3, shared_head=shared), OPTIM, total_steps=10)


def _hidden(trunk: PackedCausalLM, batch: RaggedBatch, budget: int = 1000) -> torch.Tensor:
    return forward_only(trunk, batch, HIDDEN, budget).token["hidden"]


def _plain_loss(trunk: PackedCausalLM, heads: MedusaHeads, batch: RaggedBatch) -> tuple[torch.Tensor, list[float]]:
    """Sequence by sequence and head by head, with transformers' own hidden states; and the accuracies."""
    weights, body = dict(heads.named_parameters()), trunk.release()
    losses: dict[int, list[torch.Tensor]] = {k: [] for k in range(heads.depth)}
    right: dict[int, list[bool]] = {k: [] for k in range(heads.depth)}
    for s in range(len(batch)):
        ids, num_prompt = batch.token_ids(s), 2
        with torch.no_grad():
            states = body.model(torch.tensor([ids])).last_hidden_state[0]
        for at in range(num_prompt - 1, len(ids)):
            for k in range(heads.depth):
                if at + 2 + k < len(ids):
                    x = states[at] + F.silu(weights[f"blocks.{k}.layers.0.weight"] @ states[at])
                    own = weights.get(f"lm_heads.{k}.weight")
                    logits = (body.lm_head.weight.detach() if own is None else own) @ x
                    losses[k].append(F.cross_entropy(logits, torch.tensor(ids[at + 2 + k])))
                    right[k].append(int(logits.argmax()) == ids[at + 2 + k])
    total = torch.stack([0.8**k * torch.stack(one).mean() for k, one in losses.items()]).sum()
    return total, [sum(one) / len(one) for one in right.values()]


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_that_of_the_slow_loss(
    trunk: PackedCausalLM, batch: RaggedBatch, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However prompts are shared, passes are cut and logits are portioned: same loss, same weights afterwards."""
    monkeypatch.setattr(head_trainer, "_LOGIT_BYTES", 4 * 3 * 31 * 5)
    fast, before = _trainer(trunk, shared=shared), copy.deepcopy(trunk.model.state_dict())
    for parameter in fast.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    slow = _trainer(trunk, shared=shared)
    slow.heads.load_state_dict(fast.heads.state_dict())
    found = fast.step(_hidden(trunk, batch, budget=20), batch)
    loss, accuracies = _plain_loss(trunk, slow.heads, batch)
    loss.backward()
    slow.optimizer.step()
    assert found["loss/medusa"] == pytest.approx(loss.item(), rel=1e-10)
    assert [found[f"medusa/accuracy_depth_{k}"] for k in (1, 2, 3)] == pytest.approx(accuracies)
    for name, parameter in fast.heads.state_dict().items():
        torch.testing.assert_close(parameter, slow.heads.state_dict()[name], rtol=1e-8, atol=1e-10)
    assert all(torch.equal(values, before[name]) for name, values in trunk.model.state_dict().items())


def test_what_is_measured_is_counted_by_hand(trunk: PackedCausalLM, batch: RaggedBatch) -> None:
    trainer = _trainer(trunk)
    torch.nn.init.normal_(trainer.heads.get_parameter("blocks.0.layers.0.weight"))
    hidden, labels = _hidden(trunk, batch), future_labels(batch, 3)
    found = trainer.measure([(hidden, batch)])
    parts = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    in_parts = trainer.measure([(_hidden(trunk, part), part) for part in parts])
    assert found == pytest.approx(in_parts, rel=1e-6), "however the data is cut"
    rows = (labels[:, 0] >= 0).nonzero().squeeze(1)
    likeliest = trainer.heads(hidden[rows]).argmax(-1)
    expected = 1.0
    for k in range(3):
        chains = [
            all(likeliest[n, j] == labels[row, j] for j in range(k + 1))
            for n, row in enumerate(rows.tolist())
            if labels[row, k] >= 0
        ]
        assert found[f"medusa/accepted_depth_{k + 1}"] == pytest.approx(sum(chains) / len(chains))
        expected += sum(chains) / len(chains)
    assert found["medusa/tokens_per_forward"] == pytest.approx(expected)


def test_a_step_without_finite_gradient_is_skipped(trunk: PackedCausalLM, batch: RaggedBatch) -> None:
    trainer = _trainer(trunk)
    before = copy.deepcopy(trainer.heads.state_dict())
    trainer.step(torch.full_like(_hidden(trunk, batch), float("nan")), batch)
    assert (trainer.num_skipped, trainer.num_updates) == (1, 0)
    assert all(torch.equal(values, before[name]) for name, values in trainer.heads.state_dict().items())
