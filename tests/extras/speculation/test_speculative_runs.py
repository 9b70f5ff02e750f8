"""RL runs whose engine drafts: the same training, resumed to the same drafts; what cannot be is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from breaking import same_weights, untimed_rows
from quartet.config import UserError
from quartet.config.common import CheckpointConfig, LoRAConfig, SamplingConfig, TrainConfig
from quartet.config.engines import BaseSpeculationConfig, NativeEngineConfig, VLLMEngineConfig
from quartet.config.plugins import load_object
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.extras.speculation.config import (
    HeadTraining,
    HistorySpeculation,
    MedusaSpeculation,
    StepCosts,
)
from quartet.extras.speculation.drafting import medusa
from quartet.extras.speculation.heads import MedusaHeads, vllm_medusa
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.trackers import read_metrics
from quartet.rollout.engine import load_engine
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.rollout.vllm.start import DraftSettings
from quartet.trainers.engines import EnginePolicy, _native_arguments, _vllm_specs, open_engine

COSTS = StepCosts(plain=(1.0, 1.01, 1.02), drafted=(1.0, 1.0, 1.01, 1.05, 1.15), drafting=(0.0,))
HISTORY = HistorySpeculation(min_match=1, max_draft=3, costs=COSTS)
GUMBEL = SamplingConfig(max_new_tokens=8, temperature=0.3, draw="gumbel")
DRAFTS = ("rollout/accepted_by_depth", "rollout/draft_acceptance", "rollout/tokens_per_forward")


def rollout(speculation: BaseSpeculationConfig | None, **engine: Any) -> RolloutConfig:
    config = NativeEngineConfig(**{"max_running": 4, "steps_per_lease": 2, **engine})
    return RolloutConfig(engine=config, sampling=GUMBEL, speculation=speculation)


@pytest.fixture
def heads(causal_lm: Any, tmp_path: Path) -> Path:
    """Of the tiny model, not trained: each guesses that the next token comes again."""
    packed = PackedCausalLM(causal_lm())
    MedusaHeads(packed, 2).save(tmp_path / "heads")
    packed.release()
    return tmp_path / "heads"


@pytest.fixture
def train(tiny_rl: Any, digits: Any, tmp_path: Path) -> Callable[..., Any]:
    def run(name: str, speculation: BaseSpeculationConfig | None, reward: Any = digits, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "rollout": rollout(speculation),
            "steps": 3,
            "prompts_per_step": 6,
            "responses_per_prompt": 4,
            "checkpoint": CheckpointConfig(every_steps=1, keep=10),
        }
        return tiny_rl(tmp_path / name, reward, **{**values, **changes})

    return run


def without_drafts(path: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(DRAFTS)} for row in untimed_rows(path)]


@pytest.mark.parametrize("kind", ["history", "medusa"])
def test_a_run_that_drafts_trains_on_the_same_bits(kind: str, train: Any, heads: Path, exact_processor: None) -> None:
    medusa = MedusaSpeculation(path=str(heads), tree=((0,), (1,), (0, 0)), costs=COSTS)
    plain = train("plain", None, numerics="exact").train()
    drafting = train("drafting", HISTORY if kind == "history" else medusa, numerics="exact").train()
    assert same_weights(plain.model, drafting.model)
    assert without_drafts(plain.path) == without_drafts(drafting.path)
    rows = read_metrics(drafting.path / "metrics.jsonl")[1:]
    assert any(row["rollout/tokens_per_forward"] > 1 for row in rows)
    assert any(0 < row["rollout/draft_acceptance"] < 1 for row in rows)
    assert any("rollout/accepted_by_depth_2" in row for row in rows)
    assert not any(name.startswith(DRAFTS) for row in read_metrics(plain.path / "metrics.jsonl") for name in row)


@pytest.mark.parametrize("kind", ["history", "medusa"])
def test_a_resumed_run_drafts_the_same(kind: str, train: Any, heads: Path) -> None:
    """With fast numerics, whose bits tell how many tokens a forward had: figures of drafts and weights."""
    drafts = HISTORY if kind == "history" else MedusaSpeculation(path=str(heads), costs=COSTS)
    whole = train("whole", drafts).train()
    train("resumed", drafts).train()
    path = whole.path.with_name("resumed")
    shutil.rmtree(path / "checkpoints" / "step_00000003")
    resumed = train("resumed", drafts, resume=True).train()
    assert same_weights(whole.model, resumed.model)
    assert untimed_rows(whole.path) == untimed_rows(path)
    assert read_metrics(path / "metrics.jsonl")[-1]["rollout/draft_acceptance"] > 0


def test_a_run_that_broke_off_within_a_step_resumes_from_the_history_before_it(train: Any, digits: Any) -> None:
    """What the step had sampled before the reward failed is not in the checkpoint that is written then."""
    calls = 0

    def failing(completions: list[str], **named: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ValueError("broken on purpose")
        return digits(completions, **named)

    failing.__name__ = digits.__name__
    changes = {"checkpoint": CheckpointConfig(every_steps=100), "chunk_size": 2, "steps": 3}
    whole = train("whole", HISTORY, **changes).train()
    with pytest.raises(UserError, match="broken on purpose"):
        train("broken", HISTORY, failing, **changes).train()
    path = whole.path.with_name("broken")
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step_00000001"]
    resumed = train("broken", HISTORY, resume=True, **changes).train()
    assert same_weights(whole.model, resumed.model)
    assert untimed_rows(whole.path) == untimed_rows(path)


def test_heads_may_be_on_the_hub_or_at_a_url(
    hub: Any, train: Any, heads: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the hub are pinned as its models are."""
    commit = hub.put("me/heads", heads)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").put(str(heads), "/bucket/heads", recursive=True)
    whole = train("here", MedusaSpeculation(path=str(heads), costs=COSTS), steps=1).train()
    for name in ("me/heads", "memory://bucket/heads"):
        found = train(
            name.partition(":")[0].replace("/", "-"), MedusaSpeculation(path=name, costs=COSTS), steps=1
        ).train()
        assert same_weights(whole.model, found.model)
        assert read_metrics(found.path / "metrics.jsonl")[-1]["rollout/draft_acceptance"] > 0
        noted = json.loads((found.path / "run.json").read_text()).get("commits", {})
        assert noted == ({"rollout.speculation.path": f"me/heads@{commit}"} if name == "me/heads" else {})
    with pytest.raises(UserError, match="there is nothing at memory://bucket/other"):
        train("none", MedusaSpeculation(path="memory://bucket/other"))


