"""Batches whose token ids stay in the workers that made them: the same for a worker here and on Ray."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch import ColumnSet, RaggedBatch, join_columns
from quartet.cluster import (
    RANK_ZERO,
    SPLIT,
    ResourcePool,
    WorkerError,
    WorkerGroup,
    dispatch,
)
from quartet.config.common import ShardingConfig
from quartet.observe.health import straggler_metrics
from quartet.observe.spans import SpanRecorder
from quartet.schedule.role_group import ColocatedWorker, RemoteGroup

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
TINY = {"cpus": 0.01}


def batch_of(step: int, num_groups: int = 5, length: int = 40) -> RaggedBatch:
    """Groups of three responses of growing lengths; ids and columns say where a token stands."""
    prompts = [[step * 1000 + g] * (g + 1) for g in range(num_groups)]
    responses = [[[step * 1000 + 100 * g + r] * (length + 7 * g + r) for r in range(3)] for g in range(num_groups)]
    ids = [f"{step}.{g}.{r}" for g in range(num_groups) for r in range(3)]
    batch = RaggedBatch.from_groups(prompts, responses, ids)
    batch = batch.with_token(logprobs=-torch.arange(float(batch.num_tokens)))
    return batch.with_sequence(score=torch.arange(float(len(batch)))).with_objects(text=[f"text {i}" for i in ids])


class Rollout:
    def make(self, step: int, *, num_groups: int = 5, length: int = 40) -> RaggedBatch:
        if step < 0:
            raise RuntimeError(f"there is no step {step}")
        return batch_of(step, num_groups, length)


class Model:
    """Reads token ids."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @dispatch(SPLIT, blocking=False)
    def forward(self, batch: RaggedBatch, factor: float = 2.0) -> ColumnSet:
        return ColumnSet(
            batch.ids, {"values": batch.input_ids * factor}, {"part": torch.full((len(batch),), len(batch))}
        )

    def sums(self, batches: Any, *, also: RaggedBatch | None = None) -> list[int]:
        given = [*batches, also] if also is not None else batches
        assert all(batch.has_ids for batch in given)
        return [int(batch.input_ids.sum()) for batch in given]

    @dispatch(RANK_ZERO)
    def tokens(self, batch: RaggedBatch, delay_s: float = 0.0) -> Tensor:
        time.sleep(delay_s)
        return batch.input_ids

    def rest(self, *seconds: float) -> int:
        """As long as is said last, or for this rank."""
        time.sleep(seconds[min(self.rank, len(seconds) - 1)])
        return 0


class Process(ColocatedWorker):
    def __init__(self) -> None:
        self.roles = {"rollout": Rollout(), "model": Model(self.rank)}


@pytest.fixture(scope="module")
def backend(ray_cluster: Any) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no module that a worker could import
    return ray_cluster


@pytest.fixture(scope="module")
def processes(backend: Any) -> WorkerGroup:
    return WorkerGroup(ResourcePool([2], **TINY), Process, name="two")


@pytest.fixture(scope="module")
def rollout(processes: WorkerGroup) -> RemoteGroup[Rollout]:
    return RemoteGroup(processes, "rollout", Rollout, rank=1)


@pytest.fixture(scope="module")
def model(processes: WorkerGroup) -> RemoteGroup[Model]:
    """Of both workers."""
    return RemoteGroup(processes, "model", Model)


@pytest.fixture
def made_here(monkeypatch: pytest.MonkeyPatch) -> list[RaggedBatch]:
    """Every batch that is made in this process."""
    made: list[RaggedBatch] = []
    check = RaggedBatch._validate

    def noted(batch: RaggedBatch) -> None:
        made.append(batch)
        check(batch)

    monkeypatch.setattr(RaggedBatch, "_validate", noted)
    return made


def tokens_of(model: RemoteGroup[Model], batch: RaggedBatch) -> Tensor:
    return asyncio.run(RemoteGroup(model.group, "model", Model, rank=0).call(Model.tokens, batch))


