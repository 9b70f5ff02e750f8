"""Every recipe runs for two short steps, by the command line that its head names, and learns."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from quartet.config.algorithms import AlgorithmConfig
from quartet.config.common import DataConfig, ModelConfig, OptimConfig, TrainConfig
from quartet.config.load import load_recipe
from quartet.config.plugins import recipe_classes
from quartet.config.preference import PreferenceLossConfig
from quartet.config.recipe import LogConfig, SFTRecipe
from quartet.config.strict import discriminator_values, union_members
from quartet.config.yamls import parse_yaml
from quartet.extras.pictures import task as pictures
from quartet.extras.pictures.model import save_model as save_pictures_model
from quartet.extras.process_rewards.data import save_step_separator
from quartet.extras.quickstart import task
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.trackers import read_metrics
from quartet.trainers.supervised import SFTTrainer

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "recipes").glob("*.yaml"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in PATHS}
CONTENTS: dict[str, Any] = {name: parse_yaml(text) for name, text in TEXTS.items()}

COMMAND = re.compile(r"quartet (\S+) recipes/(\S+)\.yaml(.*)")
COMMENTED = re.compile(r"^( *)# (\w+: (?:\{.*\}|[^{\s]\S*))(?:  +(.*))?$", re.MULTILINE)
"""A key that a recipe offers, and what is said of it."""

SHORT = {
    "sft": ("steps=2", "examples_per_step=4"),
    "reward-model": ("steps=2", "pairs_per_step=4"),
    "process-reward": ("steps=2", "answers_per_step=4"),
    "preference": ("steps=2", "pairs_per_step=4"),
    "medusa": ("steps=2", "answers_per_step=4", "sampling.max_new_tokens=8"),
    "rl": ("steps=2", "prompts_per_step=8", "rollout.sampling.max_new_tokens=8"),
    "eval": ("sampling.max_new_tokens=8",),
    "iterated-reward-model": (
        "rounds=1",
        "collect.prompts_per_round=4",
        "reward_model.steps=2",
        "reward_model.pairs_per_step=4",
        "rl.steps=2",
        "rl.prompts_per_step=8",
        "rl.rollout.sampling.max_new_tokens=8",
    ),
}
SHORTER = {
    "environment": ("environment.max_turns=2",),
    "rl-dapo": ("prompts_per_step=2", "algorithm.overlong.buffer=4"),
    "rl-high-entropy": ("prompts_per_step=2",),
    "story-ppo": ("evaluation.data.limit=4", "evaluation.sampling.max_new_tokens=8"),
}


# A place where all that recipes name is there -------------------------------------------------------------


def _tokenizer() -> PreTrainedTokenizerFast:
    """Reads bytes, so that it knows every character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate([*alphabet, "<|endoftext|>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _model(model_class: type[PreTrainedModel], tokenizer: Any, seed: int = 0, **changes: Any) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()


def _taught(path: Path, tokenizer: Any, seed: int) -> Path:
    """A model that answers with a digit or so, one in ten of them right."""
    draw = random.Random(seed)
    stories = (ROOT / "examples" / "story_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [row["question"] for row in _rows()["problems"]] + [json.loads(line)["prompt"] for line in stories]
    shapes = ("{}", "{}.", "={}\n", "\n\n{}")
    rows = [{"prompt": p, "completion": draw.choice(shapes).format(draw.randrange(10))} for p in prompts * 4]
    recipe = SFTRecipe(
        output_dir=str(path),
        threads=1,
        train=TrainConfig(optim=OptimConfig(lr=1e-2)),
        steps=60,
        examples_per_step=16,
        log=LogConfig(tensorboard=False),
    )
    SFTTrainer(recipe, model=_model(Qwen2ForCausalLM, tokenizer, seed), tokenizer=tokenizer, rows=rows).train()
    return path / "model"


def _pictures(path: Path) -> None:
    """The task of pictures, and a model of it that answers with one of its words."""
    save_pictures_model(path / "pictures/model", 0)
    for name in pictures.SIZES:
        pictures.write_questions(path / "pictures", name, 24, 0)
    recipe = SFTRecipe(
        output_dir=str(path / "runs/sft-pictures"),
        threads=1,
        model=ModelConfig(path=str(path / "pictures/model")),
        data=DataConfig(path=str(path / "pictures/demonstrations.jsonl")),
        train=TrainConfig(optim=OptimConfig(lr=1e-3)),
        steps=40,
        examples_per_step=16,
        log=LogConfig(tensorboard=False),
    )
    SFTTrainer(recipe).train()


def _rows() -> dict[str, list[dict[str, Any]]]:
    sums = [
        (p, task.work(*task.operands(p)), task.work(*task.operands(p), "forgetful")) for p in task.toy_prompts(0, 16)
    ]
    problems = [{"question": p, "answer": f"#### {n % 10}"} for n, (p, _, _) in enumerate(sums)]
    return {
        "demonstrations": [{"prompt": p, "completion": right} for p, right, _ in sums],
        "mine": [{"prompt": p, "completion": right} for p, right, _ in sums],
        "pairs": [{"prompt": p, "chosen": right, "rejected": wrong + "1"} for p, right, wrong in sums],
        "judged": [{"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c, _) in enumerate(sums)],
        "steps": [{"prompt": p, "steps": c.split(";"), "labels": [1, 0, 0.5][: c.count(";") + 1]} for p, c, _ in sums],
        "prompts": [{"prompt": p} for p, _, _ in sums],
        "held_out": [{"prompt": p} for p, _, _ in sums[:4]],
        "problems": problems,
        "gsm8k_train": problems,
        "gsm8k_test": problems[:4],
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data under the very names that recipes and their command lines have for them."""
    path = tmp_path_factory.mktemp("recipes")
    for name in ("examples", "recipes"):
        (path / name).symlink_to(ROOT / name)
    tokenizer = _tokenizer()
    taught, teacher = (_taught(path / "taught" / str(seed), tokenizer, seed) for seed in (0, 1))
    for name in ("DIR", "Qwen/Qwen2.5-0.5B", "runs/sft/model", "runs/gsm8k-sft/model", "runs/rl-ppo/model"):
        shutil.copytree(taught, path / name)
    shutil.copytree(teacher, path / "runs/teacher/model")
    for name in ("runs/reward-model/model", "runs/process-reward/model"):
        _model(Qwen2ForSequenceClassification, tokenizer, num_labels=1).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    _pictures(path)
    packed = PackedCausalLM(load_causal_lm(str(path / "runs/sft/model")))
    MedusaHeads(packed, 3).save(path / "runs/medusa/medusa")
    packed.release()
    save_step_separator("\n\n", path / "runs/process-reward/model")
    for name, rows in _rows().items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _learned(before: Path, after: Path) -> bool:
    """Whether a weight that both models have is another one."""
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    shared = old.keys() & new.keys()
    assert len(shared) > 5
    return any(not torch.equal(old[name], new[name]) for name in shared)


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_does_what_its_head_says(
    name: str, place: Path, quartet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found = COMMAND.search(TEXTS[name])
    assert found is not None, "the head of a recipe names its command"
    job, stem, overrides = found.groups()
    assert (job, stem) == (CONTENTS[name]["job"], name)
    short = SHORT[job] + (("critic.warmup_steps=1",) if "critic" in CONTENTS[name] else ()) + SHORTER.get(name, ())
    done = quartet(job, f"recipes/{name}.yaml", *shlex.split(overrides), "threads=1", f"output_dir=out/{name}", *short)
    assert done.status == 0, done.err
    run = place / "out" / name
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "done"
    rows = read_metrics(run / "metrics.jsonl")
    assert all(math.isfinite(value) for row in rows for key, value in row.items() if key.startswith("loss/"))
    if job == "eval":
        assert any(key.startswith("eval/") for key in rows[-1])
        return
    if job == "medusa":
        blocks = load_file(run / "medusa" / "model.safetensors")
        assert len(blocks) == 3 and all(bool(weight.any()) for weight in blocks.values()), "they begin at 0"
    else:
        before = {"sft-pictures": "pictures/model", "rl-pictures": "runs/sft-pictures/model"}.get(name, "DIR")
        assert _learned(place / before, run / "model")
    if job != "iterated-reward-model":
        assert rows[-1]["step"] == 2 and any(key.startswith("loss/") for key in rows[-1])


RELATIVES = (
    "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "discopop",
)  # fmt: skip
"""Losses that the recipe of DPO differs from by a name."""


@pytest.mark.parametrize("name", ["nca_pair", "bco_pair", "aot"])
def test_the_recipe_of_dpo_runs_with_its_relatives(
    name: str, place: Path, quartet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    short = ("steps=2", "pairs_per_step=4", "threads=1", f"output_dir=out/{name}", "evaluation_data.path=pairs.jsonl")
    done = quartet("preference", "recipes/dpo.yaml", f"loss={{name: {name}}}", *short)
    assert done.status == 0, done.err
    rows = read_metrics(place / "out" / name / "metrics.jsonl")
    assert math.isfinite(rows[-1]["loss/preference"]) and any("eval/loss" in row for row in rows)
    assert _learned(place / "DIR", place / "out" / name / "model")


# What recipes say and offer ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_recipe_offers_in_comments_is_valid(name: str, tmp_path: Path) -> None:
    for indent, offer, warning in COMMENTED.findall(TEXTS[name]):
        text = TEXTS[name].replace(f"{indent}# {offer}", f"{indent}{offer}", 1)
        replaced = re.search(r"in place of (\w+)", warning)
        if replaced is not None:
            text = re.sub(rf"^{indent}{replaced[1]}:.*\n", "", text, flags=re.MULTILINE)
        path = tmp_path / "offered.yaml"
        path.write_text(text.replace(f"  {warning}", f"  # {warning}", 1) if warning else text, encoding="utf-8")
        changed = load_recipe(CONTENTS[name]["job"], path)
        assert changed != load_recipe(CONTENTS[name]["job"], ROOT / "recipes" / f"{name}.yaml"), offer


def test_offers_are_found() -> None:
    offers = {offer.partition(":")[0] for text in TEXTS.values() for _, offer, _ in COMMENTED.findall(text)}
    assert {"columns", "evaluation_data", "judge", "kl", "reference", "refresh_steps", "separator"} <= offers


def _named(key: str) -> set[str]:
    return {content[key]["name"] for content in CONTENTS.values() if key in content}


def test_every_job_and_every_family_has_a_recipe() -> None:
    assert {content["job"] for content in CONTENTS.values()} == recipe_classes().keys()
    # Named in the recipe of their parent, which they differ from by defaults.
    variants = {"dr_grpo", "gpg", "reinforce_pp_baseline"}
    assert _named("algorithm") == set(discriminator_values(union_members(AlgorithmConfig))[1]) - variants
    lines = {"robust_dpo", "ipo", "hinge", "orpo"}
    assert _named("loss") == set(discriminator_values(union_members(PreferenceLossConfig))[1]) - lines - set(RELATIVES)
    everything = "\n".join(TEXTS.values())
    assert all(re.search(rf"\b{name}\b", everything) for name in (*variants, *lines))
    for section in ("environment", "ptx", "evaluation"):
        assert any(section in content for content in CONTENTS.values()), section
    assert any("lora" in content.get("actor", {}).get("train", {}) for content in CONTENTS.values())
    assert any(source["type"] == "process_model" for c in CONTENTS.values() for source in c.get("rewards", ()))
