"""``torchrun … quartet rl``: one Ray cluster of all nodes, one driver, one end for all, and nothing left behind.

The driver is a stand-in for ``quartet rl``; a node of the allocation is a torchrun of its own on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.cluster.ray_node import RAY_ARGUMENTS, beginning, descendants
from quartet.cluster.worker import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")

ENTRY = """
import os, sys
from quartet.cluster.allocation import Seat, run_in_allocation
sys.exit(run_in_allocation([sys.executable, *sys.argv[1:]], Seat.found(os.environ)))
"""
DRIVER = """
import os, sys, time
from pathlib import Path
from quartet.cluster import ResourcePool, Worker, WorkerGroup, connect

class Here(Worker):
    def node(self):
        import ray
        return ray.get_runtime_context().get_node_id()

if __name__ == "__main__":
    assert not [name for name in os.environ if name in ("RANK", "WORLD_SIZE") or "TORCHELASTIC" in name]
    with connect("ray", log_to_driver=False):
        group = WorkerGroup(ResourcePool([1, 1], strategy="spread"), Here)
        Path(sys.argv[1]).write_text(f"{len(set(group.call('node')))} nodes")
"""


class Allocation:
    """torchruns that are started together and end together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, str] = {}
        (folder / "entry.py").write_text(ENTRY)

    def start(self, nodes: int, processes: int, *command: str) -> None:
        port = free_port()
        for node in range(nodes):
            with (self.folder / f"node{node}.log").open("wb") as log:
                arguments = [f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
                arguments += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", str(self.folder / "entry.py")]
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    RAY_ARGUMENTS: "--object-store-memory=100000000",
                }
                self.agents.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "torch.distributed.run", *arguments, *command],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def look(self) -> dict[int, str]:
        """Processes that were started, with what each is called by the kernel, so far."""
        for agent in self.agents:
            self._seen |= descendants(agent.pid)
        return self._seen

    def wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while any(agent.poll() is None for agent in self.agents):
            self.look()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)
        return [agent.returncode for agent in self.agents]

    def left(self) -> list[str]:
        """Commands of processes that live on after the end; a moment is given to those that are just leaving."""
        for _ in range(25):
            alive = [pid for pid, began in self._seen.items() if began and beginning(pid) == began]
            if not alive:
                return []
            time.sleep(0.2)
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in alive]

    def said(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    made = Allocation(tmp_path)
    yield made
    for agent in made.agents:
        if agent.poll() is None:
            agent.terminate()
            agent.wait(60)
    for kept in re.findall(r"logs of Ray on \S+: (/tmp/quartet-ray-\w+)", made.said()):
        shutil.rmtree(kept)


def test_two_nodes_are_one_cluster(allocation: Allocation, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    allocation.start(2, 1, str(tmp_path / "driver.py"), str(tmp_path / "found"))
    assert allocation.wait(240) == [0, 0], allocation.said()
    assert (tmp_path / "found").read_text() == "2 nodes"
    assert allocation.left() == []


def test_the_drivers_failure_ends_all_with_its_status(allocation: Allocation) -> None:
    allocation.start(1, 2, "-c", "import os, sys; print('driver of', os.environ['RAY_ADDRESS']); sys.exit(2)")
    assert allocation.wait(120) == [1], allocation.said()
    assert "driver of 127.0.0.1:" in allocation.said()
    assert "exitcode  : 2" in allocation.said()
    assert allocation.left() == []


def test_whoever_is_killed_ends_all(allocation: Allocation, tmp_path: Path) -> None:
    """Rank 1 only waits, yet without it the driver is ended, and so is Ray."""
    code = f"import pathlib, time; pathlib.Path({str(tmp_path / 'runs')!r}).touch(); time.sleep(600)"
    allocation.start(1, 2, "-c", code)
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs").exists():
        allocation.look()
        assert time.monotonic() < deadline, allocation.said()
        time.sleep(0.2)
    waiting = [pid for pid in allocation.look() if b"LOCAL_RANK=1\0" in environment_of(pid)]
    assert len(waiting) == 1
    os.kill(waiting[0], signal.SIGKILL)
    killed = time.monotonic()
    assert allocation.wait(60) == [1], allocation.said()
    assert time.monotonic() - killed < 30
    assert allocation.left() == []


SAVES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])

def save(number, frame):
    for later in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(later, signal.SIG_IGN)
    import ray
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)  # still there, for the roles' weights
    time.sleep(2)
    (folder / "saved").write_text(f"{signal.Signals(number).name} {len(ray.nodes())}")
    os._exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
(folder / "runs").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("nodes", "number", "passed_on"),
    [(2, signal.SIGTERM, "SIGTERM"), (1, signal.SIGINT, "SIGINT")],
)
def test_a_signal_reaches_the_command_and_ray_stays_until_it_has_saved(
    allocation: Allocation, tmp_path: Path, nodes: int, number: signal.Signals, passed_on: str
) -> None:
    """Sent to the torchrun of the last node, which with two is not the command's."""
    (tmp_path / "saves.py").write_text(SAVES)
    allocation.start(nodes, 1, str(tmp_path / "saves.py"), str(tmp_path))
    deadline = time.monotonic() + 240
    while not (tmp_path / "runs").exists():
        allocation.look()
        assert time.monotonic() < deadline, allocation.said()
        time.sleep(0.2)
    allocation.agents[-1].send_signal(number)
    assert 0 not in allocation.wait(60)
    assert allocation.left() == []
    assert (tmp_path / "saved").read_text() == f"{passed_on} {nodes}", allocation.said()


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
