"""What a user has probably meant: the nearest known name, or the command that makes what is not there yet.

What other systems (TRL, verl, OpenRLHF, transformers) call the keys of a recipe, for messages about unknown keys.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError
from quartet.config.plugins import jobs
from quartet.config.yamls import override_word

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
    "optim.weight_decay": "weight_decay",
    "optim.schedule": "lr_scheduler_type warmup_style",
    "optim.warmup_steps": "warmup_steps lr_warmup_steps lr_warmup_steps_ratio warmup_ratio",
    "optim.max_grad_norm": "max_norm clip_grad grad_clip gradient_clipping",
    "activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_kwargs",
    "precision": "bf16 dtype torch_dtype",
    "device": "device_map use_cpu no_cuda",
    "train.compile": "torch_compile use_torch_compile",
    "train.lora": "peft_config use_peft",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
    "train.token_budget": "ppo_max_token_len_per_gpu max_token_len_per_gpu gradient_accumulation_steps "
    "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "train.forward_token_budget": "log_prob_max_token_len_per_gpu log_prob_micro_batch_size "
    "log_prob_micro_batch_size_per_gpu",
    "sharding.shard": "fsdp_size",
    "sharding.cpu_offload": "param_offload optimizer_offload offload_policy",
    "sharding.context": "ulysses_sequence_parallel_size context_parallel_size cp_size sequence_parallel_size sp_size",
    "sharding.tensor": "tensor_model_parallel_size tensor_parallel_size tp_size",
    "processes": "n_gpus_per_node nproc_per_node",
    "nodes": "nnodes num_nodes",
    # Sizes of a step
    "epochs": "num_train_epochs num_epochs total_epochs ppo_epochs num_ppo_epochs num_iterations",
    "steps": "num_episodes max_steps total_steps num_steps total_training_steps",
    "minibatches": "num_mini_batches ppo_mini_batch_size steps_per_generation",
    "responses_per_prompt": "n num_generations group_size n_samples_per_prompt num_return_sequences",
    "samples_per_prompt": "n num_generations n_samples_per_prompt num_return_sequences",
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size",
    "examples_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "pairs_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "answers_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "seed": "data_seed data.seed rollout.seed",
    # Sampling
    "sampling.max_new_tokens": "max_completion_length max_tokens response_length max_response_length generate_max_len",
    "sampling.stop_strings": "stop",
    "evaluation.sampling.temperature": "val_kwargs.temperature val_kwargs.do_sample",
    "evaluation.sampling.top_p": "val_kwargs.top_p",
    "evaluation.sampling.top_k": "val_kwargs.top_k",
    "evaluation.samples_per_prompt": "val_kwargs.n num_generations_eval",
    "rollout.engine.type": "rollout.name",
    "engine.max_running": "max_num_seqs",
    "engine.max_num_seqs": "max_num_seqs",
    "engine.max_model_len": "vllm_max_model_length vllm_max_model_len",
    "engine.max_prefill_tokens": "max_num_batched_tokens enable_chunked_prefill",
    "engine.tensor_parallel_size": "rollout.tensor_model_parallel_size vllm_tensor_parallel_size",
    "engine.engines": "vllm_num_engines rollout.data_parallel_size",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "engine.sleep_level": "vllm_enable_sleep_mode free_cache_engine",
    "engine.dtype": "rollout.dtype",
    "engine.engine_args": "engine_kwargs vllm_kwargs",
    "rollout.speculation": "speculative_config speculative_decoding",
    "speculation.max_draft": "num_speculative_tokens prompt_lookup_max prompt_lookup_num_tokens",
    "speculation.depth": "num_speculative_tokens",
    "speculation.tree": "medusa_choices speculative_token_tree",
    "speculation.min_match": "prompt_lookup_min max_matching_ngram_size",
    "environment.target": "tools environment_factory rollout_func multi_turn.enable tool_config_path "
    "interaction_config_path",
    "environment.max_turns": "max_assistant_turns max_user_turns max_tool_calling_iterations",
    "environment.max_environments": "agent.num_workers",
    # Methods
    "algorithm.name": "adv_estimator advantage_estimator loss_type",
    "loss.name": "loss_type",
    "policy_loss.name": "loss_type loss_mode",
    "loss.sft_coef": "rpo_alpha cpo_alpha",
    "loss.gamma": "simpo_gamma",
    "kl.coef": "kl_coef init_kl_coef kl_loss_coef beta",
    "kl.target": "kl_target target_kl kl_ctrl.type",
    "kl.place": "use_kl_in_reward use_kl_loss",
    "kl.estimator": "kl_penalty kl_loss_type",
    "policy_loss.clip_eps_low": "cliprange clip_range clip_ratio eps_clip epsilon clip_ratio_low",
    "policy_loss.clip_eps_high": "cliprange clip_range clip_ratio eps_clip epsilon epsilon_high clip_ratio_high",
    "policy_loss.dual_clip": "delta clip_ratio_c",
    "algorithm.value_clip": "cliprange_value value_clip_range",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.whiten_advantages": "whiten_rewards no_advantage_std_norm",
    "policy_loss.tau_pos": "sapo_temperature_pos",
    "policy_loss.tau_neg": "sapo_temperature_neg",
    "algorithm.off_policy": "vllm_importance_sampling_correction",
    "off_policy.mode": "vllm_importance_sampling_mode",
    "off_policy.cap": "rollout_is_threshold vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "off_policy.floor": "rollout_is_threshold_lower vllm_importance_sampling_clip_min",
    "off_policy.level": "rollout_is vllm_importance_sampling_mode",
    "off_policy.batch_normalize": "rollout_is_batch_normalize",
    "off_policy.rejection": "rollout_rs off_policy_mask_threshold",
    "rejection.upper": "rollout_rs_threshold",
    "rejection.lower": "rollout_rs_threshold_lower",
    "algorithm.dynamic_sampling": "filter_groups",
    "dynamic_sampling.max_prompts_factor": "max_num_gen_batches gen_batch_size",
    "reward_clip_range": "score_clip",
    "algorithm.overlong": "overlong_buffer overlong_buffer.enable overlong_buffer_cfg overlong_buffer_cfg.enable",
    "overlong.buffer": "overlong_buffer.len overlong_buffer_cfg.len",
    "overlong.penalty": "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor",
    "algorithm.normalise_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.aggregation": "loss_agg_mode",
    "entropy_coef": "entropy_coeff ent_coef",
    "critic.warmup_steps": "critic_warmup",
    "centring": "center_rewards_coefficient",
    # Models, data, runs
    "model.path": "model_name model_name_or_path pretrain sft_model_path",
    "model.revision": "model_revision",
    "model.trust_remote_code": "trust_remote_code",
    "model.tokenizer": "data.tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path processing_class",
    "model.chat_template": "chat_template_path custom_chat_template",
    "model.chat_template_kwargs": "chat_template_kwargs apply_chat_template_kwargs",
    "data.system_prompt": "system system_message default_system",
    "reference.path": "ref_model ref_model_path",
    "rewards.0.path": "reward_model_path reward_pretrain reward_model_name_or_path reward_model.model.path",
    "rewards.0.type": "reward_model.enable reward_manager",
    "rewards.0.tokenizer": "input_tokenizer",
    "rewards.0.weight": "reward_weights",
    "rewards.0.forward_token_budget": "reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size "
    "reward_model.forward_max_token_len_per_gpu",
    "rewards.0.target": "reward_funcs",
    "data.path": "dataset_name dataset train_dataset train_files prompt_data",
    "data.config": "dataset_config",
    "data.split": "dataset_train_split",
    "data.sources": "dataset_mixer",
    "data.columns": "prompt_key input_key label_key reward_fn_key dataset_text_field",
    "data.overlong": "filter_overlong_prompts truncation truncation_mode",
    "evaluation.data.path": "val_files eval_dataset",
    "evaluation_data.path": "val_files eval_dataset",
    "evaluation.data.split": "dataset_test_split",
    "evaluation_data.split": "dataset_test_split",
    "data.max_tokens": "max_length max_seq_length max_prompt_length prompt_length",
    "checkpoint.every_steps": "save_steps save_freq save_strategy",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep max_critic_ckpt_to_keep",
    "output_dir": "default_local_dir default_hdfs_dir logging_dir",
    "log.trackers": "report_to logger",
    "log.samples": "log_completions num_completions_to_print log_val_generations",
    "log.rollouts_every": "rollout_data_dir validation_data_dir",
    "log.level": "log_level",
    "trackers.0.project": "project_name",
    "trackers.0.space_id": "trackio_space_id",
    "evaluate_every_steps": "eval_steps test_freq eval_strategy",
    "evaluation.every_steps": "eval_steps test_freq eval_strategy",
    "cluster.start_timeout_s": "ray_wait_register_center_timeout",
}
"""By the end of a key's dotted name, what other systems call it."""


