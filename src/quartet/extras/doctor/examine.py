"""Builds a run as it would begin, in a directory that is thrown away, and lets the checks at it.

The checks here need the run: what engines sample, what is learned of it, new weights and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config.engines import NativeEngineConfig
from quartet.config.placement import HEADS
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.extras.doctor import rewards
from quartet.extras.doctor.checks import Finding, Findings, judged, quick_findings
from quartet.observe.memory import available_bytes
from quartet.schedule.groups import GREEDY, Chunk, make_chunk
from quartet.schedule.iteration import ModelScorer, Scorer, SubsetScorer, UpdatePlan, score_chunk
from quartet.schedule.model_worker import ModelWorker, TrainWorker, UpdateSpec
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker
from quartet.train.forward import ForwardNeeds
from quartet.trainers.experience import Experience, sampled_only
from quartet.trainers.loop import RLLoop
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import RLRoles, policy_limits
from quartet.trainers.run import RunDirectory
from quartet.trainers.run_files import output_path
from quartet.trainers.signals import run_async
from quartet.trainers.workers import RunWorkers, Sizes


@dataclass(frozen=True)
class ExaminedRun:
    """
    Args:
        max_new_tokens: most that a check samples per answer.
    """

    roles: RLRoles
    workers: RunWorkers
    loop: RLLoop
    max_new_tokens: int

    @property
    def tolerance(self) -> float:
        """Nats by which engine and trainer may differ about a token."""
        return self.loop.rollout.canary.tolerance

    async def canaries(self) -> list[RaggedBatch]:
        """Returns each engine's answer to the canary prompt."""
        rollout, found = self.loop.rollout, list[RaggedBatch]()
        async with rollout.leases.turn("rollout", "generate", "canary", step=0, reads=rollout.reads()):
            for engine in self.workers.engines:
                await engine.call(RolloutWorker.run_canary, rollout.canary, "canary")
                answers = await engine.call(RolloutWorker.canary)
                found += [answers.select([s]) for s in range(len(answers))]  # of each engine that a worker has
        return found

    def needs(self) -> ForwardNeeds:
        """Asks for log-probabilities of what was sampled, at the recipe's temperature."""
        recipe = self.roles.recipe
        temperature = recipe.rollout.sampling.temperature
        return ForwardNeeds(logprobs=True, mask="action_mask", temperature=temperature, limits=policy_limits(recipe))

    async def logprobs(self, batch: RaggedBatch, needs: ForwardNeeds) -> Tensor:
        """Returns the actor's log-probabilities ``[T]``."""
        async with self.loop.leases.turn("actor", "forward", "doctor", step=0, reads={"actor": None}):
            found = await self.roles.groups["actor"].call(ModelWorker.forward, batch.without_objects(), needs)
        return found.token["logprobs"]

    def largest(self, difference: Tensor) -> float:
        """Returns the largest difference; with bf16, whose tails are long, what 99 of 100 stay below."""
        if not difference.numel():
            return 0.0
        if self.roles.actor.packed.precision == "fp32":
            return float(difference.max())
        return float(torch.quantile(difference.float(), 0.99))


OLD, _LOGPROBS = "old_logprobs", "rollout_logprobs"


@dataclass(frozen=True)
class Learned:
    """
    Args:
        experience: the sampled answers with all columns.
        metrics: of the rehearsed update.
    """

    experience: Experience
    metrics: dict[str, float]


async def rehearse(run: ExaminedRun, chunk: Chunk, rewards: Sequence[ColumnSet]) -> Learned:
    """Rehearses scores, advantages, and an update that changes nothing, against the log-probabilities of a pass without
    gradient.

    Raises:
        UserError: a model's values are not finite, or memory is too small.
    """
    roles, loop = run.roles, run.loop
    scorers = list(roles.column_scorers(loop.leases))
    if all(scorer.column != OLD for scorer in scorers):
        scorers.append(ModelScorer(loop.leases, "actor", roles.groups["actor"], run.needs(), OLD, trains=True))
    parts: list[Scorer] = list(scorers)
    if GREEDY in chunk.data.sequence:
        parts = [SubsetScorer(scorer, sampled_only) for scorer in scorers]
    columns = await score_chunk(parts, chunk)
    experience: Experience = await loop.stages.assemble([(chunk, [*rewards, *columns])])
    return Learned(experience, await _update(run, loop.learned(experience)))


