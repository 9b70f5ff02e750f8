"""Exact match of the final answer, and a noisy judge of pairs made from it.

Only evaluation and the labelling of pairs use this module. Training never sees it: what PPO maximises is the
reward model learned from the judge's labels.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from quartet.extras.quickstart.task import COLUMN_END, operands

JUDGE_ERROR_RATE = 0.1
"""Part of the pairs that the judge labels the wrong way round."""


def is_correct(prompt: str, completion: str) -> bool:
    """Tells whether the final answer is the sum, digit for digit (no leading zero, nothing after it). It stands behind
    the last ``;``; where there is none it is the whole completion.

    The working is not judged: a right answer under wrong working counts as right.

    Args:
        prompt: as made by ``task.prompt_of``.
        completion: text without the prompt and without end-of-text; a cut-off completion is just its text.
    """
    return completion.rpartition(COLUMN_END)[2] == str(sum(operands(prompt)))


def judge_pairs(
    seed: int, groups: Iterable[tuple[str, Sequence[str]]], error_rate: float = JUDGE_ERROR_RATE
) -> list[dict[str, str]]:
    """Makes one preference row per group that holds both a right and a wrong completion, labelled by a judge who errs.

    Args:
        seed: decides which completions meet and where the judge errs; each prompt is judged independently of
            the others, so a pair does not depend on which groups stand beside it.
        groups: ``(prompt, completions)``; groups all right or all wrong yield nothing.
        error_rate: probability that the labels are exchanged; 0 gives the clean pairs for evaluation.
    """
    pairs = []
    for prompt, completions in groups:
        right = [text for text in completions if is_correct(prompt, text)]
        wrong = [text for text in completions if not is_correct(prompt, text)]
        if not right or not wrong:
            continue
        rng = random.Random(f"judge {seed} {prompt}")
        chosen, rejected = rng.choice(right), rng.choice(wrong)
        if rng.random() < error_rate:
            chosen, rejected = rejected, chosen
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs
