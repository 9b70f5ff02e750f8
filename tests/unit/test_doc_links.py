"""What the pages point to is there: links, anchors, and the files, modules and commands that are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from pydoc import locate
from urllib.parse import unquote

import pytest

from quartet.cli.main import add_plugins
from quartet.cli.options import GROUPS
from quartet.config.plugins import GROUP

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"CHANGELOG.md", "log.md"}
"""Pages that name files of their day, which may be gone."""
FOLDERS = ("src", "tests", "benchmarks", "recipes", "examples")
OF_USERS = {"recipe.yaml", "fragment.yaml", "program.py", "path/to/file.py"}
"""Names that stand for files of the reader's own."""
SHOWN = {name for page in PAGES for name in re.findall(r'^```\w+ title="(.*)"$', page.read_text("utf-8"), flags=re.M)}
"""Files whose contents a page shows."""

_FENCED = re.compile(r"^```.*?^```", flags=re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w./*<>…-])[\w./-]+\.(?:pyi?|toml|yaml)\b(?!/)")
_COMMAND = re.compile(r"(?:^|[`$(] ?)quartet ([a-z][a-z-]*)", flags=re.M)
_MODULE = re.compile(r"\bquartet\.[\w.]*\w")
_IN_REPOSITORY = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/](?![\w<{{*-])")


@cache
def _files() -> frozenset[str]:
    """Every end of the path of every file, "/a/b.py" and "/b.py"."""
    paths = (path.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
    return frozenset("/" + "/".join(parts[start:]) for parts in paths for start in range(len(parts)))


def _anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.M)
    texts = (_LINK.sub("", heading).replace("[", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def _broken_links(page: Path) -> list[str]:
    found = []
    for target in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            found.append(target)
    return found


def _missing_files(page: Path) -> list[str]:
    """Files that are named in code but are not there; in fenced code, those below the repository's folders."""
    text = page.read_text(encoding="utf-8")
    named = {name for code in _INLINE_CODE.findall(_FENCED.sub("", text)) for name in _FILE.findall(code)}
    missing = {name for name in named - OF_USERS - SHOWN if f"/{name}" not in _files()}
    code = [*_FENCED.findall(text), *_INLINE_CODE.findall(_FENCED.sub("", text))]
    missing |= {path for part in code for path in _IN_REPOSITORY.findall(part) if not (ROOT / path).exists()}
    return sorted(missing)


def _missing_names(page: Path) -> list[str]:
    """Commands and dotted names of quartet in code that are not there; the group of entry points is no module."""
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*_FENCED.findall(text), *(f"`{code}" for code in _INLINE_CODE.findall(_FENCED.sub("", text)))])
    add_plugins()
    commands = {name for names in GROUPS.values() for name in names}
    missing = [f"quartet {name}" for name in _COMMAND.findall(code) if name not in commands]
    return missing + [name for name in _MODULE.findall(code) if name != GROUP and locate(name) is None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert _broken_links(page) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: str(page.relative_to(ROOT))
)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert _missing_files(page) == []
    assert _missing_names(page) == []


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """``make docs``: every page is in the navigation, and every link and anchor leads somewhere."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(mkdocs, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    broken = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r'<(?:script|img|iframe)[^>]* src="?https?:[^>]*|<link[^>]*stylesheet[^>]*https?:[^>]*', text
        )
        for target in re.findall(r'(?:href|src)="([^"#?:]+)["#]', text) if page.name != "404.html" else ():
            if not (page.parent / unquote(target)).exists():
                broken.add((page.name, target))
    assert not broken
    assert (tmp_path / "files/recipes/rl-grpo.yaml.html").exists()


@pytest.mark.parametrize(
    ("text", "links", "files"),
    [
        ("[here](#a-title-with-code) [there](other.md#two) [out](https://example.com/x.md)", [], []),
        ("[gone](gone.md)", ["gone.md"], []),
        ("[no such heading](other.md#three)", ["other.md#three"], []),
        ("`rollout/engine.py`, `engine.py`, `my own recipe.yaml`, `tests/unit/`", [], []),
        ("`rollout/no_such.py` and `no_such.py`", [], ["no_such.py", "rollout/no_such.py"]),
        ("```\nquartet rl recipes/no_such.yaml my.yaml\n```", [], ["recipes/no_such.yaml"]),
    ],
)
def test_what_is_broken_is_found(tmp_path: Path, text: str, links: list[str], files: list[str]) -> None:
    (tmp_path / "other.md").write_text("# One\n## Two\n```\n# Not a heading\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"# A title, with `code`\n\n{text}\n", encoding="utf-8")
    assert _broken_links(page) == links
    assert _missing_files(page) == files


def test_commands_and_modules_that_are_gone_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "quartet shows, `quartet show`, `quartet rl x.yaml`, `quartet.RLRecipe`, `quartet.NoSuch`\n"
        "`quartet.data.datasets`, `quartet.data.no_such`\n"
        "```\nquartet sft x.yaml\n$ quartet trian x.yaml\nimport quartet as q\n```\n",
        encoding="utf-8",
    )
    assert sorted(_missing_names(page)) == ["quartet show", "quartet trian", "quartet.NoSuch", "quartet.data.no_such"]