async def _update(run: ExaminedRun, batch: RaggedBatch) -> dict[str, float]:
    """Returns what the rehearsed update measured; nothing where no token is learned from."""
    roles, loop = run.roles, run.loop
    picked = UpdatePlan(1, 1, roles.recipe.seed).selections(batch, 0)
    if not picked:
        return {}
    actor = roles.train_group("actor")
    update = UpdateSpec(picked[0], loop.policy_objective(False), 0, rehearsal=True)
    if roles.ptx is not None:
        await actor.call(TrainWorker.expect_update, 0)
    # Weights are read, and stay: nobody waits for a new version.
    async with loop.leases.turn("actor", "train", "rehearsal", step=0, reads={"actor": None}):
        (found,) = await actor.call(TrainWorker.update, batch.without_objects(), [update])
    return found


def check_signal(learned: Learned) -> Finding:
    """Checks that advantages are numbers, and not all 0 where scores of a group differ."""
    batch = learned.experience.batch
    groups, scores = batch.sequence["group"].tolist(), batch.sequence["score"].nan_to_num().tolist()
    differ = len({*zip(groups, scores, strict=True)}) > len(set(groups))
    advantages = batch.token["advantages"][batch.token["loss_mask"]]
    broken, alive = int((~torch.isfinite(advantages)).sum()), int((advantages != 0).sum())
    found = f"{alive} of {len(advantages)} trained tokens have an advantage, {broken} one that is not finite"
    return judged("learning_signal", found, failure=broken > 0, warning=alive == 0 and differ)


def check_first_ratio(run: ExaminedRun, learned: Learned) -> Finding:
    """Checks that the first mini-batch's policy is the one that the step began with."""
    name, metrics = "first_ratio", learned.metrics
    if "policy/ratio_max" not in metrics:
        return judged(name, "the method has no ratio" if metrics else "no token was trained on")
    mean, most, kl = (metrics[f"policy/{key}"] for key in ("ratio_mean", "ratio_max", "approx_kl"))
    in_fp32 = run.roles.actor.packed.precision == "fp32"
    apart = max(abs(mean - 1), abs(kl), abs(most - 1) if in_fp32 else 0.0)
    found = f"ratio {mean:.6f} (largest {most:.6f}), approximate KL {kl:.2g}, with gradients against without"
    return judged(name, found, failure=not apart <= run.tolerance)


def check_gradient(learned: Learned) -> Finding:
    """Checks that the first update's gradient is finite, and there where there is something to learn."""
    name, norm = "gradient", learned.metrics.get("grad_norm")
    if norm is None:
        return judged(name, "no token was trained on")
    has_signal = bool((learned.experience.batch.token["advantages"] != 0).any())
    found = f"the first update's gradient has the norm {norm:.3g}"
    return judged(name, found, failure=not math.isfinite(norm), warning=norm == 0 and has_signal)


def check_reference(run: ExaminedRun, learned: Learned) -> Finding:
    """Checks that the reference is the actor as it starts, or is meant to be another model."""
    name, batch = "reference_kl", learned.experience.batch
    if "ref_logprobs" not in batch.token:
        return judged(name, "nothing reads a reference")
    gap = (batch.token[OLD] - batch.token["ref_logprobs"])[batch.token["action_mask"]]
    largest, kl = run.largest(gap.abs()), float(gap.mean()) if len(gap) else 0.0
    found = f"KL to the reference is {kl:.2g} nats per token at the start (at most {largest:.2g})"
    # The reference's log-probabilities are those of all tokens, whatever sampling leaves out.
    if run.roles.recipe.reference.path is not None or run.needs().limits is not None:
        return judged(name, f"{found}; the two are meant to differ", failure=not math.isfinite(kl), warning=kl > 5)
    return judged(name, found, failure=not largest <= run.tolerance)


_GIB = 2**30


async def check_memory(run: ExaminedRun) -> Finding:
    """Compares the bytes that each role must have in its largest mode with its pool's budget and what this
    machine has.
    """
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
    """Estimates bytes of gradients, moments, activations and logits of a micro-batch, and the cache of the answers that
    run at a time.
    """
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
    return state + activations + logits + width * _numbers_per_token(config) * _cache_tokens(recipe, longest)


def _numbers_per_token(config: Any) -> int:
    """Counts the keys and values that a token has in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size)


def _cache_tokens(recipe: RLRecipe, longest: int) -> int:
    """Counts cache tokens of the native engine, for as many of the longest answers as it decodes together; others keep
    to their own.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, NativeEngineConfig):
        return 0
    running = min(engine.max_running, recipe.prompts_per_step * recipe.responses_per_prompt)
    return engine.cache_tokens or running * longest


