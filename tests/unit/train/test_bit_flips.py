"""A change that takes itself back, and an update that changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from quartet.config.algorithms import PPO
from quartet.train.engine import flip_bits
from quartet.train.objectives import PolicyObjective


def test_flipping_twice_is_nothing_and_once_changes_every_number() -> None:
    torch.manual_seed(0)
    special = [0.0, -0.0, 1.0, 2.0**-10, 2.0**-10 * 1.125, 1e-38, 3e38, float("inf")]
    values = torch.cat([torch.randn(1000), torch.tensor(special)])
    # What flipping makes of zeros and of their partners.
    values = torch.cat([values, torch.tensor([1 << 20, (1 << 20) ^ 0x3A800000], dtype=torch.int32).view(torch.float32)])
    before = values.view(torch.int32).clone()
    flip_bits(values)
    assert bool((values.view(torch.int32) != before).all())
    change = (values[:1000] / before.view(torch.float32)[:1000] - 1).abs()
    assert float(change.min()) > 0.05 and float(change.max()) <= 0.126
    assert bool((values[1000:1001].abs() > 1e-4).all()), "a zero becomes something that products feel"
    flip_bits(values)
    assert torch.equal(values.view(torch.int32), before)


def test_a_rehearsed_update_measures_the_same_and_changes_nothing(batch: Any, make_engine: Any) -> None:
    policy = PolicyObjective(PPO(), 6, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=8)
    engine = make_engine()
    before = {name: tensor.clone() for name, tensor in engine.packed.model.state_dict().items()}
    rehearsed = engine.train_step(batch, policy, rehearsal=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.packed.model.state_dict().items())
    assert not engine.optimizer.state and engine.num_updates == engine.num_skipped == 0
    assert rehearsed["grad_norm"] > 0 and rehearsed == engine.train_step(batch, policy)
    assert engine.num_updates == 1
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.packed.model.state_dict().items())
