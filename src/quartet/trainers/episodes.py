"""Episodes as the source of a run's trajectories: played over the rollout engine, laid out for scoring and training.

A group is one prompt's episodes. Each is a trajectory of one sequence, or of several where its environment rewrote the
state; sequences whose first states begin alike share these tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from quartet.batch.columns import ColumnSet, join
from quartet.batch.prefixes import Segments
from quartet.batch.ragged import RaggedBatch
from quartet.config.environments import EnvironmentConfig
from quartet.data.datasets import PromptItem
from quartet.envs.episode import Episode, EpisodeEnd, EpisodeLimits, play_episode
from quartet.envs.protocol import EnvironmentFactory, Item
from quartet.envs.transcript import Action, EpisodeSequence
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import NO_VERSION, PromptGroup
from quartet.schedule.iteration import Chunk
from quartet.text.tokenizer import TextCodec
from quartet.trainers.advantages import REWARD_PREFIX, STEP_PREFIX
from quartet.trainers.evaluation import Answer, Completer, RewardScorer
from quartet.trainers.trajectories import Trajectories, num_emitted

SOURCE = "environment"
"""Name of the environment's own rewards among the sources of reward."""
_ENDED = ("stop", "stop_string")
_CUT_OFF = tuple(end.value for end in (EpisodeEnd.MAX_TURNS, EpisodeEnd.CONTEXT))
_T = TypeVar("_T")


# Playing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpisodeGroup:
    """All episodes of one prompt. ``index`` is the group's place in the stream, ``prompt`` the data set's item.

    ``rewards`` are the columns of the reward sources over the group's own batch, where they were needed before the
    group was accepted.
    """

    index: int
    prompt: PromptItem
    episodes: tuple[Episode, ...]
    rewards: tuple[ColumnSet, ...] = ()

    @property
    def first_version(self) -> int:
        """Of the oldest weights that a token was sampled with."""
        return min(sequence.versions[0] for episode in self.episodes for sequence in episode.sequences)


AnyGroup = PromptGroup | EpisodeGroup


@dataclass(frozen=True)
class GroupSource:
    """Where a run's groups come from, and how they become a chunk.

    Args:
        generate: ``index → group`` of the stream.
        collect: ``(step, index, groups) → chunk``.
    """

    generate: Callable[[int], Awaitable[AnyGroup]]
    collect: Callable[[int, int, Sequence[Any]], Chunk[RaggedBatch]]


class EpisodePlayer:
    """Plays episodes side by side, at most ``max_environments`` at a time.

    Args:
        make: a fresh environment.
        completer: generates each turn's action.
        limits: how far an episode may go.
    """

    def __init__(
        self,
        make: EnvironmentFactory,
        config: EnvironmentConfig,
        completer: Completer,
        codec: TextCodec,
        limits: EpisodeLimits,
        *,
        run_seed: int,
        on_played: Callable[[int], None] | None = None,
    ) -> None:
        self._make = make
        self._slots = asyncio.Semaphore(config.max_environments)
        self._completer = completer
        self._codec = codec
        self._limits = limits
        self._run_seed = run_seed
        self._on_played = on_played

    async def group(
        self, index: int, item: PromptItem, sampling: SamplingParams, num_episodes: int, *, draw: int | None = None
    ) -> EpisodeGroup:
        """The episodes of ``item``.

        Args:
            index: place in the stream.
            sampling: of one turn; its seed is not used.
            draw: what is sampled depends on it, the prompt's id, the episode and the turn; ``index`` when left out.
        """
        drawn = index if draw is None else draw
        played = [self._episode(f"{index}.{r}", drawn, item, r, sampling) for r in range(num_episodes)]
        return EpisodeGroup(index, item, tuple(await _together(played)))

    async def _episode(
        self, name: str, draw: int, item: PromptItem, response: int, sampling: SamplingParams
    ) -> Episode:

        async def generate(token_ids: tuple[int, ...], turn: int, max_new_tokens: int) -> Action:
            params = replace(
                sampling,
                max_new_tokens=min(sampling.max_new_tokens, max_new_tokens),
                seed=sample_seed(self._run_seed, draw, item.prompt_id, response, turn),
            )
            request = Request(f"{name}.{turn}", f"{name}.{turn}", token_ids, params)
            return _action((await self._completer.complete([request]))[0])

        seed = sample_seed(self._run_seed, draw, f"{SOURCE}\x1f{item.prompt_id}", 0)
        about = Item(item.prompt, item.columns, item.prompt_id, seed, response)
        async with self._slots:
            episode = await play_episode(self._make, about, generate, self._codec, self._limits)
        if self._on_played is not None:
            self._on_played(1)
        return episode


