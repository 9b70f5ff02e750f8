"""Stages that have some layers each compute what one process computes, and keep and send no more than they must."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

import pipeline_ranks as ranks
import rank_forks
from pipeline_ranks import Case

CASES = [
    Case("sft", 2),
    Case("ppo-actor", 2, recompute="selective", lora=True),
    Case("ppo-critic", 2, recompute=True),
    Case("sft", 2, "gemma2", recompute=True),
    Case("dpo", 2, "gpt2", share=False),
    Case("sft", 2, dtype=torch.float32, precision="bf16", recompute="selective"),
    Case("ppo-actor", 4, tied=True, recompute=True),
    Case("sft", 4, lora=True, recompute=True),
    Case("reward", 4, recompute="selective"),
    Case("ppo-actor", 4, "qwen3"),
    Case("sft", 4, "gemma3", recompute="selective"),
    Case("ppo-critic", 4, share=False, lora=True),
    Case("ppo-actor", 4, "gpt2", dtype=torch.float32, precision="bf16"),
    Case("ppo-actor", 2, "qwen3", dtype=torch.float32, numerics="exact"),
]

ROUNDS = {"exact": torch.float32, "fast": torch.bfloat16}


alone = cache(lambda case: ranks.computed(case.alone))


@pytest.fixture(scope="module")
def found() -> list[list[list[dict]]]:
    """By rank, case and repetition."""
    return rank_forks.run_ranks(4, ranks.all_computed, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_stages_compute_what_one_process_computes(number, found, tolerances) -> None:
    torch.set_num_threads(1)
    case = CASES[number]
    stages, expected = [found[rank][number][0] for rank in range(case.stages)], alone(case)
    atol, rtol = (1e-12, 0.0) if case.dtype == torch.float64 else tolerances[ROUNDS[case.numerics]]
    assert len(stages[-1]["outputs"]) == len(expected["outputs"]) > 0
    for values, of_one in zip(stages[-1]["outputs"], expected["outputs"], strict=True):
        assert torch.equal(values, of_one)
    assert stages[-1]["metrics"] == expected["metrics"] != {}
    gradients = {name for stage in stages for name in stage["gradients"]}
    assert gradients == expected["gradients"].keys()
    for stage in stages:
        for name, gradient in stage["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], atol=atol, rtol=rtol, msg=name)
    norm = math.hypot(*(stage["norm"] for stage in stages))
    assert norm == pytest.approx(expected["norm"], rel=1e-12 if case.dtype == torch.float64 else rtol)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_every_parameter_is_on_one_stage_and_a_tied_one_on_both_ends(number, found) -> None:
    case = CASES[number]
    names = [found[rank][number][0]["parameters"] for rank in range(case.stages)]
    of_one = alone(case)["parameters"]
    both = {"model.embed_tokens.weight", "transformer.wte.weight"} & {*names[0]} & {*names[-1]}
    assert bool(both) == (case.tied is True or case.family in ("gemma2", "gemma3", "gpt2"))
    assert sorted([*of_one, *both]) == sorted(name for of_stage in names for name in of_stage)
    assert all(of_stage == [name for name in of_one if name in of_stage] for of_stage in names)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_the_first_rank_gets_every_weight_of_the_model_once(number, found) -> None:
    case, of_one = CASES[number], alone(CASES[number])["weights"]
    weights = [found[rank][number][0]["weights"] for rank in range(case.stages)]
    assert all([name for name, _ in of_rank] == [name for name, _ in of_one] for of_rank in weights)
    assert all(torch.equal(tensor, expected) for (_, tensor), (_, expected) in zip(weights[0], of_one, strict=True))
    assert all(tensor is None for of_rank in weights[1:] for _, tensor in of_rank)


def test_the_same_bits_come_out_twice(found) -> None:
    for of_rank in found:
        for once, again in (of_case for of_case in of_rank if of_case):
            assert once["metrics"] == again["metrics"]
            for name, gradient in once["gradients"].items():
                assert torch.equal(gradient, again["gradients"][name]), name


def test_a_stage_keeps_no_more_micro_batches_than_there_are_stages_from_it_on(found) -> None:
    for number, case in enumerate(CASES):
        for rank in range(case.stages):
            of_rank = found[rank][number][0]
            assert of_rank["num_parts"] >= 4
            assert of_rank["most"] == case.stages - rank, (case, rank)


def test_nothing_but_hidden_states_and_tied_gradients_travels(found) -> None:
    for number, case in enumerate(CASES):
        first, last = (found[rank][number][0]["gradients"] for rank in (0, case.stages - 1))
        tied = sum(gradient.nbytes for name, gradient in first.items() if name in last)
        for rank in range(case.stages):
            of_rank, is_last = found[rank][number][0], rank + 1 == case.stages
            # Once without gradients, once with.
            passes = 2 * (not is_last) + (rank > 0)
            expected = passes * of_rank["rows"] * ranks.WIDTH * case.dtype.itemsize
            assert of_rank["sent"] == expected + (is_last or rank == 0) * tied, (case, rank)
