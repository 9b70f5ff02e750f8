"""Lines of code by folder: without blank lines, comments and docstrings.

    python benchmarks/code_lines.py [TREE ...]

A tree is a checkout; the default is this one. Several stand side by side.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code; those of a string that spans several count, unless it stands alone as docstrings do."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def by_folder(tree: Path) -> Counter[str]:
    """Folder of ``src/quartet`` → lines; ``.`` for the files beside the folders, ``tests`` for all tests."""
    found: Counter[str] = Counter()
    package = tree / "src" / "quartet"
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        found[parts[0] if len(parts) > 1 else "."] += code_lines(path.read_text(encoding="utf-8"))
    for path in (tree / "tests").rglob("*.py"):
        found["tests"] += code_lines(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", default=[Path(__file__).parents[1]])
    trees = [by_folder(tree) for tree in parser.parse_args().trees]
    folders = sorted({folder for tree in trees for folder in tree} - {"tests"})
    for folder in folders:
        print(f"{folder:12s}", *(f"{tree[folder]:7d}" for tree in trees))
    print(f"{'src':12s}", *(f"{sum(tree[folder] for folder in folders):7d}" for tree in trees))
    print(f"{'tests':12s}", *(f"{tree['tests']:7d}" for tree in trees))


if __name__ == "__main__":
    main()