_ANSWERS: dict[str, str] = {
    "leave it out: {sharding.shard} cuts a model over its processes (FSDP2)": "deepspeed fsdp fsdp_config zero_stage "
    "ds3_gather_for_generation actor.strategy critic.strategy ref.strategy reward_model.strategy",
    "leave it out: sequences are packed without padding, up to {train.token_budget} tokens": "packing packing_strategy "
    "padding_free use_remove_padding use_dynamic_bsz log_prob_use_dynamic_bsz group_by_length pad_to_multiple_of",
    "leave it out: a run is called as its {output_dir}": "run_name experiment_name",
    "leave it out: a row's columns and roles say what carries loss (docs/data.md)": "assistant_only_loss "
    "completion_only_loss remove_unused_columns return_raw_chat dataset_kwargs",
    "leave it out: name your code as a target, as in {rewards.0.target}, or use the Python API": "external_lib "
    "custom_cls custom_cls.path custom_cls.name",
    "leave it out: that is done by itself, or decided by other keys (docs/comparison.md)": ""
    "per_device_eval_batch_size val_batch_size eval_packing eval_accumulation_steps balance_batch disable_dropout "
    "lora_dropout shuffle_dataset shuffle dataloader_num_workers dataset_num_proc dataloader_pin_memory eos_token "
    "pad_token logging_steps logging_strategy logging_first_step save_only_model save_contents load_contents "
    "save_safetensors overwrite_output_dir attn_implementation use_flash_attention_2 model_init_kwargs "
    "ref_model_init_kwargs override_config use_liger_kernel use_liger use_liger_loss use_fused_kernels "
    "cast_lm_head_to_fp32 hybrid_engine colocate_all_models enable_prefix_caching cache_implementation "
    "use_transformers_paged calculate_log_probs load_format launch_reward_fn_async val_before_train ddp_timeout "
    "ddp_backend ddp_find_unused_parameters local_rank model_adapter_name ref_adapter_name wandb_log_unique_prompts "
    "log_unique_prompts loss_type critic.enable tf32",
    "the optimizer is AdamW: set its keys in {train.optim}": "optim optimizer optim_args",
    "set {optim.schedule} and {optim.min_lr_ratio}": "lr_scheduler_kwargs",
    "write {train.precision}: bf16; fp16 is not there": "fp16 half",
    "write {rollout.engine.type}: vllm, which starts its engines by itself where {placement.type} has rollout": ""
    "use_vllm vllm_model_impl vllm_mode vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout "
    "vllm_group_port",
    "write {placement.type}: asynchronous for sampling that runs ahead": "rollout.mode",
    "write {sampling.temperature}: 0 for greedy answers": "do_sample",
    "set {prompts_per_step} and {responses_per_prompt}, whose product it is": "generation_batch_size",
    "write {rewards.0.type}: function and {rewards.0.target}: path/to/file.py:name": "custom_reward_function "
    "custom_reward_function.path custom_reward_function.name",
    "write {rewards.0.type}: code, which has a sandbox of its own": "sandbox_fusion.url sandbox_fusion",
    "write {cluster.type}: ray, and {cluster.address} where it is running already": "ray_init ray_kwargs",
    "write {algorithm.name}: gspo for ratios of whole responses": "importance_sampling_level",
    "write {loss.name}: simpo or orpo": "reference_free",
    "set {data.max_tokens}, for prompt and answer together": "max_completion_length",
    "add --resume to the command": "resume_from_checkpoint resume_mode resume_from_path",
    "use the commands quartet eval and quartet generate": "val_only generate_during_eval",
    "use the command quartet push when the run is done": "push_to_hub hub_model_id hub_token hub_private_repo "
    "hub_strategy",
    "not there: {export_every} writes models while the run goes on": "load_best_model_at_end",
    "not there: {train.lora} and {activation_checkpointing} need less memory": "load_in_4bit load_in_8bit "
    "activation_offloading enable_activation_offload",
    "not there: see docs/comparison.md": "repetition_penalty presence_penalty frequency_penalty generation_kwargs "
    "ignore_eos mask_truncated_completions sync_ref_model ref_model_sync_steps ref_model_mixup_alpha "
    "use_bias_correction_kl neftune_noise_alpha loss_weights use_weighting ld_alpha f_divergence_type "
    "pipeline_model_parallel_size pipeline_parallel_size expert_parallel_size expert_model_parallel_size image_key "
    "video_key",
}
"""What to do about keys that have no counterpart, by their names; keys of ours are in braces."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("conversations", "conversation"),
    "prompt": ("question", "problem", "instruction", "query", "input", "text"),
    "completion": ("response", "answer", "output", "solution", "code"),
    "answer": ("solution", "final_answer", "ground_truth", "target"),
    "tests": ("test_list", "test_cases", "test"),
}
"""By our name of a column, what data sets call it."""
_MORE_PROMPT = ("input", "context")
"""The rest of a prompt, in a column of its own: of Alpaca and Dolly."""
JOINT = " + "
"""Between the columns whose texts make one."""
_THEIR_SECTIONS = {"actor_rollout_ref": "", "trainer": "", "ref": "reference", "reward_model": "rewards.0"}
"""Sections of verl, and what they are here."""


def usual_columns(needs: Iterable[str], row: Mapping[str, Any]) -> dict[str, str]:
    """Returns our columns that a row lacks → those that it has under a usual name; none twice."""
    needs = list(needs)
    if "messages" in row:
        return {}
    if "prompt" in needs and "prompt" not in row:
        for column in COLUMNS["messages"]:
            if isinstance(row.get(column), (list, str)):
                rest = usual_columns((name for name in needs if name not in ("prompt", "completion")), row)
                return {"messages": column, **rest}
    found: dict[str, str] = {}
    for name in (name for name in needs if name not in row):
        usual = [column for column in COLUMNS.get(name, ()) if column in row and column not in found.values()]
        if usual:
            found[name] = usual[0]
    prompt = found.get("prompt")
    if prompt == "text" and "completion" in needs and "completion" not in found:
        return {}  # Its text is learned as a whole.
    more = [name for name in _MORE_PROMPT if isinstance(row.get(name, 0), str | None) and name not in found.values()]
    if prompt is not None and more:
        found["prompt"] = JOINT.join([prompt, *more])
    return found


def synonyms(path: str, names: Iterable[str]) -> list[str]:
    """Returns those of ``names`` (dotted) that mean what another system calls the key at ``path``; the likeliest."""
    known = list(names)
    section = _section(path)
    if path.rpartition(".")[2] in PASSES_OVER_DATA and f"{section}.minibatches".strip(".") in known:
        return [f"{section}.steps".strip(".")]
    for ending in _endings(path):
        meant = [ours for ours, theirs in _THEIRS.items() if ending in theirs.split()]
        for ours in (meant, [name.rpartition(".")[2] for name in meant]):
            if found := [name for name in known if any(f".{name}".endswith(f".{end}") for end in ours)]:
                return likeliest(found, path)
        if ending in _ANSWERED:
            return []
    return []


def answer(path: str, names: Iterable[str]) -> str | None:
    """Says what to do about another system's key without a counterpart among ``names``; None where nothing is known."""
    known = list(names)
    text = next((_ANSWERED[ending] for ending in _endings(path) if ending in _ANSWERED), None)

    def in_full(key: re.Match[str]) -> str:
        found = [name for name in known if f".{name}".endswith(f".{key[1]}")]
        return likeliest(found, path)[0] if found else key[1]

    return None if text is None else re.sub(r"\{([\w.]+)\}", in_full, text)


