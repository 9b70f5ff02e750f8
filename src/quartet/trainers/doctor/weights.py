"""Checks of new weights: what the actor gets every engine computes with, the head too, and after sleep; and all of it
is taken back."""

from __future__ import annotations

import math

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.schedule.model_worker import TrainWorker
from quartet.schedule.offloadable import Offloadable
from quartet.train.bit_flips import ModelPart
from quartet.trainers.doctor.findings import Finding, Findings, judged, ok
from quartet.trainers.doctor.joints import Joints
from quartet.trainers.run import Stopwatch


async def check_weights(joints: Joints, findings: Findings) -> float:
    """Changes the embeddings, then the body, then both back; each time the engines are given the new weights.

    Returns:
        Seconds of a publication.
    """
    rollout, before = joints.attempt.rollout, await joints.canaries()
    trained = await joints.logprobs(before[0], mask="loss_mask")
    watch, flipped = Stopwatch(), set[ModelPart]()
    try:
        findings.add(await _check_part(joints, "tied_head", "embeddings", flipped))
        findings.add(await _check_part(joints, "weight_update", "body", flipped))
        findings.add(await _check_sleep(joints))
    finally:
        for part in sorted(flipped):
            await _flip(joints, part)
    seconds = watch.seconds / 3
    with findings.errors_of("weights_restored"):
        await rollout.publish(_version(joints))
        after = await joints.canaries()
        again = await joints.logprobs(before[0], mask="loss_mask")
        apart = max(_difference(old, new) for old, new in zip(before, after, strict=True))
        findings.add(
            judged(
                "weights_restored",
                f"the actor's weights are those of before to the bit; the engines' canary differs by {apart:.2g} nats",
                "an engine keeps something of older weights: look at its prefix cache and its copies",
                failure=not torch.equal(trained, again) or not apart <= joints.tolerance / 10,
            )
        )
    return seconds


async def _check_part(joints: Joints, name: str, part: ModelPart, flipped: set[ModelPart]) -> Finding:
    """A change of ``part`` moves every engine's canary, and brings it to where the trainer's is."""
    rollout, before = joints.attempt.rollout, await joints.canaries()
    num = await _flip(joints, part)
    flipped |= {part} if num else set()
    remedy = (
        "the engine kept its old output head: a tied one is sent once, and its packed or rounded copy made anew"
        if part == "embeddings"
        else "the engine kept old weights: look at weight_sync, and at what it computes from weights once only"
    )
    try:
        difference = (await rollout.publish(_version(joints)))["agreement/canary_diff"]
    except UserError as error:
        return Finding(name, "failure", f"{error.problem} ({error.found})", remedy)
    after = await joints.canaries()
    still = sum(_is_same(old, new) for old, new in zip(before, after, strict=True))
    if not num:
        return ok(name, f"the {part} are not trained; engines agree within {difference:.2g} nats")
    return judged(
        name,
        f"{still} of {len(after)} engines compute as before a change of {num} tensors"
        if still
        else f"{len(after)} engines follow a change of {num} tensors ({part}), {difference:.2g} nats from the trainer",
        remedy,
        failure=still > 0,
    )


async def _check_sleep(joints: Joints) -> Finding:
    """Engines that give up their memory for others come back with the same weights."""
    name, rollout = "after_sleep", joints.attempt.rollout
    if "rollout" not in joints.workers.offloaded_roles():
        return ok(name, "engines never sleep in this placement")
    before = await joints.canaries()
    async with rollout.leases.turn("rollout", "generate", "sleep", step=0, reads=rollout.reads()):
        for engine in joints.workers.engines:
            await engine.call(Offloadable.offload)
            await engine.call(Offloadable.onload, "generate")
    after = await joints.canaries()
    apart = max(_difference(old, new) for old, new in zip(before, after, strict=True))
    return judged(
        name,
        f"{len(after)} engines slept and woke: their canary differs by {apart:.2g} nats",
        "the engine woke with other weights: send them again after level 2, and keep what level 1 moves",
        failure=not apart <= joints.tolerance / 10,
    )


async def _flip(joints: Joints, part: ModelPart) -> int:
    """Makes the actor's next version; returns the number of tensors that changed."""
    async with joints.attempt.leases.turn("actor", "train", "flip_bits", step=_version(joints), writes="actor"):
        return await joints.roles.train_group("actor").call(TrainWorker.flip_bits, part)


def _version(joints: Joints) -> int:
    """Of the actor's weights."""
    return joints.attempt.leases.arbiter.version("actor")


def _is_same(one: RaggedBatch, other: RaggedBatch) -> bool:
    return _difference(one, other) == 0


def _difference(one: RaggedBatch, other: RaggedBatch) -> float:
    """Between two answers to the canary prompt: nats, or infinity where other tokens were chosen."""
    if not torch.equal(one.input_ids, other.input_ids):
        return math.inf
    mask, key = one.token["loss_mask"], "rollout_logprobs"
    return float((one.token[key][mask] - other.token[key][mask]).abs().max())
