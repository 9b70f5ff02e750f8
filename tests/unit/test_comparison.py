"""The comparison page names metrics of ours that exist, and those of the others that people look for.

Its commands are checked with those of all pages (test_doc_samples.py).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
METRICS = tomllib.loads((ROOT / "src" / "quartet" / "observe" / "metrics.toml").read_text(encoding="utf-8"))


def _rows(section: str) -> list[list[str]]:
    """Cells of the rows below the header of a section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in table}) == 1, "a row with more or fewer cells than its header"
    return table[2:]


def test_every_metric_of_ours_exists() -> None:
    names = [name for row in _rows("Metric names") for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(names) > 25 and len(set(names)) == len(names)
    assert set(names) <= set(METRICS)
