"""Answers to prompts, several per prompt where asked for, and their scores by source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.trajectory import CUT_OFF, REWARD_PREFIX, Trajectories, num_emitted
from quartet.config.common import SamplingConfig
from quartet.data.datasets import PromptData, PromptItem
from quartet.rewards.combine import LEFT_OUT_PREFIX, combine
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import Group, answered, chunk_of, group_batch
from quartet.schedule.iteration import score_all
from quartet.schedule.sampled import PromptRequest, Sample, completion_text
from quartet.text.tokenizer import TextCodec
from quartet.trainers.finished import Finished

CHUNK = 64
"""Answers that are scored together."""


class Completer(Protocol):
    async def complete(self, requests: Sequence[Request]) -> list[Completion]: ...


class RewardScorer(Protocol):
    async def score(self, chunk: Any) -> ColumnSet: ...


@dataclass(frozen=True)
class Answer:
    """One sample of a prompt and its scores by reward source (NaN: does not apply). ``length`` is in tokens."""

    item: PromptItem
    text: str
    finish_reason: str
    rewards: dict[str, float]
    sample: int = 0
    length: int = 0


def sampling_params(config: SamplingConfig, codec: TextCodec, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=tuple(sorted(codec.eos_ids)),
        stop_strings=config.stop_strings,
        seed=seed,
    )


async def answer_prompts(
    completer: Completer,
    prompts: PromptData,
    codec: TextCodec,
    sampling: SamplingConfig,
    scorers: Sequence[RewardScorer],
    *,
    seed: int,
    step: int,
    samples: int = 1,
    finished: Finished | None = None,
) -> list[Answer]:
    """``samples`` answers to every prompt with the scores of all ``scorers``, prompt after prompt.

    A sample depends on ``seed``, its prompt's id and its place alone, so two models get the same random numbers.

    Args:
        step: the step that the spans of scoring belong to.
        finished: what is there already, and where scores are kept.
    """
    asked = prompt_requests(prompts, codec, sampling, seed=seed, samples=samples)
    requests = [
        Request(sample.request_id, request.group, ids, sample.sampling)
        for item, request in asked
        for ids in (tuple(codec.encode_prompt(item.prompt)),)
        for sample in request.samples
    ]
    known = dict(finished.completions) if finished is not None else {}
    missing = [request for request in requests if request.request_id not in known]
    made = await completer.complete(missing) if missing else []
    known.update({request.request_id: completion for request, completion in zip(missing, made, strict=True)})
    groups = [
        answers_of(codec, i, item, [known[request_id] for request_id in request.request_ids])
        for i, (item, request) in enumerate(asked)
    ]
    return await score_groups(groups, scorers, step=step, finished=finished)


def prompt_requests(
    prompts: PromptData, codec: TextCodec, sampling: SamplingConfig, *, seed: int, samples: int
) -> list[tuple[PromptItem, PromptRequest]]:
    """What is asked for each prompt: a sample depends on ``seed``, its prompt's id and its place alone."""
    params = sampling_params(sampling, codec, 0)

    def sample(i: int, r: int, item: PromptItem) -> Sample:
        return Sample(_name(i, r), replace(params, seed=sample_seed(seed, -1, item.prompt_id, r)))

    return [
        (item, PromptRequest(f"eval.{i}", item.prompt, tuple(sample(i, r, item) for r in range(samples))))
        for i, item in enumerate(prompts)
    ]


def answers_of(codec: TextCodec, index: int, item: PromptItem, completions: Sequence[Completion]) -> Group:
    """Completions of one prompt as trajectories of one turn, with their texts."""
    ids = tuple(codec.encode_prompt(item.prompt))
    made = [answered(ids, one, completion_text(codec, ids, one)) for one in completions]
    return Group.of(index, item, group_batch(index, made))


