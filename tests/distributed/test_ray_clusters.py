"""Two Ray nodes on this machine: places, data and faults across them, addresses that do and do not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from quartet.batch import ColumnSet, RaggedBatch, join_columns
from quartet.cluster import RANK_ZERO, SPLIT, ResourcePool, Worker, WorkerDied, WorkerGroup, connect, dispatch
from quartet.config.errors import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")


class Scorer(Worker):
    @dispatch()
    def where(self) -> tuple[int, int, int, str]:
        return self.rank, self.local_rank, self.place.local_world_size, ray.get_runtime_context().get_node_id()

    @dispatch()
    def sum_ranks(self) -> float:
        self.init_process_group("gloo", timeout_s=60)
        value = torch.tensor(float(self.rank + 1))
        distributed.all_reduce(value)
        return value.item()

    @dispatch(SPLIT)
    def score(self, batch: RaggedBatch) -> ColumnSet:
        return ColumnSet(batch.ids, {"score": batch.input_ids.float()})

    @dispatch(SPLIT)
    def update(self, batch: RaggedBatch) -> ColumnSet:
        return ColumnSet(batch.ids, {"twice": 2 * batch.token["score"]})

    @dispatch(RANK_ZERO, blocking=False)
    def large(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @dispatch(RANK_ZERO)
    def size(self, value: torch.Tensor) -> int:
        return int(value.nbytes)


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    memory = 400 * 2**20
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": memory, "include_dashboard": False}
    )
    try:
        made.add_node(num_cpus=2, object_store_memory=memory, resources={"scratch": 2})
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def spread(cluster: object) -> Iterator[WorkerGroup]:
    with connect(address=cluster.address, log_to_driver=False):  # type: ignore[attr-defined]
        yield WorkerGroup(ResourcePool([1, 1], strategy="spread"), Scorer, name="spread")


def test_every_entry_of_a_spread_pool_has_a_node_of_its_own(spread: WorkerGroup) -> None:
    ranks, local_ranks, local_sizes, nodes = zip(*spread.where(), strict=True)
    assert ranks == (0, 1) and local_ranks == (0, 0) and local_sizes == (1, 1)
    assert len(set(nodes)) == 2
    assert nodes == tuple(info.node for info in spread.processes)


def test_workers_of_two_nodes_form_a_group(spread: WorkerGroup) -> None:
    assert spread.sum_ranks() == [3.0, 3.0]


def test_a_batch_is_split_over_nodes(spread: WorkerGroup) -> None:
    batch = RaggedBatch.from_groups([[1, 2], [3]], [[[4], [5, 6]], [[7]]], ["a", "b", "c"])
    columns = spread.update(join_columns(batch, spread.score(batch)))
    assert torch.equal(join_columns(batch, columns).token["twice"], 2.0 * batch.input_ids)


def test_a_worker_of_the_right_node(spread: WorkerGroup) -> None:
    group = WorkerGroup(ResourcePool([1], cpus=0.1, resources={"scratch": 1}), Scorer, name="picky")
    assert group.processes[0].node in {node["NodeID"] for node in ray.nodes() if "scratch" in node["Resources"]}
    made = group.large(50 * 2**20)
    assert spread.size(made) == 50 * 2**20
    group.stop()


def test_the_drivers_memory_does_not_grow_with_what_passes_by(spread: WorkerGroup) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 100 * 2**20
    spread.size(spread.large(size))
    before = resident()
    for _ in range(3):
        assert spread.size(spread.large(size)) == size
    assert resident() - before < size // 10
    # Three, as one may find room that this process has from before.
    held = [spread.large(size).result() for _ in range(3)]
    assert sum(array.nbytes for array in held) == 3 * size
    assert resident() - before > size, "asked for, they do come: the measurement sees it"


def test_what_the_cluster_cannot_grant_is_refused_with_what_it_has(spread: WorkerGroup) -> None:
    with pytest.raises(UserError) as caught:
        WorkerGroup(ResourcePool([4]), Scorer)
    assert caught.value.found.count("has 2 CPU") == 2


def test_what_others_hold_is_waited_for_and_named(spread: WorkerGroup) -> None:
    other = ray.util.placement_group([{"CPU": 1}])
    assert other.wait(30)
    with pytest.raises(UserError) as caught:
        WorkerGroup(ResourcePool([1]), Scorer, start_timeout_s=1.0)
    ray.util.remove_placement_group(other)
    assert "was not granted within 1 s" in caught.value.problem
    assert "has 2 CPU; free in all: 0.9 CPU" in caught.value.found


def test_a_second_back_end_shares_the_connection(spread: WorkerGroup, cluster: object) -> None:
    with connect(address=cluster.address):  # type: ignore[attr-defined]
        pass
    assert ray.is_initialized() and len(spread.where()) == 2


# Addresses -----------------------------------------------------------------------------------------------


TRIES = """
import sys, time
from quartet.cluster import connect
from quartet.config import UserError
for address, problem in zip(sys.argv[1::2], sys.argv[2::2]):
    begin = time.monotonic()
    try:
        connect(address=address)
    except UserError as error:
        assert problem in error.problem and address in error.found, error
    else:
        sys.exit("connected")
    assert time.monotonic() - begin < 20, address
"""


def test_bad_addresses_are_refused_at_once() -> None:
    bad = {
        "127.0.0.1:1": "does not answer",
        "ray://127.0.0.1:10001": "client protocol",
        "cluster": "does not answer",
    }
    command = [sys.executable, "-c", TRIES, *(word for pair in bad.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


def test_a_node_that_goes_takes_its_workers_and_says_so(cluster: object, spread: WorkerGroup) -> None:
    """Last, since the node does not come back."""
    other = next(info for info in spread.processes if info.node != ray.get_runtime_context().get_node_id())
    rank = [info.pid for info in spread.processes].index(other.pid)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30.0
    while not (found := spread.dead()):  # its processes live on for a moment
        assert time.monotonic() < deadline, "the node's death was not noticed"
    assert [death.rank for death in found] == [rank]
    with pytest.raises(WorkerDied, match=f"rank {rank} of group 'spread'"):
        spread.where()
