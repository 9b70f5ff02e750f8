"""Drafts by Medusa heads, and the drafter that a recipe names.

Shapes: B rows, D hidden, K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quartet.config.speculation import HistorySpeculation, SpeculationConfig
from quartet.models.medusa import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.history import HistoryDrafter
from quartet.rollout.protocol import Draw
from quartet.rollout.sampler import SamplingRows, argmax, sample_tokens
from quartet.rollout.scheduler import Response
from quartet.rollout.speculation import Speculator

Choice = Literal["top", "uniform", "gumbel"]
_DRAWS: dict[Choice, Draw] = {"uniform": "inverse", "gumbel": "gumbel"}


class HeadDrafter:
    """A token from each head's distribution, as the request itself would draw at that position, or the likeliest.

    Args:
        heads: hidden states ``[B, D]`` to logits ``[B, K, V]``; that of depth 1 are of the token after the newest.
        longest: heads that are used.
        learned: weights of the heads that a trainer sends, named.
    """

    reads_hidden = True

    def __init__(
        self,
        heads: Callable[[Tensor], Tensor],
        longest: int,
        choose: Choice = "top",
        learned: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        self.longest = longest
        self._learned = learned
        self._heads = heads
        self._choose: Choice = choose

    def lengths(self, running: Sequence[Response]) -> list[int]:
        return [self.longest] * len(running)

    @torch.no_grad()
    def draft(self, running: Sequence[Response], depth: int) -> list[list[int]]:
        logits = self._heads(torch.stack([r.hidden for r in running if r.hidden is not None]))[:, :depth]
        flat = logits.flatten(0, 1)
        if self._choose == "top":
            tokens = argmax(flat)
        else:
            draw = _DRAWS[self._choose]
            sampling = [replace(r.request.sampling, draw=draw) for r in running]
            rows = SamplingRows.build([params for params in sampling for _ in range(depth)], flat.shape[1], flat.device)
            places = np.array([len(r.token_ids) + i for r in running for i in range(depth)], dtype=np.uint64)
            tokens = sample_tokens(flat, rows, places)
        found: list[list[int]] = tokens.view(len(running), depth).tolist()
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


def build_speculator(config: SpeculationConfig, packed: PackedCausalLM, heads: MedusaHeads | None = None) -> Speculator:
    """
    Args:
        heads: those of the trainer, whose model the engine shares; else they are loaded, and sent where they learn.

    Raises:
        UserError: heads that are not there, or are another trunk's.
    """
    if isinstance(config, HistorySpeculation):
        return Speculator(HistoryDrafter(config.min_match, config.max_draft, config.kept_tokens), config.costs)
    if heads is not None:
        return Speculator(HeadDrafter(heads, heads.depth, config.choose), config.costs)
    heads = MedusaHeads.load(Path(config.path), packed, config.depth)
    learned = () if config.train is None else tuple(heads.weights())
    return Speculator(HeadDrafter(heads, heads.depth, config.choose, learned), config.costs)
