"""Every metric the system logs: name, unit, meaning, what a bad value looks like; the rows are in ``metrics.toml``.

A name that is not in the table cannot be logged, so the table, ``docs/metrics.md`` and the report's
explanations never fall behind the code. Names with a placeholder (``reward/<source>``) stand for a family; an exact
name wins over a family. After a change, write the page anew: ``python -m quartet.observe.metrics > docs/metrics.md``.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from types import MappingProxyType


@dataclass(frozen=True)
class MetricDescription:
    """One row of the table; ``name`` may hold ``<placeholders>``, ``bad`` says what a bad value looks like."""

    name: str
    unit: str
    meaning: str
    bad: str


_TABLE = tomllib.loads(resources.files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))
METRICS: Mapping[str, MetricDescription] = MappingProxyType(
    {name: MetricDescription(name, **row) for name, row in _TABLE.items()}
)
"""The table by name; families stand under their placeholder name."""

_PLACEHOLDER = re.compile(r"<\w+>")
_FAMILY_MEMBER = r"[\w.+@:-]+(?:/[\w.+@:-]+)*"
_FAMILIES = tuple(
    (re.compile(_FAMILY_MEMBER.join(re.escape(part) for part in _PLACEHOLDER.split(row.name))), row)
    for row in METRICS.values()
    if _PLACEHOLDER.search(row.name)
)


@cache
def find_metric(name: str) -> MetricDescription:
    """Finds the row that explains ``name``.

    Raises:
        ValueError: the table does not know the name; the message offers the nearest one.
    """
    if name in METRICS and not _PLACEHOLDER.search(name):
        return METRICS[name]
    for pattern, row in _FAMILIES:
        if pattern.fullmatch(name):
            return row
    family = [known for known in METRICS if known.split("/")[0] == name.split("/")[0]]
    near = difflib.get_close_matches(name, family or METRICS, n=1, cutoff=0.0)
    raise ValueError(f"unknown metric {name!r}; the nearest known name is {near[0]!r} (table: quartet.observe.metrics)")


def metrics_page() -> str:
    """Writes the text of ``docs/metrics.md``, one table per family of names."""
    lines = [
        "# Metrics",
        "",
        "Every figure a run logs to `metrics.jsonl` and its trackers. This page is written from the table in",
        "`src/quartet/observe/metrics.toml` by `python -m quartet.observe.metrics > docs/metrics.md`; a test",
        "keeps the two equal, and a name that is not here cannot be logged. Names in angle brackets stand",
        "for any name: a reward source called `style` is logged as `reward/style`. The thresholds are rules",
        "of thumb for where to look first.",
        "",
        "`metrics.jsonl` holds one JSON object per logged step: `step`, `time_s` (Unix time in seconds) and",
        "the metrics by name. A value that is not finite is `null`, and `nonfinite` says which:",
        '`{"loss/policy": "nan"}`.',
    ]
    for family, rows in groupby(METRICS.values(), lambda row: row.name.split("/")[0]):
        lines += ["", f"## {family}", "", "| name | unit | meaning | a bad value |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.unit} | {row.meaning} | {row.bad} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
