"""When a decode step runs as it is, is captured, is replayed; with doubles for what only a CUDA device has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from quartet.rollout.cuda_graphs import GraphedStep, bucket

CUDA = torch.device("cuda")


class Device:
    """Records what is asked of CUDA; a captured body is replayed by calling it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.mode = 0
        device = self

        class Graph:
            def replay(self) -> None:
                device.log.append("replay")

            def pool(self) -> str:
                return "pool"

        @contextlib.contextmanager
        def capture(graph: Graph, pool: str | None) -> Iterator[None]:
            device.log.append(f"capture into {pool}")
            yield

        def set_mode(mode: int | str) -> None:
            device.mode = {"error": 2}.get(mode, mode) if isinstance(mode, str) else mode

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: device.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def body(self, key: int) -> None:
        self.log.append(f"body {key}" + (" watched" if self.mode == 2 else ""))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_first_as_it_is_then_captured_then_replayed(device: Device) -> None:
    step = GraphedStep(device.body, CUDA)
    for key in (4, 4, 4, 8, 8):
        step.run(key)
    first_key = ["body 4 watched", "capture into None", "body 4", "replay", "replay"]
    assert device.log == [*first_key, "body 8 watched", "capture into pool", "body 8", "replay"]
    assert step.num_graphs == 2
    assert device.mode == 0


def test_tensors_that_move_make_graphs_anew(device: Device) -> None:
    step = GraphedStep(device.body, CUDA)
    step.run(4)
    step.run(4)
    step.clear()
    device.log.clear()
    step.run(4)
    assert device.log == ["body 4 watched"]


def test_a_body_that_waits_for_the_device_runs_as_it_is_from_then_on(device: Device) -> None:
    def body(key: int) -> None:
        device.body(key)
        if device.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    step = GraphedStep(body, CUDA)
    for _ in range(3):
        step.run(4)
    assert device.log == ["body 4 watched", "body 4", "body 4", "body 4"]
    assert step.obstacle is not None
    assert device.mode == 0


def test_other_errors_are_not_taken_for_that(device: Device) -> None:
    def body(key: int) -> None:
        raise RuntimeError("shapes do not fit")

    step = GraphedStep(body, CUDA)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        step.run(4)
    assert step.obstacle is None
    assert device.mode == 0


@pytest.mark.parametrize(("where", "enabled"), [("cpu", True), ("cuda", False)])
def test_without_graphs_the_body_runs(device: Device, where: str, enabled: bool) -> None:
    step = GraphedStep(device.body, torch.device(where), enabled=enabled)
    step.run(4)
    step.run(4)
    assert device.log == ["body 4", "body 4"]


def test_buckets_hold_what_they_are_for() -> None:
    sizes = [bucket(n) for n in range(1, 700)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768]
