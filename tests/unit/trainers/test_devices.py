"""Which device and precision a run gets, what is refused, and what a resumed run is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.config.evaluation import EvalRecipe
from quartet.config.load import load_recipe
from quartet.config.recipe import LogConfig, RLRecipe, SFTRecipe
from quartet.trainers.devices import (
    CPU,
    FrozenModels,
    compute_device,
    resolve_device,
    resolve_precision,
    resolved_settings,
    worker_device,
)
from quartet.trainers.run import RunDirectory
from quartet.trainers.supervised import SFTTrainer

GPU = torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: f"GPU of {n}")
    monkeypatch.setattr("quartet.trainers.devices._has_bf16", lambda device: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", "cuda:0"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_name_stands_for_a_device(asked: str, expected: str, two_gpus: None) -> None:
    assert str(resolve_device(asked)) == expected


def test_a_number_that_is_not_there_is_refused_with_those_that_are(two_gpus: None) -> None:
    with pytest.raises(UserError, match=r"no device cuda:7\n  found: cuda:0 \(GPU of 0\), cuda:1 \(GPU of 1\)"):
        resolve_device("cuda:7")


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_without_a_gpu_nothing_is_loaded(device: str, no_gpu: None, tmp_path: Path) -> None:
    recipe = SFTRecipe(device=device, model={"path": "/there/is/none"}, output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=f"there is no device {device}\n  found: torch"):
        SFTTrainer(recipe)
    assert not (tmp_path / "run").exists()


def test_precision_is_that_of_the_device(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve_precision(GPU, asked) for asked in ("auto", "fp32", "bf16")] == ["bf16", "fp32", "bf16"]
    assert [resolve_precision(CPU, asked) for asked in ("auto", "fp32", "bf16")] == ["fp32", "fp32", "bf16"]
    monkeypatch.setattr("quartet.trainers.devices._has_bf16", lambda device: False)
    assert resolve_precision(GPU, "auto") == "fp32"


def test_an_object_stays_where_it_lies_unless_a_device_is_named(two_gpus: None, causal_lm: Any) -> None:
    assert compute_device(SFTRecipe(), causal_lm()) == CPU
    assert str(compute_device(SFTRecipe())) == "cuda:0"
    assert str(compute_device(SFTRecipe(device="cuda"), causal_lm())) == "cuda:0"


def rl(*overrides: str) -> RLRecipe:
    base = ["actor.model.path=m", "data.path=d", "rewards=[{type: exact_match}]"]
    recipe = load_recipe("rl", None, [*base, *overrides])
    assert isinstance(recipe, RLRecipe)
    return recipe


RAY = ("cluster.type=ray", "placement={type: full_offload, pool: {}}")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("numerics=exact", "device=cuda"), "numerics: exact needs the CPU; found device: cuda"),
        (("numerics=exact", *RAY, "cluster.gpus_per_process=1"), "exact needs the CPU"),
        (("numerics=exact", "actor.train.precision=bf16"), "exact needs precision: fp32"),
        (("numerics=exact", "actor.train.compile=true"), "leave out train.compile"),
        ((*RAY, "device=cuda"), "cluster.gpus_per_process is 0"),
        ((*RAY, "device=cuda:1", "cluster.gpus_per_process=1"), "Ray decides which GPU"),
        ((*RAY, "device=cpu", "cluster.gpus_per_process=1"), "leave out either"),
        ((*RAY, "cluster.gpus_per_process=1", "critic.train.compile=true"), "cluster.max_restarts: 0"),
    ],
)
def test_contradictions_are_refused(overrides: tuple[str, ...], part: str) -> None:
    with pytest.raises(UserError) as caught:
        rl(*overrides)
    assert part in str(caught.value)


def test_exact_numerics_stay_on_the_cpu(two_gpus: None) -> None:
    assert compute_device(rl("numerics=exact")) == CPU


def test_workers_have_what_ray_grants_them(two_gpus: None) -> None:
    without, granted = rl(*RAY), rl(*RAY, "cluster.gpus_per_process=1", "device=cuda")
    assert (compute_device(without).type, compute_device(granted).type) == ("cpu", "cuda")
    assert worker_device(GPU, without) == CPU and worker_device(GPU, granted) == GPU
    with pytest.raises(UserError, match="granted a GPU and sees none"):
        worker_device(CPU, granted)


# The record ----------------------------------------------------------------------------------------------


def test_what_auto_stood_for_is_recorded(two_gpus: None) -> None:
    assert resolved_settings(SFTRecipe(), GPU) == {
        "device": "cuda:1",
        "gpu": "GPU of cuda:1",
        "train.precision": "bf16",
    }
    assert resolved_settings(EvalRecipe(), CPU) == {"device": "cpu", "precision": "fp32"}


def directory(path: Path, device: torch.device = CPU, *, resume: bool = False, **train: Any) -> RunDirectory:
    recipe = SFTRecipe(train=TrainConfig(**train), log=LogConfig(tensorboard=False))
    return RunDirectory(path, recipe, resume=resume, resolved=resolved_settings(recipe, device))


def test_a_run_goes_on_elsewhere_but_not_in_another_precision(two_gpus: None, tmp_path: Path) -> None:
    with directory(tmp_path / "run", GPU):
        pass
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]["train.precision"] == "bf16"
    with pytest.raises(UserError, match=r"bf16 then, fp32 on cpu\n  do: set train.precision: bf16"):
        directory(tmp_path / "run", resume=True)
    with directory(tmp_path / "run", resume=True, precision="bf16"):
        pass


# Frozen models -------------------------------------------------------------------------------------------


def test_a_frozen_model_in_bf16_keeps_its_results_and_half_its_bytes(causal_lm: Any) -> None:
    ids = torch.arange(3, 12)

    def hidden(packed: Any) -> torch.Tensor:
        from quartet.models.attention import PackedAttention

        with torch.no_grad():
            return packed.logits(packed.hidden(ids, torch.arange(9), PackedAttention((9,))))

    held = FrozenModels(precision="bf16")
    passed, loaded = held.causal(causal_lm(), is_user_object=True), held.causal(causal_lm())
    assert torch.equal(hidden(passed), hidden(loaded))
    assert {p.dtype for p in passed.model.parameters()} == {torch.float32}
    dtypes = {name: p.dtype for name, p in loaded.model.named_parameters()}
    assert all(dtypes[n] == torch.bfloat16 for n in dtypes if "_proj.weight" in n)
    assert all(dtypes[n] == torch.float32 for n in dtypes if "norm" in n or "embed" in n)
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_a_scalar_head_stays_in_fp32(scalar_model: Any) -> None:
    packed = FrozenModels(precision="bf16").scalar(scalar_model())
    assert packed.head.weight.dtype == torch.float32
    assert any(p.dtype == torch.bfloat16 for p in packed.model.parameters())
