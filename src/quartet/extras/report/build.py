"""Puts data, style and script into one HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError, printable
from quartet.extras.report.collect import collect_run
from quartet.extras.report.samples import ReportLimits
from quartet.observe.jsonl import replace_atomically

SCRIPTS = (
    "dom.js",
    "charts.js",
    "curves.js",
    "timing.js",
    "colours.js",
    "replay.js",
    "tokens.js",
    "alarm.js",
    "compare.js",
    "live.js",
    "main.js",
)
"""Joined in this order into one function, so that they share names with each other and with nothing else."""

_SLOT = re.compile(r"\{\{ (\w+) \}\}")


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the report of ``run_dir`` and returns its path (default: ``report.html`` inside the run).

    The page loads nothing: data, style and script are in it, and its content security policy allows no more.

    Raises:
        UserError: ``run_dir`` holds no run, or the report cannot be written.
    """
    data = collect_run(run_dir, ReportLimits())
    return write_page(data, out if out is not None else run_dir / "report.html")


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Writes a page with ``data``; UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, render_page(data).encode("utf-8"))
    except OSError as error:
        raise UserError(
            "the report cannot be written",
            found=f"{path}: {error.strerror or error}",
            remedy="name another file with --out, or make room",
        ) from error
    return path


def render_page(data: Mapping[str, Any], *, live: bool = False) -> str:
    """The page for what :func:`quartet.extras.report.collect.collect_run` returns.

    Args:
        live: the page may ask the server that it came from what is new.
    """
    style = _asset("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    slots = {
        "title": html.escape(printable(f"{data['run'].get('name', 'run')} · Quartet")),
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
        + ("; connect-src 'self'" if live else ""),
        "style": style,
        "data": _inert_json(data),
        "script": script,
    }
    # one pass, so that a slot's name inside the data stays what it is
    return _SLOT.sub(lambda match: slots[match[1]], _asset("template.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _inert_json(data: Mapping[str, Any]) -> str:
    """JSON that no HTML parser can mistake for markup, in ASCII, so that lone surrogates survive too."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
