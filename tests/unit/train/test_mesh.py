"""The mesh of a role: who is whose peer, and which groups they have."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from quartet.config import UserError
from quartet.train.parallel.mesh import CONTEXT, SHARD, TENSOR, DataParallelGroup, Mesh
from rank_forks import run_ranks


def _seen(*, shard: int = 1, context: int = 1, tensor: int = 1) -> dict[str, object]:
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard, context=context, tensor=tensor)

    def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    return {
        "sizes": (mesh.replicate, mesh.shard, mesh.context, mesh.tensor),
        "data rank": (mesh.data_rank, mesh.num_data_ranks, mesh.is_first_peer),
        "place": mesh.place,
        "copy": mesh.copy.ranks,
        "fsdp": ranks(mesh.group(SHARD)),
        "context": ranks(mesh.context_group),
        "tensor": ranks(mesh.tensor_group),
        "words": {name: ranks(group) for name, group in mesh.words.items()},
        "names": mesh.fsdp_mesh.mesh_dim_names,
    }


def _all_seen() -> list[dict[str, object]]:
    return [_seen(shard=2, context=2, tensor=2), _seen(context=2, tensor=2), _seen(shard=2, tensor=2), _seen(context=4)]


@pytest.fixture(scope="module")
def seen() -> list[list[dict[str, object]]]:
    return run_ranks(8, _all_seen)


def test_tensor_varies_fastest_then_context_shard_and_replicate(seen: list[list[dict[str, object]]]) -> None:
    whole, two_copies, no_context, no_tensor = seen[5]
    assert whole == {
        "sizes": (1, 2, 2, 2),
        "data rank": (1, 2, False),
        "place": 5,
        "copy": list(range(8)),
        "fsdp": [1, 3, 5, 7],
        "context": [5, 7],
        "tensor": [4, 5],
        "words": {CONTEXT: [5, 7], TENSOR: [4, 5]},
        "names": ("replicate", "shard"),
    }
    assert two_copies["sizes"] == (2, 1, 2, 2)
    assert (two_copies["place"], two_copies["copy"], two_copies["fsdp"]) == (1, [4, 5, 6, 7], [5, 7])
    assert no_context["data rank"] == (2, 4, False)
    assert (no_context["context"], no_context["words"]) == (None, {TENSOR: [4, 5]})
    assert no_tensor["sizes"] == (2, 1, 4, 1)
    assert (no_tensor["tensor"], no_tensor["fsdp"]) == (None, [4, 5, 6, 7])


def test_one_rank_speaks_for_each_data_rank(seen: list[list[dict[str, object]]]) -> None:
    for way in range(4):
        said = [of_rank[way]["data rank"] for of_rank in seen]
        first = [found[0] for found in said if found[2]]
        assert first == list(range(said[0][1]))


def _misfit() -> str:
    with pytest.raises(UserError) as error:
        Mesh.of(DataParallelGroup.of_world(), shard=2, tensor=2)
    return str(error.value)


def test_sizes_that_do_not_divide_are_named() -> None:
    found = run_ranks(2, _misfit)[1]
    assert "shard: 2, context: 1, tensor: 2, 2 processes" in found
    assert "1, 2" in found