@pytest.mark.parametrize("length", [40, 4000], ids=["small", "large"])
def test_an_outline_has_everything_but_the_ids(
    rollout: RemoteGroup[Rollout], model: RemoteGroup[Model], length: int
) -> None:
    outline = asyncio.run(rollout.leave(Rollout.make, 1, num_groups=4, length=length))
    full = batch_of(1, 4, length)
    assert not outline.has_ids and bool((outline.input_ids == -1).all())
    assert (outline.ids, outline.segment_lengths, outline.parents) == (full.ids, full.segment_lengths, full.parents)
    assert torch.equal(outline.token["logprobs"], full.token["logprobs"])
    assert torch.equal(outline.sequence["score"], full.sequence["score"])
    assert dict(outline.objects) == dict(full.objects)
    assert torch.equal(tokens_of(model, outline), full.input_ids)


def test_what_is_left_is_split_over_ranks_selected_and_joined(
    backend: Any, rollout: RemoteGroup[Rollout], model: RemoteGroup[Model], made_here: list[RaggedBatch]
) -> None:
    """The driver joins two steps, drops sequences and has the rest scored by two workers, without ever holding ids."""

    async def run() -> tuple[RaggedBatch, ColumnSet]:
        outlines = [await rollout.leave(Rollout.make, step) for step in (1, 2)]
        experience = RaggedBatch.concat([outlines[0].select([7, 3, 2, 11]), outlines[1]])
        return experience, await model.call(Model.forward, experience, 3.0)

    experience, columns = asyncio.run(run())
    assert made_here and not any(batch.has_ids for batch in made_here)
    full = RaggedBatch.concat([batch_of(1).select([7, 3, 2, 11]), batch_of(2)])
    assert torch.equal(columns.token["values"], full.input_ids * 3.0)
    assert columns.sequence["part"].max() < len(full), "each worker had a part"
    assert join_columns(experience, columns).elsewhere == experience.elsewhere and len(experience.elsewhere) == 2


def test_seconds_of_each_worker_are_noted_in_the_span_around_the_call(backend: Any, model: RemoteGroup[Model]) -> None:
    recorder = SpanRecorder()

    async def run() -> None:
        with recorder.span("rest", step=0):
            await model.call(Model.rest, 0.05, 2.0)
        with recorder.span("tokens", step=0):
            await RemoteGroup(model.group, "model", Model, rank=1).call(Model.rest, 0.0)

    asyncio.run(run())
    rest, tokens = (span.worker_s for span in recorder.spans())
    assert set(rest) == {"model 0", "model 1"} and set(tokens) == {"model 1"}
    assert rest["model 1"] >= 2.0 > rest["model 0"] >= 0.05
    assert straggler_metrics(recorder.spans())["time/straggler_rest"] > 1.2


def test_the_last_outline_frees_the_ids(backend: Any, rollout: RemoteGroup[Rollout]) -> None:
    def held() -> set[Any]:
        counts: dict[Any, Any] = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
        return set(counts)

    before = held()
    outline = asyncio.run(rollout.leave(Rollout.make, 1, num_groups=9, length=5000))
    name = outline.elsewhere[0].ref.hex().encode()
    part = outline.select([0])
    del outline
    gc.collect()
    assert held() - before == {name}, "a part of it is still there; the manifest, with its columns, is not"
    del part
    gc.collect()
    deadline = time.monotonic() + 10
    while held() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not held() - before, "neither the ids nor the manifest"


def test_ids_that_were_never_made_fail_what_reads_them(processes: WorkerGroup, model: RemoteGroup[Model]) -> None:
    failed = processes.call(ColocatedWorker.leave_role, "rollout", "make", -1, mode=RANK_ZERO, blocking=False)
    outline = batch_of(1).outline([failed.reference()])
    for method in (Model.forward, Model.tokens):
        with pytest.raises(WorkerError, match="there is no step -1") as caught:
            asyncio.run(model.call(method, outline))
        assert str(caught.value).count("Traceback (most recent call last)") == 1


def test_workers_that_compute_a_part_together_get_the_same_and_one_answers(
    processes: WorkerGroup, rollout: RemoteGroup[Rollout], model: RemoteGroup[Model]
) -> None:
    """A role that is cut by ``tensor`` beside one that is not, in the same processes."""
    peers = RemoteGroup(processes, "model", Model, sharding=ShardingConfig(tensor=2))
    for batch in (batch_of(1), asyncio.run(rollout.leave(Rollout.make, 1))):
        found, apart = (asyncio.run(group.call(Model.forward, batch)) for group in (peers, model))
        assert found.ids == apart.ids
        assert torch.equal(found.token["values"], apart.token["values"])
        assert found.sequence["part"].unique().tolist() == [15], "both have computed the whole"
        assert int(apart.sequence["part"].max()) < 15
