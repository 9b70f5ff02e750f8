"""Where the time of a decode step and of an update goes: how long the device is busy, and with which kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rollout
import torch
import training
from machine import seconds_of
from shapes import config_of
from torch.profiler import ProfilerActivity, profile

STEPS = 4
LARGEST = 6
"""Kernels that are named."""


def measure(name: str, device: torch.device, *, smoke: bool) -> list[dict[str, Any]]:
    engine = rollout.engine_of(name, device, smoke=smoke)
    engine.submit(rollout.requests(config_of(name).vocab_size, rollout.sizes(smoke)[3], smoke=smoke))
    for _ in range(STEPS):
        engine.step()
    found = [{"model": name, "work": "decode step"} | _profiled(engine.step, device, STEPS)]
    engine.release_cache()
    trainer = training.engine_of(name, device, fused=False, smoke=smoke)
    for layout, groups in training.layouts(smoke).items():
        batch = training.batch_of(groups, trainer.packed.vocab_size, device)
        objective = training.objective_of(groups, len(batch))
        update = lambda batch=batch, objective=objective: trainer.train_step(batch, objective)  # noqa: E731
        update()
        found.append({"model": name, "work": f"update, {layout}"} | _profiled(update, device, 1))
    return found


def _profiled(work: Callable[[], object], device: torch.device, times: int) -> dict[str, Any]:
    """Of one call, the mean of ``times``; the profiler itself makes the host slower, so ``seconds`` are without it."""
    seconds = seconds_of(lambda: [work() for _ in range(times)], device) / times
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        seconds_of(lambda: [work() for _ in range(times)], device)
    kernels = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / times / 1e6
    return {
        "seconds": seconds,
        "busy_s": busy,
        "num_kernels": sum(event.count for event in kernels) // times,
        "largest": {e.key[:60]: e.self_device_time_total / times / 1e6 for e in kernels[:LARGEST]},
    }
