"""What else the machine does changes no bit: two threads compute, quiet and beside processes that want all cores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

from quartet.config.recipe import RLRecipe
from quartet.schedule.model_worker import TrainWorker
from quartet.trainers.rl import RLTrainer


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """A process more than there are cores, none of which ever waits."""
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_two_threads_end_with_the_same_bits_on_a_busy_machine(
    world: Any, recipes: Any, metrics_of: Any, wide_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    update = TrainWorker.update

    @wraps(update)
    def noted(self: TrainWorker, *args: Any) -> list[dict[str, float]]:
        threads.add(torch.get_num_threads())
        return update(self, *args)

    monkeypatch.setattr(TrainWorker, "update", noted)

    def run(path: str) -> tuple[dict[str, str], list[dict[str, float]]]:
        changes: dict[str, Any] = {"threads": 2, "steps": 2, "output_dir": path, "chunk_size": 2}
        content = recipes["rl"]("grpo", **changes)
        content["actor"]["model"] = {"path": str(wide_model)}
        RLTrainer(RLRecipe.model_validate(content)).train()
        files = sorted(Path(path).glob("*/model.safetensors"))
        assert files
        return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}, metrics_of(
            Path(path)
        )

    quiet = run("quiet")
    with busy_machine():
        busy = run("busy")
    assert busy == quiet
    assert threads == {2}


@pytest.fixture(scope="module")
def wide_model(world_of_session: Any) -> Path:
    """Its products are large enough for torch to compute them on several threads."""
    path: Path = world_of_session.path / "wide"
    narrow = world_of_session.path / "model"
    config = AutoConfig.from_pretrained(narrow, hidden_size=128, intermediate_size=512)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(narrow).save_pretrained(path)
    return path
