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
    """Counts what has ended in the step under way.

    Args:
        after: stage → stages that must have ended wholly before any part of it begins. Stages that nobody plays have
            no parts and hold nobody back.
        num_chunks: chunks of a step.
    """

    def __init__(self, after: Mapping[str, Sequence[str]], *, num_chunks: int) -> None:
        self._after = {stage: tuple(earlier) for stage, earlier in after.items()}
        self._num_chunks = num_chunks
        self._parts: Counter[str] = Counter()  # in every step
        self._ended: Counter[str] = Counter()  # in this one
        self._step = -1
        self._waiting: list[tuple[str, Waiting[None]]] = []

    def collect(
        self, collect: Callable[[int, int, Sequence[Group]], Chunk[Data]]
    ) -> Callable[[int, int, Sequence[Group]], Chunk[Data]]:
        """The stage ``generate``: a chunk's groups are there when it is collected."""
        self._parts["generate"] += self._num_chunks

        def collected(step: int, index: int, groups: Sequence[Group]) -> Chunk[Data]:
            if index == 0:
                self._begin(step)
            chunk = collect(step, index, groups)
            self._end("generate")
            return chunk

        return collected

    def scorer(self, stage: str, scorer: Scorer[Data, Columns]) -> Scorer[Data, Columns]:
        """The scorer, with its waits; several scorers may make up one stage."""
        self._parts[stage] += self._num_chunks
        return _HeldScorer(self, stage, scorer)

    def learner(self, stage: str, learner: Learner[Experience]) -> Learner[Experience]:
        self._parts[stage] += 1
        return _HeldLearner(self, stage, learner)

    async def wait(self, stage: str) -> None:
        """Until everything that ``stage`` comes after has ended in this step."""
        for earlier in self._after.get(stage, ()):
            if self._is_missing(earlier):
                waiting: Waiting[None] = Waiting(lambda: self._describe(stage))
                self._waiting.append((earlier, waiting))
                await waiting

    def part_ended(self, stage: str) -> None:
        self._end(stage)

    def _begin(self, step: int) -> None:
        if step == self._step:
            raise RuntimeError(f"step {step} begins twice")
        self._step = step
        self._ended.clear()
        self._waiting.clear()  # of a step that failed: nobody is there any more

    def _end(self, stage: str) -> None:
        self._ended[stage] += 1
        if self._is_missing(stage):
            return
        for earlier, waiting in self._waiting:
            if earlier == stage and not waiting.done():
                waiting.set_result(None)
        self._waiting = [entry for entry in self._waiting if entry[0] != stage]

    def _is_missing(self, stage: str) -> bool:
        return self._ended[stage] < self._parts[stage]

    def _describe(self, stage: str) -> str:
        missing = [
            f"{earlier} ({self._ended[earlier]} of {self._parts[earlier]})"
            for earlier in self._after[stage]
            if self._is_missing(earlier)
        ]
        return f"{stage} of step {self._step} waits for {', '.join(missing)}"


@dataclass(frozen=True)
class _HeldScorer(Generic[Data, Columns]):
    barriers: Barriers
    stage: str
    scorer: Scorer[Data, Columns]

    async def score(self, chunk: Chunk[Data]) -> Columns:
        await self.barriers.wait(self.stage)
        columns = await self.scorer.score(chunk)
        self.barriers.part_ended(self.stage)
        return columns


@dataclass(frozen=True)
class _HeldLearner(Generic[Experience]):
    barriers: Barriers
    stage: str
    learner: Learner[Experience]

    async def train(self, experience: Experience, step: int) -> Mapping[str, float]:
        await self.barriers.wait(self.stage)
        metrics = await self.learner.train(experience, step)
        self.barriers.part_ended(self.stage)
        return metrics