def check_ends(run: ExaminedRun, batch: RaggedBatch) -> list[Finding]:
    """Checks that nothing follows an end-of-text token, and most answers end by themselves."""
    recipe, num = run.roles.recipe, len(batch)
    one_turn = recipe.environment is None
    inside = 0
    if batch.has_ids and one_turn:
        answers = (batch.input_ids[slice(*batch.leaf_span(s))].tolist() for s in range(num))
        inside = sum(not run.roles.codec.eos_ids.isdisjoint(ids[:-1]) for ids in answers)
    share, limit = 1 - float(batch.sequence["ended"].float().mean()), recipe.rollout.sampling.max_new_tokens
    is_limited = run.max_new_tokens < limit and one_turn
    cut = f"{share:.0%} of {num} answers are cut off at {min(limit, run.max_new_tokens)} tokens"
    cut += f", where this check stops; the recipe allows {limit}" if is_limited else ""
    return [
        judged("end_of_text", f"{inside} of {num} answers go on behind an end-of-text token", failure=inside > 0),
        judged("truncation", cut, warning=share > 0.9 and not is_limited),
    ]


def check_diversity(batch: RaggedBatch) -> Finding:
    """Checks that answers to one prompt differ."""
    texts = dict[int, list[str]]()
    picked = batch.select(sampled_only(batch)[0]) if GREEDY in batch.sequence else batch
    for group, text in zip(picked.sequence["group"].tolist(), picked.objects["completion"], strict=True):
        texts.setdefault(group, []).append(text)
    several = [found for found in texts.values() if len(found) > 1]
    same = sum(len(set(found)) == 1 for found in several)
    found = f"all answers are alike in {same} of {len(several)} groups"
    return judged("diversity", found, warning=0 < len(several) == same)


# Log-probabilities ---------------------------------------------------------------------------------------


async def check_agreement(run: ExaminedRun, batch: RaggedBatch) -> Finding:
    """Checks that sampler and trainer give every sampled token the same log-probability, both at the recipe's
    temperature.
    """
    mask = batch.token["action_mask"]
    gap = (batch.token[_LOGPROBS] - await run.logprobs(batch, run.needs()))[mask].abs()
    largest, mean = run.largest(gap), float(gap.mean())
    # A mean has no tails: with bf16, where single tokens may differ much, it tells more.
    wrong = not (largest <= run.tolerance and mean <= run.tolerance / 4)
    found = f"sampler and trainer differ by {largest:.2g} nats (mean {mean:.2g}, {len(gap)} tokens, "
    return judged("sampler_agreement", f"{found}allowed {run.tolerance:.2g})", failure=wrong)


async def check_weights(run: ExaminedRun) -> Finding:
    """Changes every weight of the actor, gives the engines the new ones, and changes all back.

    Raises:
        UserError: engines and trainer differ by more than the run allows.
    """
    rollout, before = run.loop.rollout, await run.canaries()
    await _flip(run)
    try:
        difference = (await rollout.publish(_version(run)))["agreement/canary_diff"]
        after = await run.canaries()
    finally:
        await _flip(run)
    pairs = zip(before, after, strict=False)  # an engine that failed meanwhile is started anew, and answers later
    still = sum(torch.equal(old.token[_LOGPROBS], new.token[_LOGPROBS]) for old, new in pairs)
    found = f"{still} of {len(before)} engines compute as before a change of all weights, "
    return judged("weight_update", f"{found}{difference:.2g} nats from the trainer", failure=still > 0)


async def _flip(run: ExaminedRun) -> None:
    """Makes the actor's next version, with heads that learn along as they are."""
    leases, step = run.loop.leases, _version(run)
    async with leases.turn("actor", "train", "flip_bits", step=step, writes="actor"):
        await run.roles.train_group("actor").call(TrainWorker.flip_bits)
    if HEADS in run.loop.rollout.sends:
        async with leases.turn("actor", "forward", "flip_bits", step=step, reads={"actor": None}, writes=HEADS):
            pass


def _version(run: ExaminedRun) -> int:
    """Returns the version of the actor's weights."""
    return run.loop.leases.arbiter.version("actor")


MAX_NEW_TOKENS = 128
_ANSWERS, _PROMPTS = 16, 8
"""Answers that are sampled, of at most so many prompts and at least two."""


