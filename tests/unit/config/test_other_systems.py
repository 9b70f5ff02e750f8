"""Keys of TRL and verl in a recipe: each leads to the key that it is here, or is told not to be needed or not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quartet.config import nearest
from quartet.config.errors import UserError
from quartet.config.load import load_recipe
from quartet.config.plugins import recipes
from quartet.config.strict import _fields, dotted_fields

NOT_NEEDED, NOT_THERE = "leave it out: ", "not there: "
GRPO = {
    "learning_rate": "actor.train.optim.lr",
    "per_device_train_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "actor.train.token_budget",
    "num_train_epochs": "steps",
    "max_steps": "steps",
    "warmup_steps": "actor.train.optim.warmup_steps",
    "weight_decay": "actor.train.optim.weight_decay",
    "lr_scheduler_type": "actor.train.optim.schedule",
    "optim": "actor.train.optim",
    "bf16": "actor.train.precision",
    "gradient_checkpointing": "actor.train.activation_checkpointing",
    "save_steps": "checkpoint.every_steps",
    "eval_strategy": "evaluation.every_steps",
    "report_to": "log.trackers",
    "run_name": NOT_NEEDED + "a run is called as its output_dir",
    "push_to_hub": "use the command quartet push",
    "deepspeed": NOT_NEEDED + "actor.sharding.shard",
    "resume_from_checkpoint": "add --resume",
    "model_name_or_path": "actor.model.path",
    "trust_remote_code": "actor.model.trust_remote_code",
    "use_peft": "actor.train.lora",
    "load_in_4bit": NOT_THERE,
    "dataset_name": "data.path",
    "reward_funcs": "rewards.0.target",
    "num_generations": "responses_per_prompt",
    "max_prompt_length": "data.max_tokens",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "repetition_penalty": NOT_THERE,
    "use_vllm": "write rollout.engine.type: vllm",
    "vllm_gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "beta": "algorithm.kl.coef",
    "delta": "algorithm.policy_loss.dual_clip",
    "scale_rewards": "algorithm.normalise_std",
    "loss_type": "algorithm.name",
    "importance_sampling_level": "algorithm.name: gspo",
    "sync_ref_model": NOT_THERE,
    "log_completions": "log.samples",
    "tools": "environment.target",
}
DPO = {
    "beta": "loss.beta",
    "loss_type": "loss.name",
    "learning_rate": "train.optim.lr",
    "max_length": "data.max_tokens",
    "max_completion_length": "set data.max_tokens",
    "reference_free": "loss.name: simpo or orpo",
    "rpo_alpha": "loss.sft_coef",
    "deepspeed": NOT_NEEDED + "sharding.shard",
}
SFT = {
    "max_length": "data.max_tokens",
    "packing": NOT_NEEDED,
    "dataset_text_field": "data.columns",
    "per_device_train_batch_size": "examples_per_step",
    "num_train_epochs": "epochs",
    "loss_type": NOT_NEEDED,
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL = {
    "data.train_files": "data.path",
    "data.val_files": "evaluation.data.path",
    "data.max_prompt_length": "data.max_tokens",
    "data.train_batch_size": "prompts_per_step",
    "data.return_raw_chat": NOT_NEEDED,
    "data.custom_cls.path": NOT_NEEDED,
    "actor_rollout_ref.model.path": "actor.model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.train.activation_checkpointing",
    f"{ACTOR}strategy": NOT_NEEDED + "actor.sharding.shard",
    f"{ACTOR}optim.lr": "actor.train.optim.lr",
    f"{ACTOR}optim.lr_warmup_steps_ratio": "actor.train.optim.warmup_steps",
    f"{ACTOR}ppo_mini_batch_size": "minibatches",
    f"{ACTOR}ppo_micro_batch_size_per_gpu": "actor.train.token_budget",
    f"{ACTOR}ppo_epochs": "epochs",
    f"{ACTOR}clip_ratio_high": "algorithm.policy_loss.clip_eps_high",
    f"{ACTOR}use_kl_loss": "algorithm.kl.place",
    f"{ACTOR}loss_agg_mode": "algorithm.aggregation",
    f"{ACTOR}fsdp_config.param_offload": "actor.sharding.cpu_offload",
    f"{ACTOR}ulysses_sequence_parallel_size": "actor.sharding.context",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference.sharding.cpu_offload",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "actor.train.forward_token_budget",
    f"{ROLLOUT}name": "rollout.engine.type",
    f"{ROLLOUT}mode": "placement.type: asynchronous",
    f"{ROLLOUT}n": "responses_per_prompt",
    f"{ROLLOUT}tensor_model_parallel_size": "rollout.engine.tensor_parallel_size",
    f"{ROLLOUT}free_cache_engine": "rollout.engine.sleep_level",
    f"{ROLLOUT}engine_kwargs.vllm.swap_space": "rollout.engine.engine_args",
    f"{ROLLOUT}val_kwargs.temperature": "evaluation.sampling.temperature",
    f"{ROLLOUT}val_kwargs.do_sample": "evaluation.sampling.temperature",
    f"{ROLLOUT}multi_turn.max_assistant_turns": "environment.max_turns",
    "critic.optim.lr": "critic.train.optim.lr",
    "reward_model.model.path": "rewards.0.path",
    "reward_model.reward_manager": "rewards.0.type",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "algorithm.overlong",
    "reward_model.sandbox_fusion.url": "rewards.0.type: code",
    "ray_kwargs.ray_init.num_cpus": "cluster.type: ray",
    "custom_reward_function.path": "write rewards.0.type: function and rewards.0.target",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.kl_ctrl.type": "algorithm.kl.target",
    "trainer.total_epochs": "steps",
    "trainer.logger": "log.trackers",
    "trainer.n_gpus_per_node": "placement.actor.processes",
    "trainer.test_freq": "evaluation.every_steps",
}
TABLES = [("rl", GRPO), ("preference", DPO), ("sft", SFT), ("rl", VERL)]


def refused(job: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(job, None, overrides)
    return caught.value


def names(text: str, job: str) -> set[str]:
    """Keys of the job's recipe that are in a text."""
    return set(re.findall(r"[\w.]+\w", text)) & set(_fields(recipes()[job]))


