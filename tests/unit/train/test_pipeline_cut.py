"""How a model is cut into pipeline stages, in which order they compute, and what each has; without other processes."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import pipeline_ranks as ranks
from pipeline_ranks import Case
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM, PackedModel, decoder_layers
from quartet.train.forward import PackedPass
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.pipeline import ModelParts, Stage, order_of, split_layers
from sharded_ranks import make_batch, objectives

# Which layers are where ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "stages", "first", "last", "expected"),
    [
        ([1] * 8, 4, 0, 0, [2, 2, 2, 2]),
        ([1] * 5, 2, 0, 0, [2, 3]),
        ([1] * 10, 4, 0, 0, [2, 2, 3, 3]),
        ([10] * 8, 2, 0, 20, [5, 3]),
        ([10] * 8, 2, 21, 20, [4, 4]),
        ([855] * 80, 8, 1051, 1051, [9, 10, 10, 10, 10, 11, 11, 9]),
        ([9, 1, 1, 1], 2, 0, 0, [1, 3]),
        ([1, 1, 1, 9], 3, 0, 0, [1, 2, 1]),
        ([3], 1, 5, 5, [1]),
        ([1, 1, 1], 3, 100, 100, [1, 1, 1]),
    ],
)
def test_layers_are_split_evenly(costs, stages, first, last, expected) -> None:
    found = split_layers(costs, stages, first=first, last=last)
    assert [len(layers) for layers in found] == expected
    assert [layer for layers in found for layer in layers] == list(range(len(costs)))


def test_no_split_has_a_cheaper_dearest_stage() -> None:
    draw = random.Random(0)
    for _ in range(100):
        costs, stages = [draw.randint(1, 9) for _ in range(draw.randint(4, 7))], draw.randint(1, 4)
        first, last = draw.randint(0, 12), draw.randint(0, 12)

        def price(ends: tuple[int, ...], costs=costs, first=first, last=last) -> list[int]:
            bounds = (0, *ends, len(costs))
            of_stages = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            of_stages[0] += first
            of_stages[-1] += last
            return of_stages

        cuts = list(itertools.combinations(range(1, len(costs)), stages - 1))
        best = min((max(price(ends)), sum(c * c for c in price(ends)), ends) for ends in cuts)
        found = split_layers(costs, stages, first=first, last=last)
        assert tuple(layers.stop for layers in found[:-1]) == best[2]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="more pipeline stages than layers") as caught:
        split_layers([1] * 6, 8)
    assert (caught.value.found, caught.value.remedy) == ("sharding.pipeline: 8, 6 layers", "choose 6 stages or fewer")


# In which order they compute -----------------------------------------------------------------------------


def test_after_as_many_forwards_as_stages_behind_it_a_stage_makes_one_of_each() -> None:
    names = {"forward": "F", "backward": "B"}
    found = [" ".join(f"{names[kind]}{i}" for kind, i in order_of(stage, 3, 4)) for stage in range(3)]
    assert found == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert order_of(1, 3, 2, gradients=False) == [("forward", 0), ("forward", 1)]


def most_alive(stage: int, stages: int, num: int) -> int:
    alive, most = set[int](), 0
    for kind, i in order_of(stage, stages, num):
        if kind == "forward":
            alive.add(i)
        else:
            alive.remove(i)  # KeyError before its forward
        most = max(most, len(alive))
    assert not alive
    return most


def seconds(stages: int, num: int, forward: float, backward: float, *, gradients: bool) -> float:
    """Until the last stage ends, where messages take no time, but every one waits until both of its ends are there.

    Raises:
        AssertionError: stages wait for each other.
    """
    orders = [order_of(stage, stages, num, gradients=gradients) for stage in range(stages)]
    clocks, steps, there = [0.0] * stages, [0] * stages, dict[tuple[Any, int], float]()

    def messages(stage: int, step: int) -> list[tuple[str, int, int]]:
        """What the exchange before a step carries; the number is that of the earlier of two stages."""
        found = []
        if step > 0:
            kind, i = orders[stage][step - 1]
            found.append((kind, i, stage if kind == "forward" else stage - 1))
        if step < len(orders[stage]):
            kind, i = orders[stage][step]
            found.append((kind, i, stage - 1 if kind == "forward" else stage))
        return [message for message in found if 0 <= message[2] < stages - 1]

    while any(step <= len(order) for step, order in zip(steps, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            if steps[stage] > len(order):
                continue
            under_way = messages(stage, steps[stage])
            there.update({(message, stage): clocks[stage] for message in under_way if (message, stage) not in there})
            ends = [(message, end) for message in under_way for end in (message[2], message[2] + 1)]
            if all(end in there for end in ends):
                clocks[stage] = max([clocks[stage], *(there[end] for end in ends)])
                if steps[stage] < len(order):
                    clocks[stage] += forward if order[steps[stage]][0] == "forward" else backward
                steps[stage] += 1
                moved = True
        assert moved, (stages, num, steps)
    return max(clocks)


@pytest.mark.parametrize("stages", range(1, 9))
def test_no_stage_waits_longer_than_it_must(stages) -> None:
    for num in (1, 2, 3, 7, 8, 9, 16, 33):
        assert seconds(stages, num, 1.0, 2.0, gradients=True) == (num + stages - 1) * 3.0
        assert seconds(stages, num, 1.0, 2.0, gradients=False) == num + stages - 1
        assert [most_alive(stage, stages, num) for stage in range(stages)] == [
            min(stages - stage, num) for stage in range(stages)
        ]


# What can be cut -----------------------------------------------------------------------------------------


def on_meta(family: str, **options: Any) -> PackedModel:
    make, of_family = ranks.CONFIGS[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make(**{**ranks.SIZES, **of_family, **options}))
    return PackedCausalLM(model)


@pytest.mark.parametrize(
    ("family", "before", "behind", "is_tied"),
    [
        ("llama", ("model.embed_tokens",), ("model.norm", "lm_head"), False),
        ("gemma3", ("model.embed_tokens",), ("model.norm", "lm_head"), True),
        ("gpt2", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head"), True),
    ],
)
def test_parts_are_found_on_the_meta_device(family, before, behind, is_tied) -> None:
    packed = on_meta(family)
    modules = list(packed.model.modules())
    parts = ModelParts.of(packed)
    assert (parts.before, parts.behind, bool(parts.tied)) == (before, behind, is_tied)
    layers = {name: module for name, module in packed.model.named_modules() if module in decoder_layers(packed.body)}
    assert parts.layers == tuple(layers)
    assert parts.costs == tuple(sum(p.numel() for p in layer.parameters()) for layer in layers.values())
    assert sum(parts.costs) + sum(parts.around) == sum(
        p.numel() for _, p in packed.model.named_parameters(remove_duplicate=False)
    )
    assert list(packed.model.modules()) == modules  # nothing was left in their places


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_pack_are_no_hindrance(rope) -> None:
    factors = {"long_factor": [1.0] * 2, "short_factor": [1.0] * 2} if rope == "longrope" else {}
    rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    assert len(ModelParts.of(on_meta("llama", rope_parameters={**rope_parameters, **factors})).layers) == 5


def refused(packed: PackedModel, stages: int = 2) -> str:
    with pytest.raises(UserError) as caught:
        ModelParts.of(packed).split(stages)
    assert "sharding" in caught.value.remedy or "stages" in caught.value.remedy
    return f"{caught.value} {caught.value.found}"


def test_what_cannot_be_cut_is_refused_on_the_meta_device() -> None:
    assert "sharding.pipeline: 6, 5 layers" in refused(on_meta("llama"), 6)
    packed = on_meta("llama")
    packed.body.layers[3].mlp.down_proj.weight = packed.body.layers[1].mlp.down_proj.weight
    assert "model.layers.1.mlp.down_proj.weight, which 2 of its parts use" in refused(packed)
    packed = on_meta("llama")
    packed.body.register_parameter("extra", nn.Parameter(torch.zeros(3, device="meta")))
    assert "model.extra, which none of its parts use" in refused(packed)
    packed = on_meta("llama")
    packed.body.layers[3] = packed.body.layers[1]
    assert "a pass around its layers fails" in refused(packed)
    packed = on_meta("llama")
    packed.body.others = nn.ModuleList([packed.body.layers.pop(4)])
    assert "not those of one list" in refused(packed)


def test_families_whose_hidden_states_are_not_all_that_goes_on_are_refused() -> None:
    packed = on_meta("llama")
    body = packed.body

    def between(input_ids: Tensor, **_: Any) -> Tensor:
        x = body.embed_tokens(input_ids)
        for layer in body.layers:
            x = layer(x) + 1
        return body.norm(x)

    body.forward = between
    assert "model.layers.1 is not given what the layer before it gives" in refused(packed)

    def twice(input_ids: Tensor, **_: Any) -> Tensor:
        x = body.norm(body.embed_tokens(input_ids))
        for layer in body.layers:
            x = layer(x)
        return body.norm(x)

    body.forward = twice
    assert "a pass calls its modules in this order: model.embed_tokens, model.norm, model.layers.0" in refused(packed)
    with torch.device("meta"):
        config = Gemma4TextConfig(**ranks.SIZES, hidden_size_per_layer_input=4, vocab_size_per_layer_input=31)
        model = AutoModelForCausalLM.from_config(config)
    packed = PackedCausalLM(model)
    assert "Gemma4ForCausalLM cannot be cut into pipeline stages" in refused(packed)


# What a stage has ----------------------------------------------------------------------------------------


def cut(case: Case) -> list[PackedModel]:
    packed = [ranks.make_packed(case) for _ in range(case.stages)]
    for index, of_stage in enumerate(packed):
        Stage.cut(of_stage, index, case.stages)
    return packed


@pytest.mark.parametrize(
    "case",
    [
        Case("sft", 3, numerics="exact", dtype=torch.float32),
        Case("sft", 2, "gemma2", dtype=torch.float32, precision="bf16"),
        Case("ppo-critic", 5, "gemma3", dtype=torch.float32),
        Case("sft", 4, "gpt2", lora=True, dtype=torch.float32, precision="bf16"),
    ],
    ids=str,
)
@torch.no_grad()
def test_one_stage_after_the_other_gives_the_bits_of_the_whole(case) -> None:
    whole, stages, needs = ranks.make_packed(case), cut(case), objectives()[case.objective][1].needs
    for deep, share in ((True, True), (False, False)):
        batch, received = make_batch(deep=deep), None
        expected = PackedPass(whole, batch, needs, 7, share=share).outputs().fields()
        for packed in stages[:-1]:
            one = PackedPass(packed, batch, needs, 7, share=share)
            received = one.hidden(received)
            assert received.shape == (one.num_rows, packed.stage.width)
            assert received.dtype == packed.stage.dtype
        found = PackedPass(stages[-1], batch, needs, 7, share=share).outputs(received).fields()
        assert found.keys() == expected.keys() != set()
        assert all(torch.equal(values, expected[name]) for name, values in found.items())


@pytest.mark.parametrize("case", [Case("sft", 2, "gpt2", lora=True, recompute=True), Case("ppo-critic", 3)], ids=str)
def test_a_stage_lets_go_of_the_rest_and_speaks_of_the_whole(case) -> None:
    whole = ranks.make_packed(case)
    weights = dict(whole.model.named_parameters())
    assert whole.adapters is None or whole.adapters.reset(3) is None
    for index in range(case.stages):
        packed = ranks.make_packed(case)
        layers = [weakref.ref(layer) for layer in decoder_layers(packed.body)]
        stage = Stage.cut(packed, index, case.stages)
        gc.collect()
        assert [i for i, layer in enumerate(layers) if layer() is not None] == list(stage.layers)
        assert [layer() for layer in layers if layer() is not None] == decoder_layers(packed.body)
        assert (packed.flops, packed.token_cost, packed.num_rows(7)) == (
            whole.flops, whole.token_cost, whole.num_rows(7),
        )  # fmt: skip
        if packed.adapters is not None and whole.adapters is not None:
            packed.adapters.reset(3)
            own = packed.adapters.trained
            assert own.keys() == whole.adapters.trained.keys() & dict(packed.model.named_parameters()).keys() != set()
            assert all(torch.equal(p, weights[name]) for name, p in own.items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_stage_without_contents_reads_its_own(lora, tmp_path: Path) -> None:
    """Tied weights stay one, and adapters know which parameters are theirs."""
    case = Case("sft", 2, tied=True, lora=lora, dtype=torch.float32)
    whole = ranks.make_packed(case)
    with whole.without_adapters():
        whole.model.save_pretrained(tmp_path)
        assert whole.adapters is None or whole.adapters.reset(3) is None
    expected = dict(whole.model.named_parameters(remove_duplicate=False))
    for index in range(2):
        packed = PackedCausalLM(load_causal_lm(str(tmp_path), empty=True))
        if lora:
            packed.adapt(LoRAConfig(rank=2, alpha=4.0), seed=0)
        stage = Stage.cut(packed, index, 2)
        load_shares(packed, str(tmp_path), seed=3)
        found = dict(packed.model.named_parameters(remove_duplicate=False))
        assert all(torch.equal(p, expected[name]) for name, p in found.items())
        pair = {id(found[name]) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in found}
        assert len(pair) == 1 and len(stage.tied) == 1
        if packed.adapters is not None:
            assert packed.adapters.trained == {n: p for n, p in found.items() if p.requires_grad} != {}


def test_a_tied_weight_counts_once() -> None:
    first, middle, last = (packed.stage for packed in cut(Case("sft", 3, tied=True)))
    name = "model.embed_tokens.weight"
    assert (first.tied, middle.tied, last.tied) == ((name,), (), (name,))
    assert [stage.counts(name) for stage in (first, last)] == [True, False]
    assert last.counts("model.norm.weight")
