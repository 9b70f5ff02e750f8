"""The YAML dialect of recipes: YAML 1.2 scalars, no duplicate keys.

PyYAML reads YAML 1.1, where ``1e-6`` is a string, ``no`` is false, ``1:30`` is ninety and ``2026-01-01`` is a
date. Here a scalar is null, true/false, an integer, a float or a string, for the loader and the dumper alike.

Text from anywhere is refused quickly where it is far larger than any recipe: long, deeply nested, or short and
expanded by aliases into millions of values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

MAX_CHARACTERS = 200_000
MAX_DEPTH = 64
MAX_DIGITS = 300
MAX_VALUES = 20_000
"""Values of a document, each as often as aliases repeat it."""

_RESOLVERS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
]


_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
_CONSTRUCTORS = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _PLAIN
}
"""PyYAML has more (dates, sets, bytes), which no recipe can hold."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it
    yaml_constructors = dict(_CONSTRUCTORS)  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _refused(problem: str, where: yaml.Event | yaml.Node) -> yaml.YAMLError:
    mark: Any = where.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _refused(f"the key {key!r} is not text; put it into quotes", key_node)
        if key in seen:
            raise _refused(f"the key {key!r} stands here and in line {seen[key]}", key_node)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) <= MAX_DIGITS:
        return int(node.value)
    raise _refused(f"a number of {len(node.value)} digits, more than {MAX_DIGITS}", node)


def _string(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if half is not None:
        raise _refused(f"half a character, U+{ord(half):04X}, which no text can hold", node)
    return text


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:str", _string)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks as they are in single quotes and reads them back as spaces or "\n".
    style = '"' if any(c in value for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        yaml.YAMLError: malformed text, a duplicate key, a key that is not text, a tag that is not plain data, or more
            of it than a recipe can need.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.MarkedYAMLError(problem=f"{len(text)} characters, more than {MAX_CHARACTERS}")
    _check_size(yaml.parse(text, Loader=_Loader))
    return yaml.load(text, Loader=_Loader)


def _check_size(events: Iterator[yaml.Event]) -> None:
    """Counts before anything is built: PyYAML builds recursively, and follows aliases into what grows exponentially."""
    anchored: dict[str, int] = {}
    # Per open collection its anchor and the values in it so far; the document itself at the bottom.
    open_collections: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        anchor, size = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((anchor, 1))
            if len(open_collections) > MAX_DEPTH:
                raise _refused(f"more than {MAX_DEPTH} levels of nesting", event)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise _refused(f"the alias *{event.anchor} names nothing that is complete before it", event)
            anchor, size = None, anchored[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        if anchor is not None:
            anchored[anchor] = size
        above, total = open_collections[-1]
        open_collections[-1] = above, total + size
        if sum(count for _, count in open_collections) > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES} values, aliases written out", event)


def override_word(key: str, text: str) -> str:
    """``key=text`` as a word for the shell that is read as this very text, and not as a number, say."""
    try:
        is_text = parse_yaml(text) == text
    except yaml.YAMLError:
        is_text = False
    quoted = yaml.dump(text, Dumper=_Dumper, default_style='"', allow_unicode=True, width=MAX_CHARACTERS).rstrip("\n")
    return shlex.quote(f"{key}={text if is_text else quoted}")


def dump_yaml(value: Any) -> str:
    """Plain data as block YAML in its own key order; ``parse_yaml`` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def yaml_complaint(error: yaml.YAMLError) -> tuple[str, int | None]:
    """What PyYAML disliked in one line, and the line number (from 1) where it knows one."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    text = getattr(error, "problem", None) or str(error)
    return " ".join(str(text).split()), None if mark is None else mark.line + 1
