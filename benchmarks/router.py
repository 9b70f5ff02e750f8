"""What the router costs, and the way into another process.

    python benchmarks/router.py [--model tiny] [--requests 64] [--longest 256]

First table: time of the router alone for each request, with engines that answer 256 tokens at once. Second table: the
native engine on the same requests, driven by hand, in a process of its own, and behind the router; sides take turns in
every repeat, figures are medians. With one thread for each side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from common import arguments, markdown, prompt_ids, saved_model, step_groups, write_results

from quartet.rollout.engine import load_engine
from quartet.rollout.process import EngineProcess, EngineSpec
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    PartialCompletion,
    Request,
    RolloutEngine,
    SamplingParams,
)
from quartet.rollout.router import Router
from quartet.weights.sink import TensorSink

TARGET = "quartet.rollout.engine:load_engine"


_ANSWERS: dict[str, Completion] = {}
"""Made before the clock runs."""


class Instant:
    """Answers everything at the next look."""

    def __init__(self) -> None:
        self._done: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._done += [_ANSWERS[request.request_id] for request in requests]

    def completed(self, timeout_s: float) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def cancel(self, request_ids: Iterable[str]) -> None: ...

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        return {}

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def weight_sink(self) -> TensorSink:
        raise NotImplementedError("nothing is sent here")

    def sleep(self, level: Literal[1, 2]) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...


def requests(model: str, num: int, longest: int) -> list[Request]:
    """Groups of 8, of which every answer has a length of its own."""
    groups = step_groups(max(1, num // 8), 8, longest)
    prompts = prompt_ids(groups, 512)
    return [
        Request(f"{model}-{g}-{i}", f"{g}", tuple(prompt), SamplingParams(max_new_tokens=length, seed=8 * g + i))
        for g, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
        for i, length in enumerate(group.responses)
    ]


def run(engine: RolloutEngine, asked: Sequence[Request]) -> float:
    """Seconds until all have ended."""
    start = time.perf_counter()
    engine.submit(asked)
    left = len(asked)
    while left:
        left -= len(engine.completed(1.0))
    return time.perf_counter() - start


def alone(num_engines: int, num: int, repeats: int) -> float:
    """Seconds of the router for each request."""
    asked = requests("alone", num, 256)
    for request in asked:
        number = request.sampling.max_new_tokens
        columns = (7,) * number, (-1.0,) * number, (0,) * number
        _ANSWERS[request.request_id] = Completion(request.request_id, request.group, *columns, FinishReason.LENGTH)
    took = []
    for _ in range(repeats):
        router = Router([Instant() for _ in range(num_engines)], max_outstanding=64)
        took.append(run(router, asked) / len(asked))
        router.close()
    return statistics.median(took)


def sides(path: Path, num: int, longest: int, repeats: int) -> dict[str, float]:
    """Median seconds of each side."""
    kwargs: dict[str, Any] = {"path": str(path), "version": 0}
    native = load_engine(**kwargs)
    engines: dict[str, RolloutEngine] = {
        "process": EngineProcess(EngineSpec(TARGET, kwargs)),
        "router over a process": Router([EngineProcess(EngineSpec(TARGET, kwargs))], max_outstanding=num),
    }

    def by_hand(asked: Sequence[Request]) -> float:
        start = time.perf_counter()
        native.submit(asked)
        while native.has_work:
            native.step()
        return time.perf_counter() - start

    ways: dict[str, Callable[[Sequence[Request]], float]] = {"by hand": by_hand}
    ways |= {name: lambda asked, engine=engine: run(engine, asked) for name, engine in engines.items()}  # type: ignore[misc]
    took: dict[str, list[float]] = {name: [] for name in ways}
    asked = requests("sides", num, longest)
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            seconds = way(asked)
            if repeat:  # the first is for warming up
                took[name].append(seconds)
    for engine in engines.values():
        engine.close()
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def main() -> None:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--model", choices=["tiny", "small"], default="tiny")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256)
    args = parser.parse_args()
    number = 4096
    if args.smoke:
        args.requests, args.longest, args.repeats, number = 8, 8, 1, 64
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = sides(saved_model(args.model, Path(folder)), args.requests, args.longest, args.repeats)
    router = {count: alone(count, number, args.repeats) for count in (1, 4, 16)}
    results: dict[str, Any] = {"router_s_per_request": router, "sides_s": seconds}
    write_results(args, results)
    print(markdown(["engines", "router, µs per request"], [[str(n), f"{1e6 * s:.0f}"] for n, s in router.items()]))
    base = seconds["by hand"]
    rows = [[name, f"{s:.3f}", f"{100 * (s / base - 1):+.1f} %"] for name, s in seconds.items()]
    print("\n" + markdown(["native engine", "seconds", "against by hand"], rows))


if __name__ == "__main__":
    main()
