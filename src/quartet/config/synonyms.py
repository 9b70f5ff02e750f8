"""What other systems (TRL, verl, OpenRLHF, transformers) call the keys of a recipe, for messages about unknown keys."""

from __future__ import annotations

from collections.abc import Iterable

PASSES_OVER_DATA = ("num_train_epochs", "num_epochs", "total_epochs")
"""RL counts steps instead: its ``epochs`` are passes over one step's responses."""
CHOICES: dict[str, str] = {
    "sigmoid": "dpo",
    "robust": "robust_dpo",
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "raft": "best_of_n",
    "gkd": "distillation",
    "accuracy": "math",
    "reward_model": "model",
}
"""By another system's name of a method or reward, ours."""
SYNONYMS: dict[str, tuple[str, ...]] = {
    # Optimisation
    "learning_rate": ("optim.lr",),
    "adam_beta1": ("optim.betas",),
    "adam_beta2": ("optim.betas",),
    "adam_epsilon": ("optim.eps",),
    "lr_scheduler_type": ("optim.schedule",),
    "lr_warmup_steps": ("optim.warmup_steps",),
    "warmup_ratio": ("optim.warmup_steps",),
    "max_norm": ("optim.max_grad_norm",),
    "clip_grad": ("optim.max_grad_norm",),
    "grad_clip": ("optim.max_grad_norm",),
    "gradient_clipping": ("optim.max_grad_norm",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "enable_gradient_checkpointing": ("activation_checkpointing",),
    "bf16": ("precision",),
    "dtype": ("precision",),
    "torch_dtype": ("precision",),
    "device_map": ("device",),
    "use_cpu": ("device",),
    "no_cuda": ("device",),
    "torch_compile": ("train.compile",),
    "peft_config": ("train.lora",),
    "use_peft": ("train.lora",),
    "r": ("lora.rank",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_target_modules": ("lora.target_modules",),
    "ppo_max_token_len_per_gpu": ("train.token_budget",),
    "max_token_len_per_gpu": ("train.token_budget",),
    "log_prob_max_token_len_per_gpu": ("forward_token_budget",),
    # Sizes of a step
    **dict.fromkeys(PASSES_OVER_DATA, ("epochs",)),
    "num_episodes": ("steps",),
    "ppo_epochs": ("epochs",),
    "num_ppo_epochs": ("epochs",),
    "num_iterations": ("epochs",),
    "max_steps": ("steps",),
    "total_steps": ("steps",),
    "num_steps": ("steps",),
    "total_training_steps": ("steps",),
    "num_mini_batches": ("minibatches",),
    "ppo_mini_batch_size": ("minibatches",),
    "gradient_accumulation_steps": ("train.token_budget",),
    "micro_train_batch_size": ("train.token_budget",),
    "ppo_micro_batch_size_per_gpu": ("train.token_budget",),
    "n": ("responses_per_prompt", "samples_per_prompt"),
    "batch_size": ("prompts_per_step", "examples_per_step", "pairs_per_step", "answers_per_step"),
    "train_batch_size": ("prompts_per_step", "examples_per_step", "pairs_per_step", "answers_per_step"),
    "rollout_batch_size": ("prompts_per_step",),
    "per_device_train_batch_size": ("prompts_per_step", "examples_per_step", "pairs_per_step", "answers_per_step"),
    "num_generations": ("responses_per_prompt", "samples_per_prompt"),
    "group_size": ("responses_per_prompt",),
    "n_samples_per_prompt": ("responses_per_prompt", "samples_per_prompt"),
    "num_return_sequences": ("responses_per_prompt", "samples_per_prompt"),
    # Sampling
    "max_completion_length": ("sampling.max_new_tokens",),
    "max_tokens": ("sampling.max_new_tokens",),
    "response_length": ("sampling.max_new_tokens",),
    "max_response_length": ("sampling.max_new_tokens",),
    "generate_max_len": ("sampling.max_new_tokens",),
    "stop": ("sampling.stop_strings",),
    "max_num_seqs": ("max_running",),
    # Methods
    "adv_estimator": ("algorithm.name",),
    "advantage_estimator": ("algorithm.name",),
    "loss_type": ("loss.name", "policy_loss.name"),
    "kl_coef": ("kl.coef",),
    "init_kl_coef": ("kl.coef",),
    "kl_loss_coef": ("kl.coef",),
    "beta": ("kl.coef",),
    "kl_target": ("kl.target",),
    "target_kl": ("kl.target",),
    "cliprange": ("policy_loss.clip_eps_low", "policy_loss.clip_eps_high"),
    "clip_range": ("policy_loss.clip_eps_low", "policy_loss.clip_eps_high"),
    "clip_ratio": ("policy_loss.clip_eps_low", "policy_loss.clip_eps_high"),
    "eps_clip": ("policy_loss.clip_eps_low", "policy_loss.clip_eps_high"),
    "epsilon": ("policy_loss.clip_eps_low", "policy_loss.clip_eps_high"),
    "epsilon_high": ("policy_loss.clip_eps_high",),
    "clip_ratio_low": ("policy_loss.clip_eps_low",),
    "clip_ratio_high": ("policy_loss.clip_eps_high",),
    "cliprange_value": ("algorithm.value_clip",),
    "value_clip_range": ("algorithm.value_clip",),
    "lam": ("algorithm.gae_lambda",),
    "lambd": ("algorithm.gae_lambda",),
    "whiten_rewards": ("algorithm.whiten_advantages",),
    "scale_rewards": ("algorithm.normalise_std",),
    "norm_adv_by_std_in_grpo": ("algorithm.normalise_std",),
    "loss_agg_mode": ("algorithm.aggregation",),
    "entropy_coeff": ("entropy_coef",),
    "ent_coef": ("entropy_coef",),
    "critic_warmup": ("critic.warmup_steps",),
    "center_rewards_coefficient": ("centring",),
    # Models, data, runs
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "pretrain": ("model.path",),
    "sft_model_path": ("model.path",),
    "ref_model": ("reference.path",),
    "ref_model_path": ("reference.path",),
    "reward_model_path": ("rewards.0.path",),
    "reward_pretrain": ("rewards.0.path",),
    "reward_funcs": ("rewards.0.target",),
    "dataset_name": ("data.path",),
    "dataset": ("data.path",),
    "dataset_config": ("data.config",),
    "dataset_train_split": ("data.split",),
    "dataset_mixer": ("data.sources",),
    "train_files": ("data.path",),
    "prompt_data": ("data.path",),
    "val_files": ("evaluation.data.path", "evaluation_data.path"),
    "eval_dataset": ("evaluation.data.path", "evaluation_data.path"),
    "max_length": ("data.max_tokens",),
    "max_seq_length": ("data.max_tokens",),
    "max_prompt_length": ("data.max_tokens",),
    "save_steps": ("checkpoint.every_steps",),
    "save_freq": ("checkpoint.every_steps",),
    "save_total_limit": ("checkpoint.keep",),
    "max_actor_ckpt_to_keep": ("checkpoint.keep",),
    "eval_steps": ("evaluate_every_steps", "evaluation.every_steps"),
    "test_freq": ("evaluate_every_steps", "evaluation.every_steps"),
}
"""By another system's key, the ends of the dotted names that say the same here."""


def synonyms(key: str, section: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` (dotted) that mean what another system calls ``key``; the nearest to ``section``."""
    known = list(names)
    if key in PASSES_OVER_DATA and f"{section}.minibatches".strip(".") in known:
        return [f"{section}.steps".strip(".")]
    for endings in (SYNONYMS.get(key, ()), [ending.rpartition(".")[2] for ending in SYNONYMS.get(key, ())]):
        found = [name for name in known if any(f".{name}".endswith(f".{ending}") for ending in endings)]
        if found:
            nearest = max(_shared_sections(name, section) for name in found)
            near = [name for name in found if _shared_sections(name, section) == nearest]
            return sorted(near, key=lambda name: name.count("."))
    return []


def _shared_sections(name: str, section: str) -> int:
    pairs = zip(name.split("."), section.split("."), strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), len(section.split(".")))
