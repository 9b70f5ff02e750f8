"""AdamW's groups, the learning rate by hand, clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quartet.config.common import OptimConfig
from quartet.train.engine import build_optimizer, clip_gradients, learning_rate


def _rates(total_steps, **options):
    config = OptimConfig(lr=0.8, **options)
    return [learning_rate(config, step, total_steps) for step in range(total_steps + 2)]


def test_constant():
    assert _rates(3) == [0.8] * 5


def test_warm_up_then_constant():
    """Never 0, and full from the last warm-up step on."""
    assert _rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8])


def test_linear():
    expected = [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    assert _rates(6, warmup_steps=2, schedule="linear") == pytest.approx(expected)


def test_linear_to_a_tenth():
    expected = [0.8, 0.62, 0.44, 0.26, 0.08, 0.08]
    assert _rates(4, schedule="linear", min_lr_ratio=0.1) == pytest.approx(expected)


def test_cosine():
    half = 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert _rates(4, schedule="cosine") == pytest.approx([0.8, half, 0.4, 0.8 - half, 0.0, 0.0])


def test_cosine_to_a_half():
    assert _rates(2, schedule="cosine", min_lr_ratio=0.5) == pytest.approx([0.8, 0.6, 0.4, 0.4])


def test_warm_up_longer_than_the_run():
    assert _rates(2, warmup_steps=8, schedule="cosine") == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.fixture
def module():
    module = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 4), nn.Linear(4, 1))
    module[3].requires_grad_(False)
    return module


def test_matrices_are_decayed_vectors_are_not(module):
    optimizer = build_optimizer(module, OptimConfig(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-5, lr=0.3))
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(module[0].weight), id(module[2].weight)]
    assert [id(p) for p in others["params"]] == [id(module[1].weight), id(module[1].bias), id(module[2].bias)]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-5 for group in optimizer.param_groups)


def test_decay_alone(module):
    """A gradient of 0: matrices shrink by lr · decay, vectors stay."""
    optimizer = build_optimizer(module, OptimConfig(weight_decay=0.1, lr=0.5))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        shrinks = name in ("0.weight", "2.weight")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if shrinks else 1.0), atol=0, rtol=1e-6)


def test_first_adam_step_by_hand():
    """Its size is lr whatever the gradient: ``g / (|g| + eps)``."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = build_optimizer(module, OptimConfig(lr=0.25, eps=1e-12))
    module.weight.grad = torch.tensor([[3.0, -0.01]])
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), torch.tensor([[0.75, 1.25]]))


def test_tied_weights_are_optimised_once():
    first, second = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    second.weight = first.weight
    (group,) = build_optimizer(nn.Sequential(first, second), OptimConfig()).param_groups
    assert len(group["params"]) == 1


@pytest.mark.parametrize("max_norm", [2.5, 5.0, 10.0])
def test_clipping_by_hand(max_norm):
    """A gradient of norm 5 over two parameters."""
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, max_norm) == pytest.approx(5.0)
    share = min(1.0, max_norm / 5)
    assert [float(p.grad) for p in parameters] == pytest.approx([3 * share, 4 * share], rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_reported(bad):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, bad])
    assert not math.isfinite(clip_gradients([parameter], 1.0))
