"""Plays one episode: the policy acts, the environment answers, until it is done or may go no further."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from quartet.batch.trajectory import Trajectory, TrajectoryEnd
from quartet.config.errors import UserError
from quartet.config.foreign import described, excerpt, raised_at
from quartet.config.scores import as_score
from quartet.envs.protocol import EnvironmentFactory, Item, Observation, StepResult
from quartet.envs.transcript import SOURCE, Action, Transcript
from quartet.observe.global_state import GlobalStateGuard
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec

_T = TypeVar("_T")


class EpisodeError(UserError):
    """An environment failed. Raised before any update is made with its rewards, so the run can be resumed."""


class Generate(Protocol):
    """An engine, as an episode sees it."""

    async def __call__(self, token_ids: tuple[int, ...], turn: int, max_new_tokens: int) -> Action:
        """An action after ``token_ids``, of at most ``max_new_tokens``: a function of the episode and the turn."""


@dataclass(frozen=True)
class EpisodeLimits:
    """How far an episode may go.

    Attributes:
        max_turns: actions.
        max_sequence_tokens: tokens of a sequence, its prompt included.
        max_tokens: tokens of all sequences together; None for no limit.
        timeout_s: seconds that one call of the environment may take.
    """

    max_turns: int
    max_sequence_tokens: int
    max_tokens: int | None = None
    timeout_s: float = 60.0


async def play_episode(
    make: EnvironmentFactory, item: Item, generate: Generate, codec: TextCodec, limits: EpisodeLimits
) -> Trajectory:
    """One episode with a fresh environment, which is closed at the end. Its score is the sum over the turns that had a
    reward, NaN where none had.

    Raises:
        EpisodeError: the environment raised, took too long, or returned something that is not what it should be, or
            that cannot be tokenised.
        UserError: its first state leaves no room for an action.
    """
    player = _Player(item, generate, codec, limits, make.guard)
    environment = await player.call("__init__", partial(_made, make))
    try:
        episode = await player.play(environment)
    except BaseException:
        # The first error is the one to report.
        with contextlib.suppress(EpisodeError):
            await player.close(environment)
        raise
    await player.close(environment)
    return episode


async def _made(make: EnvironmentFactory) -> Any:
    return make()


class _Player:
    """One episode's calls of its environment, each with a time limit and an error that says where it was."""

    def __init__(
        self, item: Item, generate: Generate, codec: TextCodec, limits: EpisodeLimits, guard: GlobalStateGuard
    ) -> None:
        self._item = item
        self._generate = generate
        self._codec = codec
        self._limits = limits
        self._guard = guard
        self._turn = 0
        self._action: str | None = None

    async def play(self, environment: Any) -> Trajectory:
        first = _observation(await self.call("reset", lambda: environment.reset(self._item)))
        if first is None:
            raise self._error("reset", "returned no observation: text or messages are expected")
        with self._placed():
            transcript = Transcript(self._codec, first.content)
        if self._room(transcript) < 1:
            held, limit = len(transcript.token_ids), self._limits.max_sequence_tokens
            raise UserError(
                "the first state of an environment leaves no room for an action",
                found=f"{held} tokens of at most {limit}; {self._place()}",
                remedy="shorten the state, or raise environment.max_tokens where the model's context allows it",
            )
        rewards: list[float] = []
        end = TrajectoryEnd.MAX_TURNS
        while True:
            room = self._room(transcript)
            if room < 1:
                end = TrajectoryEnd.CONTEXT
                break
            action = await self._generate(transcript.token_ids, self._turn, room)
            text = transcript.act(action)
            self._action = text
            result = self._checked(await self.call("step", partial(environment.step, text)))
            if result.reward is not None:
                rewards.append(result.reward)
                transcript.earn(rewards[-1])
            self._turn += 1
            if result.done:
                end = TrajectoryEnd.DONE
                break
            if self._turn == self._limits.max_turns:
                break
            observation = _observation(result.observation)
            if observation is None:
                raise self._error("step", f"returned {excerpt(result.observation)} as observation and is not done")
            with self._placed():
                transcript.observe(observation)
        return Trajectory(transcript.sequences(), end, {SOURCE: sum(rewards) if rewards else math.nan})

    async def close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if close is not None:
            await self.call("close", close)

    async def call(self, method: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """What the environment's ``method`` returns, within the time limit. What it changes about this process is put
        back.
        """
        seconds = self._limits.timeout_s
        try:
            async with asyncio.timeout(seconds) as limit:
                with self._guard.held():
                    begun = work()
                result: _T = await self._guard.driven(begun)
                return result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, and not this episode: nobody would ever hear of it.
            raise self._error(method, "raised CancelledError") from error
        except (KeyboardInterrupt, GeneratorExit, UserError):
            raise  # Ctrl-C, the end of the event loop, or a change that cannot be put back.
        except BaseException as error:  # User code may raise anything; it is passed on with its cause.
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._error(method, f"took longer than environment.timeout_s, {seconds:g} s") from error
            raise self._error(method, f"raised {described(error)}", raised_at(error)) from error

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """A state that cannot be tokenised is reported with its episode."""
        try:
            yield
        except UserError as error:
            raise EpisodeError(error.problem, found=f"{error.found}; {self._place()}", remedy=error.remedy) from None

    def _room(self, transcript: Transcript) -> int:
        """Tokens that the next action may have."""
        held, limits = len(transcript.token_ids), self._limits
        room = limits.max_sequence_tokens - held
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens - transcript.num_closed_tokens - held)
        return room

    def _checked(self, result: Any) -> StepResult:
        if not isinstance(result, StepResult):
            raise self._error("step", f"returned {excerpt(result)}, not a StepResult")
        if result.reward is None:
            return result
        reward = as_score(result.reward)
        if isinstance(reward, str):
            raise self._error("step", f"returned the reward {reward}, which is no finite number")
        return replace(result, reward=reward)

    def _error(self, method: str, what: str, where: str | None = None) -> EpisodeError:
        return EpisodeError(
            f"the environment's `{method}` {what}",
            found=self._place() + (f"; raised in {where}" if where is not None else ""),
            remedy="correct it and resume the run: it stopped before the update, nothing is lost",
        )

    def _place(self) -> str:
        row = f" ({self._item.prompt_id})" if self._item.prompt_id else ""
        after = f", action {excerpt(self._action)}" if self._action is not None else ""
        return f"episode of prompt {excerpt(self._item.prompt)}{row}, turn {self._turn + 1}{after}"


def _observation(value: Any) -> Observation | None:
    """What an environment returned as an observation; None where it is none."""
    if isinstance(value, Observation):
        value, rewrites = value.content, value.rewrites
    else:
        rewrites = False
    if isinstance(value, str):
        return Observation(value, rewrites)
    if isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        messages: PromptText = value
        return Observation(messages, rewrites)
    return None
