"""Role handles of the local back end: every role in this process, computing one at a time under leases.

Each method waits for its lease, computes without awaiting anything, and records a span. Generation gives its lease back
every few decode steps, so scoring of finished chunks runs between them, in an order given by step counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.packed import PackedCausalLM, PackedModel
from quartet.rollout.protocol import (
    Completion,
    FinishReason,
    GenerationError,
    Request,
    RolloutEngine,
    SamplingParams,
)
from quartet.schedule.iteration import Chunk
from quartet.schedule.leases import Arbiter, Mode, PoolSpec, RoleSpec
from quartet.schedule.placement import states_of
from quartet.schedule.worker import Worker as Worker
from quartet.train.budget import TokenBudget
from quartet.train.engine import Needs, TrainEngine, forward_only

POOL = "local"


def model_bytes(model: PackedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.model.parameters())


def trained_bytes(model: PackedModel) -> int:
    """Of the parameters that learn: all of them, or adapters."""
    return sum(p.numel() * p.element_size() for p in model.model.parameters() if p.requires_grad)


def role_spec(name: str, models: Sequence[PackedModel], modes: Iterable[Mode]) -> RoleSpec:
    """What the role keeps resident: parameters; for training also gradients and two moments of those that learn."""
    size = sum(model_bytes(model) for model in models)
    states = 3 * sum(trained_bytes(model) for model in models)
    return RoleSpec(name, POOL, {mode: size + states if mode == "train" else size for mode in modes})


def local_arbiter(specs: Sequence[RoleSpec], *, version: int) -> Arbiter:
    """One pool with one slot and no byte limit; every trained role and the engine's copy is a state."""
    return Arbiter([PoolSpec(POOL, slots=1)], specs, versions=dict.fromkeys(states_of(specs), version))


# Generation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptGroup:
    """All responses to one prompt. ``index`` is the group's place in the stream; ``prompt`` is the data set's item.

    ``greedy`` is the response that only serves as a baseline, where the method has one. ``rewards`` are the columns of
    the reward sources over the group's own batch, where they were needed before the group was accepted.
    """

    index: int
    prompt: Any
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    greedy: Completion | None = None
    rewards: tuple[ColumnSet, ...] = ()


