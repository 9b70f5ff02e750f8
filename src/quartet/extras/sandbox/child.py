"""What a sandboxed process does: run a program, offer a solution's objects, or run tests against them."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quartet.extras.sandbox.channel import (
    CALLS,
    OPERATIONS,
    Channel,
    ChannelClosed,
    Refused,
    SolutionObject,
    TestObject,
    named,
)

PASSED, FAILED, REFUSED = b"P", b"F", b"R"
UNCHECKED, UNASKED = b"U", b"N"
"""Passed before any check was executed; and before the code under test was asked for anything but its names."""
MAX_REASON = 500
"""Most characters of why a test failed."""


def run_program(job: dict[str, Any]) -> None:
    """Runs the code as a program. Ends as Python ends: waits for its threads."""
    _execute(job["source"], "__main__")


def offer_solution(job: dict[str, Any]) -> None:
    """Runs the code, says which names it defines, then answers requests for them and what they give."""
    channel = Channel(job["read_fd"], job["write_fd"], OPERATIONS, TestObject)
    try:
        try:
            names = _execute(job["source"], "solution")
        except BaseException as error:
            channel.send(["broken", f"{type(error).__name__}: {error}"[:MAX_REASON]])
            raise
        channel.refer(names)
        channel.send(["ready", [name for name in names if type(name) is str]])
        channel.serve()
    finally:
        # Its threads, and what it registered for the end, have no say.
        os._exit(1)


def run_tests(job: dict[str, Any]) -> None:
    """Runs ``job["tests"]`` in order, in one namespace with the solution's names; one line for each that counts.

    The only holder of the descriptor to which verdicts are written is this process, in which no line of the solution
    runs.
    """
    global _num_checks
    verdicts = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    channel = Channel(job["read_fd"], job["write_fd"], CALLS, SolutionObject)
    uses = [node for test in job["tests"] for node in ast.walk(ast.parse(test["source"]))]
    namespace: dict[str, Any] = {"__name__": "tests", _CHECKED: _checked}
    sys.modules["pytest"] = _pytest()
    sys.modules["solution"] = solution = types.ModuleType("solution")
    try:
        modules = _modules(uses)
        vars(solution).update(_names_of_solution(channel, uses, modules))
        plain = {name: value for name, value in vars(solution).items() if name not in dir(builtins)}
        namespace |= plain | modules
    except ChannelClosed as error:
        channel.failure = str(error)
    num_asked = channel.num_asked
    for test in job["tests"]:
        failure = channel.failure if channel.is_closed else _failure(test["source"], namespace, channel)
        if test["counts"]:
            kind = REFUSED if channel.failure and not channel.is_closed else FAILED
            passed = PASSED if _num_checks else UNCHECKED if channel.num_asked > num_asked else UNASKED
            line = kind + json.dumps(failure[:MAX_REASON]).encode() if failure else passed
            os.write(verdicts, line + b"\n")
            channel.failure = channel.failure if channel.is_closed else ""
    os._exit(0)


def _modules(nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Returns the modules of the standard library by names of which the tests use nothing but what these
    modules have.
    """
    asked: dict[str, set[str]] = {}
    num_asked: dict[str, int] = {}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in sys.stdlib_module_names:
                asked.setdefault(name, set()).add(attribute)
                num_asked[name] = num_asked.get(name, 0) + 1
            case ast.Name(id=name):
                num_asked[name] = num_asked.get(name, 0) - 1
    found = {}
    for name, attributes in asked.items():
        if num_asked[name] == 0:  # no use but these
            module = importlib.import_module(name)
            if all(hasattr(module, attribute) for attribute in attributes):
                found[name] = module
    return found


def _names_of_solution(channel: Channel, nodes: Sequence[ast.AST], others: dict[str, Any]) -> dict[str, Any]:
    """Returns what the solution defines of the names that the tests use. Python's own stay Python's own, whatever the
    solution calls so, unless the tests import it from ``solution``: else it could bring its own ``sorted``, ``set`` or
    ``math`` to the comparison.
    """
    used = {node.id for node in nodes if type(node) is ast.Name} - set(dir(builtins)) - set(others)
    called = {"solution"}  # what the tests call the module
    for node in nodes:
        match node:
            case ast.ImportFrom(module="solution", names=aliases):
                used |= {alias.name for alias in aliases}
            case ast.Import(names=aliases):
                called |= {alias.asname or alias.name for alias in aliases if alias.name == "solution"}
    used |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", None) in called}
    found = {}
    match channel.receive():
        case ["ready", [*names]]:
            for name in sorted(used & {name for name in names if isinstance(name, str)}):
                try:
                    found[name] = named(channel.ask("getitem", 0, name), name)
                except (Refused, Exception):
                    channel.failure = ""  # a test that uses it finds no such name
        case ["broken", str() as reason]:
            channel.close(f"the code does not run: {reason}")
        case _:
            channel.close("no greeting")
    return found


