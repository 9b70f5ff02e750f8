"""Python objects that a recipe names: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError, describe_error
from quartet.config.nearest import missing_file_error, suggest_name


def load_target(target: str, what: str) -> Callable[..., Any]:
    """Loads the callable named by ``target``; files are looked for from the current directory.

    Args:
        what: what it is to be, for messages ("environment").

    Raises:
        UserError: no such file, module or name, a module that fails while it is imported, or nothing callable.
    """
    location, colon, name = target.rpartition(":")
    if not colon or not location or not name.isidentifier():
        raise UserError(
            f"the target of the {what} is written file.py:name or package.module:name",
            found=repr(target),
            remedy="for example my_code.py:Name",
        )
    path = Path(location) if location.endswith(".py") else None
    if path is not None:
        with contextlib.suppress(RuntimeError):  # "~name" of a user without a home directory
            path = path.expanduser()
        if not path.is_file():
            raise missing_file_error(f"there is no such file for the {what}", path)
    with _running_user_code(location if path is None else str(path), what):
        module = importlib.import_module(location) if path is None else _import_file(path)
        found = getattr(module, name, None)
    if not callable(found):
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"there is no {what} {name!r} in {location}",
            found=f"it defines {', '.join(defined) or 'nothing that can be called'}",
            remedy=suggest_name(name, defined) or "name one of these",
        )
    return found


def _import_file(path: Path) -> Any:
    # A name of its own per path: two files of one name must not replace each other.
    name = "quartet_user_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _running_user_code(source: str, what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # User code may raise anything; it is passed on with its cause.
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"the module of the {what} cannot be imported",
            found=f"{source}{line}: {describe_error(error)}",
            remedy="correct it; modules are looked for as Python does, files from the current directory",
        ) from error
