"""Sources: what they announce is what they give; fused parts; a rank that is missing from a gather."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quartet.weights.errors import WeightSyncTimeout
from quartet.weights.fusion import GATE_UP, FusedProjection, qkv
from quartet.weights.source import GatherWatchdog, NamedSource


def test_what_is_announced_is_what_comes() -> None:
    model = nn.ModuleDict({"qkv_proj": nn.Linear(4, 8), "norm": nn.LayerNorm(3), "steps": nn.Linear(1, 1)})
    source = NamedSource(model.named_parameters, fused=(qkv(2, 1),))
    specs, tensors = source.specs(), list(source.tensors())
    assert [spec.name for spec in specs[:4]] == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias"]
    for spec, tensor in zip(specs, tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.torch_dtype) == (spec.shape, torch.float32)
        assert tensor.is_contiguous() and not tensor.requires_grad


def test_nothing_is_copied_that_need_not_be() -> None:
    fused = torch.randn(6, 2)
    views = list(NamedSource(lambda: [("gate_up_proj.weight", fused)], fused=(GATE_UP,)).tensors())
    assert [view.data_ptr() for view in views] == [fused.data_ptr(), fused[3:].data_ptr()]


def test_only_a_whole_component_of_a_name_is_fused() -> None:
    named = {"my_gate_up_proj.weight": torch.zeros(2), "a.gate_up_proj_2.weight": torch.zeros(2)}
    source = NamedSource(lambda: named.items(), fused=(GATE_UP,))
    assert [spec.name for spec in source.specs()] == list(named)


@pytest.mark.parametrize("shares", [(1,), (1, 0), (1, 1, 1)])
def test_shares_that_make_no_sense(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one above 0 for each"):
        FusedProjection("ab", ("a", "b"), shares)


def test_the_rank_that_is_missing_from_a_gather_is_named() -> None:
    store = dist.HashStore()
    watches = [GatherWatchdog(store, rank, 3, timeout_s=0.5) for rank in range(3)]
    with ThreadPoolExecutor(3) as ranks:
        for name in ("first", "second"):  # again and again, on one store
            list(ranks.map(GatherWatchdog.wait, watches, [name] * 3))
        others = [ranks.submit(watches[rank].wait, "third") for rank in (0, 2)]
    with pytest.raises(WeightSyncTimeout, match="rank 1 did not come") as caught:
        others[0].result()
    assert (caught.value.rank, caught.value.tensor) == (1, "third")
    assert store.num_keys() == 2 * 1 + 3, "keys of steps that all have left are gone"


def test_each_tensor_comes_in_the_dtype_that_is_wanted() -> None:
    """Of an engine whose products are bf16 and whose norms are not; parts of a fused one go by their own."""
    given = {
        "norm": torch.randn(3),
        "gate_up_proj": torch.randn(4, 3),
        "steps": torch.tensor([4]),
        "other": torch.ones(2),
    }
    like = {"norm": torch.float32, "gate_proj": torch.bfloat16, "up_proj": torch.float16}
    source = NamedSource(given.items, like=like, fused=(GATE_UP,))
    found = dict(zip((spec.name for spec in source.specs()), source.tensors(), strict=True))
    assert [spec.torch_dtype for spec in source.specs()] == [tensor.dtype for tensor in found.values()]
    wanted = {**like, "steps": torch.int64, "other": torch.float32}
    assert {name: tensor.dtype for name, tensor in found.items()} == wanted
    assert torch.equal(found["gate_proj"], given["gate_up_proj"][:2].bfloat16())
