"""What a run exports: from any checkpoint, with every end-of-text and no code that nobody trusted; and its digests.

The critic as a run writes it: it pads with a token that the policy has not produced, also before a resume.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from breaking import fails_at
from quartet.config import UserError
from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import CheckpointConfig, LoRAConfig, ModelConfig, OptimConfig, TrainConfig
from quartet.config.evaluation import EvalRecipe
from quartet.config.plugins import recipe_classes
from quartet.config.recipe import ActorConfig, CriticConfig, RewardModelRecipe, SFTRecipe
from quartet.config.run import LogConfig
from quartet.models.loading import load_causal_lm, load_scalar_model, packed_causal_lm, save_causal_lm
from quartet.models.packed_model import PackedScalarModel
from quartet.observe.rollouts import list_rollout_steps, read_rollout_step
from quartet.schedule.model_worker import CriticWorker, TrainWorker
from quartet.text.loading import load_tokenizer
from quartet.train.engine import TrainEngine
from quartet.trainers.checkpoints import export_model, model_directory
from quartet.trainers.evaluation import Evaluator
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run_files import completed_run
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

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
    objects = {name: changes.pop(name) for name in ("model", "tokenizer", "callbacks") if name in changes}
    return SFTTrainer(SFTRecipe(output_dir=str(path), **{**COMMON, **changes}), rows=rows, resume=resume, **objects)


# Code of a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "where", "is_list"),
    [("tokenizer_config.json", "{evil}--", True), ("tokenizer_config.json", "", False), ("config.json", "", False)],
)
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


# From checkpoints ------------------------------------------------------------------------------------------


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name not in ("README.md", "models.json")}


@pytest.mark.parametrize("lora", [None, "adapter"])
def test_a_checkpoint_becomes_the_directory_that_its_run_would_have_written(
    lora: Any, base: Path, demonstrations: Any, tmp_path: Path
) -> None:
    adapters = LoRAConfig(rank=2, export=lora) if lora else None
    train = TrainConfig(optim=OptimConfig(lr=5e-3), lora=adapters)
    run = tmp_path / "run"
    sft(run, demonstrations, train=train, model=str(base)).train()
    export_model(run, 2, tmp_path / "last")
    if lora != "adapter":
        assert files(tmp_path / "last") == files(run / "model")
        export_model(run, None, tmp_path / "copied")
        assert files(tmp_path / "copied") == files(run / "model")
    sft(tmp_path / "short", demonstrations, train=train, model=str(base), steps=1).train()
    export_model(run / "checkpoints" / "step_00000001", None, tmp_path / "first")
    export_model(tmp_path / "short", 1, tmp_path / "short_model")
    assert files(tmp_path / "first") == files(tmp_path / "short_model") != files(tmp_path / "last")
    with pytest.raises(UserError, match="is not empty"):
        export_model(run, 1, tmp_path / "first")
    with pytest.raises(UserError, match="cannot be used") as missing:
        export_model(run, 7, tmp_path / "seventh")
    assert "1, 2" in missing.value.remedy


def test_the_step_of_an_rl_run_is_what_evaluation_and_generation_take(
    base: Path, tiny_rl: Any, digits: Any, prompts: Any, causal_lm: Any, tokenizer: Any, tmp_path: Path
) -> None:
    actor = ActorConfig(model=ModelConfig(path=str(base)), train=TrainConfig(optim=OptimConfig(lr=1e-2)))
    run = tmp_path / "rl"
    values = {"steps": 2, "prompts_per_step": 2, "checkpoint": CheckpointConfig(every_steps=1)}
    tiny_rl(run, digits, model=str(base), actor=actor, **values).train()
    step = run / "checkpoints" / "step_00000001"

    def answers(model: Path, name: str) -> str:
        recipe = EvalRecipe(output_dir=str(tmp_path / name), model=ModelConfig(path=str(model)), threads=1)
        Evaluator(recipe, prompts=prompts, rewards=digits).run()
        return (tmp_path / name / "answers.jsonl").read_text()

    export_model(run, 1, tmp_path / "first")
    assert answers(step, "of_step") == answers(tmp_path / "first", "of_export")
    assert model_directory(str(run)) == str(run / "model")
    assert answers(run, "of_run") == answers(run / "model", "of_model")
    for file in (run / "model").glob("*.safetensors"):  # as of a run that has not come to its end
        file.unlink()
    made = Path(model_directory(str(run)))
    export_model(run, 2, tmp_path / "last")
    assert files(made) == files(tmp_path / "last") and tmp_path not in made.parents


@pytest.mark.parametrize("pad", [None, "eos_token"])
def test_a_reward_model_pads_with_what_no_text_ends_in(
    pad: str | None, causal_lm: Any, tokenizer: Any, pairs: Any, tmp_path: Path
) -> None:
    """transformers scores at the right-most token that is not the config's pad token."""
    own = copy.deepcopy(tokenizer)
    own.pad_token = getattr(tokenizer, pad) if pad is not None else None
    values = {name: value for name, value in COMMON.items() if name != "examples_per_step"}
    recipe = RewardModelRecipe(**values, pairs_per_step=4, output_dir=str(tmp_path / "run"))
    RewardModelTrainer(recipe, model=causal_lm(), tokenizer=own, rows=pairs).train()
    config = load_scalar_model(str(tmp_path / "run" / "model")).config
    assert config.pad_token_id == load_tokenizer(tmp_path / "run" / "model").pad_token_id
    assert config.pad_token_id not in (None, tokenizer.eos_token_id)


