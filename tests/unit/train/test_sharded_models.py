"""Sharded models come in, are saved and go on without a process that holds the whole; by real processes over gloo."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import sharded_models as ranks
from quartet.cluster.dispatch import marks_of
from quartet.cluster.layout import Layout
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import scalar_model_from
from quartet.observe.files import FileDigest
from quartet.schedule.model_worker import Checkpointed
from rank_forks import run_ranks


def calls(world: int, *functions: tuple[Any, ...]) -> list[list[Any]]:
    """What every call returned, by rank."""
    return [list(results) for results in zip(*run_ranks(world, ranks.run_calls, functions), strict=True)]


SMALL: dict[str, Any] = dict(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


LORA = {"lora": ranks.LoRAConfig(rank=2), "seed": 3}


def llama(path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **options})).to(dtype)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "causal"
    llama(path, tie_word_embeddings=True)
    return path


def test_memory_of_a_rank_that_loads_is_its_shard(tmp_path: Path) -> None:
    """The pages of a file that it maps come in clusters, so these are more than its part, but not the whole file."""
    path = tmp_path / "large"
    llama(path, dtype=torch.bfloat16, vocab_size=16384, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    file_bytes = (path / "model.safetensors").stat().st_size
    cases = [(ranks.memory_of_loading, str(path), reads_all) for reads_all in (False, True)]
    for reads_all, of_ranks in zip((False, True), calls(4, *cases), strict=True):
        for found in of_ranks:
            print({name: f"{size / 2**20:.1f} MiB" for name, size in found.items()})
            assert (found["own"] <= 1.05 * found["shard"] + 2**20) is not reads_all
            assert reads_all or found["mapped"] <= 0.75 * file_bytes


def test_roles_that_start_from_one_directory_read_it_once(causal: Path, tmp_path: Path) -> None:
    """The kernel keeps the pages for all ranks and roles of a machine; where it counts none that come from the disk, as
    in memory, there is nothing to read."""
    llama(tmp_path / "large", vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    file = tmp_path / "large" / "model.safetensors"
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = run_ranks(4, ranks.read_from_disk, str(tmp_path / "large"), 3)
    print(f"{sum(found) / 2**20:.1f} MiB by 4 ranks with 3 roles, of a file of {file.stat().st_size / 2**20:.1f}")
    assert sum(found) <= 1.1 * file.stat().st_size


ARCHITECTURES = ("qwen2", "gemma3_multimodal", "phi3_longrope", "qwen3_moe", "deepseek_v3", "gpt_bigcode")
"""Ties, prefixes, buffers of two kinds, experts in one tensor, transposed layers and learnt positions."""


TIED_NAMES = ("lm_head.weight", "lm_head.weight model.embed_tokens.weight")
"""Under which a file may have a tied pair beside the usual one."""


def tied_under(names: str, causal: Path, folder: Path) -> Path:
    """The model of ``causal`` whose tied weights are in the file under ``names``."""
    path = folder / names.replace(" ", "_and_")
    shutil.copytree(causal, path)
    tensors = load_file(causal / "model.safetensors")
    shared = tensors.pop("model.embed_tokens.weight")
    tensors |= {name: shared.clone() for name in names.split()}
    noted = {"format": "pt", "model.embed_tokens.weight": "lm_head.weight"}
    save_file(tensors, path / "model.safetensors", metadata=noted)
    return path


def test_loaded_in_shares_is_loaded_whole(build_architecture: Any, causal: Path, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ARCHITECTURES]
    for path in paths:
        build_architecture(Path(path).name, seed=1).save_pretrained(path)
    # Several files with an index; and pickled ones.
    llama(tmp_path / "files").save_pretrained(tmp_path / "files", max_shard_size="4KB")
    (tmp_path / "files" / "model.safetensors").unlink()
    shutil.copytree(causal, tmp_path / "pickled")
    torch.save(load_file(causal / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    paths += [str(tmp_path / "files"), str(tmp_path / "pickled")]
    paths += [str(tied_under(names, causal, tmp_path)) for names in TIED_NAMES]
    for found in run_ranks(4, ranks.loaded_models, paths):
        assert found == {path: [] for path in paths}


def test_heads_and_adapters_are_those_of_one_process(causal: Path, tmp_path: Path) -> None:
    scalar_model_from(llama(tmp_path / "other"), seed=1).save_pretrained(tmp_path / "scalar")
    by_the_head = tied_under("lm_head.weight", causal, tmp_path)
    cases = [(ranks.loaded_heads, str(path), str(tmp_path / "scalar")) for path in (causal, by_the_head)]
    for of_ranks in calls(2, *cases):
        for found in of_ranks:
            assert found and not any(found.values())


def test_directories_that_do_not_fit_are_refused_by_name(causal: Path, tmp_path: Path) -> None:
    """On all ranks, also where only one meets the fault."""
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
        assert f"NaN or infinity in {name}" in found["not finite"]
        assert found["extra"] == "nothing"
    assert "rank 1: " in of_ranks[0]["not finite"] and "rank 1: " not in of_ranks[1]["not finite"]


# Export and weight sync ----------------------------------------------------------------------------------


def test_exported_from_shards_is_exported_whole(build_architecture: Any, causal: Path, tmp_path: Path) -> None:
    """Every file has the same bytes: tied weights, experts, prefixes, a new row to pad with, adapters in two forms."""
    paths = {name: tmp_path / name for name in ("gemma3_multimodal", "qwen3_moe", "scalar")}
    for name in ("gemma3_multimodal", "qwen3_moe"):
        build_architecture(name, seed=1).save_pretrained(paths[name])
    scalar_model_from(llama(tmp_path / "other", vocab_size=16), seed=1).save_pretrained(paths["scalar"])
    cases = {
        "causal": (causal, "causal", {}),
        "gemma3_multimodal": (paths["gemma3_multimodal"], "causal", {}),
        "qwen3_moe": (paths["qwen3_moe"], "causal", {}),
        "scalar": (paths["scalar"], "scalar", {}),
        "adapters": (causal, "causal", LORA),
        "adapters of a critic": (paths["scalar"], "scalar", LORA),
    }
    functions = [
        (ranks.exported, str(path), str(tmp_path / "out" / name), kind, options, build_tokenizer())
        for name, (path, kind, options) in cases.items()
    ]
    for name, (found, _) in zip(cases, calls(2, *functions), strict=True):
        assert found["differing"] == [], name
    several = run_ranks(2, ranks.exported_in_files, str(causal), str(tmp_path / "files"), build_tokenizer())
    assert several[0]["differing"] == [] and "model/model.safetensors.index.json" in several[0]["files"]


def test_memory_of_an_export_is_one_tensor_on_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "large"
    llama(path, dtype=torch.bfloat16, vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    cases = [(ranks.memory_of_export, str(path), str(tmp_path / f"out{fault}"), fault) for fault in (False, True)]
    for fault, of_ranks in zip((False, True), calls(4, *cases), strict=True):
        print([{name: f"{size / 2**20:.1f} MiB" for name, size in found.items()} for found in of_ranks])
        assert (of_ranks[0]["own"] <= 1.1 * of_ranks[0]["largest"] + 2**21) is not fault
        for found in of_ranks[1:]:
            assert found["own"] <= 2**21


def test_engines_get_whole_tensors_from_the_first_rank(causal: Path) -> None:
    for world in (2, 4):
        first, *others = run_ranks(world, ranks.synced, str(causal), world)
        assert first and all(first.values()) and others == [None] * (world - 1)


def test_workers_of_a_sharded_trainer_answer_a_sync_together(causal: Path) -> None:
    assert run_ranks(2, ranks.sync_of_workers, str(causal), 2) == [[], []]


# Checkpoints ---------------------------------------------------------------------------------------------


def same(run: Any, other: Any, tolerance: float | None) -> None:
    """Losses and weights, to the bit where there is no tolerance."""
    (losses, weights), (expected, wanted) = run, other
    assert weights.keys() == wanted.keys() and len(losses) == len(expected)
    if tolerance is None:
        assert losses == expected and all(torch.equal(weights[name], wanted[name]) for name in wanted)
    else:
        assert losses == pytest.approx(expected, abs=tolerance)
        assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) <= tolerance


def test_checkpoints_go_on_with_any_number_of_processes(causal: Path, tmp_path: Path) -> None:
    saved, resumed, path = ranks.saved_run, ranks.resumed_run, str(causal)
    of_one, of_two, of_four, of_square = (str(tmp_path / name) for name in ("one", "two", "four", "square"))
    ((alone,),) = calls(1, (saved, path, of_one, None))
    two = calls(
        2, (saved, path, of_two, 2), (resumed, path, of_two, 2), (resumed, path, of_one, 2), (resumed, path, of_two, 1)
    )
    four = calls(
        4,
        (saved, path, of_four, 4),
        (saved, path, of_square, 2),
        (resumed, path, of_square, 2),
        (resumed, path, of_two, 4),
    )
    back = calls(2, (resumed, path, of_four, 2))
    ((again,),) = calls(1, (resumed, path, of_four, None))
    # fp64, but norms round in fp32.
    tolerance = 1e-8
    for rank_results in (*two, *four, *back):
        for run in rank_results:
            same(run, alone, tolerance)
    same(again, alone, tolerance)
    same(two[1][0], two[0][0], None)
    same(four[2][0], four[1][0], None)
    assert alone[0][0] != alone[0][1]


def test_adapters_have_checkpoints_of_their_own(causal: Path, tmp_path: Path) -> None:
    path, root = str(causal), str(tmp_path / "root")
    two = calls(2, (ranks.saved_run, path, root, 2, LORA), (ranks.resumed_run, path, root, 2, LORA))
    ((alone,),) = calls(1, (ranks.resumed_run, path, root, None, LORA))
    same(two[1][0], two[0][0], None)
    same(alone, two[0][0], 1e-8)


def test_checkpoints_that_lack_a_part_or_are_another_models_are_told(causal: Path, tmp_path: Path) -> None:
    llama(tmp_path / "other", hidden_size=24, tie_word_embeddings=True)
    first, second = run_ranks(2, ranks.incomplete, str(causal), str(tmp_path / "root"), str(tmp_path / "other"))
    assert "of actor's model.model.embed_tokens.weight 256 numbers are there, of 496" in first["incomplete"]
    assert first["other"] == second["other"]
    assert "model.model.embed_tokens.weight: [31, 16] float64 in the checkpoint, [31, 24] float64 now" in first["other"]


def test_every_rank_of_a_role_writes_and_tells_its_files() -> None:
    saving, finishing = (marks_of(Checkpointed)[name].mode for name in ("save_checkpoint", "finish_checkpoint"))
    plan = saving.plan(Layout.fit(3), ("there",), {"background": True})
    assert [(call.args, call.kwargs) for call in plan.calls if call is not None] == [
        (("there",), {"background": True, "rank": rank}) for rank in range(3)
    ]
    collect = finishing.plan(Layout.fit(3), ("there",), {}).collect
    one, two, three = ({name: FileDigest(bytes=1, sha256="0" * 64)} for name in "abc")
    assert collect([one, two, three], [None] * 3) == {**one, **two, **three}
    assert collect([one, None, three], [None] * 3) is None  # not written yet
    assert collect([one, {}, three], [None] * 3) == {}  # a rank that was started anew has lost its part


# Offload -------------------------------------------------------------------------------------------------


def test_shards_that_leave_and_come_back_change_nothing(causal: Path, tmp_path: Path) -> None:
    """Rows of several tensors do not divide by the ranks; with adapters, and in two replicas, too."""
    cases = [
        (ranks.offloaded, str(causal), str(tmp_path / str(i)), shard, options)
        for i, (shard, options) in enumerate(((2, {}), (4, LORA)))
    ]
    for of_ranks in calls(4, *cases):
        for found in of_ranks:
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


def test_an_optimizer_on_the_host_changes_nothing(causal: Path) -> None:
    """On the CPU both are the same memory: what is seen here is that every step of the policy works."""
    for kept, other in run_ranks(2, ranks.on_host, str(causal)):
        same(kept, other, None)
