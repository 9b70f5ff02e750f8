"""The YAML dialect of recipes: YAML 1.2 scalars, no duplicate keys.

PyYAML reads YAML 1.1, where ``1e-6`` is a string, ``no`` is false, ``1:30`` is ninety and ``2026-01-01`` is a
date. Here a scalar is null, true/false, an integer, a float or a string, for the loader and the dumper alike.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not text; put it into quotes", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands here and in line {seen[key]}", key_node.start_mark
            )
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks as they are in single quotes and reads them back as spaces or "\n".
    style = '"' if any(c in value for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        yaml.YAMLError: malformed text, a duplicate key, a key that is not text, a tag that is not plain data.
    """
    return yaml.load(text, Loader=_Loader)


def dump_yaml(value: Any) -> str:
    """Plain data as block YAML in its own key order; ``parse_yaml`` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def yaml_complaint(error: yaml.YAMLError) -> tuple[str, int | None]:
    """What PyYAML disliked in one line, and the line number (from 1) where it knows one."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    text = getattr(error, "problem", None) or str(error)
    return " ".join(str(text).split()), None if mark is None else mark.line + 1
