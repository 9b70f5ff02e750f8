"""What a sandboxed process does: run a program, offer a solution's objects, or run tests against them."""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from quartet.rewards.sandbox.channel import (
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
MAX_REASON = 500
"""Most characters of why a test failed."""


def run_program(job: dict[str, Any]) -> None:
    """The code as a program, the file ``input_fd`` its standard input. Ends as Python ends: waits for its threads."""
    os.dup2(job["input_fd"], 0)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    _execute(job["source"], "__main__")


def offer_solution(job: dict[str, Any]) -> None:
    """Runs the code, says which names it defines, then answers requests for them and what they give."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
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
    verdicts = os.dup(1)
    quiet = os.open("/dev/null", os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    channel = Channel(job["read_fd"], job["write_fd"], CALLS, SolutionObject)
    uses = [node for test in job["tests"] for node in ast.walk(ast.parse(test["source"]))]
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        modules = _modules(uses)
        namespace |= _names_of_solution(channel, uses, modules) | modules
    except ChannelClosed as error:
        channel.failure = str(error)
    for test in job["tests"]:
        failure = channel.failure if channel.is_closed else _failure(test["source"], namespace, channel)
        if test["counts"]:
            kind = REFUSED if channel.failure and not channel.is_closed else FAILED
            line = kind + json.dumps(failure[:MAX_REASON]).encode() if failure else PASSED
            os.write(verdicts, line + b"\n")
            channel.failure = channel.failure if channel.is_closed else ""
    os._exit(0)


def _modules(nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Modules of the standard library by names of which the tests use nothing but what these modules have."""
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
    """What the solution defines of the names that the tests use. Python's own stay Python's own, whatever the solution
    calls so: else it could bring its own ``sorted``, ``set`` or ``math`` to the comparison.
    """
    used = {node.id for node in nodes if type(node) is ast.Name} - set(dir(builtins)) - set(others)
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
    """Why the test fails; nothing where it passes."""
    told = ""
    try:
        exec(_compiled(source, "<test>"), namespace)
    except BaseException as error:  # A test fails by whatever it raises, SystemExit too.
        try:
            told = f"{type(error).__name__}: {error}"
        except BaseException:
            told = type(error).__name__
    return channel.failure or told


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
