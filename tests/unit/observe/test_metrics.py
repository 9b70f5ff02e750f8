"""The table of metrics: complete, unambiguous, equal to its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.observe.metrics import METRICS, find_metric, metrics_page

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_page_equals_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), (
        "write it anew: python -m quartet.observe.metrics > docs/metrics.md"
    )


def test_every_metric_is_explained() -> None:
    for name, row in METRICS.items():
        assert row.name == name
        assert row.unit
        assert row.meaning.endswith((".", ")."))
        assert row.bad.endswith(".")
        assert "|" not in row.meaning + row.bad, "would break the page's table"


def test_exact_name_wins_over_family() -> None:
    assert find_metric("reward/score_mean").name == "reward/score_mean"
    assert find_metric("reward/politeness").name == "reward/<source>"
    assert find_metric("time/train_actor_s").name == "time/<stage>_s"
    assert find_metric("eval/greedy/accuracy").name == "eval/<name>"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("loss/polcy", "loss/policy"),
        ("policy/aprox_kl", "policy/approx_kl"),
        ("time/generate", "time/<stage>_s"),
        ("reward/", "reward/<source>"),
        ("reward/<source>", "reward/<source>"),
        ("eval/with space", "eval/"),
    ],
)
def test_unknown_name_offers_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match="unknown metric") as caught:
        find_metric(wrong)
    assert near in str(caught.value)
