"""Checks of what the engines sample: ends, log-probabilities, versions, and what the trainer makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.rollout.protocol import SamplingParams
from quartet.schedule.groups import GREEDY
from quartet.text.examples import PromptText
from quartet.trainers.doctor.findings import Finding, judged, ok
from quartet.trainers.doctor.joints import Joints
from quartet.trainers.experience import sampled_only

_PROBED = 6
"""Tokens of a probe's answer."""


# Ends ----------------------------------------------------------------------------------------------------


async def check_stop_tokens(joints: Joints) -> list[Finding]:
    """A stop token ends an answer where it comes, and a stop string does; by every engine."""
    item = joints.roles.prompts.items[0]
    room = max(1, min(_PROBED, joints.roles.context - item.num_tokens))
    plain = SamplingParams(temperature=0.0, max_new_tokens=room)
    (free, *_) = await joints.answers(item.prompt, [plain], "free")
    ids = _leaf(free, 0)
    # Special tokens have no text.
    spoken = [n for n, token in enumerate(ids) if joints.roles.codec.decode([token]).strip()] or range(len(ids))
    at = spoken[len(spoken) // 2]
    piece = joints.roles.codec.decode([ids[at]])
    stopped = replace(plain, stop_token_ids=(ids[at],))
    strings = [replace(plain, stop_strings=(piece,))] if piece.strip() else []
    through, goes_on = 0, 0
    for batch in await joints.answers(item.prompt, [stopped, *strings], "stops"):
        through += _leaf(batch, 0) != ids[: ids.index(ids[at]) + 1] or not bool(batch.sequence["ended"][0])
        if strings:
            text = joints.roles.codec.decode(_leaf(batch, 1))
            goes_on += piece not in text or not bool(batch.sequence["ended"][1])
    num = len(joints.workers.engines)
    remedy = "the engine must get stop_token_ids and stop_strings with every request, and stop there"
    found = f"{through} of {num} engines do not end at a stop token" if through else f"{num} engines end at stop tokens"
    tokens = judged("stop_tokens", found, remedy, failure=through > 0)
    if not strings:
        return [tokens, ok("stop_strings", "the probe's token has no text")]
    found = f"{goes_on} of {num} engines do not end at a stop string" if goes_on else f"{num} engines end at {piece!r}"
    return [tokens, judged("stop_strings", found, remedy, failure=goes_on > 0)]


def check_ends(joints: Joints, batch: RaggedBatch, trained: RaggedBatch) -> list[Finding]:
    """Nothing follows an end-of-text token, and the token itself is trained on; most answers end by themselves.

    Args:
        batch: as sampled.
        trained: the step's experience.
    """
    stops, recipe = joints.roles.codec.eos_ids, joints.roles.recipe
    ended = batch.sequence["ended"].tolist()
    inside = 0
    if batch.has_ids and recipe.environment is None:
        inside = sum(not stops.isdisjoint(_leaf(batch, s)[:-1]) for s in range(len(batch)))
    where = {name: s for s, name in enumerate(batch.ids)}
    by_token = [s for s, done in enumerate(ended) if done and batch.objects["finish_reason"][s] == "stop"]
    masks = {name: trained.token["loss_mask"] for name in trained.ids}
    unlearned = 0
    for s, name in enumerate(trained.ids):
        start, stop = trained.leaf_span(s)
        takes_part = bool(masks[name][start:stop].any())
        unlearned += where[name] in by_token and takes_part and not bool(masks[name][stop - 1])
    share, limit = 1 - sum(ended) / len(ended), recipe.rollout.sampling.max_new_tokens
    is_limited = joints.max_new_tokens < limit and recipe.environment is None
    what = f"{share:.0%} of {len(ended)} answers are cut off at {min(limit, joints.max_new_tokens)} tokens"
    return [
        judged(
            "end_of_text",
            f"{inside} of {len(batch)} answers go on behind an end-of-text token"
            if inside
            else f"no answer of {len(batch)} goes on behind an end-of-text token",
            "the engine must stop at every id of eos_token_id",
            failure=inside > 0,
        ),
        judged(
            "end_is_learned",
            f"of {len(by_token)} answers that ended, {unlearned} are trained on without their last token",
            "a mask must not recognise padding by its id: the end-of-text token may have the same",
            failure=unlearned > 0,
        ),
        ok("truncation", f"{what}, where this check stops; the recipe allows {limit}")
        if is_limited
        else judged(
            "truncation",
            what,
            "raise rollout.sampling.max_new_tokens, or begin with a model that ends its answers",
            warning=share > 0.9,
        ),
    ]


def check_diversity(joints: Joints, batch: RaggedBatch) -> Finding:
    """Answers to one prompt differ."""
    name, texts = "diversity", dict[int, list[str]]()
    picked = batch.select(sampled_only(batch)[0]) if GREEDY in batch.sequence else batch
    for group, text in zip(picked.sequence["group"].tolist(), picked.objects["completion"], strict=True):
        texts.setdefault(group, []).append(text)
    several = [found for found in texts.values() if len(found) > 1]
    same = sum(len(set(found)) == 1 for found in several)
    return judged(
        name,
        f"all answers are alike in {same} of {len(several)} groups",
        "raise rollout.sampling.temperature; if answers are alike at 1, the engine may not use each request's seed",
        warning=0 < len(several) == same,
    )


def check_versions(joints: Joints, batch: RaggedBatch) -> Finding:
    """Tokens carry the version of the weights that sampled them."""
    versions = batch.token["policy_version"][batch.token["action_mask"]]
    wrong = int((versions != joints.attempt.rollout.version).sum())
    return judged(
        "versions",
        f"{wrong} of {len(versions)} tokens do not carry version {joints.attempt.rollout.version}",
        "the engine must note for every token which weights computed it",
        failure=wrong > 0,
    )


# Log-probabilities ---------------------------------------------------------------------------------------


async def check_agreement(joints: Joints, batch: RaggedBatch) -> list[Finding]:
    """Sampler and trainer give every sampled token the same log-probability, both at the recipe's temperature."""
    mask, temperature = batch.token["action_mask"], joints.temperature
    sampled = batch.token["rollout_logprobs"][mask]
    trained = (await joints.logprobs(batch))[mask]
    gap = (sampled - trained).abs()
    largest = joints.largest(gap)
    # A mean has no tails: with bf16, where single tokens may differ much, it tells more.
    wrong = not (largest <= joints.tolerance and float(gap.mean()) <= joints.tolerance / 4)
    found = [
        judged(
            "sampler_agreement",
            f"sampler and trainer differ by {largest:.2g} nats (mean {float(gap.mean()):.2g}, {len(gap)} tokens, "
            f"allowed {joints.tolerance:.2g})",
            "see docs/numerics.md: same weights, precision, positions and temperature on both sides; "
            "numerics: exact finds rounding, canary_tolerance allows for another precision",
            failure=wrong,
        )
    ]
    if temperature == 1.0:
        return [*found, ok("temperature", "1: logits are as they are")]
    plain = (await joints.logprobs(batch, temperature=1.0))[mask]
    ignored = torch.equal(plain, trained)
    unscaled = wrong and float((sampled - plain).abs().mean()) < float(gap.mean())
    text = f"log-probabilities are those at temperature {temperature:g} on both sides"
    if ignored:
        text = f"the trainer's log-probabilities do not depend on the temperature, which is {temperature:g}"
    elif unscaled:
        text = f"the engine's log-probabilities are those at temperature 1, not {temperature:g}"
    remedy = "divide the logits by rollout.sampling.temperature before the log-softmax, in sampler and trainer"
    return [*found, judged("temperature", text, remedy, failure=ignored or unscaled)]


async def check_packing(joints: Joints, batch: RaggedBatch) -> Finding:
    """A sequence alone has the log-probabilities that it has among others, behind a shared prompt."""
    together = await joints.logprobs(batch)
    differences: list[float] = []
    for s in {0, len(batch) - 1}:
        alone = batch.select([s])
        found = await joints.logprobs(alone)
        own, (start, stop) = alone.leaf_span(0), batch.leaf_span(s)
        gap = (found[slice(*own)] - together[start:stop]).abs()
        differences.append(joints.largest(gap[batch.token["action_mask"][start:stop]]))
    return judged(
        "packing",
        f"a sequence alone and among others differ by {max(differences):.2g} nats",
        "set actor.train.share_prefixes=false to see whether shared prompts cause it; report the architecture",
        failure=not max(differences) <= joints.tolerance,
    )


async def check_pad_token(joints: Joints) -> Finding:
    """A token that happens to be the pad token's counts where it stands in a text."""
    name, codec = "pad_by_mask", joints.roles.codec
    pad = codec.tokenizer.pad_token or codec.tokenizer.eos_token
    prompt = joints.roles.prompts.items[0].prompt
    with_pad, without = (_ending(prompt, text) for text in (pad or "", ""))
    pad_id = codec.tokenizer.convert_tokens_to_ids(pad) if pad else None
    ids = codec.encode_prompt(with_pad)
    if pad_id is None or pad_id not in ids or len(ids) + 2 > joints.roles.context:
        return ok(name, "no pad token can stand in a prompt")
    greedy = SamplingParams(temperature=0.0, max_new_tokens=min(_PROBED, joints.roles.context - len(ids)))
    differences, ignored = [0.0], False
    # The same tokens behind the prompt that lacks the pad token.
    bare = codec.encode_prompt(without)
    for batch in await joints.answers(with_pad, [greedy], "pad"):
        mask = batch.token["action_mask"]
        trained = (await joints.logprobs(batch, temperature=1.0))[mask]
        differences.append(joints.largest((batch.token["rollout_logprobs"][mask] - trained).abs()))
        other = RaggedBatch.from_groups([bare], [[_leaf(batch, 0)]], ["bare"])
        other = other.with_token(action_mask=other.sequence_index() >= 0)
        removed = (await joints.logprobs(other, temperature=1.0))[other.token["action_mask"]]
        ignored |= bool((removed - trained).abs().max() < 1e-6)
    apart = not max(differences) <= joints.tolerance
    found = f"behind {pad!r} in a prompt sampler and trainer differ by {max(differences):.2g} nats"
    if ignored:
        found = f"{pad!r} in a prompt has no effect on what follows it"
    remedy = "attention must be masked by where padding is, never by the pad token's id"
    return judged(name, found, remedy, failure=apart or ignored)


def _ending(prompt: PromptText, text: str) -> PromptText:
    """The prompt whose last text has ``text`` in its middle."""
    if isinstance(prompt, str):
        middle = len(prompt) // 2
        return prompt[:middle] + text + prompt[middle:]
    *others, last = prompt
    changed: Mapping[str, str] = {**last, "content": str(_ending(str(last["content"]), text))}
    return [*others, dict(changed)]


def _leaf(batch: RaggedBatch, s: int) -> list[int]:
    """Ids of a sequence's answer."""
    found: list[int] = batch.input_ids[slice(*batch.leaf_span(s))].tolist()
    return found
