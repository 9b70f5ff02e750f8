"""The train engine: packed forward passes and optimizer updates of one model in one process.

Shapes: T stored tokens, S sequences, P packed tokens, M selected rows.

``forward`` and ``train_step`` cut a batch into micro-batches by a token budget. Losses come divided by *global*
denominators, those of the whole batch, so an update does not depend on how the batch was cut.

AdamW's learning rate is a pure function of the step. ``flip_bits`` is a change of weights that takes itself back: it
shows where new weights arrive, without a copy of a large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quartet.batch.ragged import ColumnSet, RaggedBatch, to_device_async
from quartet.cluster.dispatch import BatchShare, merge_results, segment_table, split_table
from quartet.config.common import OptimConfig, TrainConfig
from quartet.models.memory import drop_derived
from quartet.models.packed_model import CompiledLayers, PackedModel
from quartet.train.forward import (
    ForwardNeeds,
    ForwardOutputs,
    PackedPass,
    count_useful_work,
    forward_only,
    idle_batch,
    shares_prefixes,
)
from quartet.train.metrics import MetricSums
from quartet.train.offload import PARTS, Offload, OffloadPart, OffloadStore
from quartet.train.parallel.data import shard_model, sharded
from quartet.train.parallel.exchange import RankExchange
from quartet.train.parallel.mesh import Mesh
from quartet.train.parallel.pipeline import make_passes
from quartet.train.parallel.tensors import OPTIMIZER, local
from quartet.train.state import (
    REST,
    Shape,
    check_state_fits,
    make_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    saved_here,
    tensor_shapes,
)
from quartet.train.token_budget import TokenBudget


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of update ``step`` (from 0): linear warm-up, then the schedule down to
    ``min_lr_ratio``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Makes the optimizer; it decays matrices, and not vectors (norms, biases)."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales the gradients to at most ``max_norm``; returns their norm before, which may be inf or nan."""
    return float(nn.utils.clip_grad_norm_(parameters, max_norm))


_FLIPPED = 1 << 20
"""A bit of the mantissa that bf16 still has: a number changes by 6 to 12 hundredths, more than bf16 rounds away."""
_IN_PLACE_OF_ZERO = 0x3A800000
"""2**-10: zeros, as those of fresh adapters, change too."""


def flip_bits(values: Tensor) -> None:
    """Changes fp32 ``values`` in place; done twice they are as before, to the last bit."""
    bits = values.view(torch.int32)
    # Zero, its partner, and what a flipped bit would make of the two: closed under either change.
    around_zero = torch.zeros_like(bits, dtype=torch.bool)
    for value in (0, _FLIPPED, _IN_PLACE_OF_ZERO, _IN_PLACE_OF_ZERO ^ _FLIPPED):
        around_zero |= bits == value
    bits.bitwise_xor_(torch.where(around_zero, _IN_PLACE_OF_ZERO, _FLIPPED))


class Objective(Protocol):
    """A loss over a batch, in parts that add up."""

    @property
    def needs(self) -> ForwardNeeds: ...

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        """Returns the sequences that must stay in one micro-batch; each alone where nothing else is said."""
        return [[s] for s in range(len(batch))]

    def denominators(self, batch: RaggedBatch) -> Any:
        """Computes global denominators of the whole batch: a number, or a dataclass of numbers and tensors."""

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: Any, sums: MetricSums) -> Tensor:
        """Computes this micro-batch's part of the loss (scalar); adds its metrics to ``sums``."""


@dataclass(frozen=True)
class LossTerm:
    """A loss over a batch of its own, and its weight in the loss of an update."""

    batch: RaggedBatch
    objective: Objective
    weight: float = 1.0


T = TypeVar("T")
Model = TypeVar("Model", bound=PackedModel)


