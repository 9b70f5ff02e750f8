"""A worker knows its place from environment variables alone."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from torch import distributed

from quartet.cluster import Worker
from quartet.cluster.worker import RankInfo, reserved_port

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_the_variables_of_torchrun_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank) == (3, 4, 1)


def test_without_variables_a_worker_is_alone() -> None:
    worker = Worker()
    assert (worker.rank, worker.world_size) == (0, 1)


def test_a_place_survives_the_environment() -> None:
    place = RankInfo(1, 4, 1, 2, "10.0.0.1", 29500, "2,3")
    assert RankInfo.from_environment(place.environment()) == place


def test_a_worker_alone_forms_a_group_and_leaves_the_interface_alone() -> None:
    worker = Worker()
    try:
        worker.init_process_group("gloo", timeout_s=30)
        worker.init_process_group("gloo")  # nothing to do
        value = torch.ones(1)
        distributed.all_reduce(value)
        assert value.item() == 1.0
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    finally:
        distributed.destroy_process_group()


def test_only_the_store_of_torch_gets_a_reserved_port() -> None:
    with reserved_port() as kept:
        port = kept.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = distributed.TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("met", "yes")
        assert store.get("met") == b"yes"