@dataclass(frozen=True)
class CanaryProbe:
    """A fixed prompt whose log-probabilities engine and trainer must agree on after every weight update."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    tolerance: float


class LocalRollout:
    """Drives an in-process engine for the group stream.

    Args:
        requests: ``(stream index) → (prompt item, prompt ids, requests)``; the same index gives the same requests.
            Rollouts that are trained on are sampled, so a greedy request among them is the group's baseline.
        steps_per_lease: decode steps per lease.
        source: ``() → (name, tensor)`` pairs for an engine with its own weights, or None for one that shares them.
    """

    def __init__(
        self,
        worker: Worker,
        engine: RolloutEngine,
        requests: Callable[[int], tuple[Any, tuple[int, ...], Sequence[Request]]],
        *,
        steps_per_lease: int,
        version: int,
        canary: CanaryProbe,
        trainer: TrainEngine[PackedCausalLM],
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.version = version
        self._worker = worker
        self._requests = requests
        self._steps_per_lease = steps_per_lease
        self._canary = canary
        self._trainer = trainer
        self._source = source
        self._on_finished = on_finished
        self._span: tuple[str, int] | None = None
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, index: int) -> PromptGroup:
        """The group at ``index`` of the stream."""
        prompt, prompt_ids, requests = self._requests(index)
        completions = await self.complete(requests)
        pairs = list(zip(requests, completions, strict=True))
        sampled = tuple(completion for request, completion in pairs if not request.sampling.greedy)
        greedy = next((completion for request, completion in pairs if request.sampling.greedy), None)
        return PromptGroup(index, prompt, prompt_ids, sampled, greedy)

    @contextlib.contextmanager
    def spans_of(self, name: str, step: int) -> Iterator[None]:
        """What is generated meanwhile counts under another name and step: an evaluation, with no group in flight."""
        self._span = (name, step)
        try:
            yield
        finally:
            self._span = None

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of the requests, in their order."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self.engine.submit(requests)
        self._waiting.update({r.request_id: f for r, f in zip(requests, futures, strict=True)})
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
            self._pump.add_done_callback(self._pump_ended)
        try:
            # Not one after the other: what failed behind the first failure would be reported as never retrieved.
            return await asyncio.gather(*futures)
        except BaseException:
            abandoned = [r.request_id for r in requests if self._waiting.pop(r.request_id, None) is not None]
            self.engine.cancel(abandoned)
            raise

    async def _run(self) -> None:
        while self._waiting:
            name, step = self._span or ("generate", self.version)
            try:
                await self._worker.run(
                    "rollout",
                    "generate",
                    name,
                    self._burst,
                    step=step,
                    reads=self._reads(),
                    tokens_of=lambda sampled: sampled,
                )
            except GenerationError as error:
                self._fail(error, error.request_ids)
            await asyncio.sleep(0)

    def _reads(self) -> dict[str, int]:
        """The engine's weights; where they are the actor's own tensors, nobody may train those meanwhile."""
        shared = {"actor": self.version} if self._source is None else {}
        return {"rollout": self.version, **shared}

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        """Whatever ended the pump early reaches everyone who waits for it."""
        error = asyncio.CancelledError() if pump.cancelled() else pump.exception()
        if error is not None:
            self._fail(error, list(self._waiting))

    def _burst(self) -> int:
        """A few engine steps; returns the tokens they sampled."""
        finished, before = 0, self.engine.stats().generated_tokens
        for _ in range(self._steps_per_lease):
            if not self.engine.has_work:
                break
            completions = self.engine.step()
            finished += len(completions)
            for completion in completions:
                self._deliver(completion)
        if self._on_finished is not None:
            self._on_finished(finished)
        return self.engine.stats().generated_tokens - before

    def _deliver(self, completion: Completion) -> None:
        future = self._waiting.pop(completion.request_id, None)
        if future is not None and not future.done():
            future.set_result(completion)

    def _fail(self, error: BaseException, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_exception(error)

    async def publish(self, version: int) -> dict[str, float]:
        """Hands the actor's weights of ``version`` to the engine, then asks the canary.

        Raises:
            UserError: the engine's log-probabilities are not the trainer's.
        """

        def update() -> Completion:
            self.engine.update_weights(self._source() if self._source is not None else None, version)
            return self._sing()

        heard = await self._worker.run(
            "rollout",
            "generate",
            "publish",
            update,
            step=version - 1,
            nbytes=sum(t.nbytes for _, t in self._trainer.weights()) if self._source is not None else 0,
            reads={"actor": version},
            writes="rollout",
        )
        self.version = version
        expected = await self._worker.run(
            "actor",
            "forward",
            "canary",
            lambda: self._expected(heard),
            step=version - 1,
            reads={"actor": version},
        )
        difference = float((torch.tensor(heard.logprobs, dtype=torch.float64) - expected.double()).abs().max())
        if not difference <= self._canary.tolerance:
            raise UserError(
                f"after weight update {version} the rollout engine computes with other weights than the trainer",
                found=f"log-probabilities of the canary prompt differ by {difference:.3g}, "
                f"more than {self._canary.tolerance:.3g}",
                remedy="if both are meant to differ by that much (another precision), raise canary_tolerance; "
                "otherwise the engine kept old or other weights",
            )
        return {"agreement/canary_diff": difference, "policy_version": float(version)}

    def _sing(self) -> Completion:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self._canary.num_tokens)
        self.engine.submit([Request("canary", "canary", self._canary.prompt_ids, sampling)])
        heard: Completion | None = None
        while heard is None:
            for completion in self.engine.step():
                if completion.request_id == "canary":
                    heard = completion
                else:
                    self._deliver(completion)
        return heard

    def _expected(self, heard: Completion) -> Tensor:
        batch = RaggedBatch.from_groups([self._canary.prompt_ids], [[heard.token_ids]], ["canary"])
        mask = batch.sequence_index() >= 0
        columns = self._trainer.forward(batch.with_token(loss_mask=mask), Needs(logprobs=True))
        return columns.token["logprobs"][mask]


def chunk_of(
    step: int, index: int, groups: Sequence[PromptGroup], texts: Callable[[Sequence[int], Completion], str]
) -> Chunk[RaggedBatch]:
    """A chunk's ragged batch: one prompt segment per group, one child per response.

    Token fields ``action_mask``, ``loss_mask`` (bool) and ``rollout_logprobs``; sequence fields ``group`` (place in the
    stream), ``response`` (place in the group), ``ended`` (bool), ``version``; objects ``prompt``, ``completion`` (text)
    and ``finish_reason``, and ``greedy`` where the groups have one. Rewards that the groups carry are fields, too.
    """
    members = [(group, r, c) for group in groups for r, c in enumerate(group.completions)]
    batch = RaggedBatch.from_groups(
        [group.prompt_ids for group in groups],
        [[c.token_ids for c in group.completions] for group in groups],
        [f"{group.index}.{r}" for group, r, _ in members],
    )
    mask = batch.sequence_index() >= 0
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[mask] = torch.tensor([lp for _, _, c in members for lp in c.logprobs])
    ended = [c.finish_reason in (FinishReason.STOP, FinishReason.STOP_STRING) for _, _, c in members]
    batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=logprobs).with_sequence(
        group=torch.tensor([group.index for group, _, _ in members]),
        response=torch.tensor([r for _, r, _ in members]),
        ended=torch.tensor(ended),
        version=torch.tensor([c.versions[-1] for _, _, c in members]),
    )
    batch = batch.with_objects(
        prompt=[group.prompt for group, _, _ in members],
        completion=[texts(group.prompt_ids, c) for group, _, c in members],
        finish_reason=[c.finish_reason.value for _, _, c in members],
    )
    if groups[0].greedy is not None:
        batch = batch.with_objects(greedy=[group.greedy for group, _, _ in members])
    # Groups lie one after the other, so their columns do as well.
    batch = join(batch, *(ColumnSet.concat(columns) for columns in zip(*(g.rewards for g in groups), strict=True)))
    return Chunk(step, index, batch.num_tokens, batch)


# Scoring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineScorer:
    """Columns of a trained model as the step began: ``old_logprobs`` of the actor, ``values`` of the critic.

    Args:
        beside: names of other token columns by the pass's own name for them.
    """

    worker: Worker
    role: str
    engine: TrainEngine[Any]
    needs: Needs
    column: str
    beside: Mapping[str, str] = field(default_factory=dict)

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        found = await self.worker.run(
            self.role,
            "forward",
            self.column,
            lambda: self.engine.forward(chunk.data, self.needs),
            step=chunk.step,
            chunk=chunk.index,
            tokens=chunk.num_tokens,
            reads={self.role: chunk.step},
        )
        token = dict(found.token)
        beside = {column: token.pop(name) for name, column in self.beside.items()}
        main = _renamed(ColumnSet(found.ids, token, found.sequence), self.column)
        return ColumnSet(main.ids, {**main.token, **beside}, main.sequence)


@dataclass(frozen=True)
class FrozenScorer:
    """Columns of a model that never changes: ``ref_logprobs`` or a reward model's scores.

    Args:
        render: gives the batch that a scorer with another tokenizer reads; its scores stay keyed by the same sequences.
        within: the model is what its role says inside of this context alone, entered under the lease and left before
            anything is awaited: the reference that is the actor without its adapters.
        reads: states whose tensors the pass reads, so that nobody trains them meanwhile.
    """

    worker: Worker
    role: str
    model: PackedModel
    needs: Needs
    column: str
    budget: TokenBudget
    render: Callable[[RaggedBatch], RaggedBatch] | None = None
    logprob_chunk: int = 1024
    share_prefixes: bool = True
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    reads: Mapping[str, int | None] = field(default_factory=dict)

    async def score(self, chunk: Chunk[RaggedBatch]) -> ColumnSet:
        batch = self.render(chunk.data) if self.render is not None else chunk.data
        found = await self.worker.run(
            self.role,
            "forward",
            self.column,
            lambda: self._forward(batch),
            step=chunk.step,
            chunk=chunk.index,
            tokens=batch.num_tokens,
            reads=self.reads,
        )
        columns = _renamed(found, self.column)
        self._check_finite(columns)
        return columns

    def _forward(self, batch: RaggedBatch) -> ColumnSet:
        with self.within():
            return forward_only(
                self.model, batch, self.needs, self.budget, self.logprob_chunk, share=self.share_prefixes
            )

    def _check_finite(self, columns: ColumnSet) -> None:
        """A NaN among scores would pass for "does not apply"."""
        values = torch.cat([*columns.token.values(), *columns.sequence.values()])
        wrong = int((~torch.isfinite(values)).sum())
        if wrong:
            raise UserError(
                f"the model of role {self.role!r} computes values that are not finite",
                found=f"{wrong} of {len(values)} {self.column}",
                remedy="check that model's weights; the run stopped before the update and can be resumed",
            )


def _renamed(columns: ColumnSet, name: str) -> ColumnSet:
    """The one field of a pass under the name the step knows it by."""
    fields = [*columns.token.values(), *columns.sequence.values()]
    if len(fields) != 1:
        raise ValueError(f"{name} is one column, the pass gave {len(fields)}")
    return ColumnSet(
        columns.ids,
        token=dict.fromkeys([name] if columns.token else [], fields[0]),
        sequence=dict.fromkeys([name] if columns.sequence else [], fields[0]),
    )