_ANSWERED = {name: text for text, names in _ANSWERS.items() for name in names.split()}


def likeliest(names: Iterable[str], path: str) -> list[str]:
    """Returns those of ``names`` that share most sections with ``path``, then words, and are in fewest others; keys of
    rewards last, of which any may be meant.
    """
    section, words = _section(path).split("."), set(re.split(r"[._]", path) if "." in path else ())

    def fit(name: str) -> tuple[int, ...]:
        own = set(re.split(r"[._]", name))
        shared = next(
            (n for n, (a, b) in enumerate(zip(name.split("."), section, strict=False)) if a != b), len(section)
        )
        return shared, len(words & own), -name.count("."), -len(own - words)

    fits = {name: fit(name) for name in names}
    best = max(fits.values(), default=())
    return sorted((name for name in fits if fits[name] == best), key=lambda name: "rewards" in name)


def _endings(path: str) -> list[str]:
    """Returns ``a.b.c``, ``b.c``, ``c``."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _section(path: str) -> str:
    """Returns where the key at ``path`` would be in a recipe."""
    sections = [_THEIR_SECTIONS.get(section, section) for section in path.split(".")[:-1]]
    return ".".join(filter(None, sections))


_PARTS = ("model", "critic", "adapter", "answers.jsonl", "against.jsonl", "comparison.jsonl")
"""What a run leaves in its directory for later ones."""
DIRECTORY_OPTION = "directory_option"
"""In a ``run.json``: the option of the run's command that names its directory; without it the key of a recipe does."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns ``did you mean …?`` with the nearest of ``known``, or None where nothing is near."""
    names, name = list(known), name.lower()
    meant = CHOICES.get(name)
    close = [meant] if meant in names else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None


