"""The train engine: packed forward passes and optimizer updates of one model in one process.

Shapes: T stored tokens, S sequences, P packed tokens, M selected rows.

``forward`` and ``train_step`` cut a batch into micro-batches by a token budget. Losses come divided by *global*
denominators, those of the whole batch, so an update does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch, sent
from quartet.config.common import TrainConfig
from quartet.models.memory import drop_derived
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.models.packing import pack
from quartet.train.data_parallel import DataParallelGroup, Replica
from quartet.train.metrics import MetricSums
from quartet.train.offload import PARTS, Offload, OffloadPart, Store
from quartet.train.optim import build_optimizer, clip_gradients, learning_rate
from quartet.train.state import (
    OPTIMIZER,
    REST,
    Shape,
    check_fit,
    fill,
    make_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    shapes_of,
    tensors_of,
)
from quartet.train.token_budget import TokenBudget


@dataclass(frozen=True)
class Outputs:
    """What a forward pass computed, in the batch's stored layout (0 where nothing was asked for).

    ``logprobs [T]``, ``entropies [T]`` and ``values [T]`` belong to the token at the same index and are read from the
    state before it; ``scores [S]`` are read at each sequence's last token, ``step_scores [T]`` at the token itself.
    """

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    step_scores: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """What to compute, and for which tokens.

    Args:
        entropy_gradient: entropies carry gradient where gradients are enabled.
        mask: name of the boolean token field that selects tokens for log-probabilities, values or step scores.
        temperature: the sampling temperature by which logits are divided.
    """

    logprobs: bool = False
    entropies: bool = False
    values: bool = False
    scores: bool = False
    step_scores: bool = False
    entropy_gradient: bool = False
    mask: str = "loss_mask"
    temperature: float = 1.0


class Objective(Protocol):
    """A loss over a batch, in parts that add up."""

    @property
    def needs(self) -> Needs: ...

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        """Sequences that must stay in one micro-batch; each alone where nothing else is said."""
        return [[s] for s in range(len(batch))]

    def denominators(self, batch: RaggedBatch) -> Any:
        """Global denominators of the whole batch: a number, or a dataclass of numbers and tensors."""

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: Any, sums: MetricSums) -> Tensor:
        """This micro-batch's part of the loss (scalar); adds its metrics to ``sums``."""


@dataclass(frozen=True)
class LossTerm:
    """A loss over a batch of its own, and its weight in the loss of an update."""

    batch: RaggedBatch
    objective: Objective
    weight: float = 1.0


Model = TypeVar("Model", bound=PackedModel)


