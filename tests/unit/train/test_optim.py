"""AdamW's groups, the learning rate by hand, clipping."""

from __future__ import annotations

import math

import pytest
from torch import nn

from quartet.config.common import OptimConfig
from quartet.train.engine import build_optimizer, learning_rate

HALF = 0.8 * (1 + math.cos(math.pi / 4)) / 2


@pytest.mark.parametrize(
    ("total_steps", "options", "rates"),
    [
        (3, {}, [0.8] * 5),
        (6, {"warmup_steps": 4}, [0.2, 0.4, 0.6, *[0.8] * 5]),
        (6, {"warmup_steps": 2, "schedule": "linear"}, [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        (4, {"schedule": "linear", "min_lr_ratio": 0.1}, [0.8, 0.62, 0.44, 0.26, 0.08, 0.08]),
        (4, {"schedule": "cosine"}, [0.8, HALF, 0.4, 0.8 - HALF, 0.0, 0.0]),
        (2, {"warmup_steps": 8, "schedule": "cosine"}, [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_learning_rates_by_hand(total_steps, options, rates):
    config = OptimConfig(lr=0.8, **options)
    assert [learning_rate(config, step, total_steps) for step in range(total_steps + 2)] == pytest.approx(rates)


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
