"""Weights are checked whole before any is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quartet.config import UserError
from quartet.rollout.weights import DiscardedWeights, copy_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mid = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def fresh(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def test_copies_in_place_and_keeps_ties() -> None:
    model = Tied()
    places = [p.data_ptr() for p in model.parameters()]
    new = fresh(model)
    copy_weights(model, new.items())
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(p, new[name]) for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", ["head.weight", "embed.weight"])
def test_a_tied_weight_comes_under_any_of_its_names(name: str) -> None:
    model = Tied()
    new = fresh(model)
    new[name] = new.pop("embed.weight")
    copy_weights(model, new.items())
    assert torch.equal(model.head.weight, new[name])


def test_a_tied_weight_under_both_names_must_agree() -> None:
    model = Tied()
    new = fresh(model)
    new["head.weight"] = new["embed.weight"].clone()
    copy_weights(model, new.items())
    new["head.weight"][0, 0] += 1
    with pytest.raises(UserError, match="ties them"):
        copy_weights(model, new.items())


def test_casts_to_the_engines_dtype() -> None:
    model = Tied().to(torch.bfloat16)
    new = {name: p.float() for name, p in fresh(model).items()}
    copy_weights(model, new.items())
    assert torch.equal(model.mid.weight, new["mid.weight"].bfloat16())


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice"])
def test_a_wrong_source_changes_nothing(fault: str) -> None:
    model = Tied()
    before = {name: p.clone() for name, p in model.named_parameters()}
    pairs = list(fresh(model).items())
    if fault == "missing":
        pairs.pop()
    elif fault == "unknown":
        pairs.append(("mid.extra", torch.zeros(1)))
    elif fault == "shape":
        pairs[-1] = (pairs[-1][0], torch.zeros(7))
    else:
        pairs.append(pairs[0])
    named = {"missing": "mid.bias", "unknown": "mid.extra", "shape": "(7,)", "twice": "twice"}[fault]
    with pytest.raises(UserError, match="do not fit") as error:
        copy_weights(model, iter(pairs))
    assert named in error.value.found
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_discarded_weights_come_back_empty_but_usable() -> None:
    model = Tied()
    new = fresh(model)
    discarded = DiscardedWeights(model)
    assert sum(p.numel() for p in model.parameters()) == 0
    discarded.restore()
    copy_weights(model, new.items())
    assert torch.equal(model.head.weight, new["embed.weight"])
    assert model.head.weight is model.embed.weight
