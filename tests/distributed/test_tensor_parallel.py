"""Tensor-parallel layers of every family give what one process computes: outputs and all gradients; so do meshes of all
kinds where there are pictures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rank_forks
import tensor_ranks as ranks
from tensor_ranks import PictureCase, TensorCase
from tiny_vision import save_model

BIASED = (("attention_bias", True), ("mlp_bias", True))
CASES = {
    2: [
        TensorCase("llama", tree="depth 3", recompute=True, changed=(("pad_token_id", 20), *BIASED)),
        TensorCase("llama", scalar=True, recompute="selective", lora=True, changed=BIASED),
        TensorCase("qwen2", tree="depth 3", lora=True),  # tied, with windows and biases
        TensorCase("qwen3", recompute="selective", share=False),
        TensorCase("gemma2", recompute=True),  # soft caps, windows
        TensorCase("gemma3", tree="depth 3", recompute="selective", lora=True),
        TensorCase("phi3", lora=True, recompute=True),
        TensorCase("olmo2", tree="depth 3", recompute=True),
        TensorCase("granite", tree="depth 3", recompute="selective"),
        TensorCase("gemma2", dtype=torch.float32, precision="bf16", recompute=True),
    ],
    4: [
        TensorCase("llama", tensor=4, tree="depth 3", recompute=True),  # two key/value heads for four ranks
        TensorCase("llama", tensor=4, lora=True, changed=(("num_key_value_heads", 1), *BIASED)),
        TensorCase("olmo2", tensor=4, tree="depth 3"),
        TensorCase("gemma3", context=2, tree="depth 3", recompute=True),
        TensorCase("phi3", context=2, lora=True, tree="depth 3", scalar=True),
        TensorCase("qwen2", context=2, dtype=torch.float32, precision="bf16", lora=True),
    ],
}
NAMED = [(world, number) for world, cases in CASES.items() for number in range(len(cases))]


@pytest.fixture(scope="module")
def found() -> dict[int, list[list[dict]]]:
    return {world: rank_forks.run_ranks(world, ranks.all_passes, cases) for world, cases in CASES.items()}


@pytest.mark.parametrize(("world", "number"), NAMED, ids=[f"{w}-{n}-{CASES[w][n].family}" for w, n in NAMED])
def test_a_pass_is_that_of_one_process(world, number, found, tolerances) -> None:
    torch.set_num_threads(1)
    case = CASES[world][number]
    expected = ranks.run_pass(replace(case, tensor=0))
    atol, rtol = tolerances[torch.bfloat16 if case.precision == "bf16" else case.dtype]
    for of_rank in found[world]:
        of_case = of_rank[number]
        for kind in ("outputs", "with_gradient"):
            for name, values in found[world][0][number][kind].items():
                assert torch.equal(of_case[kind][name], values), name
        check(of_case, expected, atol, rtol)


def check(found: dict, expected: dict, atol: float, rtol: float) -> None:
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for kind in ("outputs", "with_gradient"):
        assert found[kind].keys() == expected[kind].keys()
        for name, values in expected[kind].items():
            torch.testing.assert_close(found[kind][name], values, atol=atol, rtol=rtol)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, atol=atol * largest, rtol=rtol, msg=name)


# Pictures ------------------------------------------------------------------------------------------------

MESHES = {
    "llava": {
        2: [{"shard": 2}, {"context": 2}, {"tensor": 2}],
        4: [{"context": 2, "tensor": 2}, {"shard": 2, "tensor": 2}],
    },
    "qwen2_vl": {4: [{"context": 2, "tensor": 2}]},
}


@pytest.fixture(scope="module", params=MESHES)
def of_pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """What ranks found in each case, and one process."""
    model = str(save_model(request.param, tmp_path_factory.mktemp("model")))
    expected, found = {}, []
    for world, meshes in MESHES[request.param].items():
        cases = [PictureCase(model, train, **mesh) for mesh in meshes for train in ("language", "all")]
        of_ranks = rank_forks.run_ranks(world, ranks.all_pictures, cases)
        for case, of_case in zip(cases, zip(*of_ranks, strict=True), strict=True):
            if case.train not in expected:
                expected[case.train] = ranks.run_pictures(replace(case, shard=0))
            found.append((case, of_case, expected[case.train]))
    return found


def test_pictures_over_ranks(of_pictures: list[tuple], tolerances) -> None:
    for case, of_ranks, expected in of_pictures:
        for of_rank in of_ranks:
            # Of the other data ranks' texts there are only gradients, the same.
            outputs = {} if of_rank["is_first"] else {kind: expected[kind] for kind in ("outputs", "with_gradient")}
            check(of_rank | outputs, expected, *tolerances[torch.float64])
        if case.train == "language":
            assert sum(of_rank["computed"] for of_rank in of_ranks) == expected["computed"] == 3, case
        else:
            assert any(
                name.startswith(("model.vis", "model.multi")) and g.any() for name, g in expected["gradients"].items()
            )


def test_supervised_jobs_on_pictures(tmp_path: Path) -> None:
    """With the tower frozen, and training in shards and over tensor ranks; a rank may have texts alone."""
    model = {"path": str(save_model("llava", tmp_path))}
    optim = {"lr": 1e-2, "schedule": "constant"}
    frozen = {"model": model, "train": {"optim": optim, "token_budget": 64}}
    trains = {"model": model, "train": {**frozen["train"], "freeze_vision_tower": False, "freeze_projector": False}}
    cuts = {"frozen": (frozen, {"shard": 2}), "trains": (trains, {"shard": 2}), "tensor": (trains, {"tensor": 2})}
    expected = ranks.picture_jobs({name: (section, {}) for name, (section, _) in cuts.items()})
    assert abs(expected["frozen"][-1] - expected["trains"][-1]) > 1e-3
    for found in rank_forks.run_ranks(2, ranks.picture_jobs, cuts):
        assert found == {name: pytest.approx(losses, rel=1e-4) for name, losses in expected.items()}
