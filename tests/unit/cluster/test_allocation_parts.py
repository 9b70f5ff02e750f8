"""The parts of an allocation that need no processes: places, addresses, what a program inherits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from quartet.cluster import torchrun
from quartet.cluster.torchrun import TorchrunRank, own_address, run_under_torchrun, without_torchrun_variables
from quartet.config.errors import UserError
from quartet.processes import ProcessReaper, descendant_processes, process_start_time

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_RANK": "5",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}


def test_the_command_sees_nothing_of_torchrun() -> None:
    assert without_torchrun_variables({**TORCHRUN, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_a_node_has_the_address_by_which_it_reaches_the_meeting_point() -> None:
    """On one machine the loopback."""
    assert own_address(1, [("a", "10.0.0.1"), ("a", "10.0.0.1")]) == "127.0.0.1"
    assert own_address(1, [("a", "127.0.1.1"), ("b", "10.0.0.2")]) == "10.0.0.2"


@pytest.mark.parametrize("node", [0, 1])
def test_the_node_of_the_meeting_point_looks_towards_another(node: int) -> None:
    """Its own name leads to the loopback there; it need not be the first node."""
    hosts = [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    hosts[node] = (hosts[node][0], "127.0.1.1")
    asked = []
    found = own_address(node, hosts, lambda host: asked.append(host) or "10.0.0.9")
    assert found == "10.0.0.9" and asked == [hosts[1 - node][1]]


def test_processes_below_another_are_found_and_not_confused() -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while not (found := descendant_processes(parent.pid)):
            assert parent.poll() is None
        (child,) = found
        assert found[child] == process_start_time(child) != process_start_time(os.getpid())
        parent.communicate(b"\n")
    assert process_start_time(child) == "", "it is gone"


def test_without_ray_the_keeper_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torchrun, "die_with_parent", lambda number: None)
    with pytest.raises(UserError, match="needs Ray"):
        run_under_torchrun(["true"], TorchrunRank(0, 2, 0, 2, 0, 1))
    assert run_under_torchrun(["true"], TorchrunRank(1, 2, 1, 2, 0, 1)) == 2


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_keeper_ends_what_is_left_however_its_owner_ends(how: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as kept, subprocess.Popen(["sleep", "600"]) as other:
        try:
            owner = os.fork()
            if owner == 0:
                keeper = ProcessReaper(
                    {kept.pid: process_start_time(kept.pid), other.pid: "another beginning", 2**22 + 1: "0"}
                )
                if how == "closed":
                    keeper.close()
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(owner, 0)
            assert kept.wait(60) == -signal.SIGKILL
            assert other.poll() is None, "its number belongs to another process now"
        finally:
            kept.kill()
            other.kill()
