"""Packed forward passes: what is computed for which tokens of a batch, with or without gradients.

Shapes: T stored tokens, S sequences, P packed tokens, M selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quartet.batch.pictures import picture_places
from quartet.batch.ragged import ColumnSet, RaggedBatch, to_device_async
from quartet.config import UserError
from quartet.models.logprobs import SamplingLimits
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.models.packing import Pack, pack
from quartet.models.work import attended_pairs
from quartet.train.parallel.context import ALONE, ModelParallel, RowRead
from quartet.train.parallel.data import sharded
from quartet.train.parallel.exchange import RankExchange
from quartet.train.parallel.pipeline import make_passes
from quartet.train.token_budget import TokenBudget


@dataclass(frozen=True)
class ForwardOutputs:
    """What a forward pass computed, in the batch's stored layout (0 where nothing was asked for).

    ``logprobs [T]``, ``entropies [T]`` and ``values [T]`` belong to the token at the same index and are read from the
    state before it, which is ``hidden [T, D]``, without gradients; ``scores [S]`` are read at each sequence's last
    token, ``step_scores [T]`` at the token itself.
    """

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    step_scores: Tensor | None = None
    hidden: Tensor | None = None

    def fields(self) -> dict[str, Tensor]:
        """Returns what was computed, by name."""
        return {name: values for name, values in vars(self).items() if values is not None}

    def nothing(self) -> Tensor:
        """Returns a scalar that is 0 times everything, to run a backward that weighs nothing."""
        return torch.stack([(values * 0).sum() for values in self.fields().values() if values.requires_grad]).sum()


@dataclass(frozen=True)
class ForwardNeeds:
    """What to compute, and for which tokens.

    Args:
        entropy_gradient: entropies carry gradient where gradients are enabled.
        mask: name of the boolean token field that selects tokens for log-probabilities, values, step scores or hidden
            states.
        temperature: the sampling temperature by which logits are divided.
        limits: of sampling, where log-probabilities are those of what they keep.
    """

    logprobs: bool = False
    entropies: bool = False
    values: bool = False
    scores: bool = False
    step_scores: bool = False
    hidden: bool = False
    entropy_gradient: bool = False
    mask: str = "loss_mask"
    temperature: float = 1.0
    limits: SamplingLimits | None = None


def forward_only(
    packed: PackedModel,
    batch: RaggedBatch,
    needs: ForwardNeeds,
    token_budget: int | TokenBudget,
    logprob_chunk: int = 1024,
    *,
    share: bool = True,
) -> ColumnSet:
    """Does what ``TrainEngine.forward`` does, for a model that is never trained (reference, reward model).

    Args:
        token_budget: most tokens of a micro-batch; a ``TokenBudget`` remembers from pass to pass what memory allowed.
        share: compute prompts once per micro-batch, where the model can.
    """
    if isinstance(token_budget, int):
        token_budget = TokenBudget(token_budget, "forward_token_budget")
    exchange = _exchange(packed)
    with packed.work.timed():
        token, sequence = token_budget.run_several(
            lambda plans: _columns(packed, batch, plans[0], needs, logprob_chunk, share),
            [(batch, [[s] for s in range(len(batch))])],
            share=shares_prefixes(packed, share),
            token_cost=packed.token_cost,
            together=None if exchange is None else exchange.data.name(),
        )
        found = ColumnSet(
            batch.ids,
            {name: values.to(batch.device) for name, values in token.items()},
            {name: values.to(batch.device) for name, values in sequence.items()},
        )
    if exchange is None or exchange.root.mesh.is_first_peer:
        count_useful_work(packed, batch, needs, gradients=False)
    return found


def count_useful_work(packed: PackedModel, batch: RaggedBatch, needs: ForwardNeeds, *, gradients: bool) -> None:
    """Counts the tokens and the FLOPs that a pass over ``batch`` needs, however it was cut."""
    rows = len(batch) if needs.scores else 0
    if needs.logprobs or needs.values or needs.step_scores:
        rows += int((batch.token[needs.mask].bool() & (batch.sequence_index() >= 0)).sum())
    work, tokens = packed.work, batch.num_tokens
    work.useful_tokens += tokens
    work.flops += packed.flops.of(tokens, attended_pairs(batch), rows, gradients=gradients)


Columns = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Token and sequence fields by name."""


@torch.no_grad()
def _columns(
    packed: PackedModel,
    batch: RaggedBatch,
    parts: Sequence[Sequence[int]],
    needs: ForwardNeeds,
    logprob_chunk: int,
    share: bool,
) -> Columns:
    """Computes the columns of the whole batch. The ranks that hold a model between them call it at once, each with a
    batch of its own or an empty one, peers with the same.
    """
    found: Columns = ({}, {})
    root, exchange = sharded(packed), _exchange(packed)
    num_passes = len(parts) if exchange is None else exchange.most_passes(len(parts))
    if root is not None:
        num_passes = max(num_passes, 1)  # the columns of an empty batch
    micro_batches = [
        partial(_ColumnPass, found, packed, batch, indices, needs, logprob_chunk, share)
        for indices in [*parts, *[[]] * (num_passes - len(parts))]
    ]
    if root is None:
        make_passes(micro_batches, gradients=False)
        return found
    root.make_passes(micro_batches, gradients=False)
    if root.pipeline is None:
        return found
    of_host: Columns = tuple({n: v.to(batch.device) for n, v in part.items()} for part in found)  # type: ignore[assignment]
    return root.from_last_stage(of_host)


