"""What an iteration costs: seconds of every stage, bytes of every role. The numbers a planner puts in place of models.

Seconds are those on the pool where a role stands; nothing here knows how they change with more devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from quartet.config.placement import HEADS
from quartet.schedule.leases import LeaseMode


@dataclass(frozen=True)
class Cost:
    """Seconds of one call: ``fixed_s + each_s · number``, of groups in a pass, of running requests in a decode step."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def seconds(self, number: int) -> float:
        return self.fixed_s + self.each_s * number

    def times(self, factor: float) -> Cost:
        return Cost(self.fixed_s * factor, self.each_s * factor)


@dataclass(frozen=True)
class StageCost:
    """A scoring pass (one call per chunk) or all updates of a role (one call per step, ``train_<role>``).

    Of the role ``heads``, which learns from as many positions in every step, only ``fixed_s`` counts.

    ``reads_own`` marks a scoring pass of a trained role: it needs the weights of its own step.
    """

    stage: str
    role: str
    cost: Cost
    reads_own: bool = False


@dataclass(frozen=True)
class GenerationCost:
    """One decode step gives every running request a token.

    Args:
        step: of a decode step, by the requests that run.
        tokens: ``(group index, response) → tokens`` of that answer, at least 1.
        max_running: requests that decode together; further ones wait in the engine.
    """

    step: Cost
    tokens: Callable[[int, int], int] = lambda index, response: 1
    responses: int = 1
    steps_per_lease: int = 1
    max_running: int = 1_000_000_000


def _as_planned(stage: str, number: int) -> float:
    return 1.0


@dataclass(frozen=True)
class CostModel:
    """All of an iteration.

    Args:
        scoring, learning: in the order in which they ask for their leases.
        publish_s: handing new weights to the engine; comparing both with the canary takes no more time.
        resident_bytes: role → mode → bytes on its pool; also says which modes a role has.
        move_bytes_per_s: role → how fast its parts move in or out; those of other roles take no time.
        vary: ``(stage, number) → factor`` on the seconds of that stage's call of this number, counted from 0. Beside
            those of ``scoring`` and ``learning`` the stages are ``generate``, ``publish`` and ``canary``.
    """

    generation: GenerationCost
    scoring: tuple[StageCost, ...]
    learning: tuple[StageCost, ...]
    publish_s: float
    resident_bytes: Mapping[str, Mapping[LeaseMode, int]] = field(default_factory=dict)
    move_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    vary: Callable[[str, int], float] = _as_planned

    def sizes(self) -> dict[str, dict[LeaseMode, int]]:
        """Bytes of every role in every mode that this iteration uses; 0 where nothing is said."""
        modes: list[tuple[str, LeaseMode]] = [
            ("rollout", "generate"),
            ("actor", "forward"),
        ]
        modes += [(stage.role, "forward") for stage in self.scoring]
        modes += [(stage.role, "train") for stage in self.learning if stage.role != HEADS]  # works with the actor's
        found: dict[str, dict[LeaseMode, int]] = {}
        for role, mode in modes:
            found.setdefault(role, {})[mode] = self.resident_bytes.get(role, {}).get(mode, 0)
        return found

    def times(self, factor: float) -> CostModel:
        """The same iteration on another clock: all seconds times ``factor``."""

        def slower(stage: StageCost) -> StageCost:
            return replace(stage, cost=stage.cost.times(factor))

        return replace(
            self,
            generation=replace(self.generation, step=self.generation.step.times(factor)),
            scoring=tuple(slower(stage) for stage in self.scoring),
            learning=tuple(slower(stage) for stage in self.learning),
            publish_s=self.publish_s * factor,
            move_bytes_per_s={role: speed / factor for role, speed in self.move_bytes_per_s.items()},
        )
