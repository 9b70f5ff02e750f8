"""What holds for a user's function wherever it is called: which arguments it takes, what it may return.

Imported by the processes of functions, too: it needs neither torch nor the trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.errors import UserError, as_score, described, full_traceback, raised_at, type_name
from quartet.config.nearest import nearest


@dataclass(frozen=True)
class Parameters:
    """What a function can be given by keyword: name → whether it must be; ``takes_all``: any other name, too."""

    named: Mapping[str, bool]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """All names where Python cannot tell (some functions written in C)."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls({}, True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls({p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def accepted(self, name: str, offered: Sequence[str]) -> list[str]:
        """Those of the ``offered`` arguments that the function ``name`` takes.

        Raises:
            UserError: it does not take completions, or asks for a column that the data do not have.
        """
        if not self.takes_all and "completions" not in self.named:
            raise UserError(
                f"the reward function {name!r} has no parameter `completions`",
                found=f"its parameters are {', '.join(self.named) or 'none'}",
                remedy="write it as def f(prompts, completions, **columns)",
            )
        for parameter, is_needed in self.named.items():
            if is_needed and parameter not in offered:
                columns = sorted(set(offered) - {"prompts", "completions"})
                check_column(f"the reward function {name!r}", parameter, columns)
        return list(offered) if self.takes_all else [name for name in self.named if name in offered]


def check_column(reward: str, column: str, columns: Sequence[str]) -> None:
    """Raises ``UserError`` where ``column``, which the ``reward`` needs, is not among those of the data.

    Args:
        columns: names; of what is inside objects with dots, ``reward_model.ground_truth``.
    """
    if column in columns:
        return
    # Never an object, in which the value is only somewhere.
    objects = {path.rpartition(".")[0] for path in columns}
    meant = ("ground_truth", column) if column == "answer" else (column,)
    inside = [path for name in meant for path in columns if path.endswith(f".{name}")]
    remedy = f"map it: data.columns.{column}={inside[0] if inside else '…'}"
    if not inside:
        near = nearest(column, [path for path in columns if path not in objects])
        remedy = near or f"give the data that column, or {remedy}"
    raise UserError(
        f"{reward} asks for a column that the data do not have",
        found=f"{column!r}; the columns are {', '.join(columns) or 'none'}",
        remedy=remedy,
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it only begins the work: an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class BadReturn(Exception):
    """What a call did wrong: ``what`` as it follows the function's name, the ``sample`` it shows in, ``where`` it was
    raised and the ``traceback``, where there is one.
    """

    def __init__(self, what: str, sample: int = 0, where: str | None = None, traceback: str | None = None) -> None:
        super().__init__(what)
        self.what, self.sample, self.where, self.traceback = what, sample, where, traceback

    @classmethod
    def of(cls, error: BaseException) -> BadReturn:
        return cls(f"raised {described(error)}", 0, raised_at(error), full_traceback(error))


def scores_of(result: Any, num: int) -> list[float | None]:
    """What a function returned for ``num`` completions, as scores.

    Raises:
        BadReturn: it is not that many finite numbers or None.
        BaseException: what an object of the user's own raises while it is read.
    """
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, (list, tuple)):
        raise BadReturn(f"returned {type_name(result)}, not a list")
    values = [*values]
    if len(values) != num:
        raise BadReturn(f"returned {len(values)} scores for {num} completions", min(len(values), num - 1))
    scores: list[float | None] = []
    for n, value in enumerate(values):
        number = None if value is None else as_score(value)
        if isinstance(number, str):
            raise BadReturn(f"returned {number} for sample {n}", n)
        scores.append(number)
    return scores
