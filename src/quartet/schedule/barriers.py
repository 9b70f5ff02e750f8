"""Extra edges of a placement: a stage that waits until others have ended for the whole step.

The iteration states data dependencies only; by them a chunk's values need its groups and nothing else. A placement may
ask for more, `{"values": ["reward"]}`: no chunk's values before the rewards of all chunks. The wait is outside of any
lease, so that nothing is held meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
        self._after = after
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
            self._part_ended("generate", step)
            return chunk

        return collected

    def scorer(self, stage: str, scorer: Scorer) -> Scorer:
        """The scorer, with its waits where the stage has edges; several scorers may make up one stage."""
        return cast(Scorer, self._held(stage, scorer, self._num_chunks))

    def learner(self, stage: str, learner: StepLearner) -> StepLearner:
        return cast(StepLearner, self._held(stage, learner, 1))

    def _held(self, stage: str, inner: Any, num_parts: int) -> Any:
        if stage not in self._after and not any(stage in earlier for earlier in self._after.values()):
            return inner
        self._parts[stage] += num_parts
        return _Held(self, stage, inner)

    async def run(self, stage: str, step: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """A part of the stage, once everything that the stage comes after has ended in the step."""
        while self._missing(stage, step):
            await self._news.wait(lambda: f"{stage} of step {step} waits for {', '.join(self._missing(stage, step))}")
        result = await work()
        self._part_ended(stage, step)
        return result

    def _missing(self, stage: str, step: int) -> list[str]:
        """The stages that it waits for, with how many of their parts have ended."""
        ended, parts = self._ended[step], self._parts
        waits_for = [earlier for earlier in self._after.get(stage, ()) if ended[earlier] < parts[earlier]]
        return [f"{earlier} ({ended[earlier]} of {parts[earlier]})" for earlier in waits_for]

    def _part_ended(self, stage: str, step: int) -> None:
        self._ended[step][stage] += 1
        if self._ended[step][stage] >= self._parts[stage]:
            self._news.tell()

    def _begin(self, step: int) -> None:
        if step in self._ended:
            raise RuntimeError(f"step {step} begins twice")
        over = [earlier for earlier, ended in self._ended.items() if ended >= self._parts]
        for earlier in over[:-1]:
            del self._ended[earlier]
        self._ended[step] = Counter()


@dataclass(frozen=True)
class _Held:
    """A scorer or a learner, behind the edges of its stage."""

    barriers: Barriers
    stage: str
    inner: Any

    async def score(self, chunk: Chunk) -> Any:
        return await self.barriers.run(self.stage, chunk.step, lambda: self.inner.score(chunk))

    async def train(self, experience: Any, step: int) -> Any:
        return await self.barriers.run(self.stage, step, lambda: self.inner.train(experience, step))