def _exchange(packed: PackedModel) -> RankExchange | None:
    """Makes the exchange between the ranks that hold a model between them; None where this one holds all of it."""
    root = sharded(packed)
    return None if root is None or root.mesh.copy.size == 1 else RankExchange(root, root.mesh.copy)


class _ColumnPass:
    """One micro-batch, whose columns go into those of the whole batch. An empty one adds nothing.

    Attributes:
        num_rows: hidden rows that this rank computes.
    """

    def __init__(
        self,
        found: Columns,
        packed: PackedModel,
        batch: RaggedBatch,
        indices: Sequence[int],
        needs: ForwardNeeds,
        logprob_chunk: int,
        share: bool,
    ) -> None:
        self._found, self._packed, self._batch, self._indices = found, packed, batch, indices
        self._part = batch.select(indices) if indices else idle_batch(needs)
        self._pass = PackedPass(packed, self._part, needs, logprob_chunk, share=share)
        self.num_rows = self._pass.num_rows

    def forward(self, received: Tensor | None) -> Tensor:
        """Computes the columns, or what the next pipeline stage needs for them."""
        packed, batch, indices = self._packed, self._batch, self._indices
        if packed.stage is not None and not packed.stage.is_last:
            return self._pass.hidden(received)
        outputs = self._pass.outputs(received)
        home = to_device_async(leaf_rows(batch, indices), packed.device)
        here = to_device_async(leaf_rows(self._part, range(len(indices))), packed.device)
        token, sequence = self._found
        for name, values in outputs.fields().items():
            if name == "scores":
                target = sequence.setdefault(name, values.new_zeros(len(batch)))
                target[to_device_async(torch.tensor(indices, dtype=torch.long), packed.device)] = values[: len(indices)]
            else:
                token.setdefault(name, values.new_zeros(batch.num_tokens, *values.shape[1:]))[home] = values[here]
        return home


def idle_batch(needs: ForwardNeeds) -> RaggedBatch:
    """Makes two tokens for a pass that weighs nothing, of a rank that has no sequences left while others have."""
    mask = {needs.mask: torch.tensor([False, True])}
    return RaggedBatch.from_sequences([[0, 0]], ["idle"], token=mask)


def shares_prefixes(packed: PackedModel, asked: bool) -> bool:
    """Tells whether prompts are computed once: asked for and possible."""
    return asked and packed.shares_prefixes


def forward_packed(
    packed: PackedModel, batch: RaggedBatch, needs: ForwardNeeds, logprob_chunk: int, *, share: bool = True
) -> ForwardOutputs:
    """Makes one packed forward pass over the whole of ``batch``, with gradients where they are enabled.

    Outputs are on the model's device.
    """
    return PackedPass(packed, batch, needs, logprob_chunk, share=share).outputs()


