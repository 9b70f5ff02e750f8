"""Episodes as the source of a run's trajectories: run over the rollout engine.

A group is one prompt's episodes. Each is a trajectory of one sequence, or of several where its environment rewrote the
state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from quartet.config.recipe import EnvironmentConfig
from quartet.data.datasets import PromptItem
from quartet.envs.episode import FinishedEpisode, NoRoom, run_episode
from quartet.envs.protocol import EnvironmentFactory, Item
from quartet.envs.transcript import SOURCE, EpisodeLimits, Seen
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import Group
from quartet.schedule.iteration import side_by_side
from quartet.schedule.request_store import TurnRequest
from quartet.schedule.rollout import Rollout


class EpisodeRunner:
    """Runs episodes side by side, at most ``max_environments`` at a time.

    Args:
        make: a fresh environment.
        policy: generates each turn's action, and keeps the episodes' tokens.
        limits: how far an episode may go.
    """

    def __init__(
        self,
        make: EnvironmentFactory,
        config: EnvironmentConfig,
        policy: Rollout,
        limits: EpisodeLimits,
        *,
        run_seed: int,
        on_episode_end: Callable[[int], None] | None = None,
    ) -> None:
        self._make = make
        self._slots = asyncio.Semaphore(config.max_environments)
        self._policy = policy
        self._limits = limits
        self._run_seed = run_seed
        self._on_episode_end = on_episode_end

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
        endings = await side_by_side([self._episode(index, drawn, item, r, sampling) for r in range(num_episodes)])
        return await self._policy.episodes(index, item, endings)

    async def _episode(
        self, index: int, draw: int, item: PromptItem, response: int, sampling: SamplingParams
    ) -> FinishedEpisode:
        name = f"{index}.{response}"

        async def act(turn: int, seen: Seen) -> str:
            params = replace(sampling, seed=sample_seed(self._run_seed, draw, item.prompt_id, response, turn))
            ended = await self._policy.act(index, TurnRequest(f"{name}.{turn}", name, seen, params, self._limits))
            if ended.text is None:
                raise NoRoom(ended.held or 0)
            return ended.text

        seed = sample_seed(self._run_seed, draw, f"{SOURCE}\x1f{item.prompt_id}", 0)
        about = Item(item.prompt, item.columns, item.prompt_id, seed, response)
        async with self._slots:
            ending = await run_episode(name, self._make, about, act, self._limits)
        if self._on_episode_end is not None:
            self._on_episode_end(1)
        return ending
