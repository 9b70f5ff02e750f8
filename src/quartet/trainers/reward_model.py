"""Reward-model training on preference pairs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quartet.algorithms.evaluation_math import Interval, bootstrap_interval, wilson_interval
from quartet.config.recipe import RewardModelRecipe
from quartet.data.datasets import PreferenceData
from quartet.train.engine import TrainEngine
from quartet.train.forward import Needs
from quartet.train.preference_objectives import PairwiseObjective
from quartet.trainers.input_sources import longest_group
from quartet.trainers.supervised import SupervisedTrainer
from quartet.trainers.supervised_worker import ScalarWorker

_PAIRS_PER_PASS = 128


class RewardModelWorker(ScalarWorker[RewardModelRecipe, PreferenceData]):
    """Trains a scalar head to prefer chosen over rejected answers."""

    _rows_key = "pairs_per_step"

    @property
    def objective(self) -> PairwiseObjective:
        return PairwiseObjective(self.recipe.centring, self.recipe.margin_scale)

    def _longest(self) -> int:
        return longest_group(self.data, share=self._shares_prompts)

    def _measure(self, data: PreferenceData) -> dict[str, float]:
        chosen, rejected = score_pairs(self.engine, data)
        right = chosen > rejected
        interval = accuracy_interval(right, [pair.prompt_ids for pair in data.items], seed=self.recipe.seed)
        bounds = {} if interval is None else {"eval/accuracy_low": interval.low, "eval/accuracy_high": interval.high}
        return {
            "eval/accuracy": float(right.double().mean()),
            **bounds,
            "eval/longer_answer_accuracy": longer_answer_accuracy(data),
            "eval/margin": float((chosen - rejected).double().mean()),
            "eval/offset": float(torch.cat([chosen, rejected]).double().mean()),
        }


class RewardModelTrainer(SupervisedTrainer[RewardModelRecipe, RewardModelWorker]):
    """Trains a scalar head on a causal LM's body (or goes on with a reward model) to prefer chosen over rejected.

    Arguments as for ``SupervisedTrainer``; rows have ``prompt``, ``chosen``, ``rejected`` and, if they have one,
    ``margin``. Held-out figures: ``eval/accuracy``, the share of pairs whose chosen side scores strictly higher, with
    its interval from ``eval/accuracy_low`` to ``eval/accuracy_high``; beside it ``eval/longer_answer_accuracy``, what
    one would get by calling the answer of more tokens the better one; ``eval/margin``, the mean difference;
    ``eval/offset``, the mean score of both sides, which centring keeps near 0.
    """

    recipe_class = RewardModelRecipe
    worker_class = RewardModelWorker


def accuracy_interval(right_P: Tensor, prompts: Sequence[Hashable], *, seed: int) -> Interval | None:
    """95 % interval of the share of right pairs: Wilson's, or where pairs share prompts, and so are not independent,
    the bootstrap over prompts. None where all have one prompt.

    Args:
        right_P: bool.
        prompts: of each pair.
        seed: of the resampling.
    """
    numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    if len(numbers) == len(prompts):
        return wilson_interval(float(right_P.double().mean()), len(prompts))
    if len(numbers) < 2:
        return None
    prompt_P = torch.tensor([numbers[prompt] for prompt in prompts])
    pairs_Q = prompt_P.bincount().double()
    means_Q = prompt_P.bincount(right_P.double()) / pairs_Q
    return bootstrap_interval(means_Q, torch.Generator().manual_seed(seed), weights_P=pairs_Q)


def longer_answer_accuracy(data: PreferenceData) -> float:
    """Share of pairs whose chosen answer has more tokens; equal lengths count half."""
    chosen_P, rejected_P = data.lengths[:, 1], data.lengths[:, 2]
    return float((chosen_P > rejected_P).sum() + 0.5 * (chosen_P == rejected_P).sum()) / len(data)


def score_pairs(engine: TrainEngine[Any], data: PreferenceData) -> tuple[Tensor, Tensor]:
    """Scores ``[P]`` of the chosen and the rejected sides; collective."""
    batches = data.in_parts(_PAIRS_PER_PASS * engine.num_ranks)
    scored = engine.in_shares(batches, partial(engine.forward, needs=Needs(scores=True)))
    both = torch.cat([found.sequence["scores"] for _, found in scored]).view(-1, 2)
    return both[:, 0], both[:, 1]
