"""The one error type for mistakes a user can make and mend."""

from __future__ import annotations


class UserError(Exception):
    """A three-part message: what is wrong, what was found, what to do instead.

    The command line prints it without a traceback and exits with status 2; Python users catch it.
    """

    def __init__(self, problem: str, *, found: str, remedy: str) -> None:
        self.problem = problem
        self.found = found
        self.remedy = remedy
        super().__init__(f"{problem}\n  found: {found}\n  do: {remedy}")
