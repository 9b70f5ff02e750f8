"""``torchrun … quartet rl``: one Ray cluster of all nodes, one driver, one end for all, and nothing left behind.

The driver is a stand-in for ``quartet rl``; a node of the allocation is a torchrun of its own on this machine.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from quartet.cluster.torchrun import RAY_ARGUMENTS
from quartet.cluster.worker import free_port
from quartet.processes import descendant_processes, process_start_time

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")


class Allocation:
    """torchruns that are started together and end together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[BaseProcess] = []
        self._seen: dict[int, str] = {}

    def start(self, nodes: int, processes: int, *command: str) -> None:
        port, context = free_port(), importlib.import_module("forkserver").context()
        torchrun = importlib.import_module("torchrun_forks").torchrun
        for node in range(nodes):
            arguments = [f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
            arguments += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "entry.py", *command]
            log = str(self.folder / f"node{node}.log")
            environment = {"OMP_NUM_THREADS": "1", RAY_ARGUMENTS: "--object-store-memory=100000000"}
            agent = context.Process(target=torchrun, args=(arguments, log, environment))
            agent.start()
            self.agents.append(agent)

    def look(self) -> dict[int, str]:
        """Processes that were started, with what each is called by the kernel, so far."""
        for agent in self.agents:
            self._seen |= descendant_processes(agent.pid or 0)
        return self._seen

    def until(self, there: Path, timeout_s: float) -> None:
        """Waits for a file."""
        deadline = time.monotonic() + timeout_s
        while not there.exists():
            self.look()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def wait(self, timeout_s: float) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        while any(agent.is_alive() for agent in self.agents):
            self.look()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)
        return [agent.exitcode for agent in self.agents]

    def left(self) -> list[str]:
        """Commands of processes that live on after the end; a moment is given to those that are just leaving."""
        for _ in range(25):
            alive = [pid for pid, began in self._seen.items() if began and process_start_time(pid) == began]
            if not alive:
                return []
            time.sleep(0.2)
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in alive]

    def said(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocation]:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    made = Allocation(tmp_path)
    yield made
    for agent in made.agents:
        if agent.is_alive():
            agent.terminate()
            agent.join(60)
    for kept in re.findall(r"logs of Ray on \S+: (/tmp/quartet-ray-\w+)", made.said()):
        shutil.rmtree(kept)


def test_the_drivers_failure_ends_all_with_its_status(allocation: Allocation) -> None:
    allocation.start(1, 2, "-c", "import os, sys; print('driver of', os.environ['RAY_ADDRESS']); sys.exit(2)")
    assert allocation.wait(120) == [1], allocation.said()
    assert "driver of 127.0.0.1:" in allocation.said()
    assert "exitcode  : 2" in allocation.said()
    assert allocation.left() == []


def test_any_killed_process_ends_all(allocation: Allocation, tmp_path: Path) -> None:
    """Rank 1 only waits, yet without it the driver is ended, and so is Ray."""
    code = f"import pathlib, time; pathlib.Path({str(tmp_path / 'runs')!r}).touch(); time.sleep(600)"
    allocation.start(1, 2, "-c", code)
    allocation.until(tmp_path / "runs", 120)
    os.kill(int((tmp_path / "rank1").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    assert allocation.wait(60) == [1], allocation.said()
    assert time.monotonic() - killed < 30
    assert allocation.left() == []


SAVES = """
import os, pathlib, signal, sys, time
import ray
from quartet.cluster import connect
folder = pathlib.Path(sys.argv[1])
assert not [name for name in os.environ if name in ("RANK", "WORLD_SIZE") or "TORCHELASTIC" in name]

def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    # Ray is still there, for the roles' weights.
    (folder / "saved").write_text(f"{signal.Signals(number).name} {len(ray.nodes())} nodes")
    os._exit(128 + number)

connected = connect(log_to_driver=False)
signal.signal(signal.SIGTERM, save)  # in the place of Ray's
(folder / "runs").touch()
time.sleep(600)
"""


def test_nodes_are_one_cluster_and_a_signal_reaches_the_command_whose_ray_stays_until_it_has_saved(
    allocation: Allocation, tmp_path: Path
) -> None:
    """Sent to the torchrun of the last node, which is not the command's."""
    (tmp_path / "saves.py").write_text(SAVES)
    allocation.start(2, 1, str(tmp_path / "saves.py"), str(tmp_path))
    allocation.until(tmp_path / "runs", 240)
    os.kill(allocation.agents[-1].pid or 0, signal.SIGTERM)
    assert 0 not in allocation.wait(60)
    assert allocation.left() == []
    assert (tmp_path / "saved").read_text() == "SIGTERM 2 nodes", allocation.said()
