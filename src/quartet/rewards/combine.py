"""Several rewards as one number per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def combine(
    scores: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]
) -> tuple[list[float | None], dict[str, int]]:
    """The weighted sum of every source's scores.

    A source that does not apply to a sample (None) is left out of that sample's sum; the sum is not rescaled,
    because the other sources mean the same with or without it.

    Args:
        scores: per source, one entry per sample.
        weights: per source.

    Returns:
        Per sample the sum, None where no source applies; and per source for how many samples it did not
        apply.
    """
    if set(scores) != set(weights):
        raise ValueError(f"scores of {sorted(scores)}, weights of {sorted(weights)}")
    lengths = {name: len(values) for name, values in scores.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"sources score different numbers of samples: {lengths}")
    combined: list[float | None] = []
    for sample in range(next(iter(lengths.values()), 0)):
        parts = [weights[name] * value for name, values in scores.items() if (value := values[sample]) is not None]
        combined.append(sum(parts) if parts else None)
    return combined, {name: sum(value is None for value in values) for name, values in scores.items()}
