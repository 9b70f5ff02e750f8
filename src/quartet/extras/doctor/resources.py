"""What the run will need: memory of every role, and time."""

from __future__ import annotations

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import Trajectories
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import RLRecipe
from quartet.extras.doctor.checks import Finding, judged
from quartet.extras.doctor.examined_run import ExaminedRun
from quartet.observe.memory import available_bytes
from quartet.trainers.devices import numbers_per_token
from quartet.trainers.workers import Sizes

_GIB = 2**30
_LONG_HOURS = 24 * 7


async def check_memory(run: ExaminedRun) -> Finding:
    """Bytes that each role must have in its largest mode, against its pool's budget and what this machine has."""
    name, placement, device = "memory", run.workers.placement, run.roles.actor.packed.device
    sizes = await run.workers.sizes()
    found, is_tight = "GiB by role: ", False
    for role, of in sizes.items():
        size, pool = max(of.values()), placement.pool(placement.pool_of[role])
        is_tight |= pool.budget_bytes is not None and size > 0.95 * pool.budget_bytes
        share = f" ({size / pool.budget_bytes:.0%} of {pool.name}'s budget)" if pool.budget_bytes else ""
        found += f"{role} {size / _GIB:.3g}{share}, "
    if run.roles.recipe.cluster.type != "local":
        return judged(name, f"{found}in processes elsewhere", warning=is_tight)
    coming = _coming_bytes(run, sizes)
    try:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    except OSError:
        return judged(name, f"{found}what is free only Linux tells", warning=is_tight)
    found += f"beyond what is held now the run takes {coming / _GIB:.3g}, {device} has {free / _GIB:.3g} free"
    return judged(name, found, failure=coming > free, warning=is_tight or coming > 0.8 * free)


def _coming_bytes(run: ExaminedRun, sizes: Sizes) -> float:
    """Gradients, moments, activations and logits of a micro-batch, and the cache of the answers that run at a time."""
    recipe, roles = run.roles.recipe, run.roles
    state = sum(of["train"] - of["forward"] for of in sizes.values() if "train" in of)
    packed, train = roles.actor.packed, recipe.actor.train
    config = packed.model.config.get_text_config()
    width = 2 if packed.precision == "bf16" else 4
    longest = min(roles.context, int(roles.prompts.lengths.max()) + recipe.rollout.sampling.max_new_tokens)
    step_tokens = recipe.prompts_per_step * recipe.responses_per_prompt * longest
    hidden = config.hidden_size
    per_layer = width * (10 * hidden + 4 * (getattr(config, "intermediate_size", None) or 4 * hidden))
    kept = 4 * hidden if train.activation_checkpointing is True else per_layer
    tokens = min(train.token_budget, step_tokens)
    activations = tokens * (kept * config.num_hidden_layers + per_layer)
    logits = 3 * min(train.logprob_chunk, tokens) * packed.vocab_size * 4
    return state + activations + logits + width * numbers_per_token(config) * _cache_tokens(recipe, longest)


def _cache_tokens(recipe: RLRecipe, longest: int) -> int:
    """Of the native engine, with as many of the longest answers as it decodes together; others keep to their own."""
    engine = recipe.rollout.engine
    if not isinstance(engine, NativeEngineConfig):
        return 0
    running = min(engine.max_running, recipe.prompts_per_step * recipe.responses_per_prompt)
    return engine.cache_tokens or running * longest


def check_duration(
    run: ExaminedRun, batch: RaggedBatch, generate_s: float, score_s: float, update_s: float, publish_s: float
) -> Finding:
    """Seconds per step and hours per run, if every answer took as long as those of ``batch`` did, and nothing
    overlapped: larger batches are faster."""
    num = len(Trajectories.of(batch))
    sampled = int(batch.token["action_mask"].sum())
    recipe = run.roles.recipe
    answers = recipe.prompts_per_step * recipe.responses_per_prompt
    share = answers / max(1, num)
    parts = {"generate": generate_s * share, "score": score_s * share, "update": update_s * share * recipe.epochs}
    parts["publish"] = publish_s
    step_s = sum(parts.values())
    hours, shown = step_s * recipe.steps / 3600, ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items())
    found = f"at most {step_s:.3g} s per step ({shown}; {sampled / max(1, num):.0f} tokens per answer), "
    return judged("duration", f"{found}{hours:.2g} h for {recipe.steps} steps", warning=hours > _LONG_HOURS)