def test_an_engine_in_a_process_of_its_own_drafts_too(
    causal_lm: Any, tokenizer: Any, heads: Path, tmp_path: Path
) -> None:
    """What its child makes of the section, as it is sent there."""
    path = tmp_path / "model"
    causal_lm().save_pretrained(path)
    tokenizer.save_pretrained(path)
    for speculation in (HISTORY, MedusaSpeculation(path=str(heads), depth=1)):
        policy = EnginePolicy(str(path), 16, str, speculation=speculation)
        engine = load_engine(**pickle.loads(pickle.dumps(_native_arguments(NativeEngineConfig(), policy))))
        assert engine.drafter is not None
        assert engine.drafter.tree.depth == (3 if speculation is HISTORY else 1)
        assert engine.drafter.costs == speculation.costs
    router = open_engine(NativeEngineConfig(), replace(policy, speculation=HISTORY))
    router.submit([Request(f"{i}", "g", (3, 4, 5), SamplingParams(max_new_tokens=20, seed=i)) for i in range(6)])
    done = list[Completion]()
    while len(done) < 6:
        done += router.completed(1.0)
    stats = router.stats()
    assert sum(stats.kept_by_depth) > 0
    assert stats.num_row_steps + sum(stats.kept_by_depth) + 6 == stats.generated_tokens
    router.close()


def test_heads_of_another_trunk_are_refused_before_anything_is_written(
    train: Any, heads: Path, causal_lm: Any, tmp_path: Path
) -> None:
    for changes, problem in (
        ({"model": causal_lm(hidden_size=48)}, "trained on another model"),
        ({"rollout": rollout(MedusaSpeculation(path=str(heads), depth=3))}, "no more heads"),
        ({"rollout": rollout(MedusaSpeculation(path=str(tmp_path / "none")))}, "there is no heads directory here"),
    ):
        with pytest.raises(UserError, match=problem):
            train("refused", MedusaSpeculation(path=str(heads)), **changes)
    assert not list((tmp_path / "refused").glob("**/*.json*"))


