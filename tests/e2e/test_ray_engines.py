"""Engines in processes of their own on Ray: each worker of the rollout role starts its engine beside itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
NOT_COMPARED = ("throughput/", "time/", "memory/", "overlap/", "handover/", "time_s", "engine/", "rollout/tokens")


@pytest.mark.usefixtures("exact_processor")
def test_two_workers_with_an_engine_each_train_as_one_in_the_process(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], metrics_of: Any
) -> None:
    """Groups go to whichever worker has less to do; under exact numerics that changes nothing.
    Records of workers and engines have role and rank."""
    placement = {"type": "separated", "rollout": {"processes": 2}, "actor": {}, "reference": {}}
    served = {
        "rollout": {"sampling": {"max_new_tokens": 7}, "engine": {"process": True, "max_running": 4}},
        "placement": placement,
        "cluster": {"type": "ray", "cpus_per_process": 0.1},
        "log": {"level": "info"},
    }
    for name, changes in (("engine-here", {}), ("engine-ray", served)):
        recipe = recipes["rl"]("grpo", output_dir=name, steps=2, numerics="exact", **changes)
        recipe["algorithm"]["kl"] = {"coef": 0.05}
        found = quartet("rl", world.recipe(name, recipe))
        assert found.status == 0, found.err
    for one, other in zip(*(metrics_of(Path(name)) for name in ("engine-here", "engine-ray")), strict=True):
        shared = {key for key in one.keys() & other.keys() if not key.startswith(NOT_COMPARED)}
        shared.discard("rollout/prefill_tokens")
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}
        assert other.get("engine/restarts", 0.0) == 0.0
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    said = "".join(file.read_text() for file in logs.glob("worker-*.err"))
    records = re.findall(r"INFO \[(.+)\] quartet\.(?:trainers\.devices|rollout\.process): started as process", said)
    engines = {"native engine 0", "native engine 1"}
    assert set(records) == {"actor 0", "reference 0", "rollout 0", "rollout 1"} | engines, said