class TrainEngine(Generic[Model]):
    """Trains one packed model; see the module's docstring.

    Where memory runs out, the budget is halved and the whole pass is done again, so results are those of the smaller
    budget; it stays in force and is counted.

    Args:
        packed: the model; parameters stay fp32, ``config.precision`` chooses the compute dtype.
        config: budgets and optimizer.
        total_steps: optimizer updates of the whole run, for the learning-rate schedule.
        name: where the recipe keeps ``config``, as in ``actor.train``; messages name keys below it.
        dp_group: ranks that train this model together, each with an engine and equal weights; see ``data_parallel``.
    """

    def __init__(
        self,
        packed: Model,
        config: TrainConfig,
        *,
        total_steps: int,
        name: str = "train",
        dp_group: DataParallelGroup | None = None,
    ) -> None:
        if config.lora is not None and packed.adapters is None:
            raise ValueError(f"{name}.lora is set, but the model has no adapters: take it over with lora={name}.lora")
        self.packed = packed
        self.config = config
        self.total_steps = total_steps
        self.optimizer = build_optimizer(packed.model, config.optim)
        self.budget = TokenBudget(config.token_budget, f"{name}.token_budget")
        self.forward_budget = TokenBudget(config.forward_token_budget, f"{name}.forward_token_budget")
        self.num_updates = 0
        self.num_skipped = 0
        # Imported only where it is asked for: torch's compiler takes a second to import.
        self._compiled: Callable[[], AbstractContextManager[None]] = nullcontext
        if config.compile and packed.device.type != "meta":
            from quartet.models.compiled import CompiledLayers

            self._compiled = CompiledLayers(packed).active
        self._offload: Offload | None = None
        self._replica = Replica(dp_group) if dp_group is not None else None

    @property
    def num_oom(self) -> int:
        """How often memory ran out since the run began."""
        return self.budget.num_oom + self.forward_budget.num_oom

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed about the model, and what memory did not allow, in words."""
        return (*self.packed.warnings, *self.budget.warnings, *self.forward_budget.warnings)

    # Forward ---------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        """Forward-only pass over ``batch``; fields as in ``Outputs``, without gradients, where ``batch`` lies.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self._require("params")
        config = self.config
        with self._compiled():
            return forward_only(
                self.packed, batch, needs, self.forward_budget, config.logprob_chunk, share=config.share_prefixes
            )

    # Updates ---------------------------------------------------------------------------------------------

    def train_step(self, batch: RaggedBatch, objective: Objective, also: Sequence[LossTerm] = ()) -> dict[str, float]:
        """One optimizer update on ``batch``. A step whose gradient is not finite is skipped and counted.

        Args:
            also: losses that are added, each with its weight. Every one has micro-batches of its own under the same
                budget, and denominators of its own.

        Returns:
            The objectives' metrics, ``grad_norm``, ``lr`` and ``skipped`` (0 or 1).

        Raises:
            UserError: an atom of the objective is larger than the budget, or than the memory.
            RankFailed: another rank failed.
            RuntimeError: a part is offloaded.
        """
        with self.reporting_failures():
            if self.packed.adapters is not None:
                self.packed.adapters.check_in()
            self._require(*PARTS)
            drop_derived(self.packed.model)
            sums = self._accumulate((LossTerm(batch, objective), *also))
            return {**sums.results(), **self._optimizer_step()}

    def reporting_failures(self) -> AbstractContextManager[None]:
        """Around what goes before an update: a failure inside is told to the other ranks, which wait for this one."""
        return self._replica.reporting_failures() if self._replica is not None else nullcontext()

    def _optimizer_step(self) -> dict[str, float]:
        """Clips the gradients and updates the weights; returns ``grad_norm``, ``lr`` and ``skipped``."""
        lr = learning_rate(self.config.optim, self.num_updates, self.total_steps)
        grad_norm = clip_gradients(self.packed.model.parameters(), self.config.optim.max_grad_norm)
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self._replica is not None:
            self._replica.check_step(grad_norm)
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}

    def _accumulate(self, terms: Sequence[LossTerm]) -> MetricSums:
        """Gradients of all terms, and their metrics; those of all ranks together where there are several."""
        device, share = self.packed.device, shares(self.packed, self.config.share_prefixes)
        # Batches stay on the host, where tokens are counted and packs laid out without waiting for the device.
        denominators = [_on(device, term.objective.denominators(term.batch)) for term in terms]
        batches = [(term.batch, term.objective.atoms(term.batch)) for term in terms]
        backward, token_cost = partial(self._backward, terms, denominators), self.packed.token_cost
        if self._replica is None:
            return self.budget.run_several(backward, batches, share=share, token_cost=token_cost)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self._replica.accumulate(
            backward,
            batches,
            trained,
            self.budget,
            share=share,
            token_cost=token_cost,
            num_updates=self.num_updates,
        )

    def _backward(
        self, terms: Sequence[LossTerm], denominators: Sequence[Any], plans: Sequence[Sequence[Sequence[int]]]
    ) -> MetricSums:
        """Gradients of all terms, and their metrics."""
        # An attempt that failed may have left gradients behind.
        self.optimizer.zero_grad(set_to_none=True)
        sums = MetricSums()
        for term, parts, of_batch in zip(terms, plans, denominators, strict=True):
            for indices in filter(None, parts):
                self._backward_part(replace(term, batch=term.batch.select(indices)), of_batch, sums)
        return sums

    def _backward_part(self, part: LossTerm, denominators: Any, sums: MetricSums) -> None:
        """A function of its own, so that nothing of one micro-batch lives on in the next."""
        config, objective, needs = self.config, part.objective, part.objective.needs
        # The backward within, too: with activation checkpointing it computes layers again.
        with self._compiled():
            outputs = compute(self.packed, part.batch, needs, config.logprob_chunk, share=config.share_prefixes)
            loss = objective.loss(outputs, part.batch.to(self.packed.device), denominators, sums) * part.weight
            if loss.requires_grad:
                loss.backward()

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything an exact resume needs, named as in ``train.state``, wherever it lies now.

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

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what ``state`` gave; raises as ``loading``."""
        tensors = tensors_of(state)
        with self.loading(shapes_of(tensors), state[REST]) as live:
            fill(live, tensors)

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
        remedy = "give the model that the run began with, with the same adapters if any, or choose another output_dir"
        check_fit(
            shapes_of(self._model_tensors()), {n: s for n, s in saved.items() if not n.startswith(OPTIMIZER)}, remedy
        )
        make_optimizer_tensors(self.optimizer, self.trained, saved)
        live = {**self._model_tensors(), **optimizer_tensors(self.optimizer, self.trained)}
        check_fit(shapes_of(live), saved, remedy)
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
        """Named parameters, detached, for a rollout engine that keeps its own copy; with adapters only those.

        What is offloaded comes from host memory.
        """
        return ((name, parameter.detach()) for name, parameter in self.trained.items())

    # Room on the device ----------------------------------------------------------------------------------

    def offloading(self, store: Store | None = None) -> Offload:
        """What moves this engine's parts; made the first time, which says where they go.

        Raises:
            RuntimeError: no store was given yet, or another one.
        """
        if self._offload is None:
            if store is None:
                raise RuntimeError("this engine has no offload store; call offloading(store) first")
            self._offload = Offload(self.packed, store, self.optimizer)
        elif store is not None and store is not self._offload.store:
            raise RuntimeError("this engine's parts have a store already, and may lie there now")
        return self._offload

    def _require(self, *parts: OffloadPart) -> None:
        if self._offload is not None:
            self._offload.require(parts)


def forward_only(
    packed: PackedModel,
    batch: RaggedBatch,
    needs: Needs,
    token_budget: int | TokenBudget,
    logprob_chunk: int = 1024,
    *,
    share: bool = True,
) -> ColumnSet:
    """As ``TrainEngine.forward``, for a model that is never trained (reference, reward model).

    Args:
        token_budget: most tokens of a micro-batch; a ``TokenBudget`` remembers from pass to pass what memory allowed.
        share: compute prompts once per micro-batch, where the model can.
    """
    if isinstance(token_budget, int):
        token_budget = TokenBudget(token_budget, "forward_token_budget")
    token, sequence = token_budget.run_several(
        lambda plans: _columns(packed, batch, plans[0], needs, logprob_chunk, share),
        [(batch, [[s] for s in range(len(batch))])],
        share=shares(packed, share),
        token_cost=packed.token_cost,
    )
    return ColumnSet(
        batch.ids,
        {name: values.to(batch.device) for name, values in token.items()},
        {name: values.to(batch.device) for name, values in sequence.items()},
    )


@torch.no_grad()
def _columns(
    packed: PackedModel,
    batch: RaggedBatch,
    parts: Sequence[Sequence[int]],
    needs: Needs,
    logprob_chunk: int,
    share: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Token and sequence fields of the whole batch."""
    token: dict[str, Tensor] = {}
    sequence: dict[str, Tensor] = {}
    for indices in parts:
        part = batch.select(indices)
        outputs = compute(packed, part, needs, logprob_chunk, share=share)
        home = sent(_leaf_rows(batch, indices), packed.device)
        here = sent(_leaf_rows(part, range(len(part))), packed.device)
        for name in ("logprobs", "entropies", "values", "step_scores"):
            values = getattr(outputs, name)
            if values is not None:
                token.setdefault(name, values.new_zeros(batch.num_tokens))[home] = values[here]
        if outputs.scores is not None:
            target = sequence.setdefault("scores", outputs.scores.new_zeros(len(batch)))
            target[sent(torch.tensor(indices), packed.device)] = outputs.scores
    return token, sequence


