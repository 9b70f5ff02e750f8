"""Builds a run as it would begin, in a directory that is thrown away, and lets the checks at it.

The checks here need the run: what engines sample, what is learned of it, new weights, memory and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import Trajectories
from quartet.config import UserError
from quartet.config.engines import NativeEngineConfig
from quartet.config.placement import HEADS
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.extras.doctor import rewards
from quartet.extras.doctor.checks import Finding, Findings, judged, quick_findings
from quartet.observe.memory import available_bytes
from quartet.rollout.protocol import SamplingParams
from quartet.schedule.groups import GREEDY, Chunk, chunk_of
from quartet.schedule.iteration import ModelScorer, PartScorer, Scorer, UpdatePlan, score_all
from quartet.schedule.model_worker import ModelWorker, Offloadable, TrainWorker, Update
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker
from quartet.text.examples import PromptText
from quartet.train.engine import ModelPart
from quartet.train.forward import Needs
from quartet.trainers.experience import Experience, sampled_only
from quartet.trainers.loop import RLLoop
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import RLRoles, limits_of
from quartet.trainers.run import RunDirectory, Stopwatch
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

    @property
    def temperature(self) -> float:
        return self.roles.recipe.rollout.sampling.temperature

    async def answers(self, prompt: PromptText, params: Sequence[SamplingParams], name: str) -> dict[str, RaggedBatch]:
        """Returns what each rollout worker answers, with token ids, by each of ``params``; by the workers' names."""
        rollout, found = self.loop.rollout, dict[str, RaggedBatch]()
        asked = PromptRequest(name, prompt, {f"{name}.{n}": one for n, one in enumerate(params)})
        async with rollout.leases.turn("rollout", "generate", name, step=0, reads=rollout.reads()):
            for n, worker in enumerate(self.workers.engines):
                found[f"engine {n}"] = await worker.call(RolloutWorker.answers, [asked], [0])
        return found

    async def canaries(self) -> list[RaggedBatch]:
        """Returns each engine's answer to the canary prompt."""
        rollout, found = self.loop.rollout, list[RaggedBatch]()
        async with rollout.leases.turn("rollout", "generate", "canary", step=0, reads=rollout.reads()):
            for engine in self.workers.engines:
                await engine.call(RolloutWorker.run_canary, rollout.canary, "canary")
                answers = await engine.call(RolloutWorker.canary)
                found += [answers.select([s]) for s in range(len(answers))]  # of each engine that a worker has
        return found

    def needs(self, *, temperature: float | None = None) -> Needs:
        """Asks for log-probabilities of what was sampled, at the recipe's temperature if no other is given."""
        limits = limits_of(self.roles.recipe)
        return Needs(logprobs=True, mask="action_mask", temperature=temperature or self.temperature, limits=limits)

    async def logprobs(self, batch: RaggedBatch, needs: Needs) -> Tensor:
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


OLD = "old_logprobs"


@dataclass(frozen=True)
class Learned:
    """
    Args:
        experience: the sampled answers with all columns.
        scoring_s, update_s: seconds of the models' passes, and of the rehearsed update.
    """

    experience: Experience
    scoring_s: float
    update_s: float
    metrics: dict[str, float]


async def rehearse(run: ExaminedRun, chunk: Chunk, rewards: Sequence[ColumnSet]) -> Learned:
    """Rehearses scores, advantages, and an update that changes nothing, against the log-probabilities of a pass without
    gradient.

    Raises:
        UserError: a model's values are not finite, or memory is too small.
    """
    roles, loop, watch = run.roles, run.loop, Stopwatch()
    scorers = list(roles.column_scorers(loop.leases))
    if all(scorer.column != OLD for scorer in scorers):
        scorers.append(ModelScorer(loop.leases, "actor", roles.groups["actor"], run.needs(), OLD, trains=True))
    parts: list[Scorer] = list(scorers)
    if GREEDY in chunk.data.sequence:
        parts = [PartScorer(scorer, sampled_only) for scorer in scorers]
    columns = await score_all(parts, chunk)
    experience: Experience = await loop.stages.assemble([(chunk, [*rewards, *columns])])
    scoring_s, watch = watch.seconds, Stopwatch()
    metrics = await _update(run, loop.learned(experience))
    return Learned(experience, scoring_s, watch.seconds, metrics)


