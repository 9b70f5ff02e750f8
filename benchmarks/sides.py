"""Sides of a ratio: each in a process of its own, set up once, then taking turns so that all meet the same machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import markdown
from peers.environments import DEFAULT_ROOT, python_of, versions_of

HERE = Path(__file__).resolve().parent


class SideFailed(RuntimeError):
    """A side ended, or gave no answer in time; its log's last lines are in the message."""


@dataclass(frozen=True)
class SideSpec:
    """How to start a side.

    Attributes:
        script: relative to this folder; ``peers/…`` run in ``environment``, ours in this interpreter.
        job: what the script reads; ``threads`` is among it.
        repeats: turns wanted of this side where it differs from the others.
        source: the ``src`` folder of another checkout of ours, to measure that one.
    """

    name: str
    script: str
    job: Mapping[str, Any]
    environment: str | None = None
    repeats: int | None = None
    source: Path | None = None


@dataclass
class Side:
    """A running side; ``ready`` is its first report, ``answers`` are those of its turns, ``failure`` says why there
    are no more.
    """

    spec: SideSpec
    log: Path
    start_timeout_s: float = 300.0
    turn_timeout_s: float = 900.0
    ready: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    start_s: float = 0.0

    def start(self) -> None:
        begun = time.monotonic()
        python = python_of(self.spec.environment) if self.spec.environment else Path(sys.executable)
        threads = str(self.spec.job["threads"])
        source = str(self.spec.source) if self.spec.source is not None else os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(HERE), *filter(None, [source])])
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), str(HERE / self.spec.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.log.parent,
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "0"},
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout
        self._say(json.dumps(dict(self.spec.job)))
        self.ready = self._answer(self.start_timeout_s)
        self.start_s = time.monotonic() - begun

    def turn(self) -> dict[str, Any]:
        self._say("turn")
        self.answers.append(self._answer(self.turn_timeout_s))
        return self.answers[-1]

    def close(self) -> None:
        """Lets the process end by itself; ends it where it does not."""
        if not hasattr(self, "process"):
            return
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self._questions.write(line.encode() + b"\n")
            self._questions.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        line = self._answers.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"gave no answer within {timeout_s:.0f} s"
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise SideFailed(f"{self.spec.name} {why}; its log ends:\n{tail}")
        return dict(json.loads(line))


@contextlib.contextmanager
def _running(sides: Sequence[Side]) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides:
            side.close()


def take_turns(
    specs: Sequence[SideSpec], folder: Path, *, repeats: int, patience_s: float = 1e9, timeout_s: float = 900.0
) -> dict[str, Side]:
    """All sides started one after the other, then turn by turn, ``repeats`` times.

    Args:
        folder: for logs.
        patience_s: a side whose turns took longer than this in all gets no further one.

    A side that fails is left out from then on; its ``failure`` says why, and nobody else suffers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sides = [Side(spec, folder / f"{spec.name}.log", turn_timeout_s=timeout_s) for spec in specs]
    with _running(sides):
        for side in sides:
            _guarded(side, side.start)
        for i in range(repeats):
            for side in sides:
                wanted = i < (side.spec.repeats or repeats)
                if side.failure is None and wanted and sum(a["seconds"] for a in side.answers) <= patience_s:
                    _guarded(side, side.turn)
    return {side.spec.name: side for side in sides}


def _guarded(side: Side, work: Any) -> None:
    try:
        work()
    except (SideFailed, SystemExit) as failure:
        side.failure = str(failure)
        print(f"  {side.spec.name}: {failure}", file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def summary(side: Side) -> dict[str, Any]:
    """Medians over a side's turns, and the greatest memory it had."""
    found: dict[str, Any] = {
        "turns": len(side.answers),
        "start_s": round(side.start_s, 1),
        "environment": side.spec.environment if side.answers else None,
    }
    if side.failure is not None:
        found["failure"] = side.failure
    if side.answers:
        names = [name for name, value in side.answers[0].items() if isinstance(value, int | float)]
        found |= {name: median([answer[name] for answer in side.answers]) for name in names}
        found["all_seconds"] = [round(answer["seconds"], 4) for answer in side.answers]
        found["peak_bytes"] = max(answer["peak_bytes"] for answer in side.answers)
    return found


def sides_table(
    parts: Sequence[Mapping[str, Any]],
    rate: str,
    floor_s: Callable[[Mapping[str, Any]], float],
    extra: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType({}),
) -> str:
    """Every side of every part, beside ours.

    Args:
        rate: the figure that counts per second, as ``samples_per_s``.
        floor_s: seconds of the least work of a part.
        extra: more columns of a side, by their heads.
    """
    head = ["case", "dtype", "side", "s/step", rate.replace("_per_", "/"), "native over it", "of the floor", *extra]
    head += ["peak GiB", "native's peak over it", "turns"]
    rows = []
    for part in parts:
        native = part["sides"].get("native", {})
        for name, found in part["sides"].items():
            row = [part["case"], part["dtype"], name]
            if "seconds" not in found:
                rows.append([*row, "failed", *[""] * (len(head) - 4)])
                continue
            ratio = memory = ""
            if name != "native" and "seconds" in native:
                ratio = f"{found['seconds'] / native['seconds']:.2f}"
                memory = f"{native['peak_bytes'] / found['peak_bytes']:.2f}"
            row += [f"{found['seconds']:.2f}", f"{found[rate]:.2f}", ratio, f"{floor_s(part) / found['seconds']:.0%}"]
            row += [of(found) for of in extra.values()]
            rows.append([*row, f"{found['peak_bytes'] / 2**30:.2f}", memory, str(found["turns"])])
    return markdown(head, rows)


def peer_versions(parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Versions in the environments that gave a result to any of ``parts``."""
    used = {found["environment"] for part in parts for found in part["sides"].values() if found["environment"]}
    return {name: versions_of(name) for name in sorted(used)}


def work_folder(name: str) -> Path:
    """Scratch space beside the environments: model directories and logs."""
    folder = DEFAULT_ROOT / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
