"""`quartet doctor`: what is wrong with an RL recipe, found before the run on its real models and engines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quartet.extras.doctor.checks import Finding


def doctor(
    recipe: Annotated[Path, typer.Argument(help="Recipe of quartet rl (YAML).", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: key=value, e.g. steps=10, or @fragment.yaml")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer that is sampled here.", min=1)] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all findings.")] = False,
) -> None:
    """Examines an RL recipe before its run."""
    from quartet.config.errors import escape_control
    from quartet.config.load import load_recipe
    from quartet.config.recipe import RLRecipe
    from quartet.extras.doctor.examine import examine

    def show(finding: Finding) -> None:
        if not as_json:
            typer.echo(escape_control(finding.line()))

    loaded = load_recipe("rl", recipe, overrides or [])
    assert isinstance(loaded, RLRecipe)
    findings = examine(loaded, max_new_tokens=max_new_tokens, tell=show)
    counts = {status: sum(one.status == status for one in findings) for status in ("ok", "warning", "failure")}
    if as_json:
        typer.echo(json.dumps({**counts, "findings": [asdict(one) for one in findings]}, indent=2, ensure_ascii=False))
    else:
        typer.echo(", ".join(f"{num} {status}" for status, num in counts.items()))
    if counts["failure"]:
        sys.exit(1)
