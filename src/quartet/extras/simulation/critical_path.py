"""The critical path of a run, read from its spans: the chain of work that made it as long as it is.

A span began when the last of its *causes* had ended: the data it needs, or the work that held its pool. Going back from
the span that ended last, from cause to cause, gives the path; what lies between a cause's end and the next beginning is
waiting that no span explains (on a virtual clock there is none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quartet.config.placement import HEADS, ResolvedPlacement
from quartet.extras.simulation.cost_model import CostModel
from quartet.observe.spans import Span

IsCause = Callable[[Span, Span], bool]


@dataclass(frozen=True)
class PathSpan:
    """A span of the path; ``wait_s`` passed between the end of its cause (or the run's beginning) and its own start."""

    span: Span
    wait_s: float


_TOLERANCE_S = 1e-6
"""By how much a cause may end after its effect began and still count as before it."""


def critical_path(spans: Iterable[Span], is_cause: IsCause) -> list[PathSpan]:
    """The path to the span that ends last, in order of time.

    Args:
        is_cause: ``(earlier, later)`` → whether ``later`` may have waited for ``earlier``; times are not its business.
    """
    rest = sorted(spans, key=lambda span: (span.end_s, span.start_s))
    if not rest:
        return []
    first_s = min(span.start_s for span in rest)
    current, path = rest.pop(), []
    while True:
        rest = [span for span in rest if span.end_s <= current.start_s + _TOLERANCE_S]
        causes = [span for span in rest if is_cause(span, current)]
        if not causes:
            path.append(PathSpan(current, current.start_s - first_s))
            return path[::-1]
        cause = causes[-1]
        path.append(PathSpan(current, max(0.0, current.start_s - cause.end_s)))
        rest.remove(cause)
        current = cause


def seconds_on_path(path: Sequence[PathSpan]) -> dict[str, float]:
    """Seconds per span name that took any, and ``wait`` for what lies between."""
    found: dict[str, float] = {}
    for link in (link for link in path if link.span.seconds > 0):
        found[link.span.name] = found.get(link.span.name, 0.0) + link.span.seconds
    waits = sum(link.wait_s for link in path)
    return {**found, "wait": waits} if waits > 0 else found


def iteration_causes(costs: CostModel, placement: ResolvedPlacement, spans: Iterable[Span]) -> IsCause:
    """What may hold up what in the spans of a run: data, extra edges of the placement, and its pools.

    A movement of parts needs what the work needs for which they move.
    """
    scoring = {stage.stage for stage in costs.scoring}
    learning = {stage.stage for stage in costs.learning}
    publishers = {stage.stage for stage in costs.learning if stage.role in ("actor", HEADS)}
    ends_step = learning | {"publish", "canary"}
    movers = _purposes(list(spans), placement)

    def shares_pool(earlier: Span, later: Span) -> bool:
        return _pool(placement, earlier) == _pool(placement, later)

    def gives_data(earlier: Span, later: Span) -> bool:
        later = movers.get(id(later), later)
        if earlier.step is None or later.step is None:
            return False
        follows = earlier.step == later.step - 1 and earlier.name in ends_step
        same_step = earlier.step == later.step
        if later.name == "generate":
            return follows
        if later.name in scoring:
            held_back = same_step and earlier.name in placement.after.get(later.name, ())
            return follows or held_back or (earlier.name == "generate" and earlier.step <= later.step)
        if later.name in learning:
            return same_step and (earlier.name in scoring or earlier.name in placement.after.get(later.name, ()))
        if later.name == "canary":
            return same_step and earlier.name == "publish"
        return same_step and earlier.name in publishers

    return lambda earlier, later: shares_pool(earlier, later) or gives_data(earlier, later)


def _purposes(spans: Sequence[Span], placement: ResolvedPlacement) -> dict[int, Span]:
    """Each movement (by its id) → the work before which it came.

    What moves in is for its role's next work; what moves out for the next that moves in on its pool.
    """
    found: dict[int, Span] = {}
    in_time = sorted(spans, key=lambda span: span.start_s)
    for move in (span for span in spans if span.name in ("onload", "offload")):
        later = [span for span in in_time if span.start_s >= move.end_s and span is not move]
        mine = [span for span in later if _pool(placement, span) == _pool(placement, move)]
        arriving = move if move.name == "onload" else next((span for span in mine if span.name == "onload"), None)
        role = None if arriving is None else arriving.role
        work = next((span for span in mine if span.role == role and span.mode is not None), None)
        if work is not None:
            found[id(move)] = work
    return found


def _pool(placement: ResolvedPlacement, span: Span) -> str:
    return placement.pool_of[str(span.role)]