async def score_groups(
    groups: Sequence[Group], scorers: Sequence[RewardScorer], *, step: int, finished: Finished | None = None
) -> list[Answer]:
    """Every trajectory as an answer with the scores of all ``scorers``, prompt after prompt; of several turns the last
    action is the text.

    Args:
        finished: samples that it has scores of are not scored again; those of the others are kept there.
    """
    rewards: dict[tuple[int, int], dict[str, float]] = {}
    num_answers = [len(Trajectories.of(group.batch)) for group in groups]
    per_chunk = max(1, CHUNK // max(1, max(num_answers, default=1)))
    for number, start in enumerate(range(0, len(groups), per_chunk)):
        places = range(start, min(start + per_chunk, len(groups)))
        members = [(i, r) for i in places for r in range(num_answers[i])]
        if finished is not None:
            rewards |= {m: finished.rewards[_name(*m)] for m in members if _name(*m) in finished.rewards}
            members = [member for member in members if member not in rewards]
        if members:
            found = await _scored(groups, members, scorers, step=step, number=number)
            rewards |= {member: scores for member, (scores, _) in found.items()}
            for member, (scores, is_whole) in found.items():
                if finished is not None and is_whole:
                    finished.keep_rewards(_name(*member), scores)
    return [answer for i, group in enumerate(groups) for answer in _answers(i, group, rewards)]


def _answers(i: int, group: Group, rewards: Mapping[tuple[int, int], dict[str, float]]) -> Iterator[Answer]:
    batch, trajectories = group.batch, Trajectories.of(group.batch)
    lengths = num_emitted(batch, trajectories).tolist()
    for r, (last, length) in enumerate(zip(trajectories.final_N.tolist(), lengths, strict=True)):
        reason = batch.objects["finish_reason"][last]
        # Cut off is cut off, by whichever limit.
        reason = "length" if reason in CUT_OFF else reason
        yield Answer(group.prompt, batch.objects["completion"][last], reason, rewards[i, r], r, int(length))


async def _scored(
    groups: Sequence[Group],
    members: Sequence[tuple[int, int]],
    scorers: Sequence[RewardScorer],
    *,
    step: int,
    number: int,
) -> dict[tuple[int, int], tuple[dict[str, float], bool]]:
    """Scores by source of some samples, as (place of the prompt, sample); and whether no source left the sample out."""
    picked = [_only(groups[i], [r for j, r in members if j == i]) for i in dict.fromkeys(i for i, _ in members)]
    chunk = chunk_of(step, number, picked)
    batch = join(chunk.data, *await score_all(scorers, chunk))
    final_N = Trajectories.of(batch).final_N
    values = {name: column[final_N].tolist() for name, column in batch.sequence.items()}
    scores = {n.removeprefix(REWARD_PREFIX): found for n, found in values.items() if n.startswith(REWARD_PREFIX)}
    left_out = [found for name, found in values.items() if name.startswith(LEFT_OUT_PREFIX)]
    return {
        member: ({name: float(found[k]) for name, found in scores.items()}, not any(found[k] for found in left_out))
        for k, member in enumerate(members)
    }


def _only(group: Group, responses: Sequence[int]) -> Group:
    """The group with some of its trajectories."""
    wanted = torch.isin(group.batch.sequence["response"], torch.tensor(responses))
    return replace(group, batch=group.batch.select(wanted.nonzero().squeeze(1).tolist()))


def _name(place: int, sample: int) -> str:
    """Of a sample, in requests and files."""
    return f"eval.{place}.{sample}"


def as_completion(codec: TextCodec, item: PromptItem, text: str, finish_reason: str) -> Completion:
    """A completion for an answer of which only the text is known, to be scored, never to be trained on.

    Its token ids are those the text has after its prompt; end-of-text stands behind it only where it ended by itself.
    """
    _, ids = codec.encode_completion(item.prompt, text)
    reason = FinishReason(finish_reason)
    if reason is not FinishReason.STOP and len(ids) > 1:
        ids = ids[:-1]
    return Completion("stored", "stored", tuple(ids), (0.0,) * len(ids), (0,) * len(ids), reason)


def weighted_scores(rewards: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> list[float]:
    """Each answer's weighted sum of the sources that apply, under their gates, as in training; NaN where none does."""
    if not weights or not rewards:
        return [math.nan] * len(rewards)
    by_source = {name: torch.tensor([found.get(name, math.nan) for found in rewards]) for name in weights}
    total, applies = combine(by_source, weights)
    return torch.where(applies, total, math.nan).tolist()


def by_prompt(answers: Sequence[Answer]) -> list[list[Answer]]:
    """The samples of each prompt, in order."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.item.prompt_id, []).append(answer)
    return list(found.values())