class TrainEngine(Generic[Model]):
    """Trains one packed model; see the module's docstring.

    Where memory runs out in one process, the budget is halved and the whole pass is done again, so results are those of
    the smaller budget; it stays in force and is counted. Of several ranks the one where it ran out raises.

    Args:
        packed: the model; parameters stay fp32, ``config.precision`` chooses the compute dtype.
        config: budgets and optimizer.
        total_steps: optimizer updates of the whole run, for the learning-rate schedule.
        name: where the recipe keeps ``config``, as in ``actor.train``; messages name keys below it.
        mesh: the ranks that train this model together, each with an engine. A model that is not shared out over it yet
            is now: the same weights on every rank.
    """

    def __init__(
        self,
        packed: Model,
        config: TrainConfig,
        *,
        total_steps: int,
        name: str = "train",
        mesh: Mesh | None = None,
    ) -> None:
        if config.lora is not None and packed.adapters is None:
            raise ValueError(f"{name}.lora is set, but the model has no adapters: take it over with lora={name}.lora")
        self.packed = packed
        packed.freeze_parts(
            tower=config.freeze_vision_tower, projector=config.freeze_projector, language=config.freeze_language_model
        )
        self._root = shard_model(packed, mesh) if mesh is not None else None
        self._exchange = RankExchange(self._root) if self._root is not None else None
        self.config = config
        self.total_steps = total_steps
        self.optimizer = build_optimizer(packed.model, config.optim)
        self.budget = TokenBudget(config.token_budget, f"{name}.token_budget")
        self.forward_budget = TokenBudget(config.forward_token_budget, f"{name}.forward_token_budget")
        self.num_updates = 0
        self.num_skipped = 0
        self._compiled: Callable[[], AbstractContextManager[None]] = nullcontext
        if config.compile and packed.device.type != "meta":
            self._compiled = CompiledLayers(packed).active
        self._offload: Offload | None = None

    @property
    def num_ranks(self) -> int:
        """Data ranks that train this model together."""
        return 1 if self._root is None else self._root.mesh.num_data_ranks

    @property
    def num_oom(self) -> int:
        """How often memory ran out since the run began."""
        return self.budget.num_oom + self.forward_budget.num_oom

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed about the model, and what memory did not allow, in words."""
        return (*self.packed.warnings, *self.budget.warnings, *self.forward_budget.warnings)

    # Forward ---------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        """Makes a forward-only pass over ``batch``; fields as in ``ForwardOutputs``, without gradients, where ``batch``
        lies.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self._require("params")
        config = self.config
        with self._compiled():
            return forward_only(
                self.packed, batch, needs, self.forward_budget, config.logprob_chunk, share=config.share_prefixes
            )

    def in_shares(
        self, batches: Iterable[RaggedBatch], forward: Callable[[RaggedBatch], ColumnSet]
    ) -> list[tuple[RaggedBatch, ColumnSet]]:
        """Returns the batches, which every rank has, with the columns that ``forward`` gives of them: each data rank
        computes its share of every batch, and all get the columns of the others. Collective.

        Raises:
            RankFailed: another rank failed.
        """
        if self._exchange is None:
            return [(batch, forward(batch)) for batch in batches]
        mesh, own = self._exchange.root.mesh, []
        plans: list[tuple[RaggedBatch, list[BatchShare], RaggedBatch]] = []
        for batch in batches:
            table = segment_table(batch)
            plans.append((batch, split_table(table, mesh.num_data_ranks), table))
            own.append(forward(batch.select(plans[-1][1][mesh.data_rank].positions)))
        of_ranks = self._exchange.data.gather(own if mesh.is_first_peer else [])[mesh.first_peers]
        by_batch = zip(plans, zip(*of_ranks, strict=True), strict=True)
        return [(batch, merge_results(found, shares, table)) for (batch, shares, table), found in by_batch]

    def of_first_rank(self, function: Callable[[], T]) -> T:
        """Returns on all ranks what ``function`` returns on the first one, which alone calls it. Collective.

        Raises:
            RankFailed: it raised there.
        """
        if self._exchange is None:
            return function()
        found: Any = function() if self._exchange.data.rank == 0 else None
        first: T = self._exchange.data.gather(found)[0]
        return first

    def of_all_ranks(self, value: T) -> list[T]:
        """Returns every data rank's value, in their order. Collective.

        Raises:
            RankFailed: another rank failed.
        """
        return [value] if self._exchange is None else self._exchange.data.gather(value)

    # Updates ---------------------------------------------------------------------------------------------

    def train_step(
        self, batch: RaggedBatch, objective: Objective, also: Sequence[LossTerm] = (), *, rehearsal: bool = False
    ) -> dict[str, float]:
        """Makes one optimizer update on ``batch``. A step whose gradient is not finite is skipped and counted.

        Args:
            rehearsal: everything is computed, and nothing changed by it: neither weights nor the optimizer's state.
            also: losses that are added, each with its weight. Every one has micro-batches of its own under the same
                budget, and denominators of its own.

        Returns:
            The objectives' metrics, ``grad_norm``, ``lr`` and ``skipped`` (0 or 1).

        Raises:
            UserError: an atom of the objective is larger than the budget, or than the memory.
            RankFailed: another rank failed.
            RuntimeError: a part is offloaded.
        """
        terms = (LossTerm(batch, objective), *also)
        with self.packed.work.timed():
            if self.packed.adapters is not None:
                self.packed.adapters.check_in()
            self._require(*PARTS)
            drop_derived(self.packed.model)
            metrics = {**self._accumulate(terms).results(), **self._optimizer_step(rehearsal)}
        if self._root is None or self._root.mesh.data.rank == 0:  # every rank has the whole batch
            for term in terms:
                count_useful_work(self.packed, term.batch, term.objective.needs, gradients=True)
        return metrics

    def _optimizer_step(self, rehearsal: bool) -> dict[str, float]:
        """Clips the gradients and updates the weights; returns ``grad_norm``, ``lr`` and ``skipped``."""
        lr = learning_rate(self.config.optim, self.num_updates, self.total_steps)
        parameters, max_norm = self.packed.model.parameters(), self.config.optim.max_grad_norm
        if self._exchange is None:
            grad_norm = clip_gradients(parameters, max_norm)
        else:
            grad_norm = self._exchange.clip_gradients(parameters, max_norm)
        finite = math.isfinite(grad_norm)
        if finite and not rehearsal:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
        elif not rehearsal:
            self.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}

    def _accumulate(self, terms: Sequence[LossTerm]) -> MetricSums:
        """Computes the gradients of all terms, and their metrics; those of all ranks together where there
        are several.
        """
        device, share = self.packed.device, shares_prefixes(self.packed, self.config.share_prefixes)
        # Batches stay on the host, where tokens are counted and packs laid out without waiting for the device.
        denominators = [_on(device, term.objective.denominators(term.batch)) for term in terms]
        batches = [(term.batch, term.objective.atoms(term.batch)) for term in terms]
        backward, token_cost = partial(self._backward, terms, denominators), self.packed.token_cost
        if self._exchange is None:
            return self.budget.run_several(backward, batches, share=share, token_cost=token_cost)
        return self._exchange.accumulate(
            backward, batches, self.budget, share=share, token_cost=token_cost, num_updates=self.num_updates
        )

    def _backward(
        self, terms: Sequence[LossTerm], denominators: Sequence[Any], plans: Sequence[Sequence[Sequence[int]]]
    ) -> MetricSums:
        """Computes the gradients of all terms, and their metrics."""
        # An attempt that failed may have left gradients behind.
        self.optimizer.zero_grad(set_to_none=True)
        sums = MetricSums()
        micro_batches = [
            partial(_LossPass, self.packed, self.config, term, indices, of_batch, sums)
            for term, parts, of_batch in zip(terms, plans, denominators, strict=True)
            for indices in parts
        ]
        # The backward within, too: with activation checkpointing it computes layers again.
        with self._compiled():
            if self._root is not None:
                self._root.make_passes(micro_batches, gradients=True)
            else:
                make_passes(micro_batches, gradients=True)
        return sums

    @torch.no_grad()
    def flip_bits(self) -> None:
        """Changes every trained weight by about a tenth, and by the same call back to the last bit."""
        self._require("params")
        drop_derived(self.packed.model)
        for parameter in self.trained.values():
            flip_bits(local(parameter))

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns everything an exact resume needs, named as in ``train.state``, wherever it lies now.

        Of a model with adapters only what is trained, and which base it belongs to.
        """
        adapters = self.packed.adapters
        rest = {
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "budget": self.budget.state(),
            "forward_budget": self.forward_budget.state(),
            **({} if adapters is None else {"base": adapters.base}),
        }
        return {**self._model_tensors(), **optimizer_tensors(self.optimizer, self.trained), REST: rest}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        """Gives the tensors that a saved state is to be written into, and afterwards takes up the rest of it.

        What is offloaded stays so.

        Args:
            saved: the shapes of the state's tensors, by name.

        Raises:
            UserError: it belongs to another model; no weight is changed then.
        """
        adapters = self.packed.adapters
        if adapters is not None:
            adapters.check_base(rest)
        saved = saved_here(saved, self.packed)
        remedy = "give the model that the run began with, with the same adapters if any, or choose another output_dir"
        check_state_fits(
            tensor_shapes(self._model_tensors()),
            {n: s for n, s in saved.items() if not n.startswith(OPTIMIZER)},
            remedy,
        )
        make_optimizer_tensors(self.optimizer, self.trained, saved)
        live = {**self._model_tensors(), **optimizer_tensors(self.optimizer, self.trained)}
        check_state_fits(tensor_shapes(live), saved, remedy)
        yield live
        for group, values in zip(self.optimizer.param_groups, rest["groups"], strict=True):
            group.update(values)
        self.num_updates = rest["num_updates"]
        self.num_skipped = rest["num_skipped"]
        self.budget.load_state(rest["budget"])
        self.forward_budget.load_state(rest["forward_budget"])
        if self._offload is not None:
            self._offload.settle()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer may change, by name."""
        adapters = self.packed.adapters
        return dict(self.packed.model.named_parameters() if adapters is None else adapters.trained.items())

    def _model_tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.packed.model.state_dict() if self.packed.adapters is None else self.trained)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields named parameters, detached, for a rollout engine that keeps its own copy; with adapters only those.

        What is offloaded comes from host memory; what other stages have is on the meta device.
        """
        return ((name, tensor.detach()) for name, tensor in self.packed.complete_trained().items())

    # Room on the device ----------------------------------------------------------------------------------

    def offloading(self, store: OffloadStore | None = None) -> Offload:
        """Returns what moves this engine's parts; made by the first call, which says where they go."""
        if self._offload is None:
            assert store is not None, "the first call gives the store"
            self._offload = Offload(self.packed, store, self.optimizer)
        return self._offload

    def _require(self, *parts: OffloadPart) -> None:
        if self._offload is not None:
            self._offload.require(parts)


