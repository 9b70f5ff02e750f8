"""A model's answers to prompts, several per prompt where asked for, and their scores by source.

::

    prompt_requests ──► completions, or episodes ──► groups ──► score_groups ──► answers with scores

``quartet eval`` and the iterated reward model generate with an ``EvaluationModel``, which has the process to itself; an
RL run with its own rollout (``PeriodicEvaluation``); ``quartet generate`` answers without scores (``generate``).
What answers are worth is measured in ``evaluation_metrics.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.ragged import join
from quartet.batch.trajectory import CUT_OFF, REWARD_PREFIX, Trajectories, TrajectoryEnd, num_emitted
from quartet.config.common import DataConfig, ModelConfig, SamplingConfig, TrainConfig
from quartet.config.engine_types import EngineConfig
from quartet.config.engines import NativeEngineConfig, is_served
from quartet.config.reward_types import RewardConfig
from quartet.data.datasets import PromptData, PromptItem
from quartet.models.directories import load_warnings
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.progress import ProgressBar
from quartet.observe.spans import SpanRecorder
from quartet.rewards.source import LEFT_OUT_PREFIX
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams, StepEngine
from quartet.rollout.sampler import sample_seed
from quartet.schedule.groups import Group, answered, chunk_of, group_batch
from quartet.schedule.iteration import Chunk, Scorer, score_all
from quartet.schedule.leases import LeaseContext, local_arbiter
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.rollout_worker import PromptRequest, SampleRequest, completion_text
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.trainers.devices import META, FrozenModels
from quartet.trainers.engines import has_folder, step_engine
from quartet.trainers.evaluation_files import Answer, EvaluationCache, matched
from quartet.trainers.event_loop import run_async
from quartet.trainers.input_sources import (
    context_length,
    cut_short,
    prompt_data,
    resolve_model,
    resolve_tokenizer,
    vocabulary_size,
)
from quartet.trainers.reward_roles import encode_answer
from quartet.trainers.reward_sources import (
    Rewards,
    RewardSources,
    fit_to_data,
    reward_functions,
    reward_models,
)

_NATIVE = NativeEngineConfig()
CHUNK = 64
"""Answers that are scored together."""


# What is asked -------------------------------------------------------------------------------------------


def sampling_params(config: SamplingConfig, codec: TextCodec) -> SamplingParams:
    """What the recipe says about every sample; end-of-text ends each, and each gets a seed of its own."""
    return SamplingParams(**config.model_dump(), stop_token_ids=tuple(sorted(codec.eos_ids)))


def prompt_request(
    name: str, item: PromptItem, params: SamplingParams, *, seed: int, draw: int, samples: int
) -> PromptRequest:
    """The request for ``samples`` responses to a prompt. A response's random numbers depend on ``seed``, ``draw``, the
    prompt's id and the response's place alone, so two models get the same ones."""
    seeds = [sample_seed(seed, draw, item.prompt_id, r) for r in range(samples)]
    requests = [SampleRequest(f"{name}.{r}", replace(params, seed=one)) for r, one in enumerate(seeds)]
    return PromptRequest(name, item.prompt, tuple(requests))


def prompt_requests(
    prompts: PromptData, codec: TextCodec, sampling: SamplingConfig, *, seed: int, samples: int
) -> list[tuple[PromptItem, PromptRequest]]:
    """What an evaluation asks for each prompt."""
    params = sampling_params(sampling, codec)
    return [
        (item, prompt_request(f"eval.{i}", item, params, seed=seed, draw=-1, samples=samples))
        for i, item in enumerate(prompts)
    ]


def _name(place: int, sample: int) -> str:
    """Of a sample, in requests and files."""
    return f"eval.{place}.{sample}"


# Scores --------------------------------------------------------------------------------------------------


async def score_groups(
    groups: Sequence[Group], scorers: Sequence[Scorer], *, step: int, cache: EvaluationCache | None = None
) -> list[Answer]:
    """Every trajectory as an answer with the scores of all ``scorers``, prompt after prompt; of several turns the last
    action is the text.

    Args:
        step: the step that the spans of scoring belong to.
        cache: samples that it has scores of are not scored again; those of the others are kept there.
    """
    rewards = dict(cache.rewards) if cache is not None else {}
    num_answers = [len(Trajectories.of(group.batch)) for group in groups]
    per_chunk = max(1, CHUNK // max(1, max(num_answers, default=1)))
    for number, start in enumerate(range(0, len(groups), per_chunk)):
        places = range(start, min(start + per_chunk, len(groups)))
        missing = {i: [r for r in range(num_answers[i]) if _name(i, r) not in rewards] for i in places}
        picked = []
        for i, samples in missing.items():
            if samples:
                batch = groups[i].batch
                wanted = torch.isin(batch.sequence["response"], torch.tensor(samples)).nonzero().squeeze(1)
                picked.append(replace(groups[i], batch=batch.select(wanted.tolist())))
        if not picked:
            continue
        names = [_name(i, r) for i, samples in missing.items() for r in samples]
        scored = await _scored(chunk_of(step, number, picked), scorers)
        for name, (scores, is_left_out) in zip(names, scored, strict=True):
            rewards[name] = scores
            if cache is not None and not is_left_out:
                cache.keep_rewards(name, scores)
    return [answer for i, group in enumerate(groups) for answer in _answers(i, group, rewards)]


async def _scored(chunk: Chunk, scorers: Sequence[Scorer]) -> list[tuple[dict[str, float], bool]]:
    """Scores of each trajectory by source, and whether a source has left it out."""
    batch = join(chunk.data, *await score_all(scorers, chunk))
    final_N = Trajectories.of(batch).final_N
    columns = {name: column[final_N].tolist() for name, column in batch.sequence.items()}
    scores = {name.removeprefix(REWARD_PREFIX): c for name, c in columns.items() if name.startswith(REWARD_PREFIX)}
    left_out = [column for name, column in columns.items() if name.startswith(LEFT_OUT_PREFIX)]
    return [
        ({name: float(column[n]) for name, column in scores.items()}, any(column[n] for column in left_out))
        for n in range(len(final_N))
    ]


def _answers(place: int, group: Group, rewards: dict[str, dict[str, float]]) -> Iterator[Answer]:
    batch, item, trajectories = group.batch, group.prompt, Trajectories.of(group.batch)
    lengths = num_emitted(batch, trajectories).tolist()
    for r, (last, length) in enumerate(zip(trajectories.final_N.tolist(), lengths, strict=True)):
        reason = batch.objects["finish_reason"][last]
        # Cut off is cut off, by whichever limit.
        reason = "length" if reason in CUT_OFF else reason
        text = batch.objects["completion"][last]
        scores = rewards[_name(place, r)]
        if reason == TrajectoryEnd.FAILED:
            scores = dict.fromkeys(scores, math.nan)
        yield Answer(item.prompt_id, r, item.prompt, text, reason, int(length), scores)


# Plain generation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """One completion: its text (without end-of-text or stop string), why it ended, and the raw completion."""

    text: str
    finish_reason: str
    completion: Completion


def generate(
    packed: PackedCausalLM,
    codec: TextCodec,
    prompts: Sequence[PromptText],
    sampling: SamplingParams,
    *,
    num_responses: int = 1,
    seed: int = 0,
    max_running: int = 64,
    engine: StepEngine | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[list[Generated]]:
    """Completions of every prompt, ``num_responses`` each, in order.

    Args:
        sampling: applies to all; every response gets its own seed, derived from ``seed``, prompt place and place.
        engine: what generates; None: the native engine, with ``max_running``.
        on_done: called with the number of completions finished by each engine step.
    """
    engine = engine or NativeEngine(packed, max_running=max_running, decode=codec.decode_completion)
    stops = tuple(sorted({*sampling.stop_token_ids, *codec.eos_ids}))
    encoded = [tuple(codec.encode_prompt(prompt)) for prompt in prompts]
    requests = [
        Request(f"{p}.{r}", str(p), ids, replace(sampling, stop_token_ids=stops, seed=sample_seed(seed, 0, p, r)))
        for p, ids in enumerate(encoded)
        for r in range(num_responses)
    ]

    def report(completions: Sequence[Completion]) -> None:
        if on_done is not None:
            on_done(len(completions))

    found = iter(run_to_end(engine, requests, report))
    return [
        [Generated(completion_text(codec, ids, c), c.finish_reason.value, c) for c in islice(found, num_responses)]
        for ids in encoded
    ]


def run_to_end(
    engine: StepEngine,
    requests: Sequence[Request],
    on_done: Callable[[Sequence[Completion]], None] | None = None,
) -> list[Completion]:
    """Completions of the requests, in their order, by an engine that does nothing else meanwhile.

    Args:
        on_done: called with the completions of each engine step that finished any.
    """
    engine.submit(requests)
    found: dict[str, Completion] = {}
    while engine.has_work:
        finished = engine.step()
        found.update({completion.request_id: completion for completion in finished})
        if finished and on_done is not None:
            on_done(finished)
    return [found[request.request_id] for request in requests]


# A model alone -------------------------------------------------------------------------------------------


def answers_of(
    codec: TextCodec, index: int, item: PromptItem, completions: Sequence[Completion], texts: Sequence[str] = ()
) -> Group:
    """Completions of one prompt as trajectories of one turn, with their texts; those given where they are known."""
    ids = tuple(codec.encode_prompt(item.prompt))
    texts = texts or [completion_text(codec, ids, one) for one in completions]
    made = [answered(ids, one, text) for one, text in zip(completions, texts, strict=True)]
    return Group.of(index, item, group_batch(index, made))


def as_completion(codec: TextCodec, answer: Answer) -> Completion:
    """A completion for an answer of which only the text is known, to be scored, never to be trained on.

    Its token ids are those the text has after its prompt; end-of-text stands behind it only where it ended by itself.
    """
    reason = FinishReason(answer.finish_reason)
    _, ids = encode_answer(codec, answer.prompt, answer.completion, ended=reason is FinishReason.STOP)
    return Completion("stored", "stored", tuple(ids), (0.0,) * len(ids), (0,) * len(ids), reason)


class EvaluationModel:
    """A model that answers prompts with the process to itself, and the rewards that score its answers.

    They are what the recipe's parts name, or the objects passed in their place; ``close`` gives all of it back.

    Args:
        frozen: where the models go, and in which precision.
        engine: what is to answer; one that reads the weights itself leaves the model here without contents.

    Raises:
        UserError: model, tokenizer, data and rewards do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig | None,
        data: DataConfig | None,
        reward_configs: Sequence[RewardConfig],
        *,
        frozen: FrozenModels,
        engine: EngineConfig = _NATIVE,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rewards: Rewards = (),
        prompts: Sequence[Any] | None = None,
    ) -> None:
        tokenizer = resolve_tokenizer(config, tokenizer)
        is_apart = model is None and is_served(engine) and (engine.has_own_weights or has_folder(config))
        causal = resolve_model(config, model, partial(load_causal_lm, empty=is_apart), "model")
        check_vocabulary(tokenizer, vocabulary_size(causal))
        self.codec = TextCodec.of(tokenizer, causal.generation_config)
        self.prompts = prompt_data(data, prompts, self.codec, context_length(causal), "data", check_all=True)
        functions = reward_functions(reward_configs, rewards)
        fit_to_data(functions, self.prompts, self.codec)
        models = reward_models(reward_configs, rewards, self.codec, TrainConfig(), frozen)
        self.rewards = RewardSources(models, functions)
        placed = replace(frozen, device=META) if is_apart else frozen
        self.packed = placed.causal(causal, is_user_object=model is not None)
        self._config, self._engine = config, engine
        self._device = frozen.device if is_apart else self.packed.device

    def close(self) -> None:
        """Gives the models back their own attention and closes the rewards."""
        for model in (self.packed, *(role.model for role in self.rewards.models)):
            model.release()
        self.rewards.close()

    def warnings(self) -> list[str]:
        """Rows left out or converted, what is changed about the model, and samples that rewards left out, in words."""
        found = [*self.prompts.remarks, *self.packed.warnings]
        found += [warning for role in self.rewards.models for warning in load_warnings(role.model.model)]
        return found + self.rewards.warnings()

    def cut_short(self, sampling: SamplingConfig, key: str) -> list[str]:
        """What is to be said where ``key``'s answers end at the model's context."""
        lengths = self.prompts.lengths[:, 0].tolist()
        return cut_short(lengths, sampling.max_new_tokens, context_length(self.packed.model), key)

    def answers(
        self,
        sampling: SamplingConfig,
        samples: int,
        recorder: SpanRecorder,
        bar: ProgressBar,
        *,
        seed: int,
        cache: EvaluationCache | None = None,
    ) -> list[Answer]:
        """``samples`` answers to every prompt, scored. ``bar`` is told how many are generated.

        Args:
            cache: what an evaluation before this one has; this one's work is kept there.
        """
        asked = prompt_requests(self.prompts, self.codec, sampling, seed=seed, samples=samples)
        known = dict(cache.completions) if cache is not None else {}
        bar.advance(len(known))
        missing = []
        for item, request in asked:
            ids = tuple(self.codec.encode_prompt(item.prompt))
            samples_left = [sample for sample in request.samples if sample.request_id not in known]
            missing += [Request(one.request_id, request.group, ids, one.sampling) for one in samples_left]

        def keep(completions: Sequence[Completion]) -> None:
            known.update({one.request_id: one for one in completions})
            if cache is not None:
                cache.keep_completions(completions)
            bar.advance(len(completions))

        if missing:
            with step_engine(self._engine, self.packed, self.codec, self._config, self._device) as engine:
                run_to_end(engine, missing, keep)
        groups = [
            answers_of(self.codec, i, item, [known[name] for name in request.request_ids])
            for i, (item, request) in enumerate(asked)
        ]
        return run_async(score_groups(groups, self._scorers(recorder), step=0, cache=cache))

    def score_stored(
        self, stored: Sequence[Answer], recorder: SpanRecorder, cache: EvaluationCache | None = None
    ) -> list[Answer]:
        """Answers of an earlier evaluation to the same prompts, scored by these rewards."""
        by_prompt_id = matched(stored, self.prompts.items)
        groups: list[Group] = []
        for item in self.prompts:
            if item.prompt_id in by_prompt_id:
                answers = sorted(by_prompt_id[item.prompt_id], key=lambda answer: answer.sample)
                # As long as what was sampled; the text is the stored one.
                completions = [as_completion(self.codec, answer) for answer in answers]
                texts = [answer.completion for answer in answers]
                groups.append(answers_of(self.codec, len(groups), item, completions, texts))
        return run_async(score_groups(groups, self._scorers(recorder), step=0, cache=cache))

    def _scorers(self, recorder: SpanRecorder) -> Sequence[Scorer]:
        workers = {role.name: role.worker() for role in self.rewards.models}
        arbiter = local_arbiter({name: worker.sizes() for name, worker in workers.items()}, version=0)
        groups = {name: LocalGroup(worker) for name, worker in workers.items()}
        return self.rewards.scorers(LeaseContext(arbiter, recorder), groups)