def test_a_tree_is_not_for_vllm() -> None:
    tree = MedusaSpeculation(path="heads", tree=((0,), (1,)))
    with pytest.raises(UserError, match="tree is the native engine's"):
        RLRecipe(rollout=RolloutConfig(engine=VLLMEngineConfig(), speculation=tree))


def test_vllm_drafts_from_history_and_by_heads() -> None:
    learning = MedusaSpeculation(path="heads", train=HeadTraining())
    for speculation in (HistorySpeculation(min_match=2, max_draft=4), learning):
        RLRecipe(rollout=RolloutConfig(engine=VLLMEngineConfig(), speculation=speculation))
    adapted = ActorConfig(train=TrainConfig(lora=LoRAConfig(rank=4)))
    with pytest.raises(UserError, match="vLLM is sent adapters alone"):
        RLRecipe(actor=adapted, rollout=RolloutConfig(engine=VLLMEngineConfig(), speculation=learning))


def test_what_vllm_is_told_of_history(tmp_path: Path) -> None:
    policy = EnginePolicy("model", 16, str, speculation=HistorySpeculation(min_match=2, max_draft=4))
    (spec,) = _vllm_specs(VLLMEngineConfig(), policy)
    target, section = spec.kwargs["drafter"]
    drafts = load_object(target)(section, tmp_path)
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 16}
    assert drafts == DraftSettings({"method": "ngram", "num_speculative_tokens": 4, **lookup})


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("train", [None, HeadTraining()])
def test_heads_are_written_for_vllm(shared: bool, train: Any, causal_lm: Any, tmp_path: Path) -> None:
    """The first ``depth`` of them, beside a place for an LM head that all share; what is sent has these shapes."""
    packed = PackedCausalLM(causal_lm())
    heads = MedusaHeads(packed, 3, layers=2, shared_head=shared)
    for parameter in heads.blocks.parameters():
        torch.nn.init.normal_(parameter)
    heads.save(tmp_path / "heads")
    section = MedusaSpeculation(path=str(tmp_path / "heads"), depth=2, train=train).model_dump()
    (folder := tmp_path / "vllm").mkdir()
    drafts = vllm_medusa(section, folder)
    assert drafts.config == {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2}
    sent = MedusaHeads.load(tmp_path / "heads", packed, 2).weights()
    shapes = {name.removeprefix("medusa."): tuple(tensor.shape) for name, tensor in sent}
    assert drafts.shapes == ({f"medusa.{name}": shape for name, shape in shapes.items()} if train else {})
    assert drafts.stay is (train is None)
    written = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["num_heads"] == 2
    assert written.keys() - {"lm_head.weight"} == shapes.keys() and ("lm_head.weight" in written) is shared
    assert all(torch.equal(written[name], heads.state_dict()[name]) for name in shapes)


@pytest.mark.parametrize(
    "values",
    [
        {"type": "history", "path": "x"},
        {"type": "medusa"},
        {"type": "medusa", "path": "x", "min_match": 2},
        {"type": "history", "costs": {"plain": [], "drafted": [1.0]}},
        {"type": "eagle"},
    ],
    ids=str,
)
def test_each_type_has_its_own_keys(values: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        RolloutConfig(speculation=values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tree": [[0], [1, 0]]}, "each once, that continue another"),
        ({"tree": [[0], [1], [0]]}, "each once, that continue another"),
        ({"tree": [[]]}, "each once, that continue another"),
        ({"tree": [[0]], "depth": 1}, "depth and tree both say what is drafted"),
    ],
    ids=str,
)
def test_trees_that_are_none_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        RolloutConfig(speculation={"type": "medusa", "path": "x", **values})


def test_a_tree_is_drafted_from_as_many_heads_as_it_is_deep(heads: Path, causal_lm: Any) -> None:
    tree = MedusaSpeculation(path=str(heads), tree=((0, 1), (1,), (0,), (0, 0)))
    assert (tree.num_heads, tree.tree) == (2, ((0,), (1,), (0, 0), (0, 1)))
    drafter = medusa(tree, PackedCausalLM(causal_lm()), None)
    assert (drafter.tree.parents, drafter.tree.depth) == ((-1, -1, 0, 0), 2)
    deeper = MedusaSpeculation(path=str(heads), tree=((0,), (0, 0), (0, 0, 0)))
    with pytest.raises(UserError, match="no more heads"):
        medusa(deeper, PackedCausalLM(causal_lm()), None)
