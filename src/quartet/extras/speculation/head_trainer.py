"""Training of Medusa heads from hidden states of their trunk and the tokens that followed.

Whoever runs the trunk gives its hidden states: a job that trains the heads alone, or an actor's own training forward.

Companion training: Medusa heads learn beside their trunk, from hidden states that its own updates leave behind.

::

    watched = companion.watch(batch, objective, …)   which positions, by budget and seed
    engine.train_step(batch, watched)                its passes leave the states of these positions
    companion.keep(watched)                          for later
    …                                                further updates of the step
    companion.learn()                                one update of the heads for each of the trunk's, while others work

The trunk makes no further pass and gets no gradient: its updates are those without heads, to the bit. Ranks that train
a model together give each other the states and then make the same update, so that their heads stay equal.

Shapes: T stored tokens, M positions that are learned from, D hidden, K depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quartet.batch.ragged import RaggedBatch, to_device_async
from quartet.config.common import OptimConfig
from quartet.extras.speculation.config import DECAY, FOLDER, PREFIX, HeadTraining, MedusaSpeculation
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.schedule.leases import LeaseMode
from quartet.schedule.model_worker import AddedLosses, TrainWorker, UpdateSpec
from quartet.train.engine import Objective, TrainEngine, build_optimizer, clip_gradients, learning_rate
from quartet.train.forward import ForwardNeeds, ForwardOutputs, leaf_rows
from quartet.train.metrics import MetricSums
from quartet.train.state import (
    REST,
    Shape,
    check_state_fits,
    make_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    tensor_shapes,
)

HIDDEN = ForwardNeeds(hidden=True)
"""The states that ``HeadTrainer`` learns from, of the tokens under ``loss_mask``."""
_LOGIT_BYTES = 1 << 26
"""Most bytes of the logits of all heads that exist at a time."""


def future_labels(batch: RaggedBatch, depth: int) -> Tensor:
    """Returns ``[T, K]`` token ids that follow each token of ``loss_mask`` 1 … K places behind it, -1 where there is
    none.

    The state before token ``t``, from which the trunk draws ``t`` itself, is that from which head ``k`` guesses label
    ``k`` of ``t``. A label belongs to the same sequence, and all between are under the mask, too.
    """
    ids, mask, owner = batch.input_ids, batch.token["loss_mask"].bool(), batch.sequence_index()
    labels = torch.full((len(ids), depth), -1, dtype=ids.dtype, device=ids.device)
    alive = mask & (owner >= 0)
    for k in range(min(depth, len(ids) - 1)):
        alive = alive[:-1] & mask[k + 1 :] & (owner[k + 1 :] == owner[: -k - 1])
        labels[: len(alive), k] = torch.where(alive, ids[k + 1 :], -1)
    return labels


def labelled(labels: Tensor) -> Tensor:
    """Returns ``[M]`` positions that have a label for the first head."""
    return (labels[:, 0] >= 0).nonzero().squeeze(1)


class HeadTrainer:
    """AdamW on Medusa heads; the trunk gets no gradient.

    The loss is ``Σ_k DECAY^k`` times head ``k``'s mean cross-entropy over the positions that it has labels for.

    Args:
        optim: of the heads alone.
        total_steps: updates of the whole run, for the learning-rate schedule.
    """

    def __init__(self, heads: MedusaHeads, optim: OptimConfig, *, total_steps: int) -> None:
        self.heads = heads
        self.optim = optim
        self.total_steps = total_steps
        self.optimizer = build_optimizer(heads, optim)
        self.num_updates = 0
        self.num_skipped = 0

    def step(self, hidden: Tensor, batch: RaggedBatch) -> dict[str, float]:
        """Makes one update. A step whose gradient is not finite is skipped and counted.

        Args:
            hidden: ``[T, D]`` states before the batch's tokens, as ``Needs.hidden`` gives them; without gradients.
            batch: with the token field ``loss_mask``.

        Returns:
            ``loss/medusa``, ``medusa/accuracy_depth_<k>``, ``medusa/positions``, ``grad_norm`` and ``lr``.
        """
        labels = future_labels(batch, self.heads.depth)
        rows, sums = labelled(labels), MetricSums()
        update, found = self.learn(hidden, labels, rows, sums), sums.results()
        accuracies = {f"medusa/{name}": value for name, value in found.items() if name.startswith("accuracy")}
        return {"loss/medusa": found["loss"], **accuracies, "medusa/positions": float(len(rows)), **update}

    def learn(self, hidden: Tensor, labels: Tensor, rows: Tensor, sums: MetricSums) -> dict[str, float]:
        """Makes one update from ``rows [M]`` of states ``[T, D]`` and labels ``[T, K]``; returns ``grad_norm`` and
        ``lr``.

        Adds to ``sums`` the ``loss`` and ``accuracy_depth_<k>``.
        """
        counts = (labels[rows] >= 0).sum(0).tolist()
        self.optimizer.zero_grad(set_to_none=True)
        for states_MD, labels_MK in self._chunks(hidden, labels, rows):
            for k, (decay, count) in enumerate(zip(self._decays, counts, strict=True)):
                has = labels_MK[:, k] >= 0
                logits, wanted = self.heads.logits_of(k, states_MD[has]), labels_MK[has, k]
                loss = F.cross_entropy(logits, wanted, reduction="sum") * (decay / max(1, count))
                loss.backward()
                sums.total("loss", loss)
                sums.add(f"accuracy_depth_{k + 1}", (logits.argmax(-1) == wanted).sum(), has.sum())
        return self._update()

    def _update(self) -> dict[str, float]:
        lr = learning_rate(self.optim, self.num_updates, self.total_steps)
        grad_norm = clip_gradients(self.heads.parameters(), self.optim.max_grad_norm)
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr}

    def measure(self, found: Iterable[tuple[Tensor, RaggedBatch]]) -> dict[str, float]:
        """Measures how well the heads guess, over all positions of hidden states with their batches, as ``step`` takes
        them.

        Returns:
            ``eval/loss``; by depth ``medusa/accepted_depth_<k>``, how often heads 1 … k all have the token as their
            likeliest; ``medusa/tokens_per_forward``, one and the accepted ones.
        """
        sums, depth = MetricSums(), self.heads.depth
        for hidden, batch in found:
            labels = future_labels(batch, depth)
            for states_MD, labels_MK in self._chunks(hidden, labels, labelled(labels)):
                logits, has = self.heads(states_MD), labels_MK >= 0
                chain = (logits.argmax(-1) == labels_MK).cumprod(1)
                losses = F.cross_entropy(logits.transpose(1, 2), labels_MK, ignore_index=-1, reduction="none")
                for k in range(depth):
                    sums.mean(f"loss_{k}", losses[:, k], has[:, k])
                    sums.mean(f"medusa/accepted_depth_{k + 1}", chain[:, k], has[:, k])
        figures = sums.results()
        losses_K = [figures.pop(f"loss_{k}", 0.0) for k in range(depth)]
        accepted = sum(value for name, value in figures.items() if name.startswith("medusa/accepted"))
        loss = sum(decay * value for decay, value in zip(self._decays, losses_K, strict=True))
        return {"eval/loss": loss, **figures, "medusa/tokens_per_forward": 1 + accepted}

    @property
    def _decays(self) -> list[float]:
        return [DECAY**k for k in range(self.heads.depth)]

    def _chunks(self, hidden: Tensor, labels: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields states ``[m, D]`` and labels ``[m, K]`` of the rows, on the heads' device, as many as there is room
        for.
        """
        heads, device = self.heads, self.heads.trunk.device
        for part in rows.split(max(1, _LOGIT_BYTES // (4 * heads.depth * heads.vocab_size))):
            yield to_device_async(hidden[part.to(hidden.device)], device), to_device_async(labels[part], device)

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns everything an exact resume needs, named as in ``train.state``, and as beside a trunk's."""
        rest = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
        return {**self._tensors(), REST: rest}

    def _named(self) -> dict[str, Tensor]:
        return {PREFIX + name: parameter for name, parameter in self.heads.named_parameters()}

    def _tensors(self) -> dict[str, Tensor]:
        return {**model_tensors(self._named()), **optimizer_tensors(self.optimizer, self._named())}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        """Gives tensors to load a saved state into, as ``TrainEngine.loading`` does."""
        make_optimizer_tensors(self.optimizer, self._named(), saved)
        live = self._tensors()
        remedy = "train the heads that the run began with, or choose another output_dir"
        check_state_fits(tensor_shapes(live), saved, remedy)
        yield live
        self.num_updates, self.num_skipped = rest["num_updates"], rest["num_skipped"]


class Watched(Objective):
    """An objective whose passes leave hidden states behind, and which is the same in everything else.

    Args:
        batch: that is trained on.
        rows: ``[M]`` its tokens, in their order; the states before them are kept.
        labels: ``[M, K]`` what followed each.

    Attributes:
        states: ``[M, D]`` those that were in this process's passes; None before any.
        is_here: ``[M]`` which they are.
    """

    def __init__(self, objective: Objective, batch: RaggedBatch, rows: Tensor, labels: Tensor) -> None:
        self._objective = objective
        self.batch = batch
        self.rows = rows
        self.labels = labels
        self._place = torch.full((batch.num_tokens,), -1).index_put((rows,), torch.arange(len(rows)))
        self._number = {name: s for s, name in enumerate(batch.ids)}
        self.states: Tensor | None = None
        self.is_here = torch.zeros(len(rows), dtype=torch.bool)

    @property
    def needs(self) -> ForwardNeeds:
        return replace(self._objective.needs, hidden=True)

    def atoms(self, batch: RaggedBatch) -> Sequence[Sequence[int]]:
        return self._objective.atoms(batch)

    def denominators(self, batch: RaggedBatch) -> Any:
        return self._objective.denominators(batch)

    def loss(self, outputs: ForwardOutputs, batch: RaggedBatch, denominators: Any, sums: MetricSums) -> Tensor:
        assert outputs.hidden is not None, "asked for"
        # A pass that ran out of memory is made again, in other parts: each leaves what it has where it belongs.
        home = leaf_rows(self.batch, [self._number[name] for name in batch.ids])
        places = self._place[home]
        wanted = places >= 0
        hidden, device = outputs.hidden, outputs.hidden.device
        if self.states is None:
            self.states = hidden.new_zeros(len(self.rows), hidden.shape[1])
        here = leaf_rows(batch, range(len(batch)))[to_device_async(wanted, batch.device)]
        self.states[to_device_async(places[wanted], device)] = hidden[here]
        self.is_here[places[wanted]] = True
        return self._objective.loss(outputs, batch, denominators, sums)


class Companion:
    """Trains Medusa heads beside the updates of their trunk.

    Args:
        engine: the trunk's.
        seed: of the run; decides with the number of the update which positions are drawn.
    """

    def __init__(
        self, engine: TrainEngine[PackedCausalLM], heads: MedusaHeads, config: HeadTraining, *, seed: int
    ) -> None:
        self.heads = heads
        self._engine = engine
        self._tokens_per_step = config.tokens_per_step
        self._seed = seed
        self.trainer = HeadTrainer(heads, config.optim, total_steps=engine.total_steps)
        self._kept: list[tuple[Tensor | None, Tensor, Tensor]] = []  # states, is_here, labels

    def watch(self, batch: RaggedBatch, objective: Objective, num_updates: int) -> Watched:
        """Has ``objective`` watched with the positions of ``batch`` to learn from, in a step of ``num_updates``
        updates.
        """
        most = max(1, round(self._tokens_per_step / num_updates))
        labels = future_labels(batch, self.heads.depth)
        rows = labelled(labels)
        if len(rows) > most:
            number = self.trainer.num_updates + self.trainer.num_skipped + len(self._kept)
            picked = np.sort(np.random.default_rng([self._seed, number]).choice(len(rows), most, replace=False))
            rows = rows[to_device_async(torch.from_numpy(picked), rows.device)]
        return Watched(objective, batch, rows, labels[rows])

    def keep(self, watched: Watched) -> None:
        """Keeps what the trunk's passes left behind for ``learn``; nothing without a position."""
        if len(watched.rows):
            self._kept.append((watched.states, watched.is_here, watched.labels))  # not the batch

    def learn(self) -> dict[str, float]:
        """Makes an update from each of those kept, in their order; with the LM head that the trunk has now.

        Collective where the trunk is trained by several ranks.

        Returns:
            ``heads/…`` of these updates; nothing where there were none.
        """
        kept, sums = self._kept, MetricSums()
        self._kept = []
        if not kept:
            return {}
        with self.heads.with_whole_head():
            for states, is_here, labels in kept:
                whole = states if self._engine.num_ranks == 1 else self._joined(states, is_here)
                assert whole is not None, "every position is in a pass"
                self.trainer.learn(whole, labels, torch.arange(len(labels)), sums)
        figures = sums.results()
        return {
            **{f"heads/{name}": value for name, value in figures.items() if name.startswith("accuracy")},
            "heads/loss": figures["loss"] / len(kept),
            "heads/tokens": float(sum(len(labels) for *_, labels in kept)),
            "heads/skipped_steps": float(self.trainer.num_skipped),
        }

    def _joined(self, states: Tensor | None, is_here: Tensor) -> Tensor:
        """Joins ``[M, D]`` from the passes of all ranks."""
        own = None if states is None else states[is_here].cpu()
        found = self._engine.of_all_ranks((is_here.cpu(), own))
        parts = [(is_here, theirs) for is_here, theirs in found if theirs is not None]
        joined = parts[0][1].new_zeros(len(is_here), self.heads.hidden_size)
        for places, theirs in parts:
            joined[places] = theirs
        return joined


class CompanionWorker(TrainWorker):
    """An actor with heads that learn along. They stay on the device, are sent with its weights, and are written beside
    it.
    """

    drafter_model: MedusaHeads

    def __init__(self, engine: TrainEngine[PackedCausalLM], also: AddedLosses | None, companion: Companion) -> None:
        super().__init__(engine, also)
        self.companion = companion
        self.drafter_model = companion.heads

    def _update_once(self, update: UpdateSpec, batch: RaggedBatch, num_updates: int) -> dict[str, float]:
        if update.rehearsal:
            return super()._update_once(update, batch, num_updates)
        watched = self.companion.watch(batch, update.objective, num_updates)
        result = super()._update_once(replace(update, objective=watched), batch, num_updates)
        self.companion.keep(watched)
        return result

    def train_drafter(self) -> dict[str, float]:
        return self.companion.learn()

    def sizes(self) -> dict[LeaseMode, int]:
        of_heads = 4 * sum(p.nbytes for p in self.drafter_model.parameters())  # with gradients and moments
        return {mode: size + of_heads for mode, size in super().sizes().items()}

    def sent_weights(self) -> Iterable[tuple[str, Tensor]]:
        return chain(super().sent_weights(), self.drafter_model.weights())

    def checkpoint_state(self) -> dict[str, Any]:
        state, own = super().checkpoint_state(), self.companion.trainer.state()
        return {**state, **own, REST: {**state[REST], "companion": own[REST]}}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        of_heads = {name: shape for name, shape in saved.items() if PREFIX in name}
        others = {name: shape for name, shape in saved.items() if name not in of_heads}
        with (
            self.companion.trainer.loading(of_heads, rest.get("companion", {})) as theirs,
            super().loading(others, rest) as live,
        ):
            yield {**live, **theirs}

    def _write(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, seen: Collection[int], eos_ids: Collection[int]
    ) -> str | None:
        self.drafter_model.save(path.with_name(FOLDER))
        return super()._write(path, tokenizer, seen, eos_ids)


def companion_worker(
    engine: TrainEngine[PackedCausalLM],
    also: AddedLosses | None,
    config: MedusaSpeculation,
    heads: MedusaHeads,
    seed: int,
) -> CompanionWorker:
    assert config.train is not None, "they learn along"
    return CompanionWorker(engine, also, Companion(engine, heads, config.train, seed=seed))
