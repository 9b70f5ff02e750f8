"""`quartet doctor` on a recipe with two vLLM engines: all is well, and an old weight of one of them is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.config.algorithms import GRPO, KLConfig
from quartet.config.common import LogConfig, ModelConfig, SamplingConfig
from quartet.config.engines import VLLMEngineConfig
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.extras.doctor.checks import Finding
from quartet.extras.doctor.examine import examine
from quartet.rollout.process import EngineProcess
from quartet.rollout.staging import StagedWeights
from quartet.weights.sink import write_into

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
ROWS = [f"w{7 * n + 3} w{n + 40} w{n + 300}" for n in range(8)]


def odd_words(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Share of words with an odd number."""
    return [sum(text.count(f"{digit} ") for digit in "13579") / 16 for text in completions]


@pytest.fixture
def examined(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Finding]]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = save_model(tmp_path / "model")
    recipe = RLRecipe(
        algorithm=GRPO(kl=KLConfig(coef=0.05)),
        actor=ActorConfig(model=ModelConfig(path=str(model))),
        rollout=RolloutConfig(
            engine=VLLMEngineConfig(
                python=str(PYTHON), engines=2, enforce_eager=True, cache_bytes=1 << 26, max_num_seqs=16
            ),
            sampling=SamplingConfig(max_new_tokens=64, temperature=0.8),
        ),
        steps=2,
        prompts_per_step=4,
        responses_per_prompt=4,
        threads=1,
        placement={"type": "full_offload", "pool": {"budget_bytes": 1 << 30}},
        output_dir=str(tmp_path / "run"),
        log=LogConfig(tensorboard=False),
    )
    return lambda: {
        finding.name: finding for finding in examine(recipe, max_new_tokens=16, rewards=[odd_words], prompts=ROWS)
    }


def unwell(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.line() for name, finding in found.items() if finding.status != "ok"}


def test_two_engines_are_all_ok(examined: Callable[[], dict[str, Finding]]) -> None:
    found = examined()
    assert not unwell(found)
    assert "0 of 2 engines" in found["stop_tokens"].found and "0 of 2 engines" in found["pad_by_mask"].found
    assert "0 of 2 engines" in found["weight_update"].found
    assert "2 engines slept and woke" in found["after_sleep"].found


STALE = "model.layers.1.mlp.down_proj.weight"


def test_an_old_weight_of_one_engine_is_found(
    examined: Callable[[], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine always gets the first version of one tensor."""
    load, first = EngineProcess._load, dict[str, torch.Tensor]()

    def keeps_one(self: EngineProcess, version: int) -> None:
        staging = self._staging
        assert staging is not None
        if self.name != "vllm engine 1":
            load(self, version)
            return
        sent = {name: tensor.clone() for name, tensor in staging.handle}
        sent[STALE] = first.setdefault(STALE, sent[STALE])
        with closing(StagedWeights(sent.items())) as copied:
            write_into(copied.weight_sink(), sent.items(), version)
            handle = replace(staging.handle, path=copied.handle.path)
            with monkeypatch.context() as patched:
                patched.setattr(self, "_staging", SimpleNamespace(handle=handle))
                load(self, version)

    monkeypatch.setattr(EngineProcess, "_load", keeps_one)
    found = examined()
    assert unwell(found).keys() == {"weight_update"}, "embeddings and head are new, and the old one is right at the end"
