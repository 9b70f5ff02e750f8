"""A host's calls on its worker."""

from __future__ import annotations

from quartet.cluster.worker_process import CallHead, ClassWithArgs, WorkerProcess


def test_only_ranks_that_answer_send_their_result() -> None:
    host = WorkerProcess("group", 1, fetch=list)
    assert host.build(ClassWithArgs(list, [3, 1, 2])) is None
    assert host.call(CallHead("pop", answers=False)) is None
    assert host.call(CallHead("pop")) == 1
    manifest, value = host.call(CallHead("copy", stays=True))
    assert value == [3] and manifest.is_small
