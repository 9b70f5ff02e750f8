"""Models cut over tensor and context ranks come in, are saved, synced, moved away and go on as those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sharded_models as ranks
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import scalar_model_from
from rank_forks import run_ranks

CONTEXT, SHARDED = (1, 2, 2), (2, 1, 2)
"""Shard, context, tensor: FSDP cuts over both ranks of the context or of shard, within those of tensor."""
SMALL: dict[str, Any] = dict(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
LORA = {"lora": ranks.LoRAConfig(rank=2), "seed": 3}
ARCHITECTURES = ("qwen2", "phi3")


def llama(path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **options})).to(dtype)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, build_architecture: Any) -> Path:
    """Models, a checkpoint of one process, and what four processes did with them."""
    folder = tmp_path_factory.mktemp("meshes")
    llama(folder / "causal", tie_word_embeddings=True)
    scalar_model_from(llama(folder / "other", vocab_size=16), seed=1).save_pretrained(folder / "scalar")
    for name in ARCHITECTURES:
        build_architecture(name, seed=1).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """Runs of one process: with a checkpoint, and with adapters."""
    path = str(folder / "causal")
    return one(
        (ranks.saved_run, path, str(folder / "of_one"), None), (ranks.saved_run, path, str(folder / "x"), None, LORA)
    )


def one(*calls: tuple[Any, ...]) -> list[Any]:
    return run_ranks(1, ranks.run_calls, calls)[0]


@pytest.fixture(scope="module")
def results(folder: Path, alone: list[Any]) -> list[dict[str, Any]]:
    """By rank."""
    path, scalar, tokenizer = str(folder / "causal"), str(folder / "scalar"), build_tokenizer()
    saved, resumed, exported = ranks.saved_run, ranks.resumed_run, ranks.exported

    def of(name: str) -> str:
        return str(folder / name)

    models = [path, *(of(name) for name in ARCHITECTURES)]
    calls: dict[str, tuple[Any, ...]] = {
        "loaded": (ranks.loaded_models, models, CONTEXT),
        "heads": (ranks.loaded_heads, path, scalar, SHARDED),
        "exported": (exported, path, of("exported"), "causal", {}, tokenizer, CONTEXT),
        "exported scalar": (exported, scalar, of("exported_scalar"), "scalar", LORA, tokenizer, SHARDED),
        "exported phi3": (exported, of("phi3"), of("exported_phi3"), "causal", {}, tokenizer, SHARDED),
        "synced": (ranks.synced, path, SHARDED),
        "workers": (ranks.sync_of_workers, path, CONTEXT),
        "saved": (saved, path, of("sharded"), SHARDED),
        "resumed": (resumed, path, of("sharded"), SHARDED),
        "resumed without": (resumed, path, of("sharded"), 4),
        "resumed with context": (resumed, path, of("sharded"), CONTEXT),
        "resumed from one": (resumed, path, of("of_one"), CONTEXT),
        "saved with context": (saved, path, of("context"), CONTEXT),
        "adapters": (saved, path, of("adapters"), CONTEXT, LORA),
        "adapters resumed": (resumed, path, of("adapters"), SHARDED, LORA),
        "offloaded": (ranks.offloaded, path, of("away"), CONTEXT, LORA),
    }
    of_ranks = run_ranks(4, ranks.run_calls, list(calls.values()))
    return [dict(zip(calls, found, strict=True)) for found in of_ranks]


def test_every_rank_reads_its_part_of_both_cuts(results: list[dict[str, Any]]) -> None:
    """Tied weights, fused projections, a head that is drawn, one that is read, and adapters."""
    for found in results:
        assert found["loaded"] and not any(found["loaded"].values())
        assert found["heads"] and not any(found["heads"].values())


def test_exports_are_those_of_one_process_to_the_byte(results: list[dict[str, Any]]) -> None:
    for name in ("exported", "exported scalar", "exported phi3"):
        assert results[0][name]["differing"] == [], name


def test_engines_get_the_trained_weights(results: list[dict[str, Any]]) -> None:
    first, *others = [found["synced"] for found in results]
    assert first and all(first.values()) and others == [None] * 3
    assert [found["workers"] for found in results] == [[]] * 4


def test_checkpoints_go_on_on_any_mesh(results: list[dict[str, Any]], folder: Path, alone: list[Any]) -> None:
    path = str(folder / "causal")
    back = one(
        (ranks.resumed_run, path, str(folder / "sharded"), None),
        (ranks.resumed_run, path, str(folder / "context"), None),
        (ranks.resumed_run, path, str(folder / "adapters"), None, LORA),
    )
    for found in results:
        for name in ("saved", "resumed", "resumed without", "resumed with context", "resumed from one"):
            same(found[name], alone[0], 1e-8)
        same(found["saved with context"], alone[0], 1e-8)
        same(found["resumed"], found["saved"], None)
        same(found["adapters"], alone[1], 1e-8)
        same(found["adapters resumed"], alone[1], 1e-8)
    same(back[0], alone[0], 1e-8)
    same(back[1], alone[0], 1e-8)
    same(back[2], alone[1], 1e-8)


def test_parts_that_leave_and_come_back_change_nothing(results: list[dict[str, Any]]) -> None:
    for found in (of_rank["offloaded"] for of_rank in results):
        assert found["losses"][0] == found["losses"][1] and found["again"][0] == found["again"][1]
        assert all(found["equal"]) and len(found["equal"]) > 4
        assert found["moved"] >= found["held"] > 0


def same(run: Any, other: Any, tolerance: float | None) -> None:
    """Losses and weights, to the bit where there is no tolerance."""
    (losses, weights), (expected, wanted) = run, other
    assert weights.keys() == wanted.keys() and len(losses) == len(expected)
    if tolerance is None:
        assert losses == expected and all(torch.equal(weights[name], wanted[name]) for name in wanted)
    else:
        assert losses == pytest.approx(expected, abs=tolerance)
        assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) <= tolerance


def test_no_rank_holds_more_than_its_parts_and_one_tensor(tmp_path: Path) -> None:
    """Beside its parts the first rank holds one whole tensor as it exports, another one half of it to pass on."""
    path = tmp_path / "large"
    llama(path, dtype=torch.bfloat16, vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    calls = (
        (ranks.memory_of_loading, str(path), False, SHARDED),
        (ranks.memory_of_export, str(path), str(tmp_path / "out"), False, SHARDED),
    )
    for rank, (loading, export) in enumerate(run_ranks(4, ranks.run_calls, calls)):
        print([{name: f"{size / 2**20:.1f} MiB" for name, size in found.items()} for found in (loading, export)])
        assert loading["own"] <= 1.05 * loading["shard"] + 2**20
        assert export["own"] <= (1.1, 0, 0.55, 0)[rank] * export["largest"] + 2**21
