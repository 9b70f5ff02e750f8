"""Checks of what the engines sample: ends, log-probabilities, versions, and what the trainer makes of them."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.extras.doctor.checks import Finding, judged
from quartet.extras.doctor.examined_run import ExaminedRun
from quartet.rollout.protocol import SamplingParams
from quartet.schedule.groups import GREEDY
from quartet.text.examples import PromptText
from quartet.train.forward import Needs
from quartet.trainers.experience import sampled_only

_PROBED = 6
"""Tokens of a probe's answer."""
_GREEDY = Needs(logprobs=True, mask="action_mask")


# Ends ----------------------------------------------------------------------------------------------------


async def check_stops(run: ExaminedRun) -> list[Finding]:
    """A stop token ends an answer where it comes, and a stop string does; by every engine."""
    item, codec = run.roles.prompts.items[0], run.roles.codec
    room = max(1, min(_PROBED, run.roles.context - item.num_tokens))
    plain = SamplingParams(temperature=0.0, max_new_tokens=room)
    (free, *_) = (await run.answers(item.prompt, [plain], "free")).values()
    ids = _leaf(free, 0)
    # Ends have no text, other tokens only a part of a character.
    pieces = codec.completion_pieces(codec.encode_prompt(item.prompt), ids)
    spoken = [n for n, text in enumerate(pieces) if text.strip() and "\ufffd" not in text]
    place = spoken[len(spoken) // 2] if spoken else len(ids) // 2
    stop, piece = ids[place], pieces[place] if spoken else ""
    ways = [replace(plain, stop_token_ids=(stop,)), replace(plain, stop_strings=(piece or "\n",))]
    through, go_on = list[str](), list[str]()
    found = await run.answers(item.prompt, ways, "stops")
    for engine, batch in found.items():
        by_token, by_string = batch.sequence["ended"].tolist()
        through += [engine] if _leaf(batch, 0) != ids[: ids.index(stop) + 1] or not by_token else []
        go_on += [engine] if piece and not by_string else []
    return [
        judged("stop_tokens", f"{_some(through, found)} do not end at a stop token", failure=bool(through)),
        judged("stop_strings", f"{_some(go_on, found)} do not end at the stop string {piece!r}", failure=bool(go_on)),
    ]


def _some(these: Sequence[str], engines: Sized) -> str:
    """How many of the engines, and which."""
    names = f" ({', '.join(these)})" if these else ""
    return f"{len(these)} of {len(engines)} engines{names}"


def check_ends(run: ExaminedRun, batch: RaggedBatch, trained: RaggedBatch) -> list[Finding]:
    """Nothing follows an end-of-text token, and the token itself is trained on; most answers end by themselves.

    Args:
        batch: as sampled.
        trained: the step's experience.
    """
    recipe, num = run.roles.recipe, len(batch)
    one_turn = recipe.environment is None
    inside = 0
    if batch.has_ids and one_turn:
        inside = sum(not run.roles.codec.eos_ids.isdisjoint(_leaf(batch, s)[:-1]) for s in range(num))
    ended = {name for name, why in zip(batch.ids, batch.objects["finish_reason"], strict=True) if why == "stop"}
    masks = [trained.token["loss_mask"][slice(*trained.leaf_span(s))].tolist() for s in range(len(trained))]
    pairs = zip(trained.ids, masks, strict=True)
    unlearned = sum(name in ended and any(mask) and not mask[-1] for name, mask in pairs)
    share, limit = 1 - float(batch.sequence["ended"].float().mean()), recipe.rollout.sampling.max_new_tokens
    is_limited = run.max_new_tokens < limit and one_turn
    cut = f"{share:.0%} of {num} answers are cut off at {min(limit, run.max_new_tokens)} tokens"
    cut += f", where this check stops; the recipe allows {limit}" if is_limited else ""
    learned = f"of {len(ended)} answers that ended, {unlearned} are trained on without their last token"
    return [
        judged("end_of_text", f"{inside} of {num} answers go on behind an end-of-text token", failure=inside > 0),
        judged("end_is_learned", learned, failure=unlearned > 0),
        judged("truncation", cut, warning=share > 0.9 and not is_limited),
    ]


def check_diversity(batch: RaggedBatch) -> Finding:
    """Answers to one prompt differ."""
    texts = dict[int, list[str]]()
    picked = batch.select(sampled_only(batch)[0]) if GREEDY in batch.sequence else batch
    for group, text in zip(picked.sequence["group"].tolist(), picked.objects["completion"], strict=True):
        texts.setdefault(group, []).append(text)
    several = [found for found in texts.values() if len(found) > 1]
    same = sum(len(set(found)) == 1 for found in several)
    found = f"all answers are alike in {same} of {len(several)} groups"
    return judged("diversity", found, warning=0 < len(several) == same)


def check_versions(run: ExaminedRun, batch: RaggedBatch) -> Finding:
    """Tokens carry the version of the weights that sampled them."""
    versions, version = batch.token["policy_version"][batch.token["action_mask"]], run.loop.rollout.version
    wrong = int((versions != version).sum())
    return judged("versions", f"{wrong} of {len(versions)} tokens do not carry version {version}", failure=wrong > 0)


# Log-probabilities ---------------------------------------------------------------------------------------


async def check_agreement(run: ExaminedRun, batch: RaggedBatch) -> list[Finding]:
    """Sampler and trainer give every sampled token the same log-probability, both at the recipe's temperature."""
    mask, temperature = batch.token["action_mask"], run.temperature
    sampled = batch.token["rollout_logprobs"][mask]
    trained = (await run.logprobs(batch, run.needs()))[mask]
    gap = (sampled - trained).abs()
    largest, mean = run.largest(gap), float(gap.mean())
    # A mean has no tails: with bf16, where single tokens may differ much, it tells more.
    wrong = not (largest <= run.tolerance and mean <= run.tolerance / 4)
    found = f"sampler and trainer differ by {largest:.2g} nats (mean {mean:.2g}, {len(gap)} tokens, "
    agreement = judged("sampler_agreement", f"{found}allowed {run.tolerance:.2g})", failure=wrong)
    if temperature == 1.0:
        return [agreement, judged("temperature", "1: logits are as they are")]
    plain = (await run.logprobs(batch, run.needs(temperature=1.0)))[mask]
    ignored = torch.equal(plain, trained)
    unscaled = wrong and float((sampled - plain).abs().mean()) < mean
    text = f"log-probabilities are those at temperature {temperature:g} on both sides"
    if ignored or unscaled:
        text = f"the {'trainer' if ignored else 'engine'} leaves the temperature out, which is {temperature:g}"
    return [agreement, judged("temperature", text, failure=ignored or unscaled)]


async def check_packing(run: ExaminedRun, batch: RaggedBatch) -> Finding:
    """A sequence alone has the log-probabilities that it has among others, behind a shared prompt."""
    together, apart = await run.logprobs(batch, run.needs()), 0.0
    for s in {0, len(batch) - 1}:
        alone, leaf = batch.select([s]), slice(*batch.leaf_span(s))
        found = (await run.logprobs(alone, run.needs()))[slice(*alone.leaf_span(0))]
        apart = max(apart, run.largest((found - together[leaf]).abs()[batch.token["action_mask"][leaf]]))
    found_text = f"a sequence alone and among others differ by {apart:.2g} nats"
    return judged("packing", found_text, failure=not apart <= run.tolerance)


async def check_pad_token(run: ExaminedRun) -> Finding:
    """A token that happens to be the pad token's counts where it stands in a text."""
    name, codec = "pad_by_mask", run.roles.codec
    pad = codec.tokenizer.pad_token or codec.tokenizer.eos_token or ""
    prompt = run.roles.prompts.items[0].prompt
    with_pad, bare = _with_inside(prompt, pad), codec.encode_prompt(_with_inside(prompt, ""))
    ids = codec.encode_prompt(with_pad)
    if not pad or codec.tokenizer.convert_tokens_to_ids(pad) not in ids or len(ids) >= run.roles.context:
        return judged(name, "no pad token can stand in a prompt")
    greedy = SamplingParams(temperature=0.0, max_new_tokens=min(_PROBED, run.roles.context - len(ids)))
    apart, ignored = dict[str, float](), False
    for engine, batch in (await run.answers(with_pad, [greedy], "pad")).items():
        mask = batch.token["action_mask"]
        trained = (await run.logprobs(batch, _GREEDY))[mask]
        apart[engine] = run.largest((batch.token["rollout_logprobs"][mask] - trained).abs())
        # The same tokens behind the prompt that lacks the pad token.
        other = RaggedBatch.from_groups([bare], [[_leaf(batch, 0)]], ["bare"])
        other = other.with_token(action_mask=other.sequence_index() >= 0)
        removed = (await run.logprobs(other, _GREEDY))[other.token["action_mask"]]
        ignored |= bool((removed - trained).abs().max() < 1e-6)
    wrong = [engine for engine, nats in apart.items() if not nats <= run.tolerance]
    found = (
        f"behind {pad!r} in a prompt {_some(wrong, apart)} differ from the trainer, by {max(apart.values()):.2g} nats"
    )
    found = f"{pad!r} in a prompt has no effect on what follows it" if ignored else found
    return judged(name, found, failure=ignored or bool(wrong))


def _with_inside(prompt: PromptText, text: str) -> PromptText:
    """The prompt with ``text`` in the middle of its last text."""
    if isinstance(prompt, str):
        middle = len(prompt) // 2
        return prompt[:middle] + text + prompt[middle:]
    last: dict[str, Any] = dict(prompt[-1])
    return [*prompt[:-1], {**last, "content": _with_inside(str(last["content"]), text)}]


def _leaf(batch: RaggedBatch, s: int) -> list[int]:
    """Ids of a sequence's answer."""
    found: list[int] = batch.input_ids[slice(*batch.leaf_span(s))].tolist()
    return found
