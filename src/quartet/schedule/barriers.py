"""Extra edges of a placement: a stage that waits until others have ended for the whole step.

The iteration states data dependencies only; by them a chunk's values need its groups and nothing else. A placement may
ask for more, `{"values": ["reward"]}`: no chunk's values before the rewards of all chunks. The wait is outside of any
lease, so that nothing is held meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from quartet.batch.columns import ColumnSet
from quartet.schedule.clock import News
from quartet.schedule.groups import Chunk, Group
from quartet.schedule.iteration import Collect, Scorer, StepLearner


class Barriers:
    """Counts what has ended in each step; parts of a coming one may end before the one under way has.

    Args:
        after: stage → stages that must have ended wholly before any part of it begins. Stages that a run does not have
            have no parts and hold nothing back.
        num_chunks: chunks of a step.
    """

    def __init__(self, after: Mapping[str, Sequence[str]], *, num_chunks: int) -> None:
        self._after = {stage: tuple(earlier) for stage, earlier in after.items()}
        self._num_chunks = num_chunks
        self._parts: Counter[str] = Counter()  # in every step
        self._ended: dict[int, Counter[str]] = {}  # by step
        self._news = News()

    def collect(self, collect: Collect) -> Collect:
        """The stage ``generate``: a chunk's groups are there when it is collected."""
        self._parts["generate"] += self._num_chunks

        def collected(step: int, index: int, groups: Sequence[Group]) -> Chunk:
            if index == 0:
                self._begin(step)
            chunk = collect(step, index, groups)
            self.part_ended("generate", step)
            return chunk

        return collected

    def scorer(self, stage: str, scorer: Scorer) -> Scorer:
        """The scorer, with its waits where the stage has edges; several scorers may make up one stage."""
        if not self._has_edges(stage):
            return scorer
        self._parts[stage] += self._num_chunks
        return _Held(self, stage, scorer)

    def learner(self, stage: str, learner: StepLearner) -> StepLearner:
        if not self._has_edges(stage):
            return learner
        self._parts[stage] += 1
        return _Held(self, stage, learner)

    def _has_edges(self, stage: str) -> bool:
        return stage in self._after or any(stage in earlier for earlier in self._after.values())

    async def wait(self, stage: str, step: int) -> None:
        """Until everything that ``stage`` comes after has ended in the step."""
        while any(self._is_missing(earlier, step) for earlier in self._after.get(stage, ())):
            await self._news.wait(lambda: self._describe(stage, step))

    def part_ended(self, stage: str, step: int) -> None:
        self._ended[step][stage] += 1
        if not self._is_missing(stage, step):
            self._news.tell()

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
class _Held:
    """A scorer or a learner, behind the edges of its stage."""

    barriers: Barriers
    stage: str
    inner: Any

    async def score(self, chunk: Chunk) -> ColumnSet:
        return cast(ColumnSet, await self._in_order(chunk.step, partial(self.inner.score, chunk)))

    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        return cast(Mapping[str, float], await self._in_order(step, partial(self.inner.train, experience, step)))

    async def _in_order(self, step: int, work: Callable[[], Awaitable[Any]]) -> Any:
        await self.barriers.wait(self.stage, step)
        result = await work()
        self.barriers.part_ended(self.stage, step)
        return result
