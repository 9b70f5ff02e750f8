"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from quartet.config import UserError

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """
    Args:
        name: of the check.
        found: in words, with the figures.
        remedy: what to do; empty where all is well.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def line(self) -> str:
        """As the terminal shows it."""
        return f"{self.status:<7}  {self.name:<18} {self.found}{f'; do: {self.remedy}' if self.remedy else ''}"


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def judged(name: str, found: str, remedy: str, *, failure: bool = False, warning: bool = False) -> Finding:
    """A finding whose remedy counts only where it is no ``ok``."""
    if not (failure or warning):
        return ok(name, found)
    return Finding(name, "failure" if failure else "warning", found, remedy)


def of_error(name: str, error: UserError) -> Finding:
    """A check, or what it needs, that ended in an error."""
    return Finding(name, "failure", f"{error.problem} ({error.found})", error.remedy)


class Findings:
    """Findings in their order; each is told as it comes."""

    def __init__(self, tell: Callable[[Finding], object] = lambda finding: None) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.all.append(finding)
            self._tell(finding)

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """A ``UserError`` inside is a failure of the check ``name``; what follows it is not done."""
        try:
            yield
        except UserError as error:
            self.add(of_error(name, error))
