"""Checks of new weights: what the actor gets every engine computes with, the head too, and after sleep; and all of it
is taken back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.schedule.model_worker import TrainWorker
from quartet.schedule.offloadable import Offloadable
from quartet.train.bit_flips import ModelPart
from quartet.train.forward import Needs
from quartet.trainers.doctor.findings import Finding, Findings, judged
from quartet.trainers.doctor.joints import Joints
from quartet.trainers.run import Stopwatch

_CANARY = Needs(logprobs=True)


async def check_weights(joints: Joints, findings: Findings) -> float:
    """Changes the embeddings, then the body, then both back; each time the engines are given the new weights.

    Returns:
        Seconds of a publication.
    """
    rollout, before, flipped = joints.attempt.rollout, await joints.canaries(), list[ModelPart]()
    trained, watch = await joints.logprobs(before[0], _CANARY), Stopwatch()
    mask = before[0].token["loss_mask"]
    apart = float((before[0].token["rollout_logprobs"] - trained)[mask].abs().max())
    # Another layer's old weights move the canary by less than two precisions may differ by in the worst case.
    allowed = max(joints.tolerance / 4, 8 * apart)
    parts: list[tuple[str, ModelPart]] = [("tied_head", "embeddings"), ("weight_update", "body")]
    try:
        for name, part in parts:
            with findings.errors_of(name):
                findings.add(await _check_part(joints, name, part, allowed, flipped))
        findings.add(await _check_sleep(joints))
    finally:
        for part in flipped:
            await _flip(joints, part)
    seconds = watch.seconds / 3
    with findings.errors_of("weights_restored"):
        await rollout.publish(_version(joints))
        after, again = await joints.canaries(), await joints.logprobs(before[0], _CANARY)
        apart, is_back = _apart(before, after), torch.equal(trained, again)
        found = (
            f"the actor is {'' if is_back else 'not '}what it was to the bit, the engines' canary {apart:.2g} nats off"
        )
        findings.add(judged("weights_restored", found, failure=not (is_back and apart <= joints.tolerance / 10)))
    return seconds


async def _check_part(joints: Joints, name: str, part: ModelPart, allowed: float, flipped: list[ModelPart]) -> Finding:
    """A change of ``part`` moves every engine's canary, and brings it to the trainer's, but for ``allowed`` nats.

    Raises:
        UserError: they differ by more than the run allows.
    """
    before = await joints.canaries()
    num = await _flip(joints, part)
    flipped += [part] if num else []
    difference = (await joints.attempt.rollout.publish(_version(joints)))["agreement/canary_diff"]
    still = sum(not _apart([old], [new]) for old, new in zip(before, await joints.canaries(), strict=True))
    found = f"{still} of {len(before)} engines compute as before a change of {num} tensors ({part}), "
    return judged(
        name,
        f"{found}{difference:.2g} nats from the trainer",
        failure=not difference <= allowed or (still > 0 and num > 0),
    )


async def _check_sleep(joints: Joints) -> Finding:
    """Engines that give up their memory for others come back with the same weights."""
    name, rollout = "after_sleep", joints.attempt.rollout
    if "rollout" not in joints.workers.offloaded_roles():
        return judged(name, "engines never sleep in this placement")
    before = await joints.canaries()
    async with rollout.leases.turn("rollout", "generate", "sleep", step=0, reads=rollout.reads()):
        for engine in joints.workers.engines:
            await engine.call(Offloadable.offload)
            await engine.call(Offloadable.onload, "generate")
    apart = _apart(before, await joints.canaries())
    found = f"{len(before)} engines slept and woke: their canary differs by {apart:.2g} nats"
    return judged(name, found, failure=not apart <= joints.tolerance / 10)


async def _flip(joints: Joints, part: ModelPart) -> int:
    """Makes the actor's next version; returns the number of tensors that changed."""
    async with joints.attempt.leases.turn("actor", "train", "flip_bits", step=_version(joints), writes="actor"):
        return await joints.roles.train_group("actor").call(TrainWorker.flip_bits, part)


def _version(joints: Joints) -> int:
    """Of the actor's weights."""
    return joints.attempt.leases.arbiter.version("actor")


def _apart(before: Sequence[RaggedBatch], after: Sequence[RaggedBatch]) -> float:
    """The most that answers to the canary prompt differ by, in nats; infinity where other tokens were chosen."""
    differences = [0.0]
    for old, new in zip(before, after, strict=True):
        mask, key = old.token["loss_mask"], "rollout_logprobs"
        is_same = torch.equal(old.input_ids, new.input_ids)
        differences.append(float((old.token[key] - new.token[key])[mask].abs().max()) if is_same else math.inf)
    return max(differences)
