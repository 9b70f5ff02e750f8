"""How the ends of a sync watch each other: who is late, who has failed, who is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from quartet.weights.errors import OtherEndFailed, WeightSyncError, WeightSyncTimeout
from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import SENDER, Position, ProgressBoard, SharedMemoryBoard, State, StoreBoard, SyncProgress

SPECS = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (3,))]


@pytest.fixture(params=["page", "store"])
def board(request: pytest.FixtureRequest) -> Iterator[ProgressBoard]:
    if request.param == "store":
        store = StoreBoard(dist.HashStore())
        store.clear(3)
        yield store
        return
    page = SharedMemoryBoard.create(3)
    yield page
    page.close()


def sender(board: ProgressBoard, timeout_s: float = 0.3) -> SyncProgress:
    return SyncProgress(board, SENDER, [1, 2], SPECS, timeout_s)


def at(board: ProgressBoard, rank: int, step: int, tensor: int = 0, state: State = State.RUNNING, pid: int = 0) -> None:
    board.write(1 + rank, Position(step, tensor, state, pid or os.getpid()))


def test_a_wait_ends_when_all_have_come(board: ProgressBoard) -> None:
    progress = sender(board, 5.0)
    at(board, 0, 3)
    threading.Timer(0.1, at, (board, 1, 2)).start()
    assert progress.wait(2) == 2


def test_the_one_that_stands_still_is_named_with_its_tensor(board: ProgressBoard) -> None:
    progress = sender(board)
    at(board, 0, 5, 1)
    at(board, 1, 4, 1)
    with pytest.raises(WeightSyncTimeout, match="rank 1") as caught:
        progress.wait(5)
    assert (caught.value.rank, caught.value.tensor) == (1, "b")


def test_one_that_moves_on_slowly_is_not_late(board: ProgressBoard) -> None:
    progress = sender(board, 0.4)
    at(board, 0, 9)
    timers = [threading.Timer(0.2 * step, at, (board, 1, step)) for step in range(1, 6)]
    for timer in timers:
        timer.start()
    assert progress.wait(5) == 5


def test_one_that_got_tired_of_waiting_is_not_blamed_for_the_one_that_is_behind(board: ProgressBoard) -> None:
    progress = sender(board)
    at(board, 0, 3, state=State.TIRED)
    at(board, 1, 2)
    with pytest.raises(WeightSyncTimeout, match="rank 1"):
        progress.wait(5)
    at(board, 1, 5)
    with pytest.raises(OtherEndFailed, match="rank 0"):
        progress.wait(5)


def test_a_failure_is_noticed_on_the_other_side(board: ProgressBoard) -> None:
    progress, receiver = sender(board, 30.0), SyncProgress(board, 1, [SENDER], SPECS, 30.0)
    progress.note(step=1, tensor="b")
    assert receiver.wait(1) == 1
    progress.fail(RuntimeError("no more memory"))
    with pytest.raises(OtherEndFailed, match=r"the sender of weights .*gave up") as caught:
        receiver.wait(2)
    assert (caught.value.rank, caught.value.tensor) == (None, "b")


def test_a_process_that_has_ended_is_noticed_at_once(board: ProgressBoard) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for by its parent
    progress = sender(board, 30.0)
    at(board, 0, 5)
    at(board, 1, 1, 1, pid=process.pid)
    with pytest.raises(OtherEndFailed, match=f"process {process.pid}. is gone") as caught:
        progress.wait(5)
    assert (caught.value.rank, caught.value.tensor) == (1, "b")
    process.wait()


def test_what_breaks_is_explained_by_the_board(board: ProgressBoard) -> None:
    progress = sender(board, 30.0)
    at(board, 0, 2)
    at(board, 1, 2, state=State.FAILED)
    explained = progress.broke(RuntimeError("connection reset"))
    assert isinstance(explained, OtherEndFailed) and explained.rank == 1
    at(board, 1, 2)
    assert "connection reset" in progress.broke(RuntimeError("connection reset")).found


def test_a_store_that_went_with_the_sender_is_noticed() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)
    progress = SyncProgress(StoreBoard(client), 1, [SENDER], SPECS, 30.0)
    del server
    with pytest.raises(WeightSyncError, match="the sender of weights is gone"):
        progress.wait(1)
    progress.fail(RuntimeError("nothing to write on"))
