"""The benchmarks' own arithmetic, and every one of our sides run for a few tokens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM
from quartet.train.forward import ForwardNeeds, forward_packed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Modules:
    """The benchmarks' modules, which are scripts beside each other and no package."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modules]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARTET_BENCH_ROOT", str(tmp_path_factory.mktemp("bench")))
        patch.syspath_prepend(str(BENCHMARKS))
        yield Modules()


# The floor -----------------------------------------------------------------------------------------------


def test_tracing_finds_every_linear_of_the_model(bench: Modules) -> None:
    shapes, model = bench.floor.trace(bench.common.model_config("tiny")), bench.common.build_model("tiny")
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert shapes.linear_parameters == sum(module.weight.numel() for module in linears)
    assert shapes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(shapes.norms.values()) == 2 * shapes.layers + 1
    assert shapes.activations == {512: shapes.layers}


def test_attention_pairs_are_those_of_a_mask(bench: Modules) -> None:
    group = bench.common.Group(5, (3, 1, 4))
    pairs = 5 * 6 // 2
    for response in group.responses:
        visible = torch.ones(5 + response, 5 + response).tril()
        pairs += int(visible[5:].sum())
    assert bench.floor.attention_pairs([group]) == pairs
    assert bench.floor.useful_tokens([group]) == 13
    assert bench.floor.unshared_tokens([group]) == 23


def test_linears_take_two_flops_per_weight_and_token_and_twice_that_backward(bench: Modules) -> None:
    floor, groups = bench.floor, [bench.common.Group(4, (3, 5))]
    shapes = floor.trace(bench.common.model_config("tiny"))
    operations = floor.update_operations(shapes, groups, torch.float32)
    head = shapes.hidden * shapes.vocab
    once = 2.0 * ((shapes.linear_parameters - head) * 12 + head * 8)
    linear = {phase: 0.0 for phase in ("forward", "backward")}
    for operation in operations:
        if operation.product is not None and operation.name != "attention":
            linear[operation.phase] += operation.flops * operation.count
    assert linear == {"forward": once, "backward": 2 * once}


def test_a_floor_takes_the_slower_of_flops_and_bytes(bench: Modules) -> None:
    floor, rates = bench.floor, bench.rates.Rates(budget_s=0.0, working_sets=(2**16,))
    product = bench.rates.Product(8, 8, 8)
    operations = [
        floor.Operation("a", "forward", 1e6, 0.0, 0.0, 3, product),
        floor.Operation("b", "forward", 0.0, 1e6, 1e6),
    ]
    found = floor.floor_of(operations, rates, torch.float32)
    rate = rates.flops_per_s(product, torch.float32)
    assert found.lines[0].seconds == pytest.approx(3e6 / rate)
    assert found.lines[1].seconds == pytest.approx(2e6 / rates.copy_bytes_per_s(2e6))
    assert found.seconds == pytest.approx(found.lines[0].seconds + found.lines[1].seconds)
    assert floor.table(found).count("\n") == 3


# Sides ---------------------------------------------------------------------------------------------------

SIDE = """
from peers.turns import Turns
turns = Turns()
print("noise on standard output")
turns.report()
n = 0
while turns.wait():
    n += 1
    if n == turns.job["fails_at"]:
        raise SystemExit("broken on purpose")
    with open(turns.job["trace"], "a") as file:
        file.write(turns.job["name"])
    turns.report(seconds=float(n), tokens=n)
"""


def test_sides_take_turns_and_one_failure_stays_alone(bench: Modules, tmp_path: Path) -> None:
    script, trace = tmp_path / "side.py", tmp_path / "trace"
    script.write_text(SIDE)
    specs = [
        bench.sides.SideSpec(name, str(script), {"name": name, "trace": str(trace), "fails_at": at, "threads": 1})
        for name, at in (("a", 0), ("b", 2), ("c", 0))
    ]
    found = bench.sides.take_turns(specs, tmp_path / "logs", repeats=3)
    assert trace.read_text() == "abcacac"
    assert [len(found[name].answers) for name in "abc"] == [3, 1, 3]
    assert "broken on purpose" in str(found["b"].failure) and found["a"].failure is None
    summary = bench.sides.summary(found["a"])
    assert (summary["seconds"], summary["turns"], summary["environment"]) == (2.0, 3, None)
    assert summary["peak_bytes"] > 2**20


@pytest.fixture(scope="module")
def options() -> Any:
    """What the command line gives for a smoke run of our own sides."""

    class Options:
        smoke, threads, repeats, patience, sides, token_budget, before = True, 1, 1, 60.0, ("native",), None, None

    return Options()


def test_the_update_is_timed_and_taken_apart(bench: Modules, options: Any) -> None:
    part = bench.update.measure("tiny", 8, "fp32", options)
    assert part["side"].get("seconds", 0) > 0, part
    assert part["kinds"]["products"] > 0 and part["kinds"]["attention"] > 0
    assert "failed" not in bench.update.table([part]) + bench.update.kind_table([part])


def test_native_step_trains_on_the_given_lengths(bench: Modules, options: Any) -> None:
    rates = bench.rates.Rates(budget_s=0.0, working_sets=(2**16,))
    part = bench.rl_step.measure("tiny/rloo/8", "fp32", options, rates)
    native = part["sides"]["native"]
    assert native.get("tokens") == sum(sum(g.responses) for g in bench.common.step_groups(2, 2, 8)), part
    assert {"generate", "train_actor", "ref_logprobs"} <= set(native["phases"])


