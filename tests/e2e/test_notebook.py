"""The notebook runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_the_notebook_runs_learns_and_plots(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear the outputs before you commit"
    probe = nbformat.v4.new_code_cell(
        'rows = [json.loads(line) for line in (rl.path / "metrics.jsonl").read_text().splitlines()]\n'
        'print(*(row["reward/digits_right"] for row in rows if "reward/digits_right" in row))'
    )
    notebook.cells.append(probe)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    plots = [output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(plots) == 3
    shares = [float(share) for share in probe.outputs[0]["text"].split()]
    assert len(shares) == 15 and sum(shares[:2]) / 2 < 0.8 and sum(shares[-5:]) / 5 > 0.85, shares
