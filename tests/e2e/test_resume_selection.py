"""Runs that choose what they learn from (dynamic sampling, demonstrations, greedy baselines) survive a kill as well."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

REWARD = '''
import asyncio
import random


async def parity(completions, **_):
    """Half of all pairs agree. How long it takes is drawn anew in every process."""
    await asyncio.sleep(random.SystemRandom().uniform(0, 0.01))
    return [float(sum(map(ord, text)) % 2) for text in completions]
'''
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"name": "dapo", "dynamic_sampling": {"max_prompts_factor": 20.0}},
    "remax": {"name": "remax", "kl": {"coef": 0.05}},
}


@pytest.fixture(scope="module")
def uninterrupted(world_of_session: Any, processes: Any, recipes: Any) -> dict[str, Path]:
    (world_of_session.path / "parity.py").write_text(REWARD, encoding="utf-8")
    found = {}
    for name, algorithm in ALGORITHMS.items():
        content = recipes["rl"](
            output_dir=f"runs/chosen-{name}",
            rewards=[{"type": "function", "target": "parity.py:parity"}],
            ptx={"data": {"path": "demonstrations.jsonl"}, "coef": 0.5, "examples_per_minibatch": 3},
        )
        for key in ("critic", "epochs", "evaluation"):
            del content[key]
        content["algorithm"] = algorithm
        recipe = world_of_session.recipe(f"chosen-{name}", content)
        log = world_of_session.path / f"chosen-{name}.log"
        assert processes.run("rl", recipe, cwd=world_of_session.path, output=log) == 0, log.read_text()
        found[name] = world_of_session.path / "runs" / f"chosen-{name}"
    return found


@pytest.mark.parametrize(
    ("name", "kill"),
    [("dapo", ("decode", 25)), ("dapo", ("log", 4)), ("remax", ("update", 6))],
    ids=str,
)
def test_a_killed_run_goes_on_with_the_same_choices(
    name: str,
    kill: tuple[str, int],
    world: Any,
    processes: Any,
    uninterrupted: dict[str, Path],
    same_run: Any,
) -> None:
    out = f"runs/{name}-{kill[0]}"
    command, log = ["rl", f"chosen-{name}.yaml", f"output_dir={out}"], world.path / f"{name}-{kill[0]}.log"
    status = processes.run(*command, cwd=world.path, output=log, kill=kill)
    assert status == -signal.SIGKILL, (status, log.read_text())
    assert processes.run(*command, "--resume", cwd=world.path, output=log) == 0, log.read_text()
    same_run(uninterrupted[name], world.path / out)


def test_the_kills_fall_into_runs_that_choose(uninterrupted: dict[str, Path], metrics_of: Any) -> None:
    """Groups were rejected, demonstrations mixed in, baselines scored: otherwise the above shows nothing."""
    rows = metrics_of(uninterrupted["dapo"])[1:]
    assert sum(row["groups/rejected_frac"] > 0 for row in rows) >= 2
    assert all("loss/ptx" in row for row in rows)
    assert all("reward/greedy_mean" in row for row in metrics_of(uninterrupted["remax"])[1:])