def _action(completion: Completion) -> Action:
    return Action(
        completion.token_ids,
        completion.logprobs,
        completion.versions,
        completion.finish_reason.value,
        completion.text_end,
    )


async def _together(works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order. When one fails the others are cancelled, and its error goes on when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# Layout --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One sequence of a chunk and where it belongs."""

    group: EpisodeGroup
    response: int
    part: int
    sequence: EpisodeSequence
    is_final: bool

    @property
    def episode(self) -> Episode:
        return self.group.episodes[self.response]

    @property
    def name(self) -> str:
        return f"{self.group.index}.{self.response}" + (f".{self.part}" if self.part else "")

    @property
    def finish_reason(self) -> str:
        """Of a trajectory's last sequence how the episode ended; of the others that the state was rewritten."""
        if not self.is_final:
            return "rewritten"
        return self.sequence.finish_reason if self.episode.end is EpisodeEnd.DONE else self.episode.end.value

    @property
    def reward(self) -> float:
        reward = self.episode.reward
        return math.nan if reward is None or not self.is_final else reward


def episode_chunk(step: int, index: int, groups: Sequence[EpisodeGroup]) -> Chunk[RaggedBatch]:
    """A chunk's ragged batch: one leaf per sequence, behind the segments of its first state.

    Token fields ``action_mask``, ``loss_mask``, ``observation_mask`` (bool: tokens of a leaf that the policy only
    read), ``rollout_logprobs``, ``policy_version`` (of the weights that sampled the token, -1 where none have) and
    ``step_reward/environment``; sequence fields ``group``, ``response`` (the trajectory in its group), ``part`` (the
    sequence in its trajectory), ``num_turns``, ``ended`` (the episode was done and its last action ended by itself),
    ``version`` (the first token's, which is the oldest) and ``reward/environment`` (on the last sequence, NaN
    elsewhere); objects ``prompt`` (whose text is what the last action answers), ``completion`` (text of the last
    action) and ``finish_reason``. Rewards that the groups carry are fields, too.
    """
    segments = Segments()
    rows: list[_Row] = []
    leaves: list[int] = []
    for group in groups:
        of_group = [
            _Row(group, r, k, sequence, k == len(episode.sequences) - 1)
            for r, episode in enumerate(group.episodes)
            for k, sequence in enumerate(episode.sequences)
        ]
        ends = segments.add_prompts(row.sequence.prompt_ids for row in of_group)
        leaves += [segments.add(row.sequence.token_ids, ends[row.sequence.prompt_ids]) for row in of_group]
        rows += of_group
    batch = RaggedBatch(
        input_ids=torch.tensor(segments.input_ids, dtype=torch.int64),
        segment_lengths=tuple(segments.lengths),
        parents=tuple(segments.parents),
        leaves=tuple(leaves),
        ids=tuple(row.name for row in rows),
    )
    batch = _with_columns(batch, rows)
    # Groups lie one after the other, so their columns do as well.
    batch = join(batch, *(ColumnSet.concat(columns) for columns in zip(*(g.rewards for g in groups), strict=True)))
    return Chunk(step, index, batch.num_tokens, batch)


def _with_columns(batch: RaggedBatch, rows: Sequence[_Row]) -> RaggedBatch:
    is_leaf = batch.sequence_index() >= 0
    actions, logprobs, rewards = (
        torch.zeros(batch.num_tokens, dtype=dtype) for dtype in (torch.bool, torch.float32, torch.float32)
    )
    # Leaves are stored in the order of the rows.
    actions[is_leaf] = torch.tensor([m for row in rows for m in row.sequence.action_mask])
    logprobs[is_leaf] = torch.tensor([p for row in rows for p in row.sequence.logprobs])
    rewards[is_leaf] = torch.tensor([r for row in rows for r in row.sequence.rewards])
    versions = torch.full((batch.num_tokens,), NO_VERSION)
    versions[is_leaf] = torch.tensor([v for row in rows for v in row.sequence.versions])
    ended = [row.is_final and row.finish_reason in _ENDED for row in rows]
    return (
        batch.with_token(
            action_mask=actions,
            loss_mask=actions,
            observation_mask=is_leaf & ~actions,
            rollout_logprobs=logprobs,
            policy_version=versions,
            **{STEP_PREFIX + SOURCE: rewards},
        )
        .with_sequence(
            group=torch.tensor([row.group.index for row in rows]),
            response=torch.tensor([row.response for row in rows]),
            part=torch.tensor([row.part for row in rows]),
            num_turns=torch.tensor([row.sequence.num_turns for row in rows]),
            ended=torch.tensor(ended),
            version=torch.tensor([row.sequence.versions[0] for row in rows]),
            **{REWARD_PREFIX + SOURCE: torch.tensor([row.reward for row in rows])},
        )
        .with_objects(
            prompt=[replace(row.group.prompt, prompt=row.sequence.state) for row in rows],
            completion=[row.sequence.completion for row in rows],
            finish_reason=[row.finish_reason for row in rows],
        )
    )


def episode_metrics(batch: RaggedBatch) -> dict[str, float]:
    """How the episodes of a step went; nothing where there are none."""
    if "observation_mask" not in batch.token:
        return {}
    num = len(Trajectories.of(batch))
    cut_off = sum(reason in _CUT_OFF for reason in batch.objects["finish_reason"])
    return {
        "episode/turns_mean": float(batch.sequence["num_turns"].sum()) / num,
        "episode/sequences_mean": len(batch) / num,
        "episode/observation_tokens": float(batch.token["observation_mask"].sum()) / num,
        "episode/done_frac": 1.0 - cut_off / num,
    }


# Scoring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinalScorer:
    """A reward source over whole trajectories: it sees the last sequence of each; NaN on the others."""

    inner: RewardScorer

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        batch = chunk.data
        final = Trajectories.of(batch).final_N.tolist()
        part = batch.select(final)
        found = await self.inner.score(replace(chunk, data=part, num_tokens=part.num_tokens))
        token: dict[str, torch.Tensor] = {}
        for name, values in found.token.items():
            token[name] = values.new_zeros(batch.num_tokens)
            for k, s in enumerate(final):
                token[name][slice(*batch.leaf_span(s))] = values[slice(*part.leaf_span(k))]
        sequence: dict[str, torch.Tensor] = {}
        for name, values in found.sequence.items():
            sequence[name] = values.new_full((len(batch),), math.nan)
            sequence[name][final] = values
        return ColumnSet(batch.ids, token, sequence)


async def answer_with_episodes(
    player: EpisodePlayer,
    items: Sequence[PromptItem],
    sampling: SamplingParams,
    scorers: Sequence[RewardScorer],
    *,
    step: int,
    samples: int = 1,
) -> list[Answer]:
    """``samples`` episodes of every prompt with all their scores, prompt after prompt; the text is the last action's.

    Args:
        step: the step that the spans of scoring belong to.
    """
    # Negative indices: no group of the stream has one.
    groups = await _together([player.group(-1 - i, item, sampling, samples, draw=-1) for i, item in enumerate(items)])
    chunk = episode_chunk(step, 0, groups)
    batch = join(chunk.data, *[await scorer.score(chunk) for scorer in scorers])
    trajectories = Trajectories.of(batch)
    lengths = num_emitted(batch, trajectories).tolist()
    rewards = {
        name.removeprefix(REWARD_PREFIX): values.tolist()
        for name, values in batch.sequence.items()
        if name.startswith(REWARD_PREFIX)
    }
    reasons = batch.objects["finish_reason"]
    return [
        Answer(
            groups[n // samples].prompt,
            batch.objects["completion"][s],
            # Cut off is cut off, by whichever limit.
            "length" if reasons[s] in _CUT_OFF else reasons[s],
            {name: values[s] for name, values in rewards.items()},
            n % samples,
            int(lengths[n]),
        )
        for n, s in enumerate(trajectories.final_N.tolist())
    ]
