"""Extra edges of a placement: a stage that waits until others have ended for the whole step.

The iteration states data dependencies only; by them a chunk's values need its groups and nothing else. A placement may
ask for more, `{"values": ["reward"]}`: no chunk's values before the rewards of all chunks. The wait is outside of any
lease, so that nothing is held meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quartet.schedule.clock import Waiting
from quartet.schedule.iteration import Chunk, Learner, Scorer

Group = TypeVar("Group")
Data = TypeVar("Data")
Columns = TypeVar("Columns")
Experience = TypeVar("Experience")


class Barriers:
    """Counts what has ended in each step; parts of a coming one may end before the one under way has.

    Args:
        after: stage → stages that must have ended wholly before any part of it begins. Stages that nobody plays have
            no parts and hold nobody back.
        num_chunks: chunks of a step.
    """

    def __init__(self, after: Mapping[str, Sequence[str]], *, num_chunks: int) -> None:
        self._after = {stage: tuple(earlier) for stage, earlier in after.items()}
        self._num_chunks = num_chunks
        self._parts: Counter[str] = Counter()  # in every step
        self._ended: dict[int, Counter[str]] = {}  # by step
        self._waiting: list[tuple[int, str, Waiting[None]]] = []

    def collect(
        self, collect: Callable[[int, int, Sequence[Group]], Chunk[Data]]
    ) -> Callable[[int, int, Sequence[Group]], Chunk[Data]]:
        """The stage ``generate``: a chunk's groups are there when it is collected."""
        self._parts["generate"] += self._num_chunks

        def collected(step: int, index: int, groups: Sequence[Group]) -> Chunk[Data]:
            if index == 0:
                self._begin(step)
            chunk = collect(step, index, groups)
            self.part_ended("generate", step)
            return chunk

        return collected

    def scorer(self, stage: str, scorer: Scorer[Data, Columns]) -> Scorer[Data, Columns]:
        """The scorer, with its waits where the stage has edges; several scorers may make up one stage."""
        if not self._has_edges(stage):
            return scorer
        self._parts[stage] += self._num_chunks
        return _HeldScorer(self, stage, scorer)

    def learner(self, stage: str, learner: Learner[Experience]) -> Learner[Experience]:
        if not self._has_edges(stage):
            return learner
        self._parts[stage] += 1
        return _HeldLearner(self, stage, learner)

    def _has_edges(self, stage: str) -> bool:
        return stage in self._after or any(stage in earlier for earlier in self._after.values())

    async def wait(self, stage: str, step: int) -> None:
        """Until everything that ``stage`` comes after has ended in the step."""
        for earlier in self._after.get(stage, ()):
            if self._is_missing(earlier, step):
                waiting: Waiting[None] = Waiting(lambda: self._describe(stage, step))
                self._waiting.append((step, earlier, waiting))
                await waiting

    def part_ended(self, stage: str, step: int) -> None:
        self._ended[step][stage] += 1
        if self._is_missing(stage, step):
            return
        for of_step, earlier, waiting in self._waiting:
            if (of_step, earlier) == (step, stage) and not waiting.done():
                waiting.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]

    def _begin(self, step: int) -> None:
        if step in self._ended:
            raise RuntimeError(f"step {step} begins twice")
        done = [of for of in self._ended if not any(self._is_missing(stage, of) for stage in self._parts)]
        for of in done[:-1]:
            del self._ended[of]
        self._ended[step] = Counter()

    def _is_missing(self, stage: str, step: int) -> bool:
        return self._ended[step][stage] < self._parts[stage]

    def _describe(self, stage: str, step: int) -> str:
        missing = [
            f"{earlier} ({self._ended[step][earlier]} of {self._parts[earlier]})"
            for earlier in self._after[stage]
            if self._is_missing(earlier, step)
        ]
        return f"{stage} of step {step} waits for {', '.join(missing)}"


@dataclass(frozen=True)
class _HeldScorer(Generic[Data, Columns]):
    barriers: Barriers
    stage: str
    scorer: Scorer[Data, Columns]

    async def score(self, chunk: Chunk[Data]) -> Columns:
        await self.barriers.wait(self.stage, chunk.step)
        columns = await self.scorer.score(chunk)
        self.barriers.part_ended(self.stage, chunk.step)
        return columns


@dataclass(frozen=True)
class _HeldLearner(Generic[Experience]):
    barriers: Barriers
    stage: str
    learner: Learner[Experience]

    async def train(self, experience: Experience, step: int) -> Mapping[str, float]:
        await self.barriers.wait(self.stage, step)
        metrics = await self.learner.train(experience, step)
        self.barriers.part_ended(self.stage, step)
        return metrics
