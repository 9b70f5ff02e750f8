"""A host's calls on its roles."""

from __future__ import annotations

from quartet.cluster import Layout, ResourcePool
from quartet.cluster.processes import GroupSpec
from quartet.cluster.worker_process import CallHead, ClassWithArgs, WorkerProcess


def test_only_ranks_that_answer_send_their_result() -> None:
    host = WorkerProcess("group", 1, fetch=list)
    roles = {"role": ClassWithArgs(list, [3, 1, 2])}
    assert host.build(GroupSpec("group", ResourcePool([1]), roles, Layout.fit(1))) is None
    assert host.call(CallHead("role", "pop", chunks=0)) is None
    assert host.call(CallHead("role", "pop")) == 1
    manifest, values = host.call(CallHead("role", "copy", chunks=1))
    assert values == [3] and manifest.num_items == 1