async def _update(run: ExaminedRun, batch: RaggedBatch) -> dict[str, float]:
    """Returns what the rehearsed update measured; nothing where no token is learned from."""
    roles, loop = run.roles, run.loop
    picked = UpdatePlan(1, 1, roles.recipe.seed).selections(batch, 0)
    if not picked:
        return {}
    actor = roles.train_group("actor")
    update = Update(picked[0], loop.policy_objective(False), 0, rehearsal=True)
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


def check_critic(learned: Learned) -> Finding:
    """Checks that values are numbers, of the size of returns."""
    name, batch = "critic_values", learned.experience.batch
    if "values" not in batch.token:
        return judged(name, "the method has no critic")
    values, returns = (batch.token[column][batch.token["action_mask"]] for column in ("values", "returns"))
    found = f"values from {float(values.min()):.3g} to {float(values.max()):.3g}, "
    found += f"returns from {float(returns.min()):.3g} to {float(returns.max()):.3g}"
    broken = not bool(torch.isfinite(torch.stack([values, returns])).all())
    large = float(values.abs().max()) > 100 * max(1.0, float(returns.abs().max()))
    return judged(name, found, failure=broken, warning=large)


_GIB = 2**30
_LONG_HOURS = 24 * 7


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


def check_duration(
    run: ExaminedRun, batch: RaggedBatch, generate_s: float, score_s: float, update_s: float, publish_s: float
) -> Finding:
    """Estimates seconds per step and hours per run, if every answer took as long as those of ``batch`` did, and nothing
    overlapped: larger batches are faster.
    """
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


_PROBED = 6
"""Tokens of a probe's answer."""
_GREEDY = Needs(logprobs=True, mask="action_mask")


# Ends ----------------------------------------------------------------------------------------------------


async def check_stops(run: ExaminedRun) -> list[Finding]:
    """Checks that a stop token ends an answer where it comes, and a stop string does; by every engine."""
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
    """Tells how many of the engines, and which."""
    names = f" ({', '.join(these)})" if these else ""
    return f"{len(these)} of {len(engines)} engines{names}"


def check_ends(run: ExaminedRun, batch: RaggedBatch, trained: RaggedBatch) -> list[Finding]:
    """Checks that nothing follows an end-of-text token, and the token itself is trained on; most answers end by
    themselves.

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
    """Checks that answers to one prompt differ."""
    texts = dict[int, list[str]]()
    picked = batch.select(sampled_only(batch)[0]) if GREEDY in batch.sequence else batch
    for group, text in zip(picked.sequence["group"].tolist(), picked.objects["completion"], strict=True):
        texts.setdefault(group, []).append(text)
    several = [found for found in texts.values() if len(found) > 1]
    same = sum(len(set(found)) == 1 for found in several)
    found = f"all answers are alike in {same} of {len(several)} groups"
    return judged("diversity", found, warning=0 < len(several) == same)


def check_versions(run: ExaminedRun, batch: RaggedBatch) -> Finding:
    """Checks that tokens carry the version of the weights that sampled them."""
    versions, version = batch.token["policy_version"][batch.token["action_mask"]], run.loop.rollout.version
    wrong = int((versions != version).sum())
    return judged("versions", f"{wrong} of {len(versions)} tokens do not carry version {version}", failure=wrong > 0)


# Log-probabilities ---------------------------------------------------------------------------------------


async def check_agreement(run: ExaminedRun, batch: RaggedBatch) -> list[Finding]:
    """Checks that sampler and trainer give every sampled token the same log-probability, both at the recipe's
    temperature.
    """
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
    """Checks that a sequence alone has the log-probabilities that it has among others, behind a shared prompt."""
    together, apart = await run.logprobs(batch, run.needs()), 0.0
    for s in {0, len(batch) - 1}:
        alone, leaf = batch.select([s]), slice(*batch.leaf_span(s))
        found = (await run.logprobs(alone, run.needs()))[slice(*alone.leaf_span(0))]
        apart = max(apart, run.largest((found - together[leaf]).abs()[batch.token["action_mask"][leaf]]))
    found_text = f"a sequence alone and among others differ by {apart:.2g} nats"
    return judged("packing", found_text, failure=not apart <= run.tolerance)


async def check_pad_token(run: ExaminedRun) -> Finding:
    """Checks that a token that happens to be the pad token's counts where it stands in a text."""
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
    """Returns the prompt with ``text`` in the middle of its last text."""
    if isinstance(prompt, str):
        middle = len(prompt) // 2
        return prompt[:middle] + text + prompt[middle:]
    last: dict[str, Any] = dict(prompt[-1])
    return [*prompt[:-1], {**last, "content": _with_inside(str(last["content"]), text)}]


