"""Pools are checked before anything starts, and the error names what would work."""

from __future__ import annotations

import pytest

from quartet.cluster import ResourcePool
from quartet.cluster.resource_pool import ClusterNode, check_pool, pool_busy_error
from quartet.config.errors import UserError


def cluster(*gpus: float) -> list[ClusterNode]:
    return [ClusterNode(f"node {i}", {"CPU": 64.0, "GPU": n}) for i, n in enumerate(gpus)]


def test_what_fits_is_granted() -> None:
    check_pool(ResourcePool([4, 4], gpus=1), cluster(4, 4))
    check_pool(ResourcePool([4, 4], gpus=1), cluster(8))
    check_pool(ResourcePool([4, 4], gpus=1, strategy="spread"), cluster(8, 4))
    check_pool(ResourcePool([3], gpus=0.5, cpus=0), cluster(2))
    check_pool(ResourcePool([1000], cpus=0), cluster(0))


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [
        (ResourcePool([8], gpus=1), cluster(4, 4)),
        (ResourcePool([4, 4], gpus=1), cluster(4, 2)),
        (ResourcePool([1], resources={"fast_disk": 1}), cluster(1)),
    ],
)
def test_what_can_never_fit_is_refused(pool: ResourcePool, nodes: list[ClusterNode]) -> None:
    with pytest.raises(UserError) as caught:
        check_pool(pool, nodes)
    assert str(list(pool.processes)) in caught.value.problem
    assert all(f"{node.name} has " in caught.value.found for node in nodes)
    assert caught.value.remedy.startswith("start nodes that have CPU and ")


def test_the_numbers_of_what_is_missing_are_named() -> None:
    with pytest.raises(UserError) as caught:
        check_pool(ResourcePool([8], gpus=1), cluster(4))
    assert caught.value.found == "each process needs 1 CPU and 1 GPU; node 0 has 64 CPU and 4 GPU"
    error = pool_busy_error(ResourcePool([8]), [ClusterNode("node 0", {"CPU": 8.0})], {"CPU": 3.0}, 5)
    assert "within 5 s" in error.problem and "node 0 has 8 CPU; free in all: 3 CPU" in error.found


@pytest.mark.parametrize("bad", [{"processes": []}, {"processes": [2, 0]}, {"gpus": -1.0}])
def test_senseless_pools_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UserError):
        ResourcePool(**{"processes": [1], **bad})  # type: ignore[arg-type]
