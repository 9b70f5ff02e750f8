"""Code by folder: files, lines (without blanks, comments, docstrings), statements, lengths of files and functions.

    python benchmarks/code_lines.py [TREE ...]

A tree is a checkout; the default is this one. Several stand below each other.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

EXTRAS = "extras"
"""Folder of what a run does not need."""
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """What a file holds.

    Attributes:
        length: all of its lines.
        code: lines that hold code; those of a string that spans several count, unless it stands alone as docstrings do.
        comments: lines with a comment.
        statements: without docstrings.
        functions: all lines of each.
    """

    length: int
    code: int
    comments: int
    statements: int
    functions: tuple[int, ...]

    @classmethod
    def of(cls, source: str) -> Module:
        lines, comments = set[int](), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            if token.type not in _NOT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        tree = ast.parse(source)
        docstrings = [node for node in ast.walk(tree) if _is_docstring(node)]
        for node in docstrings:
            lines.difference_update(_lines(node))
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(docstrings)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = tuple(len(_lines(function)) for function in functions)
        return cls(len(source.splitlines()), len(lines), len(comments), statements, lengths)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _lines(node: ast.AST) -> range:
    first, last = node.lineno, node.end_lineno
    return range(first, last + 1)


def by_folder(tree: Path) -> Iterator[tuple[str, list[Module]]]:
    """Folders of the spine (``.`` for the files beside them) and of extras, the sums of both, and ``tests``."""
    package = tree / "src" / "quartet"
    found: dict[str, list[Module]] = defaultdict(list)
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        folder = "/".join(parts[:-1][: 2 if parts[0] == EXTRAS else 1]) or "."
        found[folder].append(Module.of(path.read_text(encoding="utf-8")))
    yield from sorted(found.items())
    for name, is_extra in (("spine", False), (EXTRAS, True)):
        yield name, [m for folder, modules in found.items() if folder.startswith(EXTRAS) == is_extra for m in modules]
    yield "tests", [Module.of(path.read_text(encoding="utf-8")) for path in (tree / "tests").rglob("*.py")]


def row(name: str, modules: Sequence[Module]) -> str:
    files = [module.length for module in modules if module.length]
    functions = [length for module in modules for length in module.functions] or [0]
    figures = [
        len(modules),
        sum(module.code for module in modules),
        sum(module.statements for module in modules),
        sum(module.comments for module in modules),
        round(median(files or [0])),
        max(files or [0]),
        round(median(functions)),
        sorted(functions)[len(functions) * 99 // 100],
        max(functions),
    ]
    return f"| {name} | " + " | ".join(f"{figure:,}" for figure in figures) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", default=[Path(__file__).parents[1]])
    for tree in parser.parse_args().trees:
        print(f"\n{tree}\n")
        print("| | files | lines | statements | comments | median file | longest | median function | 99 % | longest |")
        print("|---|" + "---|" * 9)
        for name, modules in by_folder(tree):
            print(row(name, modules))


if __name__ == "__main__":
    main()
