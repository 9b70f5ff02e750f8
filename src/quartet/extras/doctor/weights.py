"""Checks of new weights: what the actor gets every engine computes with, the head too, and after sleep; and all of it
is taken back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.placement import HEADS
from quartet.extras.doctor.checks import Finding, Findings, judged
from quartet.extras.doctor.examined_run import ExaminedRun
from quartet.schedule.model_worker import Offloadable, TrainWorker
from quartet.train.engine import ModelPart
from quartet.train.forward import Needs
from quartet.trainers.run import Stopwatch

_CANARY = Needs(logprobs=True)


async def check_weights(run: ExaminedRun, findings: Findings) -> float:
    """Changes the embeddings, then the body, then both back; each time the engines are given the new weights.

    Returns:
        Seconds of a publication.
    """
    rollout, before, flipped = run.attempt.rollout, await run.canaries(), list[ModelPart]()
    trained, watch = await run.logprobs(before[0], _CANARY), Stopwatch()
    mask = before[0].token["loss_mask"]
    apart = float((before[0].token["rollout_logprobs"] - trained)[mask].abs().max())
    # Another layer's old weights move the canary by less than two precisions may differ by in the worst case.
    allowed = max(run.tolerance / 4, 8 * apart)
    parts: list[tuple[str, ModelPart]] = [("tied_head", "embeddings"), ("weight_update", "body")]
    try:
        for name, part in parts:
            with findings.errors_of(name):
                findings.add(await _check_part(run, name, part, allowed, flipped))
        findings.add(await _check_sleep(run))
    finally:
        for part in flipped:
            await _flip(run, part)
    seconds = watch.seconds / 3
    with findings.errors_of("weights_restored"):
        await rollout.publish(_version(run))
        after, again = await run.canaries(), await run.logprobs(before[0], _CANARY)
        apart, is_back = _apart(before, after), torch.equal(trained, again)
        found = (
            f"the actor is {'' if is_back else 'not '}what it was to the bit, the engines' canary {apart:.2g} nats off"
        )
        findings.add(judged("weights_restored", found, failure=not (is_back and apart <= run.tolerance / 10)))
    return seconds


async def _check_part(
    run: ExaminedRun, name: str, part: ModelPart, allowed: float, flipped: list[ModelPart]
) -> Finding:
    """A change of ``part`` moves every engine's canary, and brings it to the trainer's, but for ``allowed`` nats.

    Raises:
        UserError: they differ by more than the run allows.
    """
    before = await run.canaries()
    num = await _flip(run, part)
    flipped += [part] if num else []
    difference = (await run.attempt.rollout.publish(_version(run)))["agreement/canary_diff"]
    still = sum(not _apart([old], [new]) for old, new in _pairs(before, await run.canaries()))
    found = f"{still} of {len(before)} engines compute as before a change of {num} tensors ({part}), "
    return judged(
        name,
        f"{found}{difference:.2g} nats from the trainer",
        failure=not difference <= allowed or (still > 0 and num > 0),
    )


async def _check_sleep(run: ExaminedRun) -> Finding:
    """Engines that give up their memory for others come back with the same weights."""
    name, rollout = "after_sleep", run.attempt.rollout
    if "rollout" not in run.workers.offloaded_roles():
        return judged(name, "engines never sleep in this placement")
    before = await run.canaries()
    async with rollout.leases.turn("rollout", "generate", "sleep", step=0, reads=rollout.reads()):
        for engine in run.workers.engines:
            await engine.call(Offloadable.offload)
            await engine.call(Offloadable.onload, "generate")
    apart = _apart(before, await run.canaries())
    found = f"{len(before)} engines slept and woke: their canary differs by {apart:.2g} nats"
    return judged(name, found, failure=not apart <= run.tolerance / 10)


async def _flip(run: ExaminedRun, part: ModelPart) -> int:
    """Makes the actor's next version, with heads that learn along as they are; returns the number of tensors that
    changed.
    """
    leases, step = run.attempt.leases, _version(run)
    async with leases.turn("actor", "train", "flip_bits", step=step, writes="actor"):
        num = await run.roles.train_group("actor").call(TrainWorker.flip_bits, part)
    if HEADS in run.attempt.rollout.sends:
        async with leases.turn("actor", "forward", "flip_bits", step=step, reads={"actor": None}, writes=HEADS):
            pass
    return num


def _version(run: ExaminedRun) -> int:
    """Of the actor's weights."""
    return run.attempt.leases.arbiter.version("actor")


def _pairs(before: Sequence[RaggedBatch], after: Sequence[RaggedBatch]) -> list[tuple[RaggedBatch, RaggedBatch]]:
    """Each engine's two answers.

    Raises:
        UserError: an engine failed or came back in between.
    """
    if len(before) != len(after):
        raise UserError(
            "a rollout engine failed or was started anew during the checks",
            found=f"{len(before)} engines answered at first, {len(after)} now",
            remedy="see what the engine said as it ended, then examine again",
        )
    return list(zip(before, after, strict=True))


def _apart(before: Sequence[RaggedBatch], after: Sequence[RaggedBatch]) -> float:
    """The most that answers to the canary prompt differ by, in nats; infinity where other tokens were chosen."""
    differences = [0.0]
    for old, new in _pairs(before, after):
        mask, key = old.token["loss_mask"], "rollout_logprobs"
        is_same = torch.equal(old.input_ids, new.input_ids)
        differences.append(float((old.token[key] - new.token[key])[mask].abs().max()) if is_same else math.inf)
    return max(differences)
