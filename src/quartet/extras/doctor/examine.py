"""Builds a run as it would begin, in a directory that is thrown away, and lets the checks at it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet.config.placement import AsynchronousPlacement
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.extras.doctor import learning, resources, rewards, sampling
from quartet.extras.doctor.checks import Finding, Findings, judged, quick_findings
from quartet.extras.doctor.examined_run import ExaminedRun
from quartet.extras.doctor.weights import check_weights
from quartet.schedule.groups import Chunk, chunk_of
from quartet.schedule.rollout_worker import PromptRequest
from quartet.trainers.attempt import RunAttempt
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import RunDirectory, Stopwatch
from quartet.trainers.run_files import output_path
from quartet.trainers.signals import run_async

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
    """Everything that is found, in the order of the checks. Nothing is written into the run's directory, and models
    that were passed are afterwards what they were before.

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
    """The recipe with another directory, without a journal to follow, and without anybody who is told."""
    changes: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "log": recipe.log.model_copy(update={"trackers": (), "notify": None}),
        "callbacks": (),
    }
    if isinstance(recipe.placement, AsynchronousPlacement):
        changes["placement"] = recipe.placement.model_copy(update={"follow": None})
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
        attempt = RunAttempt(trainer.roles, trainer.workers, trainer.run, trainer.kl, lambda finished: None, 0)
        await attempt.begin()
        started = ", ".join(trainer.workers.models)
        self._findings.add(judged("start", f"{started} and {len(trainer.workers.engines)} engines"))
        async with contextlib.aclosing(attempt):
            await self._check(ExaminedRun(trainer.roles, trainer.workers, attempt, self._max_new_tokens))

    async def _check(self, run: ExaminedRun) -> None:
        findings = self._findings
        findings.add(await resources.check_memory(run))
        with findings.errors_of("stop_tokens"):
            findings.add(*await sampling.check_stops(run))
        with findings.errors_of("pad_by_mask"):
            findings.add(await sampling.check_pad_token(run))
        chunk: Chunk | None = None
        watch = Stopwatch()
        with findings.errors_of("sampling"):
            chunk = await self._sample(run)
            generate_s = watch.seconds
        learned = await self._check_sample(run, chunk) if chunk is not None else None
        with findings.errors_of("weight_update"):
            publish_s = await check_weights(run, findings)
            if chunk is not None and learned is not None:
                seconds = (generate_s, learned.scoring_s, learned.update_s, publish_s)
                findings.add(resources.check_duration(run, chunk.data, *seconds))

    async def _check_sample(self, run: ExaminedRun, chunk: Chunk) -> learning.Learned | None:
        """Checks that read sampled answers, with the weights that sampled them; None where no update is possible."""
        findings, batch = self._findings, chunk.data
        findings.add(sampling.check_versions(run, batch), sampling.check_diversity(batch))
        findings.add(*await sampling.check_agreement(run, batch), await sampling.check_packing(run, batch))
        learned: learning.Learned | None = None
        with findings.errors_of("reward_values"):
            known, scored = await rewards.score_known_answers(run), await rewards.score(run, chunk)
            findings.add(rewards.check_known_answers(run, known), *rewards.check_values(scored, known))
            findings.add(rewards.check_time(run, scored), await rewards.check_repeats(run, chunk, scored))
            with findings.errors_of("first_ratio"):
                learned = await learning.rehearse(run, chunk, scored.columns)
        if learned is not None:
            learned = replace(learned, scoring_s=learned.scoring_s + scored.seconds)
            findings.add(*sampling.check_ends(run, batch, learned.experience.batch), learning.check_signal(learned))
            findings.add(learning.check_first_ratio(run, learned), learning.check_gradient(learned))
            findings.add(learning.check_reference(run, learned), learning.check_critic(learned))
        return learned

    async def _sample(self, run: ExaminedRun) -> Chunk:
        """Groups of the first prompts, by the run's own way of asking for them."""
        roles, rollout = run.roles, run.attempt.rollout
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
        return chunk_of(0, 0, list(await asyncio.gather(*map(source, range(num)))))