def test_a_model_from_python_needs_the_directory_that_it_came_from(
    causal_lm: Any, tokenizer: Any, base: Path, demonstrations: Any, tmp_path: Path
) -> None:
    sft(tmp_path / "run", demonstrations, model=causal_lm(), tokenizer=tokenizer).train()
    with pytest.raises(UserError, match="does not say which model it began with") as refused:
        export_model(tmp_path / "run", 1, tmp_path / "first")
    assert "--model" in refused.value.remedy
    export_model(tmp_path / "run", 2, tmp_path / "last", str(base))
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "last" / "model.safetensors").read_bytes() == weights
    with pytest.raises(UserError, match="does not fit the model"):
        causal_lm(0, hidden_size=64).save_pretrained(tmp_path / "base")
        export_model(tmp_path / "run", 1, tmp_path / "other", str(base))


def test_a_run_of_somebody_else_turns_no_trust_on(base: Path, demonstrations: Any, tmp_path: Path) -> None:
    ran = tmp_path / "it_ran"
    trusted = ModelConfig(path=str(base), trust_remote_code=True)
    recipe = SFTRecipe(output_dir=str(tmp_path / "run"), **{**COMMON, "steps": 1}, model=trusted)
    SFTTrainer(recipe, rows=demonstrations).train()
    config = json.loads((base / "config.json").read_text())
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (base / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    (base / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(UserError, match="Python code of its own"):
        model_directory(str(tmp_path / "run" / "checkpoints" / "step_00000001"))
    assert not ran.exists()


# Along the way ---------------------------------------------------------------------------------------------


def test_models_are_exported_along_the_way(
    base: Path, demonstrations: Any, tiny_rl: Any, digits: Any, tmp_path: Path
) -> None:
    run, values = tmp_path / "run", {"steps": 3, "model": str(base)}
    sft(run, demonstrations, checkpoint=CheckpointConfig(every_steps=1, keep=3, export_every=2), **values).train()
    assert [path.name for path in (run / "exports").iterdir()] == ["step_00000002"]
    export_model(run, 2, tmp_path / "second")
    assert files(run / "exports" / "step_00000002" / "model") == files(tmp_path / "second")
    assert model_directory(str(run / "exports" / "step_00000002")) == str(run / "exports/step_00000002/model")
    actor = ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2), lora=LoRAConfig(rank=2)))
    often = {"steps": 2, "prompts_per_step": 2, "checkpoint": CheckpointConfig(export_every=1)}
    tiny_rl(tmp_path / "rl", digits, actor=actor, **often).train()
    second = tmp_path / "rl" / "exports" / "step_00000002"
    assert files(second / "model") == files(tmp_path / "rl" / "model")
    assert (second / "adapter" / "adapter_model.safetensors").is_file()
    assert files(second.with_name("step_00000001") / "model") != files(second / "model")


# More steps ------------------------------------------------------------------------------------------------