# The page ------------------------------------------------------------------------------------------------


def test_rendering_replaces_only_the_figures(bench: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"factor": 1, "tokens": 10, "before_bytes": 2**20, "peak_bytes": 2**21, "seconds": 1.5}
    results = {"machine": bench.common.machine(1), "memory": [part, {**part, "factor": 64}]}
    (tmp_path / "memory.json").write_text(json.dumps(results))
    (tmp_path / "update.partial.json").write_text(json.dumps({"machine": results["machine"], "update": []}))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.render.BEGIN}\nold\n{bench.render.END}\nafter\n")
    monkeypatch.setattr("sys.argv", ["render.py", str(tmp_path), "--into", str(page)])
    bench.render.main()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 64 | 10 | 1.5 | 2 | 1.000 | 1 |" in text
    assert "incomplete: update" in text and "## Update" not in text


def test_every_part_names_a_script_and_options_it_has(bench: Modules) -> None:
    for part in bench.run_all.SETS["all"]:
        script = BENCHMARKS / part.command[0]
        source = script.read_text(encoding="utf-8") + (BENCHMARKS / "common.py").read_text(encoding="utf-8")
        for option in (word for word in part.command[1:] if word.startswith("--")):
            assert f'"{option}"' in source, (part.name, option)


# The formula for memory ----------------------------------------------------------------------------------


def test_the_memory_formula_has_the_weights_of_the_models(bench: Modules) -> None:
    shapes = {name: bench.footprints.SHAPES[name.lower()] for name in ("0.5B", "7B")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS / "gpu"))
        config_of = importlib.import_module("shapes").config_of
    for name, shape in shapes.items():
        with torch.device("meta"):
            model = Qwen2ForCausalLM(config_of(name))
        assert shape.weights() == pytest.approx(sum(p.numel() for p in model.parameters()), rel=3e-4)
    # 7.6 billion weights over 8 ranks: 4 bytes each, as much of gradients, twice as much of moments.
    parts = bench.footprints.training(shapes["7B"], bench.footprints.How(8))
    assert parts["parameters"] == parts["gradients"] == parts["moments"] / 2 == pytest.approx(3.81e9, rel=1e-3)
    # A layer of 233 million weights in bf16 and the next one, each twice; two matrices of 545 million in fp32.
    assert parts["gathered"] == pytest.approx(4 * 2 * 233e6 + 2 * 4 * 545e6, rel=1e-3)


def test_the_memory_formula_has_what_pipeline_stages_have_and_keep(bench: Modules) -> None:
    shape, prints = bench.footprints.Shape(10, 64, 160, 4, 2, 4096, tied=True), bench.footprints
    how = prints.How(bf16=False, recompute="true", tokens=10_000, pipeline=4, micro_batches=3)
    stages = prints.stages_of(shape, how)
    # The embedding weighs as much as six layers, on both ends.
    assert [stage.layers for stage in stages] == [1, 4, 4, 1]
    assert [stage.alive for stage in stages] == [3, 3, 2, 1]  # the first stage has no fourth micro-batch
    assert [stage.around for stage in stages] == [64 * 4096, 0, 0, 64 * 4096]
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    parts = [prints.training_stage(shape, how, stage) for stage in stages]
    assert sum(of["parameters"] for of in parts) == 4 * (shape.weights() + shape.embedding)
    inputs = 10_000 * 4 * 64  # of a layer
    again = parts[3]["activations"] - inputs
    assert [of["activations"] - again for of in parts] == [inputs * n for n in (3 * 1, 3 * 4, 2 * 4, 1)]
    assert prints.training(shape, how) == parts[1] and {of["messages"] for of in parts} == {3 * inputs}
    # Of a few tokens most is there when the ends sum their gradients of the embedding.
    first = prints.training_stage(shape, replace(how, tokens=10), stages[0])
    assert first["sums"] == 4 * shape.embedding and first["activations"] == 0
    assert prints.scoring(shape, how)["parameters"] == 4 * (shape.layer + shape.embedding)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_formula_has_what_a_layer_keeps_for_the_backward(bench: Modules, precision: str) -> None:
    tokens, shape = 96, bench.footprints.Shape(3, 64, 160, 4, 2, 97)
    kept = [_kept_bytes(num_layers, shape, tokens, precision) for num_layers in (2, 3)]
    how = bench.footprints.How(bf16=precision == "bf16", recompute="false")
    per_token, _ = bench.footprints.kept_per_token(shape, how)
    # The formula leaves out a number of each norm, one of each head, and in one process the layer's weights in bf16.
    assert kept[1] - kept[0] == tokens * (per_token + 8 + 4 * 4) + (2 * shape.layer if how.bf16 else 0)


def _kept_bytes(num_layers: int, shape: Any, tokens: int, precision: Any) -> int:
    config = Qwen2Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=num_layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    packed = PackedCausalLM(Qwen2ForCausalLM(config), precision)
    batch = RaggedBatch.from_sequences(
        [list(range(tokens))], ["a"], token={"loss_mask": torch.tensor([False, *[True] * (tokens - 1)])}
    )
    weights = {p.untyped_storage().data_ptr() for p in packed.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_packed(packed, batch, ForwardNeeds(logprobs=True), 64)
    return sum(storage.nbytes() for storage in kept.values())