@pytest.mark.parametrize(("job", "table"), TABLES)
def test_each_key_of_another_system_has_beside_it_what_to_do(job: str, table: dict[str, str]) -> None:
    error = refused(job, *(f"{key}=1" for key in table))
    lines = str(error).splitlines()
    assert "…" not in str(error), "nothing is cut off"
    assert len(lines) == len(table) + 3
    for key, expected in table.items():
        section, _, name = key.rpartition(".")
        where = f"unknown key {name!r} {f'in {section}' if section else 'at the top'}: "
        (line,) = [line for line in lines if where in line]
        remedy = line.partition(where)[2]
        assert expected in remedy, (key, remedy)
        if "." in expected and not expected.endswith(" "):
            assert names(remedy, job) & names(expected, job), f"{key}: what is offered is a key of the job"


@pytest.mark.parametrize("key", ["weight_decay", "delta", "deepspeed", "actor_rollout_ref.rollout.name"])
def test_a_key_alone_is_told_the_same(key: str) -> None:
    error = refused("rl", f"{key}=1")
    assert error.found.startswith("unknown key") and (GRPO | VERL)[key] in error.remedy


def test_a_block_is_taken_apart_but_a_misspelt_section_is_one_mistake(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6}}, rollout: {name: vllm, n: 8}}\ntrainer: {logger: [console]}"
    )
    told = refused("rl", f"@{path}").found
    for line in (
        "'lr' in actor_rollout_ref.actor.optim: did you mean actor.train.optim.lr?",
        "'name' in actor_rollout_ref.rollout: did you mean rollout.engine.type?",
        "'n' in actor_rollout_ref.rollout: did you mean responses_per_prompt?",
        "'logger' in trainer: did you mean log.trackers?",
    ):
        assert line in told
    assert told.count("unknown key") == 4
    for section in ("optm: {lr: 1, weight_decay: 0}", "optm: {eps: 1, betas: 2}"):
        (tmp_path / "own.yaml").write_text(f"train: {{{section}}}")
        assert "optim" in str(refused("sft", f"@{tmp_path / 'own.yaml'}"))
    (tmp_path / "own.yaml").write_text("unheard_of: {a: 1, b: 2}")
    assert refused("sft", f"@{tmp_path / 'own.yaml'}").found == "unknown key 'unheard_of' at the top"


def test_every_key_that_is_offered_is_in_a_recipe() -> None:
    known = {name for recipe in recipes().values() for name, _ in dotted_fields(recipe)}
    offered = {*nearest._THEIRS, *(key for text in nearest._ANSWERS for key in re.findall(r"\{([\w.]+)\}", text))}
    assert len(offered) > 100
    assert [key for key in offered if not any(f".{name}".endswith(f".{key}") for name in known)] == []


@pytest.mark.parametrize("recipe", ["story-ppo", "story-grpo", "story-rloo"])
def test_a_recipe_of_the_native_engine_works_with_vllm(recipe: str) -> None:
    path = Path(__file__).parents[3] / "recipes" / f"{recipe}.yaml"
    native = load_recipe("rl", path)
    other = load_recipe("rl", path, ["rollout.engine.type=vllm"])
    assert (other.rollout.engine.type, other.rollout.engine.max_num_seqs) == ("vllm", native.rollout.engine.max_running)


def test_the_native_name_beside_vllms_own_is_refused() -> None:
    error = refused("rl", "rollout.engine={type: vllm, max_num_seqs: 4, max_running: 8}")
    assert "'max_running' in rollout.engine" in error.found and "max_num_seqs" in error.remedy


@pytest.mark.timeout(20)
def test_a_key_without_a_name_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("'': {limit: 8, path: {deeper: 1}}\n")
    with pytest.raises(UserError, match="not valid"):
        load_recipe("sft", path)
