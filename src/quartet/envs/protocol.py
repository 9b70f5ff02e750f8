"""What an environment is, and what it exchanges with the policy.

::

    item ─► reset ─► observation ─► policy ─► action text ─► step ─► observation, reward, done
                          ▲                                               │
                          └───────────────── next turn ───────────────────┘

The *state* is what the policy reads before it acts: text, or messages that go through the chat template. An observation
adds to the state (old state, action, observation), or it *is* the new state, whatever stood there before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from quartet.config.errors import UserError
from quartet.config.plugins import load_object, plugin_entries
from quartet.config.recipe import EnvironmentConfig
from quartet.config.targets import load_target
from quartet.observe.global_state import RandomStateGuard
from quartet.text.examples import PromptText


@dataclass(frozen=True)
class Item:
    """One row of the data: what an episode is about.

    Attributes:
        prompt: text or messages.
        columns: the row's other columns.
        prompt_id: names the row, the same at every step of training.
        seed: for whatever an environment draws at random. A function of the run's seed, the row and the place in the
            stream, so that a resumed run has the same episodes; equal for the episodes of a group, which are compared
            with each other.
        episode: place of the episode in its group.
    """

    prompt: PromptText
    columns: Mapping[str, Any] = field(default_factory=dict)
    prompt_id: str = ""
    seed: int = 0
    episode: int = 0


@dataclass(frozen=True)
class Observation:
    """What the policy gets to read.

    Attributes:
        content: text, or messages where the state is messages.
        rewrites: the content is the whole new state. Otherwise it follows the old state and the action.
    """

    content: PromptText
    rewrites: bool = False


@dataclass(frozen=True)
class StepResult:
    """What came of an action.

    Attributes:
        observation: what follows; text or messages alone add to the state. None only where ``done``.
        reward: of this action; None where there is none to give.
        done: the episode is over.
    """

    observation: Observation | PromptText | None
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """One episode: a fresh object each, ``reset`` once, then ``step`` per action.

    ``async def close(self)``, where there is one, is called at the end of the episode however it ends.
    """

    async def reset(self, item: Item) -> Observation | PromptText:
        """Returns the first state."""

    async def step(self, action: str) -> StepResult:
        """Takes an action: the text the policy generated, without end-of-text and up to a stop string."""


@dataclass
class EpisodeFailures:
    """Counts the episodes that failed and did not stop the run."""

    num: int = 0
    first: UserError | None = None

    def add(self, error: UserError) -> None:
        self.num += 1
        self.first = self.first or error


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes the fresh object of an episode. Its code runs in this process, under ``guard``."""

    make: Callable[[], Environment]
    guard: RandomStateGuard = field(default_factory=lambda: RandomStateGuard("the environment"))
    failures: EpisodeFailures = field(default_factory=EpisodeFailures)

    def __call__(self) -> Environment:
        return self.make()

    def warnings(self) -> list[str]:
        """Tells which random numbers the environment draws, and which of its episodes failed."""
        num, first = self.failures.num, self.failures.first
        if first is None:
            return self.guard.warnings()
        told = f"the environment failed in {num} episodes (environment.on_error)"
        return [*self.guard.warnings(), f"{told}; the first because {first.problem}: {first.found}"]


def environment_factory(
    config: EnvironmentConfig, environment: Callable[..., Environment] | None = None
) -> EnvironmentFactory:
    """Returns what makes the fresh object of an episode.

    Args:
        environment: the class, where Python code passes it instead of ``config.type`` or ``config.target``.

    Raises:
        UserError: there is no such class, or it lacks an async method.
    """
    guard = RandomStateGuard("the environment")
    if environment is None:
        if config.type is None and config.target is None:
            raise UserError(
                "there is no environment",
                found="environment.target is missing",
                remedy="set environment.target or environment.type, or pass the class",
            )
        with guard.held():
            made = load_object(plugin_entries("environments")[config.type]) if config.type is not None else None
            environment = made or load_target(config.target or "", "environment")
    _check(environment)
    return EnvironmentFactory(partial(environment, **config.options), guard)


def _check(environment: Callable[..., Any]) -> None:
    """Checks what can be told of a class without making an object, which might start something."""
    if not isinstance(environment, type):
        return
    name = environment.__name__
    for method, argument in (("reset", "item"), ("step", "action")):
        value = getattr(environment, method, None)
        if not inspect.iscoroutinefunction(value):
            raise UserError(
                f"the environment {name!r} has no async method `{method}`",
                found="it is missing" if value is None else f"{name}.{method} is not async",
                remedy=f"write it as async def {method}(self, {argument})",
            )
