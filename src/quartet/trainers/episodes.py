"""Episodes as the source of a run's trajectories: run over the rollout engine.

A group is one prompt's episodes. Each is a trajectory of one sequence, or of several where its environment rewrote the
state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from quartet.batch.trajectory import TrajectoryEnd
from quartet.config.errors import UserError
from quartet.config.recipe import EnvironmentConfig
from quartet.data.datasets import PromptItem
from quartet.envs.episode import Act, EpisodeError, FinishedEpisode, NoRoom, run_episode
from quartet.envs.protocol import EnvironmentFactory, Item
from quartet.envs.transcript import SOURCE, EpisodeLimits, Seen
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import Group
from quartet.schedule.iteration import side_by_side
from quartet.schedule.request_store import TurnRequest
from quartet.schedule.rollout import Rollout

_PAUSES_S = (1.0, 5.0)
"""Before an episode is played again."""
_HOPELESS = 8
"""So many groups that fail as a whole before an episode is played to its end stop the run; a bad row is one group."""


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
        self._make, self._on_error = make, config.on_error
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
        failures = self._make.failures
        is_played = any(ending.end is not TrajectoryEnd.FAILED for ending in endings)
        failures.has_played |= is_played
        failures.num_groups += not is_played
        if failures.num_groups >= _HOPELESS and not failures.has_played:
            # As with a source of reward: what has never worked is no hiccup.
            raise UserError(
                "the environment has not played a single episode to its end",
                found=str(failures.first),
                remedy="correct it and resume the run: no update was made with it",
            )
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
            ending = await self._played(name, about, act)
        if self._on_episode_end is not None:
            self._on_episode_end(1)
        return ending

    async def _played(self, name: str, about: Item, act: Act) -> FinishedEpisode:
        """The episode, under the rule for environments that fail."""
        for pause_s in (*(_PAUSES_S if self._on_error == "retry" else ()), None):
            try:
                return await run_episode(name, self._make, about, act, self._limits)
            except EpisodeError as error:
                if self._on_error == "stop" or (self._on_error == "retry" and pause_s is None):
                    raise
                self._make.failures.add(about.prompt_id, error)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return FinishedEpisode(name, TrajectoryEnd.FAILED, math.nan, None, about.prompt)
