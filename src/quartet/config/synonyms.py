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
    "ngram": "history",
    "suffix": "history",
}
"""By another system's name of a method or reward, ours."""
_THEIRS: dict[str, str] = {
    # Optimisation
    "optim.lr": "learning_rate",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "lr_warmup_steps warmup_ratio",
    "optim.max_grad_norm": "max_norm clip_grad grad_clip gradient_clipping",
    "activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "precision": "bf16 dtype torch_dtype",
    "device": "device_map use_cpu no_cuda",
    "train.compile": "torch_compile",
    "train.lora": "peft_config use_peft",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
    "train.token_budget": "ppo_max_token_len_per_gpu max_token_len_per_gpu gradient_accumulation_steps "
    "micro_train_batch_size ppo_micro_batch_size_per_gpu",
    "forward_token_budget": "log_prob_max_token_len_per_gpu",
    "sharding.shard": "fsdp_size",
    "sharding.context": "ulysses_sequence_parallel_size context_parallel_size cp_size sequence_parallel_size sp_size",
    "sharding.tensor": "tensor_model_parallel_size tensor_parallel_size tp_size",
    # Sizes of a step
    "epochs": "num_train_epochs num_epochs total_epochs ppo_epochs num_ppo_epochs num_iterations",
    "steps": "num_episodes max_steps total_steps num_steps total_training_steps",
    "minibatches": "num_mini_batches ppo_mini_batch_size",
    "responses_per_prompt": "n num_generations group_size n_samples_per_prompt num_return_sequences",
    "samples_per_prompt": "n num_generations n_samples_per_prompt num_return_sequences",
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size",
    "examples_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "pairs_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "answers_per_step": "batch_size train_batch_size per_device_train_batch_size",
    # Sampling
    "sampling.max_new_tokens": "max_completion_length max_tokens response_length max_response_length generate_max_len",
    "sampling.stop_strings": "stop",
    "engine.max_running": "max_num_seqs",
    "engine.tensor_parallel_size": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "engine.engines": "vllm_num_engines",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.speculation": "speculative_config speculative_decoding",
    "speculation.max_draft": "num_speculative_tokens prompt_lookup_max prompt_lookup_num_tokens",
    "speculation.depth": "num_speculative_tokens",
    "speculation.tree": "medusa_choices speculative_token_tree",
    "speculation.min_match": "prompt_lookup_min max_matching_ngram_size",
    # Methods
    "algorithm.name": "adv_estimator advantage_estimator",
    "loss.name": "loss_type",
    "policy_loss.name": "loss_type",
    "kl.coef": "kl_coef init_kl_coef kl_loss_coef beta",
    "kl.target": "kl_target target_kl",
    "policy_loss.clip_eps_low": "cliprange clip_range clip_ratio eps_clip epsilon clip_ratio_low",
    "policy_loss.clip_eps_high": "cliprange clip_range clip_ratio eps_clip epsilon epsilon_high clip_ratio_high",
    "algorithm.value_clip": "cliprange_value value_clip_range",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.whiten_advantages": "whiten_rewards no_advantage_std_norm",
    "policy_loss.tau_pos": "sapo_temperature_pos",
    "policy_loss.tau_neg": "sapo_temperature_neg",
    "off_policy.cap": "rollout_is_threshold vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "off_policy.floor": "rollout_is_threshold_lower vllm_importance_sampling_clip_min",
    "off_policy.level": "rollout_is",
    "off_policy.batch_normalize": "rollout_is_batch_normalize",
    "off_policy.rejection": "rollout_rs",
    "rejection.upper": "rollout_rs_threshold",
    "rejection.lower": "rollout_rs_threshold_lower",
    "reward_clip_range": "score_clip",
    "algorithm.normalise_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.aggregation": "loss_agg_mode",
    "entropy_coef": "entropy_coeff ent_coef",
    "critic.warmup_steps": "critic_warmup",
    "centring": "center_rewards_coefficient",
    # Models, data, runs
    "model.path": "model_name model_name_or_path pretrain sft_model_path",
    "model.revision": "model_revision",
    "model.chat_template": "chat_template_path custom_chat_template",
    "model.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.system_prompt": "system system_message default_system",
    "reference.path": "ref_model ref_model_path",
    "rewards.0.path": "reward_model_path reward_pretrain",
    "rewards.0.target": "reward_funcs",
    "data.path": "dataset_name dataset train_files prompt_data",
    "data.config": "dataset_config",
    "data.split": "dataset_train_split",
    "data.sources": "dataset_mixer",
    "evaluation.data.path": "val_files eval_dataset",
    "evaluation_data.path": "val_files eval_dataset",
    "data.max_tokens": "max_length max_seq_length max_prompt_length",
    "checkpoint.every_steps": "save_steps save_freq",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "log.trackers": "report_to logger",
    "trackers.0.project": "project_name",
    "evaluate_every_steps": "eval_steps test_freq",
    "evaluation.every_steps": "eval_steps test_freq",
}
"""By the end of a key's dotted name, what other systems call it."""


def synonyms(key: str, section: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` (dotted) that mean what another system calls ``key``; the nearest to ``section``."""
    known = list(names)
    if key in PASSES_OVER_DATA and f"{section}.minibatches".strip(".") in known:
        return [f"{section}.steps".strip(".")]
    meant = [ours for ours, theirs in _THEIRS.items() if key in theirs.split()]
    for endings in (meant, [ending.rpartition(".")[2] for ending in meant]):
        found = [name for name in known if any(f".{name}".endswith(f".{ending}") for ending in endings)]
        if found:
            nearest = max(_shared_sections(name, section) for name in found)
            near = [name for name in found if _shared_sections(name, section) == nearest]
            return sorted(near, key=lambda name: name.count("."))
    return []


def _shared_sections(name: str, section: str) -> int:
    pairs = zip(name.split("."), section.split("."), strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), len(section.split(".")))
