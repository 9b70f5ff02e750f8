"""Runs one episode: the policy acts, the environment answers, until it is done or may go no further.

An episode deals in text. Its tokens are kept where the policy is (``transcript.Transcript``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from quartet.batch.trajectory import TrajectoryEnd
from quartet.config.errors import UserError, describe_error, error_location, excerpt, parse_score
from quartet.envs.protocol import EnvironmentFactory, Item, Observation, StepResult
from quartet.envs.transcript import EpisodeLimits, ObservedState, StateError
from quartet.observe.global_state import RandomStateGuard
from quartet.text.examples import PromptText

_T = TypeVar("_T")


class EpisodeError(UserError):
    """An environment failed. Raised before any update is made with its rewards, so the run can be resumed."""


class ContextFull(Exception):
    """The state leaves no room for an action; it has so many tokens."""

    def __init__(self, held: int) -> None:
        self.held = held
        super().__init__(held)


class ActFunction(Protocol):
    """The policy, as an episode sees it."""

    async def __call__(self, turn: int, seen: ObservedState) -> str:
        """Returns the text of an action: a function of the episode and the turn.

        Raises:
            NoRoom: the state leaves no room for one.
            StateError: the state cannot be tokenised.
        """


@dataclass(frozen=True)
class FinishedEpisode:
    """How an episode ended.

    Attributes:
        episode: its name.
        end: why.
        score: sum over the turns that had a reward, NaN where none had.
        reward: of the last action, None where it has none or the policy knows it already.
        prompt: of an episode that failed what it was about.
    """

    episode: str
    end: TrajectoryEnd
    score: float
    reward: float | None
    prompt: PromptText | None = None


async def run_episode(
    name: str, make: EnvironmentFactory, item: Item, act: ActFunction, limits: EpisodeLimits
) -> FinishedEpisode:
    """Runs the episode ``name`` with a fresh environment, which is closed at the end.

    Raises:
        EpisodeError: the environment raised, took too long, or returned something that is not what it should be, or
            that cannot be tokenised; or its first state leaves no room for an action.
    """
    player = _EpisodeRun(item, act, limits, make.guard)
    environment = await player.call("__init__", partial(_made, make))
    try:
        ending = await player.play(name, environment)
    except BaseException:
        # The first error is the one to report.
        with contextlib.suppress(EpisodeError):
            await player.close(environment)
        raise
    await player.close(environment)
    return ending


async def _made(make: EnvironmentFactory) -> Any:
    return make()


class _OwnTime:
    """Ends a call by its own time: what it computes, and what it waits for while the event loop turns.

    The loop stands still while other code computes in it or waits for a training step. A call that was to wait for 10
    ms is not late for that, so each tick counts as what it was to take, however late it comes.
    """

    def __init__(self, seconds: float) -> None:
        self.limit = asyncio.timeout(None)
        self._left, self._tick_s = seconds, seconds / _TICKS
        self._next: asyncio.TimerHandle | None = None

    def spend(self, seconds: float) -> None:
        self._left -= seconds

    def tick(self, seconds: float) -> None:
        self.spend(seconds)
        loop = asyncio.get_running_loop()
        if self._left > 0:
            wait = min(self._left, self._tick_s)
            self._next = loop.call_later(wait, self.tick, wait)
        else:
            self.limit.reschedule(loop.time())

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()


_TICKS = 20


class _EpisodeRun:
    """One episode's calls of its environment, each with a time limit and an error that says where it was."""

    def __init__(self, item: Item, act: ActFunction, limits: EpisodeLimits, guard: RandomStateGuard) -> None:
        self._item = item
        self._act = act
        self._limits = limits
        self._guard = guard
        self._turn = 0
        self._action: str | None = None

    async def play(self, name: str, environment: Any) -> FinishedEpisode:
        first = _observation(await self.call("reset", lambda: environment.reset(self._item)))
        if first is None:
            raise self._error("reset", "returned no observation: text or messages are expected")
        rewards: list[float] = []
        seen = ObservedState(Observation(first.content, rewrites=True), begins=True)
        while True:
            try:
                self._action = await self._acted(seen)
            except ContextFull as error:
                if self._turn == 0:
                    raise self._no_room(error.held) from None
                return FinishedEpisode(name, TrajectoryEnd.CONTEXT, _total(rewards), None)
            result = self._checked(await self.call("step", partial(environment.step, self._action)))
            rewards += [] if result.reward is None else [result.reward]
            self._turn += 1
            if result.done or self._turn == self._limits.max_turns:
                end = TrajectoryEnd.DONE if result.done else TrajectoryEnd.MAX_TURNS
                return FinishedEpisode(name, end, _total(rewards), result.reward)
            observation = _observation(result.observation)
            if observation is None:
                raise self._error("step", f"returned {excerpt(result.observation)} as observation and is not done")
            seen = ObservedState(observation, result.reward)

    async def _acted(self, seen: ObservedState) -> str:
        """Returns the action on a state; one that cannot be tokenised is reported with its episode."""
        try:
            return await self._act(self._turn, seen)
        except StateError as error:
            raise EpisodeError(error.problem, found=f"{error.found}; {self._place()}", remedy=error.remedy) from None

    async def close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if close is not None:
            await self.call("close", close)

    async def call(self, method: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Returns what ``work``, a call of the environment's ``method``, gives within the time limit."""
        seconds = self._limits.timeout_s
        own = _OwnTime(seconds)
        try:
            async with own.limit:
                own.tick(0.0)
                with self._guard.held(own.spend):
                    begun = work()
                result: _T = await self._guard.driven(begun, own.spend)
                return result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, and not this episode: the error would be lost.
            raise self._error(method, "raised CancelledError") from error
        except (KeyboardInterrupt, GeneratorExit, UserError):
            raise  # Ctrl-C, the end of the event loop, or a run that was started inside.
        except BaseException as error:  # User code may raise anything; it is passed on with its cause.
            if isinstance(error, TimeoutError) and own.limit.expired():
                raise self._error(method, f"took longer than environment.timeout_s, {seconds:g} s") from error
            raise self._error(method, f"raised {describe_error(error)}", error_location(error)) from error
        finally:
            own.end()

    def _no_room(self, held: int) -> EpisodeError:
        return EpisodeError(
            "the first state of an environment leaves no room for an action",
            found=f"{held} tokens of at most {self._limits.max_sequence_tokens}; {self._place()}",
            remedy="shorten the state, or raise environment.max_tokens where the model's context allows it",
        )

    def _checked(self, result: Any) -> StepResult:
        if not isinstance(result, StepResult):
            raise self._error("step", f"returned {excerpt(result)}, not a StepResult")
        if result.reward is None:
            return result
        reward = parse_score(result.reward)
        if isinstance(reward, str):
            raise self._error("step", f"returned the reward {reward}, which is no finite number")
        return replace(result, reward=reward)

    def _error(self, method: str, what: str, where: str | None = None) -> EpisodeError:
        return EpisodeError(
            f"the environment's `{method}` {what}",
            found=self._place() + (f"; raised in {where}" if where is not None else ""),
            remedy="correct it, or set environment.on_error, and resume the run: it stopped before the update, nothing "
            "is lost",
        )

    def _place(self) -> str:
        row = f" ({self._item.prompt_id})" if self._item.prompt_id else ""
        after = f", action {excerpt(self._action)}" if self._action is not None else ""
        return f"episode of prompt {excerpt(self._item.prompt)}{row}, turn {self._turn + 1}{after}"


def _total(rewards: Sequence[float]) -> float:
    return sum(rewards) if rewards else math.nan


def _observation(value: Any) -> Observation | None:
    """Returns what an environment returned as an observation; None where it is none."""
    found = value if isinstance(value, Observation) else Observation(value)
    content: Any = found.content
    if isinstance(content, list):
        return found if all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in content) else None
    return found if isinstance(content, str) else None
