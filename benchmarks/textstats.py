"""Small statistics of accuracies and of generated texts. Pure functions, standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def number(self, digits: int = 3) -> str:
        return f"{self.value:.{digits}f} ± {(self.high - self.low) / 2:.{digits}f}"


def wilson(successes: int, total: int, z: float = Z95) -> Interval:
    """A proportion with its score interval (Wilson 1927, JASA 22: 209-212), which stays within 0 and 1."""
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"{successes} successes of {total}")
    share, spread = successes / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float], z: float = Z95) -> Interval:
    """Mean of independent values with the normal interval of its standard error. At least two values."""
    if len(values) < 2:
        raise ValueError("a confidence interval of a mean needs at least two values")
    mean = sum(values) / len(values)
    half = z * math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return Interval(mean, mean - half, mean + half)


def ngrams(items: Sequence[Hashable], n: int) -> Iterable[tuple[Hashable, ...]]:
    return (tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def distinct(texts: Sequence[str], n: int, first_words: int) -> float:
    """Different n-grams over all n-grams (Li et al. 2016, arXiv:1510.03055), of the first words of every text.

    Longer texts repeat more: without the cut, a model that writes less would look more diverse.
    """
    counts = Counter(gram for text in texts for gram in ngrams(text.lower().split()[:first_words], n))
    return len(counts) / max(1, counts.total())


def repeated(text: str, n: int) -> float:
    """Share of a text's n-grams of words that it had already used."""
    grams = list(ngrams(text.lower().split(), n))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def shared_sentences(texts: Sequence[str]) -> float:
    """Share of sentences (of at least four words) that occur in more than one text: formulas of a collapsed policy."""
    owners: dict[str, set[int]] = {}
    uses: list[str] = []
    for index, text in enumerate(texts):
        for sentence in text.lower().replace("!", ".").replace("?", ".").replace("\n", " ").split("."):
            words = sentence.split()
            if len(words) >= 4:
                key = " ".join(words)
                owners.setdefault(key, set()).add(index)
                uses.append(key)
    return sum(len(owners[key]) > 1 for key in uses) / max(1, len(uses))