def test_a_finished_run_goes_on_for_more_steps_as_if_it_had_been_to_have_them(
    causal_lm: Any, tokenizer: Any, demonstrations: Any, tiny_rl: Any, digits: Any, untimed: Any, tmp_path: Path
) -> None:
    def trained(job: str, name: str, steps: int, *, resume: bool = False) -> Any:
        path = tmp_path / job / name
        if job == "rl":
            return tiny_rl(path, digits, steps=steps, prompts_per_step=2, resume=resume).train().model
        objects = {"model": causal_lm(), "tokenizer": tokenizer}
        return sft(path, demonstrations, steps=steps, resume=resume, **objects).train().model

    for job in ("sft", "rl"):
        whole = trained(job, "whole", 4)
        trained(job, "longer", 2)
        recipe = recipe_classes()[job](**yaml.safe_load((tmp_path / job / "longer" / "recipe.yaml").read_text()))
        assert completed_run(recipe, "auto") is not None
        assert completed_run(recipe.model_copy(update={"steps": 4}), "auto") is None
        longer = trained(job, "longer", 4, resume=True)
        assert all(map(torch.equal, whole.parameters(), longer.parameters()))
        losses = [
            [
                (row["step"], row["optim/grad_norm" if job == "sft" else "policy/grad_norm"])
                for row in rows
                if row["step"]
            ]
            for rows in (untimed(tmp_path / job / name) for name in ("whole", "longer"))
        ]
        assert losses[0] == losses[1] and len(losses[0]) == 4
        with pytest.raises(UserError, match="has made more steps than it is to have") as refused:
            trained(job, "longer", 3, resume=True)
        assert "set steps to 4 or more" in refused.value.remedy
        assert json.loads((tmp_path / job / "longer" / "run.json").read_text())["status"] == "done"


# Digests ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_exported_weights_is_noticed(
    base: Path, demonstrations: Any, prompts: Any, digits: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sft(run, demonstrations, model=str(base), steps=1).train()
    export_model(run, None, tmp_path / "copied")
    for directory in (run / "model", tmp_path / "copied"):
        assert model_directory(str(directory)) == str(directory)
        (directory / "generation_config.json").write_text('{"eos_token_id": 1}')  # which users may edit
        assert model_directory(str(directory)) == str(directory)
        content = bytearray((directory / "model.safetensors").read_bytes())
        content[-5] ^= 4
        (directory / "model.safetensors").write_bytes(content)
        for name in (directory, *([run] if directory == run / "model" else [])):
            recipe = EvalRecipe(output_dir=str(tmp_path / "eval"), model=ModelConfig(path=str(name)), threads=1)
            with pytest.raises(UserError, match="not those that were written there") as noticed:
                Evaluator(recipe, prompts=prompts, rewards=digits)
            assert "model.safetensors" in noticed.value.found and "models.json" in noticed.value.remedy


VALUES: dict[str, Any] = {
    "algorithm": PPO(kl=KLConfig(coef=0.0)),
    "critic": CriticConfig(train=TrainConfig(optim=OptimConfig(lr=2e-2))),
    "steps": 2,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "checkpoint": CheckpointConfig(every_steps=1),
}


@pytest.fixture
def worker(scalar_model: Callable[..., Any]) -> Callable[[], CriticWorker]:
    def make() -> CriticWorker:
        return CriticWorker(TrainEngine(PackedScalarModel(scalar_model()), TrainConfig(), total_steps=1))

    return make


def pad_of(path: Path) -> int:
    return int(AutoConfig.from_pretrained(path).pad_token_id)


def sampled_ids(path: Path) -> set[int]:
    return {
        i for step in list_rollout_steps(path) for record in read_rollout_step(path, step) for i in record.response_ids
    }


def half(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) > 2) for text in completions]


def test_a_token_that_the_policy_has_produced_pads_nothing(
    tmp_path: Path, tiny_rl: Callable[..., RLTrainer], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays so after a resume, where the worker knows of the steps before from its checkpoint alone."""
    with pytest.raises(UserError, match="server is gone"):
        tiny_rl(tmp_path / "run", fails_at(5, half), chunk_size=1, **VALUES).train()
    assert tokenizer.pad_token_id in sampled_ids(tmp_path / "run" / "rollouts"), "else this shows nothing"
    monkeypatch.setattr(CriticWorker, "update", TrainWorker.update)
    tiny_rl(tmp_path / "run", half, resume=True, chunk_size=1, **VALUES).train()
    assert pad_of(tmp_path / "run" / "critic") == len(tokenizer)
