"""Demonstrations mixed into the actor's updates (Ouyang et al. 2022, PPO-ptx): ``loss = policy + coef · sft``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.recipe import PTXConfig, RLRecipe
from quartet.data.datasets import SFTData
from quartet.data.lazy import Prefetcher
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import LossTerm
from quartet.train.objectives import SFTObjective
from quartet.trainers.input_sources import check_budget, demonstration_reader, read_data

_ORDER = 7_919
"""Added to the run's seed: where prompts and demonstrations are the same rows, they do not come in the same order."""
BYTES_PER_TOKEN = 9
"""Of a tokenised batch: an id of 8 bytes and a mask of one."""


class PTX:
    """The second data loader: the demonstrations of update ``number`` are a function of (seed, number).

    Copies in other processes read the rows themselves, when they are first asked for: by then such a process is where
    relative paths begin.
    """

    def __init__(self, config: PTXConfig, seed: int, read: Callable[[], SFTData]) -> None:
        self.config = config
        self._seed = seed
        self._read = read
        self._batches: Prefetcher[RaggedBatch] = Prefetcher(self.batch, ahead=config.prefetch)

    def __reduce__(self) -> tuple[type[PTX], tuple[Any, ...]]:
        return PTX, (self.config, self._seed, self._read)

    @cached_property
    def data(self) -> SFTData:
        return self._read()

    def batch(self, number: int) -> RaggedBatch:
        """The demonstrations of update ``number``."""
        return self.data.batch(number, self.config.examples_per_minibatch, self._seed + _ORDER)

    def start(self, number: int) -> None:
        """Begins to prepare the batches of update ``number`` and those that follow."""
        self._batches.start(number)

    def terms(self, number: int) -> list[LossTerm]:
        """What is added to the loss of update ``number``."""
        return [LossTerm(self._batches.get(number), SFTObjective("loss/ptx"), self.config.coef)]

    def metrics(self, num_updates: int) -> dict[str, float]:
        return {"data/ptx_epoch": num_updates * self.config.examples_per_minibatch / len(self.data)}

    @property
    def warnings(self) -> list[str]:
        """What was left out or converted, and what the loader holds at most, in words."""
        tokens = self.config.examples_per_minibatch * int(self.data.lengths.max())
        held = (self.config.prefetch + 1) * tokens * BYTES_PER_TOKEN
        size = f"{len(self.data):,} demonstrations, at most {held / 2**20:.1f} MiB of them as tokens"
        return [f"ptx: {warning}" for warning in (size, *self.data.remarks)]

    def close(self) -> None:
        self._batches.close()


def build_ptx(recipe: RLRecipe, rows: Sequence[Any] | None, codec: TextCodec, context: int) -> PTX | None:
    """The loader of the recipe's ``ptx``; None without it.

    Args:
        rows: demonstrations passed from Python in place of ``ptx.data``.
        context: longest sequence that the actor can read.

    Raises:
        UserError: data or coefficient are missing, or a row cannot be used.
    """
    config = recipe.ptx
    if config is None:
        if rows is not None:
            raise UserError(
                "demonstrations need a weight in the actor's loss",
                found="ptx_rows without ptx in the recipe",
                remedy="set ptx.coef and ptx.examples_per_minibatch",
            )
        return None
    if rows is None and (config.data is None or not config.data.parts):
        raise UserError("there is no data", found="ptx.data is missing", remedy="set ptx.data.path, or pass ptx_rows")
    ptx = PTX(config, recipe.seed, partial(_read, config, rows, codec, context))
    check_budget(int(ptx.data.lengths.max()), recipe.actor.train.token_budget, "actor.train.token_budget")
    return ptx


def _read(config: PTXConfig, rows: Sequence[Any] | None, codec: TextCodec, context: int) -> SFTData:
    # The thread that prepares batches has a tokenizer of its own: not every one may be used by two at a time.
    own_codec = TextCodec(copy.deepcopy(codec.tokenizer), codec.model_eos_ids)
    return read_data(config.data, rows, own_codec, context, "ptx.data", demonstration_reader)
