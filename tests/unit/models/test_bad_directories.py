"""Model directories that were damaged, mixed up or made to harm: refused in three parts or taken with a remark, never a
traceback, and no weight is ever drawn anew without a word."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models.directories import load_warnings
from quartet.models.loading import load_causal_lm, load_scalar_model, packed_causal_lm, scalar_model_from
from quartet.text.loading import expand_local_path
from quartet.trainers.input_sources import resolve_scalar_model

Damage = Callable[[Path], Any]
INDEX = "model.safetensors.index.json"


def _config(**values: Any) -> Damage:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **values}))

    return damage


def _file(name: str, content: str | bytes | None) -> Damage:
    """``None``: a directory of that name."""

    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        if content is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def _tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    def damage(path: Path) -> None:
        save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})

    return damage


def _each(part: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return _tensors(lambda found: {name: change(t) if part in name else t for name, t in found.items()})


def _pickled(content: bytes | None) -> Damage:
    """``None``: the weights themselves."""

    def damage(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        if content is None:
            torch.save(weights, path / "pytorch_model.bin")
        else:
            (path / "pytorch_model.bin").write_bytes(content)

    return damage


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def _harmful() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": _Harmful()}, buffer)
    return buffer.getvalue()


def _sharded(path: Path, *, second: str = "b.safetensors", keep: bool = True, index: str | None = None) -> None:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    first = dict(list(weights.items())[:5])
    others = {name: t for name, t in weights.items() if name not in first}
    save_file(first, path / "a.safetensors", {"format": "pt"})
    if keep:
        save_file(others, path / "b.safetensors", {"format": "pt"})
    places = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(others, second)}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}) if index is None else index)


def _without(name: str) -> Damage:
    return _tensors(lambda found: {key: t for key, t in found.items() if key != name})


CAUSAL: dict[str, tuple[Damage, str]] = {
    # Configs: sizes, types, contradictions, not even one.
    "a layer too many": (_config(num_hidden_layers=3), "lack model.layers.2"),
    "heads that do not divide": (_config(num_attention_heads=3), "multiple of the number of att"),
    "a vocabulary too small": (_config(vocab_size=60), "is [61, 32], by the config [60, 32]"),
    "an unknown dtype": (_config(dtype="float99"), "float99"),
    "eos of text": (_config(eos_token_id=[1, "b"]), "eos_token_id"),
    "quantised by its config": (_config(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    "no end-of-text config": (_file("generation_config.json", "{"), "generation_config.json"),
    # Weights: cut, exchanged, missing, of no numbers.
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no file named model.safetensors"),
    "a pointer of Git LFS": (_file("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "header"),
    "a missing tensor": (_without("model.norm.weight"), "lack model.norm.weight"),
    "turned round": (_each("gate_proj", lambda t: t.T.contiguous()), "is [32, 48], by the config [48, 32]"),
    "not a number": (_each("o_proj", lambda t: t * float("nan")), "model.layers.0.self_attn.o_proj.weight"),
    # Pickles and shards.
    "harmful pickle": (_pickled(_harmful()), "weights only load failed"),
    "a shard gone": (lambda path: _sharded(path, keep=False), "b.safetensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_model: Any) -> Path:
    path = tmp_path_factory.mktemp("saved")
    make_model().save_pretrained(path / "causal")
    scalar_model_from(make_model(), seed=0).save_pretrained(path / "scalar")
    return path


CONTENTS = {"not a number"}
"""What no header shows."""


@pytest.mark.parametrize("empty", [False, True], ids=["whole", "headers"])
@pytest.mark.parametrize("name", list(CAUSAL))
def test_refused_in_three_parts(name, empty, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage, found = CAUSAL[name]
    shutil.copytree(saved / "causal", tmp_path / "model")
    damage(tmp_path / "model")
    if empty and name in CONTENTS:
        assert load_causal_lm(str(tmp_path / "model"), empty=True).device.type == "meta"
        return
    with pytest.raises(UserError) as refused:
        load_causal_lm(str(tmp_path / "model"), empty=empty)
    assert found.lower() in f"{refused.value.problem} {refused.value.found}".lower()
    assert refused.value.remedy and "\n" not in refused.value.found
    assert not (tmp_path / "harmed").exists()
    # What decides between reward models and causal LMs leaves the message to the loader.
    from quartet.config.common import ModelConfig

    with pytest.raises(UserError):
        resolve_scalar_model(ModelConfig(path=str(tmp_path / "model")), None, seed=0)


ACCEPTED: dict[str, tuple[Damage, str | None]] = {
    "pickled": (_pickled(None), None),
    "sharded": (_sharded, None),
    "a layer less": (_config(num_hidden_layers=1), "model.layers.1.input_layernorm.weight"),
    "a tensor more": (_tensors(lambda found: {**found, "foo.weight": torch.ones(3)}), "nowhere: foo.weight"),
    "fp64": (_each("", lambda t: t.double()), None),
    "bf16": (_each("", lambda t: t.bfloat16()), None),
}


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_headers_say_the_same(name, saved, tmp_path):
    damage, _ = ACCEPTED[name]
    shutil.copytree(saved / "causal", tmp_path / "model")
    damage(tmp_path / "model")
    whole, empty = (load_causal_lm(str(tmp_path / "model"), empty=empty) for empty in (False, True))
    assert _outline(empty) == _outline(whole)
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}
    assert load_warnings(empty) == load_warnings(whole)
    scalar = scalar_model_from(empty, seed=0)
    assert _outline(scalar) == _outline(scalar_model_from(whole, seed=0)) and scalar.device.type == "meta"


def _outline(model: PreTrainedModel) -> dict[str, Any]:
    return {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} | {
        "generation": model.generation_config.to_dict() if model.can_generate() else None
    }


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_taken_with_a_remark(name, saved, tmp_path):
    damage, warning = ACCEPTED[name]
    shutil.copytree(saved / "causal", tmp_path / "model")
    damage(tmp_path / "model")
    model = load_causal_lm(str(tmp_path / "model"))
    expected = load_file(saved / "causal" / "model.safetensors")
    expected = {key: t.bfloat16().float() if name == "bf16" else t for key, t in expected.items()}
    assert all(torch.equal(values, expected[key]) for key, values in model.state_dict().items())
    warnings = packed_causal_lm(model).warnings
    assert warnings == () if warning is None else warning in "".join(warnings)
    scalar = scalar_model_from(model, seed=0)
    assert vars(scalar)["quartet_load_remarks"] == warnings, "a reward model that starts from it says so, too"


SCALAR: dict[str, tuple[Damage, str]] = {
    "no head": (_without("score.weight"), "lack score.weight"),
    "not a number": (_each("score", lambda t: t * float("nan")), "score.weight"),
    "two labels": (_config(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}), "num_labels 2"),
    "cut off": (_file("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"), "header"),
}


@pytest.mark.parametrize("empty", [False, True], ids=["whole", "headers"])
@pytest.mark.parametrize("name", list(SCALAR))
def test_reward_models_too(name, empty, saved, tmp_path):
    damage, found = SCALAR[name]
    shutil.copytree(saved / "scalar", tmp_path / "model")
    damage(tmp_path / "model")
    if empty and name in CONTENTS:
        assert load_scalar_model(str(tmp_path / "model"), empty=True).device.type == "meta"
        return
    with pytest.raises(UserError) as refused:
        load_scalar_model(str(tmp_path / "model"), empty=empty)
    assert found in f"{refused.value.problem} {refused.value.found}"


def test_a_run_given_for_its_model_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"job": "sft", "status": "done"}', encoding="utf-8")
    with pytest.raises(UserError, match="a run without a model"):
        load_causal_lm(str(tmp_path))
    (tmp_path / "model").mkdir()
    assert expand_local_path(str(tmp_path), "model") == str(tmp_path / "model")