class PackedPass:
    """A packed forward pass over the whole of ``batch``, laid out and not computed yet.

    What is selected is counted where ``batch`` lies: from the CPU no step of it waits for a GPU. And it is known before
    the pass: within a sharded model's, nothing may fail on one rank alone.

    Attributes:
        num_rows: hidden rows that this rank computes.
    """

    def __init__(
        self, packed: PackedModel, batch: RaggedBatch, needs: ForwardNeeds, logprob_chunk: int, *, share: bool = True
    ) -> None:
        device = packed.device
        parallel: ModelParallel = packed.parallel or ALONE
        packed_batch = pack(batch, share=shares_prefixes(packed, share)).filled(parallel.num_ranks)
        predicted = own = last = None
        if needs.logprobs or needs.values or needs.hidden:
            predicted = packed_batch.predicted(batch.token[needs.mask])
        if needs.scores:
            last = packed_batch.last_rows()
        if needs.step_scores:
            own = packed_batch.own_rows(batch.token[needs.mask])
        split = parallel.split(len(packed_batch.source), None if predicted is None else predicted[0])
        if packed.tower is None and bool(picture_places(packed_batch.input_ids).any()):
            raise UserError(
                "a sequence has pictures, and the model reads text alone",
                found=f"{type(packed.model).__name__}, in a run whose policy reads pictures",
                remedy="use a vision-language model for every role that reads the prompts, or prompts of text",
            )
        self.num_rows = split.num_own
        self._packed, self._needs, self._chunk, self._pack = packed, needs, logprob_chunk, packed_batch
        ids, positions = packed_batch.input_ids[split.span], _positions(packed, packed_batch)[..., split.span]
        # Pictures are looked for on the host.
        self._ids = ids.cpu() if packed.tower is not None else to_device_async(ids, device)
        self._positions = to_device_async(positions, device)
        self._attention = split.attention(packed_batch.attention(exact=packed.numerics == "exact"))

        def there(rows: Tensor, *columns: Tensor) -> tuple[Any, ...]:
            return (split.read(rows, device), *(to_device_async(x, device) for x in columns))

        self._predicted = None if predicted is None else there(*predicted)
        self._last = None if last is None else split.read(last, device)
        self._own = None if own is None else there(*own)

    def outputs(self, received: Tensor | None = None) -> ForwardOutputs:
        """Computes what is needed.

        Args:
            received: ``[num_rows, D]`` hidden states of the layers that other ranks have, in the last pipeline stage.
        """
        found: ForwardOutputs = self._packed.one_call(lambda: self._read(self._hidden(received)))
        return found

    def hidden(self, received: Tensor | None = None) -> Tensor:
        """Computes ``[num_rows, D]`` for the next pipeline stage; the arguments are those of ``outputs``."""
        found: Tensor = self._packed.one_call(lambda: self._hidden(received))
        return found

    def _hidden(self, received: Tensor | None) -> Tensor:
        stage = self._packed.stage
        if stage is None or stage.is_last:  # every stage has the same rows
            self._packed.work.computed_tokens += self._packed.num_rows(self.num_rows)
        hidden = self._packed.hidden(self._ids, self._positions, self._attention, received)
        if self._packed.tower is not None:
            self._packed.tower.check_counts(self._pack.input_ids)
        return hidden

    def _read(self, hidden: Tensor) -> ForwardOutputs:
        packed, needs, scatter = self._packed, self._needs, self._pack.scatter
        logprobs = entropies = values = scores = step_scores = states = None
        if self._predicted is not None:
            read, labels, targets = self._predicted
            if needs.logprobs:
                found, entropy = _logprobs(packed, hidden, read, labels, needs, self._chunk)
                logprobs = scatter(found, targets)
                entropies = scatter(entropy, targets) if entropy is not None else None
            if needs.values:
                values = scatter(_scalars(packed, hidden, read), targets)
            if needs.hidden:
                states = scatter(read.join(read.own(hidden.detach()), by_tensor=True), targets)
        if self._last is not None:
            # No view: FSDP marks what a root returns.
            scores = _scalars(packed, hidden, self._last).clone()
        if self._own is not None:
            read, targets = self._own
            step_scores = scatter(_scalars(packed, hidden, read), targets)
        return ForwardOutputs(logprobs, entropies, values, scores, step_scores, states)


def _positions(packed: PackedModel, laid_out: Pack) -> Tensor:
    """Returns the positions of a pack: ``[P]``, or ``[3, P]`` where a model counts pictures in several axes."""
    if packed.tower is None or not packed.tower.has_axes or not bool(picture_places(laid_out.input_ids).any()):
        return laid_out.position_ids
    behind: list[int] = []
    pieces = []
    ids = laid_out.input_ids.tolist()
    for length, parent, end in zip(laid_out.lengths, laid_out.parents, accumulate(laid_out.lengths), strict=True):
        found, stop = packed.tower.positions(ids[end - length : end], behind[parent] if parent >= 0 else 0)
        pieces.append(found)
        behind.append(stop)
    return torch.cat(pieces, 1)


def _logprobs(
    packed: PackedModel, hidden: Tensor, read: RowRead, labels: Tensor, needs: ForwardNeeds, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """Computes the log-probabilities of ``labels [M]``, and entropies where asked for; positions without a label go no
    further than their rank.
    """
    assert isinstance(packed, PackedCausalLM), "log-probabilities need a causal LM"
    logprobs, entropies = packed.token_logprobs(
        read.of_tensor_ranks(read.own(hidden)),
        read.labels(labels),
        temperature=needs.temperature,
        limits=needs.limits,
        chunk=chunk,
        entropy=needs.entropies,
        entropy_grad=needs.entropy_gradient,
    )
    return read.join(logprobs, by_tensor=False), None if entropies is None else read.join(entropies, by_tensor=False)


def _scalars(packed: PackedModel, hidden: Tensor, read: RowRead) -> Tensor:
    assert isinstance(packed, PackedScalarModel), "values and scores need a model with a scalar head"
    return read.join(packed.scalars(read.own(hidden)), by_tensor=True)


def leaf_rows(batch: RaggedBatch, indices: Sequence[int]) -> Tensor:
    """Returns the tokens of the sequences' own segments, one after the other."""
    offsets = batch.segment_offsets
    spans = [(offsets[k], offsets[k + 1]) for k in (batch.leaves[s] for s in indices)]
    return torch.cat([torch.arange(a, b, device=batch.device) for a, b in [(0, 0), *spans]])
