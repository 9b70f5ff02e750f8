"""How the ends of a sync watch each other: who is late, who has failed, who is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from quartet.weights.manifest import PeerFailed, WeightSyncError, WeightSyncTimeout
from quartet.weights.shared_memory import SENDER, Board, MemoryBoard, StoreBoard, SyncPosition, SyncProgress, machine_id

NAMES = ["a", "b"]


@pytest.fixture(params=["memory", "store"])
def board(request: pytest.FixtureRequest) -> Board:
    return StoreBoard(dist.HashStore(), "sync 1") if request.param == "store" else MemoryBoard()


def sender(board: Board, timeout_s: float = 0.3) -> SyncProgress:
    return SyncProgress(board, SENDER, [1, 2], NAMES, timeout_s, machine_id())


def receiver(board: Board, timeout_s: float = 30.0) -> SyncProgress:
    return SyncProgress(board, 1, [SENDER], NAMES, timeout_s, machine_id())


def at(board: Board, rank: int, step: int, tensor: int = 0, failed: int = 0, pid: int = 0) -> None:
    board.write(1 + rank, SyncPosition(step, tensor, pid or os.getpid(), failed))


def test_the_one_that_stands_still_is_named_with_its_tensor(board: Board) -> None:
    progress = sender(board)
    at(board, 0, 5, 1)
    at(board, 1, 4, 1)
    with pytest.raises(WeightSyncTimeout, match="rank 1") as caught:
        progress.wait(5)
    assert (caught.value.rank, caught.value.tensor) == (1, "b")


def test_who_waits_for_the_sender_sees_that_it_goes_on(board: Board) -> None:
    """The sender waits for a slow receiver, longer than a quick one waits for the sender."""
    progress, quick = sender(board, 0.5), receiver(board, 0.7)
    slow = [threading.Timer(0.3 * step, at, (board, 1, step)) for step in range(1, 6)]
    sending = threading.Thread(target=lambda: (progress.wait(5), progress.note(step=5)))
    for thread in (*slow, sending):
        thread.start()
    quick.note(step=5)
    quick.wait(5)
    sending.join()


def test_a_failure_is_noticed_on_the_other_side(board: Board) -> None:
    progress, other = sender(board, 30.0), receiver(board)
    progress.note(step=1, tensor=1)
    other.wait(1)
    progress.fail()
    with pytest.raises(PeerFailed, match=r"the sender of weights .*gave up") as caught:
        other.wait(2)
    assert (caught.value.rank, caught.value.tensor) == (None, "b")


def test_a_process_that_has_ended_is_noticed_at_once(board: Board) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for by its parent
    progress = sender(board, 30.0)
    at(board, 0, 5)
    at(board, 1, 1, 1, pid=process.pid)
    with pytest.raises(PeerFailed, match=f"process {process.pid}. is gone") as caught:
        progress.wait(5)
    assert (caught.value.rank, caught.value.tensor) == (1, "b")
    process.wait()


def test_what_breaks_is_explained_by_the_board(board: Board) -> None:
    progress = sender(board, 30.0)
    at(board, 0, 2)
    at(board, 1, 2, failed=1)
    explained = progress.broke(RuntimeError("connection reset"))
    assert isinstance(explained, PeerFailed) and explained.rank == 1
    at(board, 1, 2)
    assert "connection reset" in progress.broke(RuntimeError("connection reset")).found


def test_a_store_that_went_with_the_sender_is_noticed() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)
    progress = receiver(StoreBoard(client, "sync 1"))
    del server
    with pytest.raises(WeightSyncError, match="the sender of weights is gone"):
        progress.wait(1)
    progress.fail()