class _LossPass:
    """One micro-batch of a loss. An empty one, beside other ranks' sequences, weighs nothing.

    Attributes:
        num_rows: hidden rows that this rank computes.
    """

    def __init__(
        self,
        packed: PackedModel,
        config: TrainConfig,
        term: LossTerm,
        indices: Sequence[int],
        denominators: Any,
        sums: MetricSums,
    ) -> None:
        self._packed, self._term, self._denominators, self._sums = packed, term, denominators, sums
        needs, self._is_idle = term.objective.needs, not indices
        self._batch = term.batch.select(indices) if indices else idle_batch(needs)
        self._pass = PackedPass(packed, self._batch, needs, config.logprob_chunk, share=config.share_prefixes)
        self.num_rows = self._pass.num_rows

    def forward(self, received: Tensor | None) -> Tensor:
        """Computes the loss, or what the next pipeline stage needs for it."""
        packed, term = self._packed, self._term
        if packed.stage is not None and not packed.stage.is_last:
            return self._pass.hidden(received)
        outputs = self._pass.outputs(received)
        if self._is_idle:
            return outputs.nothing()
        batch = self._batch.to(packed.device)
        loss = term.objective.loss(outputs, batch, self._denominators, self._sums) * term.weight
        # Where nothing of it has a gradient, the other ranks still wait for this one in the backward.
        return outputs.nothing() if not loss.requires_grad and sharded(packed) is not None else loss


def _on(device: torch.device, denominators: Any) -> Any:
    """Returns the denominators with their tensors on ``device``."""
    if not is_dataclass(denominators) or isinstance(denominators, type):
        return denominators
    values = {field.name: getattr(denominators, field.name) for field in fields(denominators)}
    return replace(denominators, **{n: to_device_async(v, device) for n, v in values.items() if isinstance(v, Tensor)})
