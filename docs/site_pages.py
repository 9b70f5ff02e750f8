"""Hook of mkdocs.yml: recipes, and files that pages link to (examples), become pages of the site.

On GitHub such a link opens the file; the site holds docs/ alone. Each file is shown as a page ``files/<path>.md`` of
its own, links to it lead there, and ``files/recipes.md`` lists the recipes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".jsonl": "json"}


def _outside(page: str, link: str) -> str | None:
    """The path in the repository of a file outside docs/ that ``link`` on ``page`` (a path below docs/) names."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    is_shown = not target.startswith(("docs/", "..")) and (ROOT / target).is_file()
    return target if is_shown else None


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every recipe and every file outside docs/ that a page links to."""
    recipes = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "recipes").rglob("*.yaml"))]
    linked = {
        target
        for file in files.documentation_pages()
        for link, _ in _LINK.findall(file.content_string)
        if (target := _outside(file.src_uri, link)) is not None
    }
    for target in sorted(linked.union(recipes)):
        language = _LANGUAGES.get(Path(target).suffix, "text")
        fenced = f"# `{target}`\n\n~~~~{language}\n{(ROOT / target).read_text(encoding='utf-8')}~~~~\n"
        files.append(_page(config, f"files/{target}.md", fenced))
    rows = "".join(f"| [`{name}`]({name}.md) | {_head(ROOT / name)} |\n" for name in recipes)
    files.append(_page(config, "files/recipes.md", f"# Recipes of the repository\n\n| file | |\n|---|---|\n{rows}"))
    return files


def _page(config: Any, path: str, content: str) -> File:
    return File.generated(config, path, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def _head(recipe: Path) -> str:
    """The first line of its comment, without the command."""
    return re.split(r": {2,}| {3,}", recipe.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))[0]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to such files to their pages."""
    here = page.file.src_uri

    def to_page(found: re.Match[str]) -> str:
        target = _outside(here, found[1])
        if target is None:
            return found[0]
        return f"]({posixpath.relpath(f'files/{target}.md', posixpath.dirname(here) or '.')})"

    return _LINK.sub(to_page, markdown)