def missing_file(problem: str, path: str | Path, otherwise: str | None = None) -> UserError:
    """Makes the error for a file that is not there: which command makes it, the nearest names in its folder, or the
    folder that is missing. ``otherwise`` is the remedy where no name is near; without it, where paths start.
    """
    path = Path(path)
    otherwise = otherwise or f"paths start at {Path.cwd()}"
    if path.is_dir():
        return UserError(problem, found=f"{path} is a folder", remedy="name a file in it")
    if (stage := made_by(path)) is not None:
        return UserError(problem, found=str(path), remedy=f"{stage}, or correct the path")
    folder = path.parent
    if not folder.is_dir():
        return UserError(problem, found=f"{path} (the folder {folder} does not exist)", remedy=otherwise)
    names = sorted(entry.name for entry in folder.iterdir())
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    remedy = f"did you mean {', '.join(close)}?" if close else otherwise
    return UserError(problem, found=str(path), remedy=remedy)


# Earlier stages ------------------------------------------------------------------------------------------


def made_by(path: Path) -> str | None:
    """Says what to run so that ``path``, a run's directory or a part of it, comes to be; None where nothing is known.

    A run that is there and has not ended is gone on with. Else the directory's name says the job.
    """
    for folder in path.parents:
        if (command := _unfinished(folder)) is not None:
            return f"let its run end first: {command}"
    run = path.parent if path.name in (*_PARTS, *(job.folder for job in jobs().values())) else path
    words = set(re.split(r"[^a-z]+", run.name.lower()))
    guess = next((name for name, job in reversed(jobs().items()) if words & set(job.words)), None)
    # Without a part of a run at its end, a path with such a name may be anything.
    if guess is None or (run == path and ("runs" not in path.parts or path.suffix)):
        return None
    return f"make it first with quartet {guess} (output_dir: {run}; quartet init {guess} writes a recipe)"


def run_info(run: Path) -> dict[str, Any]:
    """Reads what ``run.json`` of a run's directory says; nothing where there is none, or a damaged one."""
    try:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _unfinished(run: Path) -> str | None:
    """Says how to go on with the run in that directory; None where there is none, or none that is not done."""
    info = run_info(run)
    if not info or info.get("status") == "done":
        return None
    job = info.get("job")
    if (option := info.get(DIRECTORY_OPTION)) is not None:
        return f"quartet {job} {option} {shlex.quote(str(run))} --resume"
    words = f"{shlex.quote(str(run / 'recipe.yaml'))} {override_word('output_dir', str(run))}"
    return f"quartet {job} {words} --resume" if job in jobs() else None
