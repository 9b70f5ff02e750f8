"""Episodes as the source of a run's trajectories: played over the rollout engine.

A group is one prompt's episodes. Each is a trajectory of one sequence, or of several where its environment rewrote the
state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import CUT_OFF, Trajectory
from quartet.config.environments import EnvironmentConfig
from quartet.data.datasets import PromptItem
from quartet.envs.episode import EpisodeLimits, play_episode
from quartet.envs.protocol import EnvironmentFactory, Item
from quartet.envs.transcript import SOURCE, Action
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import Group
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import Completer
from quartet.trainers.trajectories import Trajectories

_T = TypeVar("_T")


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
    ) -> Group:
        """The episodes of ``item``.

        Args:
            index: place in the stream.
            sampling: of one turn; its seed is not used.
            draw: what is sampled depends on it, the prompt's id, the episode and the turn; ``index`` when left out.
        """
        drawn = index if draw is None else draw
        played = [self._episode(f"{index}.{r}", drawn, item, r, sampling) for r in range(num_episodes)]
        return Group(index, item, tuple(await together(played)))

    async def _episode(
        self, name: str, draw: int, item: PromptItem, response: int, sampling: SamplingParams
    ) -> Trajectory:

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
        completion.columns,
    )


async def together(works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order. When one fails the others are cancelled, and its error goes on when they have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def episode_metrics(batch: RaggedBatch) -> dict[str, float]:
    """How the episodes of a step went; nothing where there are none."""
    if "observation_mask" not in batch.token:
        return {}
    num = len(Trajectories.of(batch))
    cut_off = sum(reason in CUT_OFF for reason in batch.objects["finish_reason"])
    return {
        "episode/turns_mean": float(batch.sequence["num_turns"].sum()) / num,
        "episode/sequences_mean": len(batch) / num,
        "episode/observation_tokens": float(batch.token["observation_mask"].sum()) / num,
        "episode/done_frac": 1.0 - cut_off / num,
    }
