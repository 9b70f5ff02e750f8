"""The train engine: packed forward passes and optimizer updates of one model in one process.

Shapes: T stored tokens, S sequences, P packed tokens, M selected rows.

``forward`` and ``train_step`` cut a batch into micro-batches by a token budget. Losses come divided by *global*
denominators, those of the whole batch, so an update does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.partition import plan_micro_batches
from quartet.batch.ragged import RaggedBatch
from quartet.config.recipe import TrainConfig
from quartet.models.packed import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.models.packing import pack
from quartet.train.metrics import MetricSums
from quartet.train.optim import build_optimizer, clip_gradients, learning_rate


@dataclass(frozen=True)
class Outputs:
    """What a forward pass computed, in the batch's stored layout (0 where nothing was asked for).

    ``logprobs [T]``, ``entropies [T]`` and ``values [T]`` belong to the token at the same index; ``scores [S]`` are
    read at each sequence's last token.
    """

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """What to compute, and for which tokens.

    Args:
        mask: name of the boolean token field that selects tokens for log-probabilities or values.
        temperature: the sampling temperature by which logits are divided.
    """

    logprobs: bool = False
    entropies: bool = False
    values: bool = False
    scores: bool = False
    mask: str = "loss_mask"
    temperature: float = 1.0


class Objective(Protocol):
    """A loss over a batch, in parts that add up."""

    @property
    def needs(self) -> Needs: ...

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        """Sequences that must stay in one micro-batch."""

    def denominators(self, batch: RaggedBatch) -> Any:
        """Global denominators of the whole batch."""

    def loss(self, outputs: Outputs, batch: RaggedBatch, denominators: Any, sums: MetricSums) -> Tensor:
        """This micro-batch's part of the loss (scalar); adds its metrics to ``sums``."""


Model = TypeVar("Model", bound=PackedModel)


class TrainEngine(Generic[Model]):
    """Trains one packed model; see the module's docstring.

    Args:
        packed: the model; parameters stay fp32, ``config.precision`` chooses the compute dtype.
        config: budgets and optimizer.
        total_steps: optimizer updates of the whole run, for the learning-rate schedule.
    """

    def __init__(self, packed: Model, config: TrainConfig, *, total_steps: int) -> None:
        self.packed = packed
        self.config = config
        self.total_steps = total_steps
        self.optimizer = build_optimizer(packed.model, config.optim)
        self.num_updates = 0
        self.num_skipped = 0

    # Forward ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        """Forward-only pass over ``batch``; fields as in ``Outputs``, without gradients."""
        return forward_only(self.packed, batch, needs, self.config.forward_token_budget, self.config.logprob_chunk)

    # Updates ---------------------------------------------------------------------------------------------

    def train_step(self, batch: RaggedBatch, objective: Objective) -> dict[str, float]:
        """One optimizer update on ``batch``. A step whose gradient is not finite is skipped and counted.

        Returns:
            The objective's metrics, ``grad_norm``, ``lr`` and ``skipped`` (0 or 1).
        """
        denominators = objective.denominators(batch)
        sums = MetricSums()
        # A step that raised may have left gradients behind.
        self.optimizer.zero_grad(set_to_none=True)
        for indices in _plan(batch, objective.atoms(batch), self.config.token_budget):
            part = batch.select(indices)
            outputs = compute(self.packed, part, objective.needs, self.config.logprob_chunk)
            loss = objective.loss(outputs, part, denominators, sums)
            if loss.requires_grad:
                loss.backward()
        lr = learning_rate(self.config.optim, self.num_updates, self.total_steps)
        grad_norm = clip_gradients(self.packed.model.parameters(), self.config.optim.max_grad_norm)
        finite = bool(torch.isfinite(torch.tensor(grad_norm)))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums.results(), "grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything an exact resume needs, as nested dictionaries of tensors and numbers."""
        return {
            "model": self.packed.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.packed.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]
        self.num_skipped = state["num_skipped"]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Named parameters, detached, for a rollout engine that keeps its own copy."""
        return ((name, parameter.detach()) for name, parameter in self.packed.model.named_parameters())


def forward_only(
    packed: PackedModel, batch: RaggedBatch, needs: Needs, token_budget: int, logprob_chunk: int = 1024
) -> ColumnSet:
    """As ``TrainEngine.forward``, for a model that is never trained (reference, reward model)."""
    token: dict[str, Tensor] = {}
    sequence: dict[str, Tensor] = {}
    with torch.no_grad():
        for indices in _plan(batch, [[s] for s in range(len(batch))], token_budget):
            part = batch.select(indices)
            outputs = compute(packed, part, needs, logprob_chunk)
            home = _leaf_rows(batch, indices)
            here = _leaf_rows(part, range(len(part)))
            for name in ("logprobs", "entropies", "values"):
                values = getattr(outputs, name)
                if values is not None:
                    token.setdefault(name, values.new_zeros(batch.num_tokens))[home] = values[here]
            if outputs.scores is not None:
                target = sequence.setdefault("scores", outputs.scores.new_zeros(len(batch)))
                target[torch.tensor(indices, device=batch.device)] = outputs.scores
    return ColumnSet(batch.ids, token, sequence)


def compute(packed: PackedModel, batch: RaggedBatch, needs: Needs, logprob_chunk: int) -> Outputs:
    """One packed forward pass over the whole of ``batch``, with gradients where they are enabled."""
    packed_batch = pack(batch)
    hidden = packed.hidden(packed_batch.input_ids, packed_batch.position_ids, packed_batch.attention())
    logprobs = entropies = values = scores = None
    if needs.logprobs or needs.values:
        rows, labels, targets = packed_batch.predicted(batch.token[needs.mask])
        selected = hidden[rows]
        if needs.logprobs:
            found, entropy = _causal(packed).token_logprobs(
                selected, labels, temperature=needs.temperature, chunk=logprob_chunk, entropy=needs.entropies
            )
            logprobs = packed_batch.scatter(found, targets)
            entropies = packed_batch.scatter(entropy, targets) if entropy is not None else None
        if needs.values:
            values = packed_batch.scatter(_scalar(packed).scalars(selected), targets)
    if needs.scores:
        scores = _scalar(packed).scalars(hidden[packed_batch.last_rows()])
    return Outputs(logprobs, entropies, values, scores)


def _causal(packed: PackedModel) -> PackedCausalLM:
    if not isinstance(packed, PackedCausalLM):
        raise TypeError(f"log-probabilities need a causal LM, not {type(packed).__name__}")
    return packed


def _scalar(packed: PackedModel) -> PackedScalarModel:
    if not isinstance(packed, PackedScalarModel):
        raise TypeError(f"values and scores need a model with a scalar head, not {type(packed).__name__}")
    return packed


def _plan(batch: RaggedBatch, atoms: Sequence[Sequence[int]], token_budget: int) -> list[list[int]]:
    lengths = batch.sequence_lengths()
    costs = [sum(lengths[s] for s in atom) for atom in atoms]
    return [[s for a in part for s in atoms[a]] for part in plan_micro_batches(costs, token_budget)]


def _leaf_rows(batch: RaggedBatch, indices: Sequence[int]) -> Tensor:
    offsets = batch.segment_offsets
    spans = [(offsets[k], offsets[k + 1]) for k in (batch.leaves[s] for s in indices)]
    return torch.cat([torch.arange(a, b, device=batch.device) for a, b in spans])