def shares(packed: PackedModel, asked: bool) -> bool:
    """Whether prompts are computed once: asked for and possible."""
    return asked and packed.shares_prefixes


def compute(
    packed: PackedModel, batch: RaggedBatch, needs: Needs, logprob_chunk: int, *, share: bool = True
) -> Outputs:
    """One packed forward pass over the whole of ``batch``, with gradients where they are enabled.

    Outputs are on the model's device. What is selected is counted where ``batch`` lies: from the CPU no step of it
    waits for a GPU.
    """
    device = packed.device
    packed_batch = pack(batch, share=shares(packed, share))
    attention = packed_batch.attention(exact=packed.numerics == "exact")
    hidden = packed.hidden(sent(packed_batch.input_ids, device), sent(packed_batch.position_ids, device), attention)
    logprobs = entropies = values = scores = step_scores = None
    if needs.logprobs or needs.values:
        rows, labels, targets = (sent(x, device) for x in packed_batch.predicted(batch.token[needs.mask]))
        # Positions without a label go no further.
        selected = hidden.index_select(0, rows)
        if needs.logprobs:
            found, entropy = _causal(packed).token_logprobs(
                selected,
                labels,
                temperature=needs.temperature,
                chunk=logprob_chunk,
                entropy=needs.entropies,
                entropy_grad=needs.entropy_gradient,
            )
            logprobs = packed_batch.scatter(found, targets)
            entropies = packed_batch.scatter(entropy, targets) if entropy is not None else None
        if needs.values:
            values = packed_batch.scatter(_scalar(packed).scalars(selected), targets)
    if needs.scores:
        scores = _scalar(packed).scalars(hidden.index_select(0, sent(packed_batch.last_rows(), device)))
    if needs.step_scores:
        rows, targets = (sent(x, device) for x in packed_batch.own_rows(batch.token[needs.mask]))
        step_scores = packed_batch.scatter(_scalar(packed).scalars(hidden.index_select(0, rows)), targets)
    return Outputs(logprobs, entropies, values, scores, step_scores)


def _on(device: torch.device, denominators: Any) -> Any:
    """Denominators with their tensors on ``device``."""
    if not is_dataclass(denominators) or isinstance(denominators, type):
        return denominators
    values = {field.name: getattr(denominators, field.name) for field in fields(denominators)}
    return replace(denominators, **{n: sent(v, device) for n, v in values.items() if isinstance(v, Tensor)})


def _causal(packed: PackedModel) -> PackedCausalLM:
    if not isinstance(packed, PackedCausalLM):
        raise TypeError(f"log-probabilities need a causal LM, not {type(packed).__name__}")
    return packed


def _scalar(packed: PackedModel) -> PackedScalarModel:
    if not isinstance(packed, PackedScalarModel):
        raise TypeError(f"values and scores need a model with a scalar head, not {type(packed).__name__}")
    return packed


def _leaf_rows(batch: RaggedBatch, indices: Sequence[int]) -> Tensor:
    offsets = batch.segment_offsets
    spans = [(offsets[k], offsets[k + 1]) for k in (batch.leaves[s] for s in indices)]
    return torch.cat([torch.arange(a, b, device=batch.device) for a, b in spans])