def examine(
    recipe: RLRecipe,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    tell: Callable[[Finding], object] = lambda finding: None,
    **objects: Any,
) -> list[Finding]:
    """Returns everything that is found, in the order of the checks. Nothing is written into the run's directory, and
    models that were passed are afterwards what they were before.

    Args:
        recipe: of ``quartet rl``.
        max_new_tokens: longest answer that is sampled here, where the recipe allows longer ones.
        tell: shows each finding as it comes.
        objects: in the place of what the recipe names, as ``RLTrainer`` takes them.
    """
    findings = Findings(tell)
    path = output_path(recipe.output_dir, "rl", False)
    with findings.errors_of("output_dir", "warning"):
        RunDirectory(path, recipe)
        findings.add(judged("output_dir", f"{recipe.output_dir or path} is free"))
    with tempfile.TemporaryDirectory(prefix="quartet-doctor-") as scratch, findings.errors_of("start"):
        trainer = RLTrainer(_scratch_recipe(recipe, Path(scratch)), **objects)
        examination = _Examination(trainer, findings, max_new_tokens)
        with contextlib.closing(trainer.roles), contextlib.closing(trainer.workers):
            findings.add(*quick_findings(trainer.roles, path))
            run_async(trainer.start_workers())
            with trainer.run:
                run_async(examination.run())
    return findings.all


def _scratch_recipe(recipe: RLRecipe, directory: Path) -> RLRecipe:
    """Returns the recipe with another directory, and without anybody who is told."""
    changes: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "log": recipe.log.model_copy(update={"trackers": ()}),
        "callbacks": (),
    }
    return recipe.model_copy(update=changes)


class _Examination:
    """The checks that compute, on a run that has begun its first step."""

    def __init__(self, trainer: RLTrainer, findings: Findings, max_new_tokens: int) -> None:
        self._trainer = trainer
        self._findings = findings
        self._max_new_tokens = max_new_tokens

    async def run(self) -> None:
        trainer = self._trainer
        trainer.run.start(0)
        loop = RLLoop(trainer.roles, trainer.workers, trainer.run, trainer.kl, lambda finished: None, 0)
        await loop.begin()
        started = ", ".join(trainer.workers.models)
        self._findings.add(judged("start", f"{started} and {len(trainer.workers.engines)} engines"))
        async with contextlib.aclosing(loop):
            await self._check(ExaminedRun(trainer.roles, trainer.workers, loop, self._max_new_tokens))

    async def _check(self, run: ExaminedRun) -> None:
        findings = self._findings
        findings.add(await check_memory(run))
        with findings.errors_of("sampling"):
            await self._check_sample(run, await self._sample(run))
        with findings.errors_of("weight_update"):
            findings.add(await check_weights(run))

    async def _check_sample(self, run: ExaminedRun, chunk: Chunk) -> None:
        """Checks that read sampled answers, with the weights that sampled them."""
        findings, batch = self._findings, chunk.data
        findings.add(check_diversity(batch), await check_agreement(run, batch), *check_ends(run, batch))
        learned: Learned | None = None
        with findings.errors_of("reward_values"):
            known, scored = await rewards.score_known_answers(run), await rewards.score(run, chunk)
            findings.add(rewards.check_known_answers(run, known), *rewards.check_values(scored, known))
            findings.add(rewards.check_time(run, scored))
            with findings.errors_of("first_ratio"):
                learned = await rehearse(run, chunk, scored.columns)
        if learned is not None:
            findings.add(check_signal(learned), check_first_ratio(run, learned), check_gradient(learned))
            findings.add(check_reference(run, learned))

    async def _sample(self, run: ExaminedRun) -> Chunk:
        """Samples groups of the first prompts, by the run's own way of asking for them."""
        roles, rollout = run.roles, run.loop.rollout
        asked = rollout.requests

        def limited(index: int) -> tuple[PromptItem, PromptRequest]:
            item, request = asked(index)
            lengths = {name: min(length, self._max_new_tokens) for name, length in request.lengths.items()}
            samples = {name: replace(one, max_new_tokens=lengths[name]) for name, one in request.samples.items()}
            return item, replace(request, samples=samples)

        rollout.requests = limited
        source = roles.source(rollout, lambda finished: None)
        responses = roles.recipe.responses_per_prompt
        num = min(roles.recipe.prompts_per_step, _PROMPTS, max(2, -(-_ANSWERS // responses)))
        return make_chunk(0, 0, list(await asyncio.gather(*map(source, range(num)))))
