"""A host's calls on its roles."""

from __future__ import annotations

from quartet.cluster.worker_process import ClassWithArgs, WorkerProcess


def test_only_ranks_that_answer_send_their_result() -> None:
    host = WorkerProcess("group", 1, fetch=list)
    assert host.build({"role": ClassWithArgs(list, [3, 1, 2])}) is None
    assert host.call(("role", "pop", False, ())) is None
    assert host.call(("role", "pop", True, ())) == 1
    assert host.call_parts(("role", "copy", 0, ()), None) is None
    manifest, values = host.call_parts(("role", "copy", 1, ()), None)
    assert values == [3] and manifest.num_items == 1
