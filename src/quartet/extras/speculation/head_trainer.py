"""Training of Medusa heads from hidden states of their trunk and the tokens that followed.

Shapes: T stored tokens, M positions that are learned from, D hidden, K depth, V vocabulary.

Whoever runs the trunk gives its hidden states: a job that trains the heads alone, or an actor's own training forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.batch.ragged import RaggedBatch, sent
from quartet.config.common import OptimConfig
from quartet.extras.speculation.config import HeadTraining
from quartet.extras.speculation.heads import MedusaHeads
from quartet.extras.speculation.recipe import HeadsConfig
from quartet.train.engine import build_optimizer, clip_gradients, learning_rate
from quartet.train.forward import Needs
from quartet.train.metrics import MetricSums
from quartet.train.state import (
    REST,
    Shape,
    check_fit,
    make_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    shapes_of,
)

HIDDEN = Needs(hidden=True)
"""The states that ``HeadTrainer`` learns from, of the tokens under ``loss_mask``."""
TOP = 5
_LOGIT_BYTES = 1 << 26
"""Most bytes of the logits of all heads that exist at a time."""


def future_labels(batch: RaggedBatch, depth: int) -> Tensor:
    """``[T, K]`` token ids that follow each token of ``loss_mask`` 1 … K places behind it, -1 where there is none.

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


class HeadTrainer:
    """AdamW on Medusa heads; the trunk gets no gradient.

    The loss is ``Σ_k depth_decay^k`` times head ``k``'s mean cross-entropy over the positions that it has labels for.

    Args:
        optim: of the heads alone.
        total_steps: updates of the whole run, for the learning-rate schedule.
        seed: with the number of the update decides which positions are drawn where there is a budget.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        config: HeadsConfig | HeadTraining,
        optim: OptimConfig,
        *,
        total_steps: int,
        seed: int,
    ) -> None:
        self.heads = heads
        self.config = config
        self.optim = optim
        self.total_steps = total_steps
        self.seed = seed
        self.optimizer = build_optimizer(heads, optim)
        self.num_updates = 0
        self.num_skipped = 0

    def step(self, hidden: Tensor, batch: RaggedBatch) -> dict[str, float]:
        """One update. A step whose gradient is not finite is skipped and counted.

        Args:
            hidden: ``[T, D]`` states before the batch's tokens, as ``Needs.hidden`` gives them; without gradients.
            batch: with the token field ``loss_mask``.

        Returns:
            ``loss/medusa``, ``medusa/accuracy_depth_<k>``, ``medusa/positions``, ``grad_norm`` and ``lr``.
        """
        labels = future_labels(batch, self.heads.depth)
        rows, sums = self.drawn(labels, self.config.tokens_per_step), MetricSums()
        update, found = self.learn(hidden, labels, rows, sums), sums.results()
        accuracies = {f"medusa/{name}": value for name, value in found.items() if name.startswith("accuracy")}
        return {"loss/medusa": found["loss"], **accuracies, "medusa/positions": float(len(rows)), **update}

    def learn(self, hidden: Tensor, labels: Tensor, rows: Tensor, sums: MetricSums) -> dict[str, float]:
        """One update from ``rows [M]`` of states ``[T, D]`` and labels ``[T, K]``; returns ``grad_norm`` and ``lr``.

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
        """How well the heads guess, over all positions of hidden states with their batches, as ``step`` takes them.

        Returns:
            ``eval/loss``; by depth ``medusa/accepted_depth_<k>``, how often heads 1 … k all have the token as their
            likeliest, and ``medusa/top_5_depth_<k>``; ``medusa/tokens_per_forward``, one and the accepted ones.
        """
        sums, depth = MetricSums(), self.heads.depth
        for hidden, batch in found:
            labels = future_labels(batch, depth)
            for states_MD, labels_MK in self._chunks(hidden, labels, (labels[:, 0] >= 0).nonzero().squeeze(1)):
                logits, has = self.heads(states_MD), labels_MK >= 0
                # Among the first TOP in their order, the first of which is the likeliest.
                top = logits.topk(min(TOP, logits.shape[-1])).indices == labels_MK.unsqueeze(-1)
                chain = top[..., 0].cumprod(1)
                losses = F.cross_entropy(logits.transpose(1, 2), labels_MK, ignore_index=-1, reduction="none")
                for k in range(depth):
                    sums.mean(f"loss_{k}", losses[:, k], has[:, k])
                    sums.mean(f"medusa/accepted_depth_{k + 1}", chain[:, k], has[:, k])
                    sums.mean(f"medusa/top_{TOP}_depth_{k + 1}", top[:, k].any(-1), has[:, k])
        figures = sums.results()
        losses_K = [figures.pop(f"loss_{k}", 0.0) for k in range(depth)]
        accepted = sum(value for name, value in figures.items() if name.startswith("medusa/accepted"))
        loss = sum(decay * value for decay, value in zip(self._decays, losses_K, strict=True))
        return {"eval/loss": loss, **figures, "medusa/tokens_per_forward": 1 + accepted}

    @property
    def _decays(self) -> list[float]:
        return [self.config.depth_decay**k for k in range(self.heads.depth)]

    def drawn(self, labels: Tensor, most: int | None, *, ahead: int = 0) -> Tensor:
        """``[M]`` positions with a label for the first head: all, or as many as an update may have, in their order.

        Args:
            ahead: updates that are still to come before the one that these are for.
        """
        rows = (labels[:, 0] >= 0).nonzero().squeeze(1)
        if most is None or len(rows) <= most:
            return rows
        draw = np.random.default_rng([self.seed, self.num_updates + self.num_skipped + ahead])
        picked = np.sort(draw.choice(len(rows), most, replace=False))
        return rows[sent(torch.from_numpy(picked), rows.device)]

    def _chunks(self, hidden: Tensor, labels: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """States ``[m, D]`` and labels ``[m, K]`` of the rows, on the heads' device, as many as there is room for."""
        heads, device = self.heads, self.heads.trunk.device
        for part in rows.split(max(1, _LOGIT_BYTES // (4 * heads.depth * heads.vocab_size))):
            yield sent(hidden[part.to(hidden.device)], device), sent(labels[part], device)

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything an exact resume needs, named as in ``train.state``."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rest = {"groups": groups, "num_updates": self.num_updates, "num_skipped": self.num_skipped}
        return {**self._tensors(), REST: rest}

    def _tensors(self) -> dict[str, Tensor]:
        named = dict(self.heads.named_parameters())
        return {**model_tensors(named), **optimizer_tensors(self.optimizer, named)}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        """As ``TrainEngine.loading``."""
        make_optimizer_tensors(self.optimizer, dict(self.heads.named_parameters()), saved)
        live = self._tensors()
        check_fit(shapes_of(live), saved, "train the heads that the run began with, or choose another output_dir")
        yield live
        for group, values in zip(self.optimizer.param_groups, rest["groups"], strict=True):
            group.update(values)
        self.num_updates, self.num_skipped = rest["num_updates"], rest["num_skipped"]