def _leaf(batch: RaggedBatch, s: int) -> list[int]:
    """Returns the ids of a sequence's answer."""
    found: list[int] = batch.input_ids[slice(*batch.leaf_span(s))].tolist()
    return found


_CANARY = Needs(logprobs=True)


async def check_weights(run: ExaminedRun, findings: Findings) -> float:
    """Changes the embeddings, then the body, then both back; each time the engines are given the new weights.

    Returns:
        Seconds of a publication.
    """
    rollout, before, flipped = run.loop.rollout, await run.canaries(), list[ModelPart]()
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
    """Checks that a change of ``part`` moves every engine's canary, and brings it to the trainer's, but for ``allowed``
    nats.

    Raises:
        UserError: they differ by more than the run allows.
    """
    before = await run.canaries()
    num = await _flip(run, part)
    flipped += [part] if num else []
    difference = (await run.loop.rollout.publish(_version(run)))["agreement/canary_diff"]
    still = sum(not _apart([old], [new]) for old, new in _pairs(before, await run.canaries()))
    found = f"{still} of {len(before)} engines compute as before a change of {num} tensors ({part}), "
    return judged(
        name,
        f"{found}{difference:.2g} nats from the trainer",
        failure=not difference <= allowed or (still > 0 and num > 0),
    )


async def _check_sleep(run: ExaminedRun) -> Finding:
    """Checks that engines that give up their memory for others come back with the same weights."""
    name, rollout = "after_sleep", run.loop.rollout
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
    leases, step = run.loop.leases, _version(run)
    async with leases.turn("actor", "train", "flip_bits", step=step, writes="actor"):
        num = await run.roles.train_group("actor").call(TrainWorker.flip_bits, part)
    if HEADS in run.loop.rollout.sends:
        async with leases.turn("actor", "forward", "flip_bits", step=step, reads={"actor": None}, writes=HEADS):
            pass
    return num


def _version(run: ExaminedRun) -> int:
    """Returns the version of the actor's weights."""
    return run.loop.leases.arbiter.version("actor")


def _pairs(before: Sequence[RaggedBatch], after: Sequence[RaggedBatch]) -> list[tuple[RaggedBatch, RaggedBatch]]:
    """Pairs each engine's two answers.

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
    """Returns the most that answers to the canary prompt differ by, in nats; infinity where other tokens
    were chosen.
    """
    differences = [0.0]
    for old, new in _pairs(before, after):
        mask, key = old.token["loss_mask"], "rollout_logprobs"
        is_same = torch.equal(old.input_ids, new.input_ids)
        differences.append(float((old.token[key] - new.token[key])[mask].abs().max()) if is_same else math.inf)
    return max(differences)


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
        "log": recipe.log.model_copy(update={"trackers": (), "notify": None}),
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
        with findings.errors_of("stop_tokens"):
            findings.add(*await check_stops(run))
        with findings.errors_of("pad_by_mask"):
            findings.add(await check_pad_token(run))
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
                findings.add(check_duration(run, chunk.data, *seconds))

    async def _check_sample(self, run: ExaminedRun, chunk: Chunk) -> Learned | None:
        """Checks that read sampled answers, with the weights that sampled them; None where no update is possible."""
        findings, batch = self._findings, chunk.data
        findings.add(check_versions(run, batch), check_diversity(batch))
        findings.add(*await check_agreement(run, batch), await check_packing(run, batch))
        learned: Learned | None = None
        with findings.errors_of("reward_values"):
            known, scored = await rewards.score_known_answers(run), await rewards.score(run, chunk)
            findings.add(rewards.check_known_answers(run, known), *rewards.check_values(scored, known))
            findings.add(rewards.check_time(run, scored), await rewards.check_repeats(run, chunk, scored))
            with findings.errors_of("first_ratio"):
                learned = await rehearse(run, chunk, scored.columns)
        if learned is not None:
            learned = replace(learned, scoring_s=learned.scoring_s + scored.seconds)
            findings.add(*check_ends(run, batch, learned.experience.batch), check_signal(learned))
            findings.add(check_first_ratio(run, learned), check_gradient(learned))
            findings.add(check_reference(run, learned), check_critic(learned))
        return learned

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
        return chunk_of(0, 0, list(await asyncio.gather(*map(source, range(num)))))
