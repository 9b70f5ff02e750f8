"""Models of the hub in runs: which commit, whose code, and what goes back with which card. The hub is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hub_server import Hub
from quartet.cli.main import app
from quartet.config import UserError
from quartet.config.algorithms import GRPO, KLConfig
from quartet.config.common import LoRAConfig, ModelConfig, OptimConfig, TrainConfig
from quartet.config.evaluation import ComparisonConfig, EvalRecipe
from quartet.config.preference import CachedReferenceConfig, PreferenceRecipe
from quartet.config.recipe import (
    ActorConfig,
    CheckpointConfig,
    ReferenceConfig,
    SFTRecipe,
)
from quartet.config.rewards import LengthReward, ModelReward
from quartet.config.run import LogConfig
from quartet.models.loading import load_causal_lm
from quartet.text.loading import resolve_model_directory
from quartet.trainers.evaluation import Evaluator
from quartet.trainers.preference import PreferenceTrainer
from quartet.trainers.supervised import SFTTrainer

COMMON: dict[str, Any] = {
    "threads": 1,
    "train": TrainConfig(optim=OptimConfig(lr=5e-3)),
    "checkpoint": CheckpointConfig(every_steps=1),
    "log": LogConfig(tensorboard=False),
    "steps": 2,
    "evaluate_every_steps": 2,
}
README = "---\nlicense: apache-2.0\n---\nA base.\n"
Publish = Callable[..., str]


@pytest.fixture
def publish(hub: Hub, tokenizer: Any, tmp_path: Path) -> Publish:
    """``publish(repo, model, branch)``: a commit with the model, its tokenizer and a card."""

    def put(repo: str, model: PreTrainedModel, branch: str = "main") -> str:
        folder = tmp_path / "published" / repo / branch
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(README)
        return hub.put(repo, folder, branch)

    return put


def sft(path: Path, rows: Any, *, resume: bool = False, **changes: Any) -> SFTTrainer:
    values = {**COMMON, "model": ModelConfig(path="me/base"), "examples_per_step": 6, "output_dir": str(path)}
    return SFTTrainer(SFTRecipe(**(values | changes)), rows=rows, evaluation_rows=rows[:4], resume=resume)


def weights(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def commits(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((path / "run.json").read_text()).get("commits", {})
    return found


# Which commit -----------------------------------------------------------------------------------------------


def test_every_model_of_an_rl_run_is_pinned_and_the_run_says_to_what(
    publish: Publish, hub: Hub, tiny_rl: Any, causal_lm: Any, scalar_model: Any, tmp_path: Path
) -> None:
    actor, reward = publish("me/base", causal_lm(0)), publish("me/reward", scalar_model(1), "v2")
    reference = publish("me/base", causal_lm(5), "old")
    trainer = tiny_rl(
        tmp_path / "run",
        model="me/base",
        actor=ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2))),
        reference=ReferenceConfig(path="me/base", revision="old"),
        rewards=(ModelReward(path="me/reward", revision="v2", tokenizer="me/base"),),
        algorithm=GRPO(kl=KLConfig(coef=0.1)),
        steps=1,
        prompts_per_step=4,
    )
    assert equal(trainer.roles.reference.model, causal_lm(5))
    result = trainer.train()
    assert commits(result.path) == {
        "actor.model.path": f"me/base@{actor}",
        "reference.path": f"me/base@{reference}",
        "rewards.0.path": f"me/reward@{reward}",
        "rewards.0.tokenizer": f"me/base@{actor}",
    }
    assert set(hub.downloads().values()) <= {1, 2}, "two commits of one file name, each downloaded once"
    card = ModelCard.load(result.path / "model" / "README.md")
    assert card.data.tags == ["quartet", "rl", "grpo"]


def test_a_resume_keeps_the_commit_of_a_branch_that_moved(
    publish: Publish, causal_lm: Any, demonstrations: Any, break_off: Any, tmp_path: Path
) -> None:
    began = publish("me/base", causal_lm(0))
    whole = sft(tmp_path / "whole", demonstrations).train().model
    break_off(sft(tmp_path / "run", demonstrations), 1)
    publish("me/base", causal_lm(7))
    resumed = sft(tmp_path / "run", demonstrations, resume=True).train()
    assert equal(resumed.model, whole)
    assert commits(resumed.path) == {"model.path": f"me/base@{began}"}
    assert not equal(sft(tmp_path / "new", demonstrations).train().model, whole), "a new run takes what is there now"


def test_references_and_compared_models_have_revisions(
    publish: Publish, causal_lm: Any, pairs: Any, prompts: Any, tmp_path: Path
) -> None:
    main, old = publish("me/base", causal_lm(0)), publish("me/base", causal_lm(5), "old")
    reference = CachedReferenceConfig(path="me/base", revision="old")
    recipe = PreferenceRecipe(**COMMON, reference=reference, pairs_per_step=4, output_dir=str(tmp_path / "dpo"))
    dpo = PreferenceTrainer(recipe, model="me/base", rows=pairs).train()
    assert commits(dpo.path) == {"model.path": f"me/base@{main}", "reference.path": f"me/base@{old}"}
    evaluation = EvalRecipe(
        model=ModelConfig(path="me/base"),
        compare=ComparisonConfig(model="me/base", revision="old"),
        rewards=(LengthReward(max=3),),
        output_dir=str(tmp_path / "eval"),
        sampling={"max_new_tokens": 4, "temperature": 0},
    )
    result = Evaluator(evaluation, prompts=prompts[:3]).run()
    assert commits(result.path) == {"model.path": f"me/base@{main}", "compare.model": f"me/base@{old}"}


def test_a_hub_that_is_gone_is_told_and_a_missing_model_writes_nothing(
    publish: Publish, hub: Hub, causal_lm: Any, demonstrations: Any, tmp_path: Path
) -> None:
    publish("me/base", causal_lm(0))
    resolve_model_directory("me/base", "model")
    hub.refusal = (503, "", "down")
    result = sft(tmp_path / "run", demonstrations).train()
    assert any("the cache's commit" in note for note in result.summary["notes"])
    with pytest.raises(UserError, match="could not be fetched"):
        sft(tmp_path / "other", demonstrations, model=ModelConfig(path="me/other"))
    hub.refusal = None
    with pytest.raises(UserError, match="no revision 'v9'"):
        sft(tmp_path / "other", demonstrations, model=ModelConfig(path="me/base", revision="v9"))
    hub.put("me/none", {"README.md": README.encode()})
    with pytest.raises(UserError, match=r"cannot be loaded|no vocabulary"):
        sft(tmp_path / "other", demonstrations, model=ModelConfig(path="me/none"))
    assert not (tmp_path / "other").exists()


def test_revisions_belong_to_models_of_the_hub(demonstrations: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="only models of the hub have revisions"):
        sft(tmp_path / "run", demonstrations, model=ModelConfig(path=str(tmp_path / "model"), revision="main"))
    with pytest.raises(UserError, match="set it, too"):
        ReferenceConfig(revision="main")
    with pytest.raises(UserError, match="names a revision already"):
        ModelConfig(path="me/base@v1", revision="v2")


# Whose code -------------------------------------------------------------------------------------------------

CODE = """
import os
from transformers import Qwen2Config, Qwen2ForCausalLM
with open({marker!r}, "a") as ran:
    ran.write(str(os.getpid()) + "\\n")
