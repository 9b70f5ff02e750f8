"""The YAML dialect of recipes: YAML 1.2 scalars, no duplicate keys.

PyYAML reads YAML 1.1, where ``1e-6`` is a string, ``no`` is false, ``1:30`` is ninety and ``2026-01-01`` is a
date. Here a scalar is null, true/false, an integer, a float or a string, for the loader and the dumper alike.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

_RESOLVERS = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
]
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way of declaring it

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == _TAG + "merge":
            continue
        key, problem = loader.construct_object(key_node, deep=True), None
        if not isinstance(key, str):
            problem = f"the key {key!r} is not text; put it into quotes"
        elif key in seen:
            problem = f"the key {key!r} stands here and in line {seen[key]}"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor(_TAG + "map", _mapping)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks as they are in single quotes and reads them back as spaces or "\n".
    style = '"' if any(c in value for c in "\n\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", value, style=style)


def _number(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    text = re.sub(r"e([-+])0+", r"e\1", repr(value)) if abs(value) < float("inf") else yaml.dump(value).split()[0]
    return dumper.represent_scalar(f"{_TAG}float", text)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _number)


def parse_yaml(text: str) -> Any:
    """Returns the value of one YAML document.

    Raises:
        yaml.YAMLError: malformed text, a duplicate key, a key that is not text, or a tag that is not plain data.
    """
    return yaml.load(text, Loader=_Loader)


def shell_override(key: str, text: str) -> str:
    """Returns ``key=text`` as a word for the shell that is read as this very text, and not as a number, say."""
    try:
        is_text = parse_yaml(text) == text
    except yaml.YAMLError:
        is_text = False
    word = text if is_text else dump_yaml_inline(text, default_style='"')
    return shlex.quote(f"{key}={word}")


def dump_yaml(value: Any) -> str:
    """Writes plain data as block YAML in its own key order; ``parse_yaml`` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_yaml_inline(value: Any, **options: Any) -> str:
    """Writes plain data as YAML in one line, which ``parse_yaml`` reads back."""
    shape: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": 1 << 30}
    return yaml.dump(value, Dumper=_Dumper, **shape, **options).removesuffix("\n").removesuffix("\n...")


def describe_yaml_error(error: yaml.YAMLError) -> tuple[str, int | None]:
    """Returns what PyYAML disliked in one line, and the line number (from 1) where it knows one."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    text = getattr(error, "problem", None) or str(error)
    return " ".join(str(text).split()), None if mark is None else mark.line + 1
