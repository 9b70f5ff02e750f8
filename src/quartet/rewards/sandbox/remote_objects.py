"""Objects of one process used from another: tests in one sandbox call the code under test in the other.

The side of the tests trusts nothing that it reads: what arrives is plain data (numbers, text, containers and a few
types of the standard library), or a *handle*, an object that stays in the other process. A handle can be called, have
its attributes read and set, be indexed, measured and iterated; compared with plain data it is always unequal, so an
object that claims to equal everything gains nothing.

A message is four bytes of length and a pickle. Requests are ``(operation, arguments, keyword arguments)``, answers
``("value", value)`` or ``("error", type's name, text)``. Functions of the tests given to the code are called back while
their own call is waited for.
"""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import os
import pickle
import pickletools
import struct
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

MAX_MESSAGE_BYTES = 64 << 20
_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range}
_LIBRARY = {
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "frozenset"),
    ("builtins", "range"),
    ("builtins", "set"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
}


class ChannelClosed(Exception):
    """The other process is gone, or sends what is no message."""


class RemoteError(Exception):
    """The other process raised something that is no exception of Python's own."""


class Channel:
    """Messages between two processes, with a table of the own objects that the other one holds handles of."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._shared: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, Remote] = {}

    def send(self, message: Any) -> None:
        """Raises whatever pickling raises, before anything is sent."""
        body = io.BytesIO()
        _Pickler(body, self).dump(message)
        self._write(body.getvalue())

    def _write(self, body: bytes) -> None:
        view = memoryview(struct.pack(">I", len(body)) + body)
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except OSError as error:
                raise ChannelClosed(str(error)) from None

    def receive(self) -> Any:
        (size,) = struct.unpack(">I", self._read(4))
        if size > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"a message of {size} bytes")
        body = self._read(size)
        try:
            _check_builds_nothing(body)
            return _Unpickler(io.BytesIO(body), self).load()
        except Exception as error:  # Hostile bytes may make unpickling raise anything.
            raise ChannelClosed(f"{type(error).__name__}: {error}") from None

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = os.read(self._read_fd, min(size - len(found), 1 << 20))
            if not part:
                raise ChannelClosed("the other process has ended")
            found += part
        return bytes(found)

    # Handles ---------------------------------------------------------------------------------------------

    def share(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._shared[number] = value  # also keeps it alive, so that its id stays its own
        return number

    def shared(self, number: int) -> Any:
        return self._shared[number]

    def handle(self, number: int) -> Remote:
        if number not in self._handles:
            self._handles[number] = Remote(self, number)
        return self._handles[number]

    # Calls -----------------------------------------------------------------------------------------------

    def request(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of the operation in the other process; raises what it raised, if that is one of Python's own."""
        self.send((operation, arguments, keywords))
        while True:
            message = self.receive()
            match message:
                case ("value", value):
                    return value
                case ("error", str() as name, str() as text):
                    raise _exception(name, text)
                case ("call", (types.FunctionType() | types.BuiltinFunctionType() as own, *rest), dict() as keys):
                    # Only functions that were handed over come back as themselves.
                    self.answer(partial(own, *rest, **keys))
                case _:
                    raise ChannelClosed("something that is no answer")

    def answer(self, action: Callable[[], Any]) -> None:
        try:
            message: tuple[Any, ...] = ("value", action())
            self.send(message)
        except ChannelClosed:
            raise
        except BaseException as error:  # Whatever the other side's code raises is its answer.
            self.send(("error", type(error).__name__, _text(error)))

    def serve(self, operations: dict[str, Callable[..., Any]]) -> None:
        """Answers requests until the other process ends."""
        while True:
            try:
                operation, arguments, keywords = self.receive()
            except ChannelClosed:
                return
            self.answer(partial(operations[operation], *arguments, **keywords))


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, channel: Channel) -> None:
        super().__init__(file, protocol=4)
        self._channel = channel

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        kind = type(value)
        if kind is Remote:
            return ("yours", object.__getattribute__(value, "_number"))
        if kind is types.ModuleType:
            return ("module", value.__name__)
        if kind in _PLAIN or (kind.__module__, kind.__qualname__) in _LIBRARY:
            return None
        if isinstance(value, type) and (value.__module__, value.__qualname__) in _LIBRARY:
            return None  # what pickle builds the types above with
        return ("mine", self._channel.share(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, channel: Channel) -> None:
        super().__init__(file)
        self._channel = channel

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _LIBRARY:
            raise pickle.UnpicklingError(f"{module}.{name} may not cross")
        return getattr(importlib.import_module(module), name)

    def persistent_load(self, reference: Any) -> Any:
        match reference:
            case ("mine", int() as number):
                return self._channel.handle(number)
            case ("yours", int() as number):
                return self._channel.shared(number)
            case ("module", str() as name) if name.split(".")[0] in sys.stdlib_module_names:
                return importlib.import_module(name)
        raise pickle.UnpicklingError("no such reference")


def _check_builds_nothing(body: bytes) -> None:
    """Refuses the one instruction that changes what is there already: with it a message could give ``builtins``, or a
    class that plain data have, other contents. No plain value needs it.
    """
    if pickle.BUILD in body and any(opcode.name == "BUILD" for opcode, _, _ in pickletools.genops(body)):
        raise pickle.UnpicklingError("a message that changes objects")


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(text)
    return RemoteError(f"{name}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:  # The exception's own code fails.
        return ""


class Remote:
    """An object of the other process."""

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        channel: Channel = object.__getattribute__(self, "_channel")
        return channel.request(operation, self, *arguments, **keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__ask("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("setitem", key, value)

    def __contains__(self, value: Any) -> bool:
        return bool(self.__ask("contains", value))

    def __len__(self) -> int:
        return int(self.__ask("len"))

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self.__ask("iter")
        return iterator

    def __next__(self) -> Any:
        return self.__ask("next")

    def __bool__(self) -> bool:
        return bool(self.__ask("bool"))

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Remote and bool(self.__ask("eq", other)))

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "contains": operator.contains,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "eq": operator.eq,
}
"""What may be asked about an object of the code under test, by the methods of :class:`Remote`."""