class OwnConfig(Qwen2Config):
    model_type = "own"
class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(publish: Publish, hub: Hub, causal_lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on the hub as ``me/own``, whose code adds its process to the file that this is when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # of engines in processes of their own
    commit, marker = publish("me/own", causal_lm(0)), tmp_path / "it_ran"
    config = json.loads(hub.commits[commit]["config.json"])
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    hub.commits[commit] |= {
        "config.json": json.dumps(config).encode(),
        "own.py": CODE.format(marker=str(marker)).encode(),
    }
    return marker


def test_code_of_a_model_runs_only_where_it_is_trusted(
    own_code: Path, demonstrations: Any, prompts: Any, tiny_rl: Any, digits: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        sft(tmp_path / "run", demonstrations, model=ModelConfig(path="me/own"))
    assert "Python code of its own" in caught.value.problem and "trust_remote_code: true" in caught.value.remedy
    assert not own_code.exists() and not (tmp_path / "run").exists()
    trusted = ModelConfig(path="me/own", trust_remote_code=True)
    result = sft(tmp_path / "run", demonstrations, model=trusted).train()
    assert own_code.exists() and type(result.model).__name__ == "OwnForCausalLM"
    exported = tmp_path / "run" / "model"
    with pytest.raises(UserError, match="Python code of its own"):
        load_causal_lm(str(exported))
    assert equal(load_causal_lm(str(exported), trust_remote_code=True), result.model)
    assert load_causal_lm(str(exported), trust_remote_code=True, empty=True).device.type == "meta"
    tuned = tiny_rl(
        tmp_path / "rl",
        digits,
        model=str(exported),
        actor=ActorConfig(model=ModelConfig(path=str(exported), trust_remote_code=True)),
        algorithm=GRPO(),
        steps=1,
        prompts_per_step=2,
    ).train()
    assert type(tuned.model).__name__ == "OwnForCausalLM"


def test_generate_takes_a_revision_and_code(own_code: Path, publish: Publish, causal_lm: Any) -> None:
    publish("me/own", causal_lm(3), "plain")
    words = ["generate", "--model", "me/own", "--prompt", "1+", "--max-new-tokens", "2", "--device", "cpu"]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, UserError) and "--trust-remote-code" in str(refused.exception)
    assert CliRunner().invoke(app, [*words, "--revision", "plain"]).exit_code == 0
    assert not own_code.exists()
    here = CliRunner().invoke(app, [*words, "--trust-remote-code"])
    there = CliRunner().invoke(app, [*words, "--trust-remote-code", "--engine", "process=true"])
    assert here.exit_code == there.exit_code == 0 and here.stdout == there.stdout
    assert len(set(own_code.read_text().split())) == 2


# What goes back ---------------------------------------------------------------------------------------------


def test_a_result_is_copied_and_pushed_with_a_card(
    publish: Publish, hub: Hub, causal_lm: Any, demonstrations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("me/base", causal_lm(0))
    monkeypatch.setenv("HF_TOKEN", "hf_written_nowhere")
    result = sft(tmp_path / "run", demonstrations).train()
    card = ModelCard.load(result.path / "model" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "me/base",
        "tags": ["quartet", "sft"],
    }
    for expected in ("examples_per_step: 6", "`eval/loss`", "`loss/sft`", "transformers ", "seed 0"):
        assert expected in card.text, expected
    copied = result.save_pretrained(tmp_path / "copy")
    assert equal(AutoModelForCausalLM.from_pretrained(copied), result.model)
    with pytest.raises(UserError, match="not empty"):
        result.save_pretrained(copied)

    result.push_to_hub("me/tuned", private=True)
    files = {file.name: file.read_bytes() for file in (result.path / "model").iterdir()}
    assert hub.sent["me/tuned"]["main"] == files
    done = CliRunner().invoke(app, ["push", str(result.path), "me/again", "--revision", "dpo", "--public"])
    assert done.exit_code == 0 and f"{hub.url}/me/again/commit/" in done.output
    assert hub.sent["me/again"]["dpo"] == files and hub.created[-1]["visibility"] == "public"
    assert not any(b"hf_written_nowhere" in f.read_bytes() for f in result.path.rglob("*") if f.is_file())


def test_adapters_name_their_base(publish: Publish, causal_lm: Any, demonstrations: Any, tmp_path: Path) -> None:
    publish("me/base", causal_lm(0))
    first = sft(tmp_path / "first", demonstrations).train()
    lora = TrainConfig(lora=LoRAConfig(rank=2, export="adapter"))
    second = sft(tmp_path / "second", demonstrations, model=ModelConfig(path=str(first.path / "model")), train=lora)
    result = second.train()
    card = ModelCard.load(result.path / "adapter" / "README.md").data
    assert card.library_name == "peft"
    assert (result.save_pretrained(tmp_path / "copy") / "adapter_config.json").is_file()
    third = sft(tmp_path / "third", demonstrations, train=lora).train()
    adapter = json.loads((third.path / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "me/base", "no directory of this machine"
