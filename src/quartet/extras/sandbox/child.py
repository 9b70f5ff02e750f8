"""What a sandboxed process does: run a program, offer a solution's objects, or run tests against them."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quartet.extras.sandbox.channel import CALLS, OPERATIONS, Channel, Refused, SolutionObject, TestObject, named

MAX_REASON = 500
"""Most characters of why a test failed."""


def run_program(job: dict[str, Any]) -> None:
    """Runs the code as a program. Ends as Python ends: waits for its threads."""
    # Line ends of any kind are one, as where input is typed; what is no UTF-8 is an error.
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
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
    """Runs ``job["tests"]`` in order, in one namespace with the solution's names. Writes a line of JSON for each that
    counts: why it failed, empty where it passed.

    The only holder of the descriptor to which verdicts are written is this process, in which no line of the solution
    runs.
    """
    verdicts = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    channel = Channel(job["read_fd"], job["write_fd"], CALLS, SolutionObject)
    nodes = [node for test in job["tests"] for node in ast.walk(ast.parse(test["source"]))]
    modules = _modules(nodes)
    sys.modules["pytest"] = _pytest()
    sys.modules["solution"] = solution = types.ModuleType("solution")
    with contextlib.suppress(Refused):
        vars(solution).update(_names_of_solution(channel, nodes))
    # Python's own names stay Python's own, whatever the solution calls so, unless the tests import it from
    # ``solution``: else it could bring its own ``sorted`` or ``math`` to the comparison.
    plain = {name: value for name, value in vars(solution).items() if name not in dir(builtins)}
    namespace = {**plain, **modules, "__name__": "tests"}
    for test in job["tests"]:
        channel.refused = ""
        failure = _failure(test["source"], namespace, channel)
        if test["counts"]:
            os.write(verdicts, json.dumps(failure[:MAX_REASON]).encode() + b"\n")
    os._exit(0)


def _modules(nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Returns the modules of the standard library that the tests ask for attributes, and use in no other way: as those
    which the solution imports.
    """
    asked = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    found = {n.id for n in names if id(n) in asked} - {n.id for n in names if id(n) not in asked}
    return {name: importlib.import_module(name) for name in found & sys.stdlib_module_names}


def _names_of_solution(channel: Channel, nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Returns what the solution defines of the names in the tests."""
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    found = {}
    match channel.receive():
        case ["ready", [*names]]:
            for name in sorted(used.intersection(name for name in names if isinstance(name, str))):
                with contextlib.suppress(Refused, Exception):  # a test that uses it finds no such name
                    found[name] = named(channel.ask("getitem", 0, name), name)
        case ["broken", str() as reason]:
            channel.close(f"the code does not run: {reason}")
        case _:
            channel.close("no greeting")
    return found


def _failure(source: str, namespace: dict[str, Any], channel: Channel) -> str:
    """Tells why the test fails; nothing where it passes."""
    told = ""
    try:
        exec(_compiled(source, "<test>"), namespace)
    except BaseException as error:  # A test fails by whatever it raises, SystemExit too.
        try:
            told = f"{type(error).__name__}: {error}"
        except BaseException:
            told = type(error).__name__
    return channel.closed or channel.refused or told


# The part of pytest that tests of plain functions use; no installed package is here ------------------------------

PYTEST_NAMES = ("pytest.raises", "pytest.approx", "pytest.main")


def _pytest() -> types.ModuleType:
    module = types.ModuleType("pytest")
    vars(module).update(raises=_raises, approx=_Approximate)
    return module


@contextlib.contextmanager
def _raises(kinds: Any, match: str = "") -> Iterator[types.SimpleNamespace]:
    caught = types.SimpleNamespace()
    try:
        yield caught
    except kinds as error:
        caught.type, caught.value = type(error), error
        if not re.search(match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {match!r}") from error
    else:
        raise AssertionError(f"did not raise {kinds}")


class _Approximate:
    """``pytest.approx``: numbers, alone or in lists, tuples and dicts, equal within ``rel`` or ``abs``."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected = expected
        self.abs = 1e-12 if abs is None else abs
        self.rel = (0.0 if abs is not None else 1e-6) if rel is None else rel

    def __eq__(self, found: Any) -> bool:
        expected = self.expected
        if isinstance(expected, dict):
            return (
                isinstance(found, dict)
                and found.keys() == expected.keys()
                and all(self._near(found[key], value) for key, value in expected.items())
            )
        if isinstance(expected, list | tuple):
            return (
                type(found) is type(expected) and len(found) == len(expected) and all(map(self._near, found, expected))
            )
        return bool(found == expected or abs(found - expected) <= max(self.rel * abs(expected), self.abs))

    def _near(self, found: Any, expected: Any) -> bool:
        return _Approximate(expected, self.rel, self.abs) == found


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
