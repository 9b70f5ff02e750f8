"""The two examples are short, run, and are the ones in the docs."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
ROOT = Path(__file__).parents[2]
NAMES = ("accumulators", "data_parallel_loss")
MOST_LINES = 25


def source(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(
    name: str, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [program])
    runpy.run_path(program, run_name="__main__")
    said = capfd.readouterr().out
    if name == "accumulators":
        assert "[1, 2, 3, 4]" in said
        return
    shown = next(line for line in said.splitlines() if "tensor(" in line)
    losses = [float(x) for x in shown.split("[")[1].split("]")[0].split(",")]
    assert losses == pytest.approx(expected_losses(), abs=1e-3)


def expected_losses() -> list[float]:
    """The example's numbers without any worker."""
    import torch

    torch.manual_seed(0)
    logits = torch.randn(10, 10)
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 3], [2, 7, 1, 8]]
    return [-sum(logits[a].log_softmax(0)[b].item() for a, b in zip(s, s[1:])) / (len(s) - 1) for s in sequences]  # noqa: B905, RUF007


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    tree = ast.parse(source(name))
    documented = ast.get_docstring(tree, clean=False) or ""
    lines = [line for line in source(name).splitlines() if line.strip()]
    assert len(lines) - len([line for line in documented.splitlines() if line.strip()]) <= MOST_LINES


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_show_the_example(name: str) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    code = source(name)
    shown = code[code.index("class ") :].replace("connect(*sys.argv[1:])", "connect()")
    assert shown in page
