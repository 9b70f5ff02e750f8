"""Models cut over shard, pipeline, tensor and context ranks come in, are saved, synced, moved away and go on as those
of one process, and no process holds the whole; by real processes over gloo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import sharded_models as ranks
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import scalar_model_from
from rank_forks import run_ranks

CONTEXT, SHARDED = (1, 2, 2), (2, 1, 2)
"""Shard, context, tensor: FSDP cuts over both ranks of the context or of shard, within those of tensor."""
STAGES, SHARDED_STAGES = (1, 1, 2, 2), (2, 1, 1, 2)
"""The same with two pipeline stages."""
SMALL: dict[str, Any] = dict(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
LORA = {"lora": ranks.LoRAConfig(rank=2), "seed": 3}
ARCHITECTURES = ("qwen2", "phi3", "gemma3_multimodal", "qwen3_moe", "gpt_bigcode")
"""The first two for both cuts; prefixes, experts in one tensor, transposed layers and learnt positions."""
TIED_NAMES = ("lm_head.weight", "lm_head.weight model.embed_tokens.weight")
"""Under which a file may have a tied pair beside the usual one."""


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
    # Several files with an index; pickled ones; tied weights under other names.
    llama(folder / "files").save_pretrained(folder / "files", max_shard_size="4KB")
    (folder / "files" / "model.safetensors").unlink()
    tensors = load_file(folder / "causal" / "model.safetensors")
    for name in ("pickled", *TIED_NAMES):
        shutil.copytree(folder / "causal", folder / name)
    torch.save(tensors, folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    shutil.copytree(folder / "causal", folder / "untied")  # though its config says otherwise
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(tensors | head, folder / "untied" / "model.safetensors", metadata={"format": "pt"})
    shared = tensors.pop("model.embed_tokens.weight")
    noted = {"format": "pt", "model.embed_tokens.weight": "lm_head.weight"}
    for names in TIED_NAMES:
        content = tensors | {name: shared.clone() for name in names.split()}
        save_file(content, folder / names / "model.safetensors", metadata=noted)
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

    models = [path, *(of(name) for name in (*ARCHITECTURES, "files", "pickled", *TIED_NAMES))]
    calls: dict[str, tuple[Any, ...]] = {
        "loaded": (ranks.loaded_models, models[:3], CONTEXT),
        "loaded in shards": (ranks.loaded_models, models, 4),
        "heads": (ranks.loaded_heads, path, scalar, SHARDED),
        "exported": (exported, path, of("exported"), "causal", {}, tokenizer, CONTEXT),
        "exported scalar": (exported, scalar, of("exported_scalar"), "scalar", LORA, tokenizer, SHARDED),
        "exported experts": (exported, of("qwen3_moe"), of("exported_moe"), "causal", {}, tokenizer, 4),
        "exported untied": (exported, of("untied"), of("exported_untied"), "causal", {}, tokenizer, SHARDED),
        "exported untied of stages": (exported, of("untied"), of("untied_s"), "causal", {}, tokenizer, STAGES),
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
        "loaded in stages": (ranks.loaded_models, [path, of("qwen2"), of("phi3")], STAGES),
        "loaded in sharded stages": (ranks.loaded_models, [of("qwen3_moe"), of("gpt_bigcode")], SHARDED_STAGES),
        "heads of stages": (ranks.loaded_heads, path, scalar, SHARDED_STAGES),
        "exported in stages": (exported, path, of("exported_s"), "causal", {}, tokenizer, STAGES),
        "exported scalar of stages": (exported, scalar, of("exported_scalar_s"), "scalar", LORA, tokenizer, STAGES),
        "exported experts of stages": (exported, of("qwen3_moe"), of("moe_s"), "causal", {}, tokenizer, SHARDED_STAGES),
        "synced in stages": (ranks.synced, path, STAGES),
        "workers in stages": (ranks.sync_of_workers, path, SHARDED_STAGES),
        "saved in stages": (saved, path, of("stages"), STAGES),
        "resumed in stages": (resumed, path, of("stages"), STAGES),
        "resumed in sharded stages": (resumed, path, of("sharded"), SHARDED_STAGES),
        "resumed without stages": (resumed, path, of("stages"), CONTEXT),
        "adapters in stages": (saved, path, of("adapters_s"), SHARDED_STAGES, LORA),
        "adapters without stages": (resumed, path, of("adapters_s"), 4, LORA),
        "offloaded in stages": (ranks.offloaded, path, of("away_s"), STAGES, {}),
    }
    of_ranks = run_ranks(4, ranks.run_calls, list(calls.values()), limit_s=300)
    return [dict(zip(calls, found, strict=True)) for found in of_ranks]


def test_every_rank_reads_its_part_of_both_cuts(results: list[dict[str, Any]]) -> None:
    """Tied weights, fused projections, a head that is drawn, one that is read, and adapters."""
    for found in results:
        assert found["loaded"] and not any(found["loaded"].values())
        assert len(found["loaded in shards"]) == 10 and not any(found["loaded in shards"].values())
        assert found["heads"] and not any(found["heads"].values())
        assert found["loaded in stages"] and not any(found["loaded in stages"].values())
        assert found["loaded in sharded stages"] and not any(found["loaded in sharded stages"].values())
        assert found["heads of stages"] and not any(found["heads of stages"].values())


def test_exports_are_those_of_one_process_to_the_byte(results: list[dict[str, Any]]) -> None:
    for name in (name for name in results[0] if name.startswith("exported")):
        assert results[0][name]["differing"] == [], name


def test_engines_get_the_trained_weights(results: list[dict[str, Any]]) -> None:
    for name in ("synced", "synced in stages"):
        first, *others = [found[name] for found in results]
        assert first and all(first.values()) and others == [None] * 3
    for name in ("workers", "workers in stages"):
        assert [found[name] for found in results] == [[]] * 4


def test_checkpoints_go_on_on_any_mesh(results: list[dict[str, Any]], folder: Path, alone: list[Any]) -> None:
    path = str(folder / "causal")
    back = one(
        (ranks.resumed_run, path, str(folder / "sharded"), None),
        (ranks.resumed_run, path, str(folder / "context"), None),
        (ranks.resumed_run, path, str(folder / "stages"), None),
        (ranks.resumed_run, path, str(folder / "adapters"), None, LORA),
        (ranks.resumed_run, path, str(folder / "adapters_s"), None, LORA),
    )
    for found in results:
        for name in (name for name in found if name.startswith(("saved", "resumed"))):
            same(found[name], alone[0], 1e-8)
        for name in (name for name in found if name.startswith("adapters")):
            same(found[name], alone[1], 1e-8)
        same(found["resumed"], found["saved"], None)
        same(found["resumed in stages"], found["saved in stages"], None)
    for run in back[:3]:
        same(run, alone[0], 1e-8)
    for run in back[3:]:
        same(run, alone[1], 1e-8)


def test_parts_that_leave_and_come_back_change_nothing(results: list[dict[str, Any]]) -> None:
    for found in (of_rank[name] for of_rank in results for name in ("offloaded", "offloaded in stages")):
        assert found["losses"][0] == found["losses"][1] and found["again"][0] == found["again"][1]
        assert all(found["equal"]) and len(found["equal"]) > 4
        assert found["refused"].count("are offloaded; onload(") == 2
        assert found["moved"] >= found["held"] > 0


def test_memory_of_shards_is_free_while_they_are_away(tmp_path: Path) -> None:
    path = tmp_path / "large"
    llama(path, vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    for found in run_ranks(2, ranks.memory_of_offload, str(path), str(tmp_path / "away")):
        assert found["same"]
        assert found["moved"] >= found["shards"] and found["freed"] >= 0.95 * found["shards"]
        assert found["kept"] > 20  # frozen shards that came back are not written again


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
        (ranks.memory_of_loading, str(path), SHARDED),
        (ranks.memory_of_export, str(path), str(tmp_path / "out"), SHARDED),
    )
    for rank, (loading, export) in enumerate(run_ranks(4, ranks.run_calls, calls)):
        assert loading["own"] <= 1.05 * loading["shard"] + 2**20
        assert export["own"] <= (1.1, 0, 0.55, 0)[rank] * export["largest"] + 2**21


def test_directories_that_do_not_fit_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """On all ranks, also where only one meets the fault."""
    causal = folder / "causal"
    tensors = load_file(causal / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    unfinite = tensors[name].clone()
    unfinite[-1, 0] = float("nan")
    broken = {
        "missing": {n: t for n, t in tensors.items() if n != name},
        "misshapen": {**tensors, name: tensors[name][:-1].clone()},
        "not finite": {**tensors, name: unfinite},
        "extra": {**tensors, "model.other": torch.zeros(1)},
    }
    paths = {case: tmp_path / case for case in broken}
    for case, content in broken.items():
        shutil.copytree(causal, paths[case])
        save_file(content, paths[case] / "model.safetensors", metadata={"format": "pt"})
    of_ranks = run_ranks(2, ranks.refused, str(causal), {c: str(p) for c, p in paths.items()})
    for found in of_ranks:
        assert f"lack {name}" in found["missing"]
        assert f"{name} is [23, 16], by the config [24, 16]" in found["misshapen"]
        assert found["extra"] == "nothing"
    assert f"NaN or infinity in {name}" in of_ranks[1]["not finite"]


def test_checkpoints_that_lack_a_part_or_are_another_models_are_told(folder: Path, tmp_path: Path) -> None:
    llama(tmp_path / "other", hidden_size=24, tie_word_embeddings=True)
    first, second = run_ranks(
        2, ranks.incomplete, str(folder / "causal"), str(tmp_path / "root"), str(tmp_path / "other")
    )
    assert "of actor's model.model.embed_tokens.weight 256 numbers are there, of 496" in first["incomplete"]
    assert first["other"] == second["other"]
    assert "model.model.embed_tokens.weight: [31, 16] float64 in the checkpoint, [31, 24] float64 now" in first["other"]


def test_an_optimizer_on_the_host_changes_nothing(folder: Path) -> None:
    """On the CPU both are the same memory: what is seen here is that every step of the policy works."""
    for kept, other in run_ranks(2, ranks.on_host, str(folder / "causal")):
        same(kept, other, None)
