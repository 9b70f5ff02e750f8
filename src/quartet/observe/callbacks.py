"""Python objects that are told of a run's steps, and may end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quartet.config.errors import UserError, describe_error
from quartet.config.run import CallbackConfig, Recipe
from quartet.config.targets import load_target
from quartet.observe.health import HealthFinding


@dataclass
class RunControl:
    """What a callback knows of its run, and changes about it.

    Attributes:
        recipe, path: of the run; ``path`` is its directory.
        should_stop: set to True, it lets the run end after the step under way, as it would after its last one: it is
            evaluated, saved and exported, and ``--resume`` goes on with the steps that are left.
    """

    recipe: Recipe
    path: Path
    should_stop: bool = False


class Callback:
    """Does nothing at each point of a run; a subclass overrides the points it needs.

    Calls come in the run's own process (with torchrun that of rank 0) between computations, and the run waits for them.
    An error ends the run as an error of its own would. Steps count from 1.

    Attributes:
        control: of the run, once a trainer has the callback.
    """

    control: RunControl

    def on_train_begin(self) -> None:
        """Is called when the directory is the run's own, and the first step is about to begin; also where a run is
        resumed.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Is called when ``step`` is trained; of an iterated run a round. ``metrics`` are not evaluated or
        logged yet.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Is called with held-out figures after ``step`` complete steps; 0: before the first."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Is called when a row was written to ``metrics.jsonl``, with the held-out figures where there are any."""

    def on_health(self, step: int, finding: HealthFinding) -> None:
        """Is called when a check of the run's health has found something for the first time, in the metrics of
        ``step``.
        """

    def on_save(self, step: int, path: Path) -> None:
        """Is called when the checkpoint of ``step`` is complete in ``path``. It is written in the background: ``step``
        may be over.
        """

    def on_train_end(self) -> None:
        """Is called when models and ``summary.json`` are written."""

    def on_exception(self, error: BaseException) -> None:
        """Is called when the run ends without having reached its end; ``Interrupted`` and ``KeyboardInterrupt`` are
        signals.
        """


class Callbacks:
    """All callbacks of a run, in order.

    Attributes:
        stopped_by: class of the one that asked for the run's end.
        saved: checkpoints that were completed, in another thread, since ``tell_saved``.
    """

    def __init__(self, callbacks: Sequence[Callback], control: RunControl) -> None:
        self._all, self.control = tuple(callbacks), control
        self.stopped_by: str | None = None
        self.saved: deque[tuple[int, Path]] = deque()
        self._has_begun = False
        for callback in self._all:
            callback.control = control

    def __call__(self, point: Callable[..., None], *values: Any) -> None:
        """Calls the method ``point`` of all: ``callbacks(Callback.on_log, step, metrics)``.

        Raises:
            UserError: one raised an error.
        """
        values = tuple(MappingProxyType(value) if isinstance(value, dict) else value for value in values)
        for callback in self._all:
            try:
                getattr(callback, point.__name__)(*values)
            except Exception as error:  # It is user code.
                raise UserError(
                    f"the callback {type(callback).__name__} failed in {point.__name__}",
                    found=describe_error(error),
                    remedy="correct it, or leave it out; --resume goes on from the last checkpoint",
                ) from error
            if self.control.should_stop and self.stopped_by is None:
                self.stopped_by = type(callback).__name__

    def begin(self) -> None:
        """Calls ``on_train_begin`` once in a run, however often workers are replaced."""
        if not self._has_begun:
            self._has_begun = True
            self(Callback.on_train_begin)

    def tell_saved(self) -> None:
        while self.saved:
            self(Callback.on_save, *self.saved.popleft())

    def fail(self, error: BaseException) -> None:
        """Calls ``on_exception``, where the run has begun; ``error``, on its way out, matters more than a callback's
        own.
        """
        if self._has_begun:
            with suppress(UserError):
                self(Callback.on_exception, error)


def build_callbacks(passed: Sequence[Callback], configs: Sequence[CallbackConfig]) -> list[Callback]:
    """Returns the callbacks passed from Python and those that the recipe names.

    Raises:
        UserError: a target cannot be loaded or made, or something is no callback.
    """
    found: list[Any] = list(passed) if isinstance(passed, Sequence) else [passed]
    for config in configs:
        made = load_target(config.target, "callback")
        try:
            found.append(made(**config.options))
        except Exception as error:  # It is user code.
            raise UserError(
                "a callback of the recipe cannot be made",
                found=f"{config.target}: {describe_error(error)}",
                remedy="correct it, or callbacks.options",
            ) from error
    for callback in found:
        if not isinstance(callback, Callback):
            raise UserError(
                "a callback is an object of a class derived from quartet.Callback",
                found=f"{callback!r:.100}",
                remedy="derive the class from it, and pass an object: callbacks=[MyCallback()]",
            )
    return found
