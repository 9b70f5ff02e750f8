"""Drafts by Medusa heads, and the drafters that recipes name.

Shapes: B rows, D hidden, K depth, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quartet.extras.speculation.config import HistorySpeculation, MedusaSpeculation
from quartet.extras.speculation.heads import MedusaHeads
from quartet.extras.speculation.history import HistoryDrafter
from quartet.extras.speculation.speculator import Speculator
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.drafter import DraftTree
from quartet.rollout.protocol import Draw
from quartet.rollout.sampler import SamplingRows, largest, sample_tokens
from quartet.rollout.scheduler import Response

Choice = Literal["top", "uniform", "gumbel"]
_DRAWS: dict[Choice, Draw] = {"uniform": "inverse", "gumbel": "gumbel"}


def branching(paths: Sequence[Sequence[int]]) -> DraftTree:
    """A node per path, which ends in it.

    Args:
        paths: of ranks among a head's tokens: ``(0, 2)`` is the third of the second head's behind the likeliest of the
            first's. Shorter ones first; each continues another by one.
    """
    place = {tuple(path): i for i, path in enumerate(paths)}
    parents = tuple(place[tuple(path[:-1])] if len(path) > 1 else -1 for path in paths)
    return DraftTree(parents, tuple(range(len(paths))))


class HeadDrafter:
    """Tokens from each head's distribution: the likeliest, or those that the request itself would draw there first.

    Args:
        heads: hidden states ``[B, D]`` and a depth K to logits ``[B, K, V]``; of depth 1 is the token after the newest.
        paths: a draft's nodes by ranks among the heads' tokens (``branching``).
        learned: weights of the heads that a trainer sends, named.
    """

    reads_hidden = True

    def __init__(
        self,
        heads: Callable[[Tensor, int], Tensor],
        paths: Sequence[Sequence[int]],
        choose: Choice = "top",
        learned: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        self.tree = branching(paths)
        self._ranks = [path[-1] for path in paths]
        self._learned = learned
        self._heads = heads
        self._choose: Choice = choose

    def lengths(self, running: Sequence[Response]) -> list[int]:
        return [self.tree.depth] * len(running)

    @torch.no_grad()
    def draft(self, running: Sequence[Response], nodes: Sequence[int]) -> list[list[int]]:
        depths, ranks = [self.tree.depths[node] - 1 for node in nodes], [self._ranks[node] for node in nodes]
        depth = 1 + max(depths)
        flat = self._heads(torch.stack([r.hidden for r in running if r.hidden is not None]), depth).flatten(0, 1)
        # Of a vocabulary with fewer tokens than ranks the last one has the ranks behind it, too.
        num = min(1 + max(ranks), flat.shape[1])
        ranks = [min(rank, num - 1) for rank in ranks]
        if self._choose == "top":
            tokens = largest(flat, num)
        else:
            draw = _DRAWS[self._choose]
            sampling = [replace(r.request.sampling, draw=draw) for r in running]
            rows = SamplingRows.build([params for params in sampling for _ in range(depth)], flat.shape[1], flat.device)
            places = np.array([len(r.token_ids) + i for r in running for i in range(depth)], dtype=np.uint64)
            tokens = sample_tokens(flat, rows, places, num)
        found: list[list[int]] = tokens.view(len(running), depth, num)[:, depths, ranks].tolist()
        return found

    def finished(self, response: Response) -> None:
        """Heads learn elsewhere."""

    def forget(self, response: Response) -> None:
        """Nothing is kept."""

    def weights(self) -> Sequence[tuple[str, Tensor]]:
        return self._learned

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is none."""


def history(config: HistorySpeculation, packed: PackedCausalLM, model: None) -> Speculator:
    return Speculator(HistoryDrafter(config.min_match, config.max_draft, config.kept_tokens), config.costs)


def medusa(config: MedusaSpeculation, packed: PackedCausalLM, heads: MedusaHeads | None) -> Speculator:
    """
    Args:
        heads: those of the trainer, whose model the engine shares; else they are loaded, and sent where they learn.

    Raises:
        UserError: heads that are not there, or are another trunk's.
    """
    learned: Sequence[tuple[str, Tensor]] = ()
    if heads is None:
        heads = load_heads(config, packed)
        learned = tuple(heads.weights()) if config.learns else ()
    paths = config.tree or [(0,) * depth for depth in range(1, heads.depth + 1)]
    return Speculator(HeadDrafter(heads, paths, config.choose, learned), config.costs)


def load_heads(config: MedusaSpeculation, packed: PackedCausalLM) -> MedusaHeads:
    return MedusaHeads.load(config.path, packed, config.num_heads)
