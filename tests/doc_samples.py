"""Code samples of the pages, and what is wrong with them. The rules:

- A ``yaml`` block is a part of a recipe: for some job every key is known and every value fits (required keys may be
  missing; a list is one of rewards). With ``title="name.yaml"`` it is a whole recipe.
- A ``quartet …`` command in a ``sh``, ``bash`` or ``console`` block, in a block without a language, or alone in inline
  code, has arguments that the command takes. Its recipe is the page's of that title, or the repository's, and is valid
  with the overrides; the overrides of any other recipe, which is the reader's own, are a part of a recipe as above.
- A ``python`` block compiles. What a page says is run has ``<!-- sample: run -->`` before it.
- A ``diff`` block is a patch that applies to the repository.
- ``<!-- sample: not checked -->`` before a block takes it out of these rules.

Commands with ``…``, ``[--option]`` or ``<job>``, and those that end in an option without its value, are patterns.
They are not looked at.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from pydantic import BaseModel, ValidationError

from quartet.cli.main import add_plugins, app
from quartet.config.load import _overridden, _with_defaults, load_engine, load_recipe
from quartet.config.plugins import all_jobs, recipe_classes
from quartet.config.strict import as_user_error, item_annotation, union_members
from quartet.config.yamls import parse_yaml
from quartet.extras.recipes.reference import sections, starter

add_plugins()
ROOT = Path(__file__).parents[1]
SHELL = {"sh", "bash", "console", ""}

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- sample: (?P<mark>.*?) -->\n\n?)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^[ ]*```$",
    flags=re.M | re.S,
)
_TITLE = re.compile(r'title="([^"]+)"')
_INLINE = re.compile(r"`(quartet [^`\n]+)`")
_COMMAND = re.compile(r"(?:^|[\s(])quartet(?= )(?P<words>.*)$", flags=re.M)
_PATTERN = re.compile(r"…|\[-|<\w+>| --[\w-]+$")
_OPEN = ("missing", "default_factory_not_called", "union_tag_not_found")
_END = re.compile(r"\s(?:\|{1,2}|>{1,2}|&{1,2}|;|2>)(?:\s|$).*|\$\(.*")


@dataclass(frozen=True)
class Sample:
    """One fenced block of a page."""

    language: str
    text: str
    title: str = ""
    mark: str = ""


def samples(page: str) -> list[Sample]:
    """The fenced blocks of a page, in their order."""
    found = []
    for block in _BLOCK.finditer(page):
        title = _TITLE.search(block["info"])
        text = re.sub(rf"^{block['indent']}", "", block["text"], flags=re.M)
        found.append(Sample(block["language"], text, title[1] if title else "", block["mark"] or ""))
    return found


def commands(shell: str) -> Iterator[list[str]]:
    """The words after ``quartet`` of every such command in the text of a shell, joined where a line goes on."""
    for found in _COMMAND.finditer(shell.replace("\\\n", " ")):
        text = found["words"]
        if _PATTERN.search(text) is None:
            yield shlex.split(_END.sub("", text), comments=True)


def complaints(page: str) -> list[str]:
    """What is wrong with the samples of a page."""
    blocks = [sample for sample in samples(page) if sample.mark != "not checked"]
    recipes = {sample.title: sample.text for sample in blocks if sample.title.endswith(".yaml")}
    found = []
    for sample in blocks:
        try:
            _check(sample, recipes)
        except Exception as error:  # whatever a check raises is what is wrong
            found.append(f"{sample.title or sample.text[:60]!r}: {error}")
    prose = _BLOCK.sub("", page)
    for words in (words for line in _INLINE.findall(prose) for words in commands(line)):
        try:
            check_command(words, recipes, inline=True)
        except Exception as error:
            found.append(f"{words}: {error}")
    return found


def _check(sample: Sample, recipes: dict[str, str]) -> None:
    if sample.language == "yaml":
        value = parse_yaml(sample.text)
        if sample.title:
            _check_overrides(value["job"], sample.text, ())
        else:
            check_part({"rewards": value} if isinstance(value, list) else value)
    elif sample.language == "python":
        compile(sample.text, sample.title or "sample", "exec", flags=0x2000)  # top-level await
    elif sample.language == "diff":
        subprocess.run(["git", "apply", "--check"], input=sample.text, text=True, cwd=ROOT, check=True)
    elif sample.language in SHELL:
        for words in commands(sample.text):
            check_command(words, recipes)


def check_part(value: dict[str, Any], models: Sequence[type[BaseModel]] | None = None) -> None:
    """Raises where ``value`` is a part of none of ``models`` (every recipe, and every section of one) what is wrong
    with it for the nearest.

    What is missing, and whether the recipe's sections fit each other, is not asked of a part.
    """
    errors = []
    for model in _sections() if models is None else models:
        try:
            model.model_validate_json(json.dumps(_with_defaults(model, value)), strict=True)
        except ValidationError as error:
            mistakes = [each for each in error.errors() if each["type"] not in _OPEN and each["loc"]]
            if mistakes:
                unknown = sum(each["type"] == "extra_forbidden" and len(each["loc"]) == 1 for each in mistakes)
                errors.append((unknown, len(mistakes), as_user_error(error, model, f"as a part of {model.__name__}")))
                continue
        return
    raise min(errors, key=lambda each: each[:2])[2]


@cache
def _sections() -> tuple[type[BaseModel], ...]:
    """The recipes, then all that is in them."""
    found: dict[type[BaseModel], None] = dict.fromkeys(recipe_classes().values())
    for model in (waiting := list(found)):
        for field in model.model_fields.values():
            below = union_members(field.annotation) or union_members(item_annotation(field.annotation))
            waiting += [each for each in below if each not in found]
            found.update(dict.fromkeys(below))
    return tuple(found)


@cache
def _group() -> Any:
    return typer.main.get_command(app)


def check_command(words: list[str], recipes: dict[str, str], *, inline: bool = False) -> None:
    """Raises what is wrong with ``quartet`` followed by ``words``; ``recipe_classes``: texts by file name."""
    if words[0] in ("--version", "--install-completion"):
        return
    group = _group()
    with group.make_context("quartet", list(words)) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        if inline and not rest:
            return
        with command.make_context(name, list(rest), parent=context) as parsed:
            given = parsed.params
    if name == "init":
        starter(given["job"], method=given["method"], reward=given["reward"])
    elif name == "config" and given["job"]:
        list(sections(given["job"], given["part"] or ""))
    elif name == "serve" and given["model"]:
        load_engine(given["engine"] or ())
    elif (name in all_jobs() or name == "doctor") and given["recipe"]:
        job = "rl" if name == "doctor" else name
        _check_job(job, given["recipe"], given["overrides"] or (), recipes)


def _check_job(job: str, recipe: Path, overrides: Sequence[str], texts: dict[str, str]) -> None:
    # A variable of the shell stands for any value, and $@ for more overrides.
    known = [each for each in overrides if not re.search(r"=\$\w+$", each) and each != "$@"]
    for each in set(overrides) - {*known, "$@"}:
        list(sections(job, each.partition("=")[0]))
    if str(recipe) in texts:
        _check_overrides(job, texts[str(recipe)], known)
    elif recipe.parts[0] == "recipes":
        load_recipe(job, ROOT / recipe, _from_root(known))
    else:
        check_part(_overridden(job, None, _from_root(known)), [recipe_classes()[job]])


def _check_overrides(job: str, text: str, overrides: Sequence[str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sample.yaml"
        path.write_text(text, encoding="utf-8")
        load_recipe(job, path, _from_root(overrides))


def _from_root(overrides: Sequence[str]) -> list[str]:
    return [f"@{ROOT / each[1:]}" if each.startswith("@") else each for each in overrides]
