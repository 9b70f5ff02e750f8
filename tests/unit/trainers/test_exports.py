"""What a run exports: no code that nobody trusted, every end-of-text, from any checkpoint; and what is checked of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import quartet
from quartet.config import UserError
from quartet.config.common import LogConfig, OptimConfig, TrainConfig
from quartet.config.recipe import CheckpointConfig, SFTRecipe
from quartet.models.loading import load_causal_lm, packed_causal_lm, save_causal_lm
from quartet.text.loading import load_tokenizer
from quartet.trainers.sft import SFTTrainer

COMMON: dict[str, Any] = {
    "threads": 1,
    "train": TrainConfig(optim=OptimConfig(lr=5e-3)),
    "checkpoint": CheckpointConfig(every_steps=1, keep=3),
    "log": LogConfig(tensorboard=False),
    "steps": 2,
    "examples_per_step": 4,
}


@pytest.fixture
def base(causal_lm: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A model directory."""
    causal_lm().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def sft(path: Path, rows: Any, *, resume: bool = False, **changes: Any) -> SFTTrainer:
    objects = {name: changes.pop(name) for name in ("model", "tokenizer") if name in changes}
    return SFTTrainer(SFTRecipe(output_dir=str(path), **{**COMMON, **changes}), rows=rows, resume=resume, **objects)


# Code of a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("where", ["{evil}--", ""])
@pytest.mark.parametrize("is_list", [False, True])
def test_code_that_nobody_trusted_never_runs_and_is_not_written_out(
    file: str, where: str, is_list: bool, base: Path, tmp_path: Path
) -> None:
    evil, ran = tmp_path / "evil", tmp_path / "it_ran"
    for folder in (evil, base):
        folder.mkdir(exist_ok=True)
        (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass T: pass\nC = M = T\n")
    prefix = where.format(evil=evil)
    names: Any = {"AutoTokenizer": [f"{prefix}evil.T"] * 2}
    if file == "config.json":
        names |= {"AutoConfig": f"{prefix}evil.C", "AutoModelForCausalLM": f"{prefix}evil.M"}
    elif is_list:
        names = names["AutoTokenizer"]
    settings = json.loads((base / file).read_text())
    (base / file).write_text(json.dumps({**settings, "auto_map": names}))
    tokenizer, packed = load_tokenizer(base), packed_causal_lm(load_causal_lm(str(base)))
    save_causal_lm(packed, tokenizer, tmp_path / "model")
    assert not ran.exists() and not any("auto_map" in f.read_text() for f in (tmp_path / "model").glob("*.json"))
    AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert not ran.exists()


def test_trust_is_nowhere_on_by_itself() -> None:
    """Only what a user has set is handed on: no call of the package says True."""
    found = [
        f"{path.name}:{call.lineno}"
        for path in Path(quartet.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.keyword) and call.arg == "trust_remote_code"
        if isinstance(call.value, ast.Constant) and call.value.value is not False
    ]
    assert found == []


def test_what_an_export_needs_is_tried_before_the_first_step(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, tiny_rl: Any, digits: Any, tmp_path: Path
) -> None:
    broken = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map)
    broken.init_kwargs["of_its_own"] = object()
    with pytest.raises(UserError, match="could not be saved after training") as refused:
        sft(tmp_path / "run", demonstrations, model=causal_lm(), tokenizer=broken)
    assert "not JSON serializable" in refused.value.found and not (tmp_path / "run").exists()
    trainer = tiny_rl(tmp_path / "rl", digits, steps=1, prompts_per_step=2)
    trainer.roles.codec.tokenizer.init_kwargs["of_its_own"] = object()
    try:
        with pytest.raises(UserError, match="could not be saved after training"):
            trainer.train()
    finally:
        del tokenizer.init_kwargs["of_its_own"]
    assert not (tmp_path / "rl").exists()


# End of text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_model", [None, 5, [5, 6], "the tokenizer's"])
def test_an_export_names_every_end_of_text_of_its_training(
    of_model: Any, causal_lm: Any, tokenizer: Any, demonstrations: Any, tmp_path: Path
) -> None:
    own = tokenizer.eos_token_id
    former = own if isinstance(of_model, str) else of_model
    model = causal_lm()
    model.generation_config.eos_token_id = former
    sft(tmp_path / "run", demonstrations, model=model, tokenizer=tokenizer, steps=1).train()
    found = GenerationConfig.from_pretrained(tmp_path / "run" / "model").eos_token_id
    listed = former if isinstance(former, list) else [former] if former not in (None, own) else []
    assert found == ([*listed, own] if listed else own)
    assert model.generation_config.eos_token_id == former