def _failure(source: str, namespace: dict[str, Any], channel: Channel) -> str:
    """Tells why the test fails; nothing where it passes."""
    told = ""
    try:
        exec(compile(_counted(source), "<test>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # A test fails by whatever it raises, SystemExit too.
        try:
            told = f"{type(error).__name__}: {error}"
        except BaseException:
            told = type(error).__name__
    return channel.failure or told


# What counts as a check --------------------------------------------------------------------------------------

_CHECKED = "__quartet_checked__"
_FAILING = ("fail", "raises", "exit", "_exit", "quit")
_num_checks = 0


def is_check(node: ast.AST) -> bool:
    """Tells whether a statement can make a test fail by what it finds: an ``assert`` or a call named so, or a branch
    that raises.
    """
    match node:
        case ast.Assert():
            return True
        case ast.Expr() | ast.Assign() | ast.Return():
            return any(_is_assertion(part) for part in ast.walk(node))
        case ast.With(items=items):
            return any(_is_assertion(item.context_expr) for item in items)
        case ast.If():  # an assert in it is a check of its own
            return any(isinstance(part, ast.Raise) or _is_assertion(part) for part in ast.walk(node))
        case ast.Try():
            return any(isinstance(part, ast.Raise | ast.Assert) or _is_assertion(part) for part in ast.walk(node))
    return False


def _is_assertion(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name.startswith("assert") or name in _FAILING
    return False


def _checked() -> None:
    global _num_checks
    _num_checks += 1


class _Counting(ast.NodeTransformer):
    """Calls ``_checked`` before each check."""

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if not is_check(node):
            return node
        call = ast.Expr(ast.Call(ast.Name(_CHECKED, ast.Load()), [], []))
        return [ast.fix_missing_locations(ast.copy_location(call, node)), node]


def _counted(source: str) -> ast.Module:
    tree: ast.Module = _Counting().visit(ast.parse(source))
    return tree


# The part of pytest that tests of plain functions use; no installed package is here ------------------------------

PYTEST_NAMES = ("pytest.raises", "pytest.approx", "pytest.mark.parametrize", "pytest.main")


def _pytest() -> types.ModuleType:
    module = types.ModuleType("pytest")
    vars(module).update(raises=_Raises, approx=_Approximate, mark=types.SimpleNamespace(parametrize=_parametrize))
    return module


class _Raises:
    """``pytest.raises``, with a function or as a context."""

    def __init__(self, kinds: Any, *call: Any, match: str | None = None, **keywords: Any) -> None:
        self.kinds, self.match = kinds, match
        if call:
            with self:
                call[0](*call[1:], **keywords)

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self.kinds}")
        self.type, self.value = kind, error
        if not isinstance(error, self.kinds):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        return True


class _Approximate:
    """``pytest.approx``: numbers, alone or in lists, tuples and dicts, equal within ``rel`` or ``abs``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.abs = 1e-12 if abs is None else abs
        self.rel = (0.0 if abs is not None else 1e-6) if rel is None else rel

    def __eq__(self, found: object) -> bool:
        return self._equal(found, self.expected)

    def _equal(self, found: Any, expected: Any) -> bool:
        match expected:
            case dict():
                return (
                    isinstance(found, dict)
                    and {*found} == {*expected}
                    and all(self._equal(found[key], expected[key]) for key in expected)
                )
            case list() | tuple():
                return (
                    type(found) is type(expected)
                    and len(found) == len(expected)
                    and all(map(self._equal, found, expected))
                )
            case bool() | None | str():
                return bool(found == expected)
        if not isinstance(found, int | float | complex | Decimal | Fraction) or isinstance(found, bool):
            return False
        if found == expected or (self.nan_ok and found != found and expected != expected):
            return True
        allowed = max(self.rel * abs(float(abs(expected))), self.abs)
        return bool(allowed < float("inf") and abs(found - expected) <= allowed)


def _parametrize(names: Any, values: Any, **_: Any) -> Any:
    """Stands for ``pytest.mark.parametrize``: one call for each of the values."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(function: Any) -> Any:
        def each(*own: Any, **others: Any) -> None:
            for value in values:
                function(*own, **others, **dict(zip(names, value if len(names) > 1 else [value], strict=True)))

        return each

    return decorate


def _execute(source: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    # Programs use them, and Python has them only where it looks for installed packages, which there are none of here.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    exec(_compiled(source, "<solution>"), module.__dict__)
    return module.__dict__


def _compiled(source: str, name: str) -> types.CodeType:
    # Not with this module's own ``from __future__ import annotations``: code may use its annotations.
    return compile(source, name, "exec", dont_inherit=True)


ROLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "program": run_program,
    "solution": offer_solution,
    "tests": run_tests,
}
