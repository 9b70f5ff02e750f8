"""Tables of docs/benchmarks.md from the results of run_all.py.

    python benchmarks/render.py DIR [--into docs/benchmarks.md]

``--into`` replaces what stands between the two marker lines of the page; without it the tables are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import exact
import floor
import fusions
import memory
import preference
import prefix
import products
import rl_step
import rollout
import update
from sides import work_folder

BEGIN, END = "<!-- figures: benchmarks/render.py -->", "<!-- /figures -->"

Tables = Callable[[list[dict[str, Any]]], Sequence[str]]

SECTIONS: tuple[tuple[str, str, str, Tables], ...] = (
    (
        "Whole RL step",
        "rl_step",
        "`benchmarks/rl_step.py`: 8 prompts x 8 completions against TRL; a case is model/algorithm/longest "
        "response[/prompt].",
        lambda parts: (rl_step.table(parts), "Where the time goes:", rl_step.phase_table(parts)),
    ),
    (
        "Rollout engines",
        "rollout",
        "`benchmarks/rollout.py`: mixed = 256 requests of 8 to 256 tokens, at most 64 running; shared = 8 prompts of "
        "512 tokens x 16 responses.",
        lambda parts: (rollout.table(parts),),
    ),
    (
        "Update",
        "update",
        "`benchmarks/update.py`: one optimizer update on 64 responses to 8 prompts.",
        lambda parts: (update.table(parts), update.kind_table(parts)),
    ),
    (
        "Shared prefix",
        "prefix",
        "`benchmarks/prefix.py`: one prompt of 1024 tokens, 8 responses of 128.",
        lambda parts: (prefix.table(parts),),
    ),
    (
        "Preference training",
        "preference",
        "`benchmarks/preference.py`: one update on 16 pairs with answers of 64 to 192 tokens against TRL; a case is "
        "model/job/prompt.",
        lambda parts: (preference.table(parts),),
    ),
    (
        "Memory of a step",
        "memory",
        "`benchmarks/memory.py`: peak memory of a whole step, budgets fixed to what one prompt fills.",
        lambda parts: (memory.table(parts),),
    ),
    (
        "Exact numerics",
        "exact",
        "`benchmarks/exact.py`: `numerics: exact` against fast, one thread each.",
        lambda parts: (exact.table(parts),),
    ),
    (
        "Products of a decode step",
        "products",
        "`benchmarks/products.py`: GFLOP/s by the form of the weight.",
        lambda parts: (products.table(parts),),
    ),
    (
        "Fusions on the CPU",
        "fusions",
        "`benchmarks/fusions.py`: processor time of a decode step and of an update, and how much longer without each.",
        lambda parts: (fusions.table(parts),),
    ),
    (
        "Floors",
        "floor",
        "`benchmarks/floor.py`: what an update on 64 responses to 8 prompts and a decode step of 64 requests need at "
        "the rates measured here; run it for the list of operations.",
        lambda parts: (floor.summary_table(parts),),
    ),
)


def collect(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[Mapping[str, Any]], list[str]]:
    """Parts by kind, the machines they ran on, and the names of those that ran out of time.

    Raises:
        SystemExit: there is a smoke run among them, whose figures mean nothing.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    machines, incomplete = [], []
    for path in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime):
        name = path.name.removesuffix(".json")
        if name.endswith(".partial"):
            name = name.removesuffix(".partial")
            if (folder / f"{name}.json").exists():
                continue
            incomplete.append(name)
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("smoke"):
            raise SystemExit(f"{path} is a smoke run; measure it before it is shown")
        if "machine" in found:
            machines.append(found["machine"])
        for _, kind, _, _ in SECTIONS:
            parts.setdefault(kind, []).extend(found.get(kind, []))
    return parts, machines, incomplete


def render(folder: Path) -> str:
    parts, machines, incomplete = collect(folder)
    lines = []
    if machines:
        m = machines[-1]
        dates = sorted({machine["date"] for machine in machines})
        lines += [
            f"{m['processor']}, {m['cores']} cores, {m['threads']} threads, {m['memory_bytes'] / 2**30:.0f} GiB, units "
            f"{', '.join(m['units'])}; Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}; "
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {_peers(folder)}",
            "",
        ]
    for title, kind, text, tables in SECTIONS:
        if parts.get(kind):
            lines += [f"## {title}", "", text, ""]
            for block in tables(parts[kind]):
                lines += [block, ""]
    if incomplete:
        lines += [f"Ran out of time, so incomplete: {', '.join(incomplete)}.", ""]
    return "\n".join(lines)


def _peers(folder: Path) -> str:
    found: dict[str, dict[str, str]] = {}
    for path in folder.glob("*.json"):
        found |= json.loads(path.read_text(encoding="utf-8")).get("peers", {})
    texts = [f"{name}: {', '.join(f'{p} {v}' for p, v in found[name].items())}" for name in sorted(found)]
    return f"Environments of the peers: {'; '.join(texts)}." if texts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=work_folder("results"))
    parser.add_argument("--into", type=Path, help="the page whose figures are replaced")
    args = parser.parse_args()
    text = render(args.folder)
    if args.into is None:
        print(text)
        return
    page = args.into.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    args.into.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
