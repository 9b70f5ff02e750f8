"""The run directory: who owns it, what is in it, how it is resumed.

::

    run.json          job, name, date, status (running, interrupted, failed, done), versions
    recipe.yaml       the resolved recipe
    metrics.jsonl     one line per step            tensorboard/   the same for TensorBoard
    spans.jsonl       when each stage ran          rollouts/      every token of every response
    checkpoints/      step_00000050/, atomic       summary.json   at the end
    model/, critic/   Hugging Face directories, at the end
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError

from quartet.config import Interrupted, UserError
from quartet.config.load import dump_recipe
from quartet.config.recipe import Recipe
from quartet.config.yamls import parse_yaml
from quartet.observe import rollouts as rollout_store
from quartet.observe.background import BackgroundWriter
from quartet.observe.jsonl import truncate_after as truncate_rows_after
from quartet.observe.spans import BACKGROUND, SpanRecorder
from quartet.observe.trackers import JsonlTracker, MultiTracker, TensorBoardTracker, Tracker
from quartet.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, snapshot

_FREE_KEYS = (
    "output_dir",
    "log",
    "checkpoint",
    "cluster",
    "offload",
    "weight_sync",
    "ptx.prefetch",
    "algorithm.dynamic_sampling.max_prompts_factor",
)
"""Recipe keys that may differ when a run is resumed: they change no weight."""

_CHECKPOINT, _WRITER = "checkpoint", "writer"

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_output_dir(job: str) -> Path:
    return Path("runs") / f"{job}-{datetime.now():%Y%m%d-%H%M%S}"


def software_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("quartet-rl", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` (disk full, no permission) into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} could not be written",
            found=str(error),
            remedy="free some space and go on with --resume, or choose another output_dir",
        ) from error


def write_json(path: Path, value: object) -> None:
    """Writes atomically: a reader sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


class RunDirectory:
    """One job's directory: checked when made, owned and written to only inside ``with``.

    Args:
        path: where.
        recipe: the resolved recipe.
        resume: go on with the run that is there (start it when there is none).
        name: shown in reports.

    Raises:
        UserError: the directory holds another run (or other files), is in use, or the recipe has changed.
    """

    def __init__(self, path: Path, recipe: Recipe, *, resume: bool = False, name: str | None = None) -> None:
        self.path = path
        self.recipe = recipe
        self.job = str(getattr(recipe, "job", "run"))
        self.name = name or path.name
        self._resume = resume
        self._lock: TextIO | None = None
        self._tracker: Tracker | None = None
        self._recorder: SpanRecorder | None = None
        self._writer = BackgroundWriter(limits={_CHECKPOINT: 1})
        self._stop_requested = False
        self._info: dict[str, Any] = {}
        self._inspect()

    # Ownership -------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held for the run's lifetime
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{self.path} is in use",
                found="another process is running this job now",
                remedy="wait for it, or choose another output_dir",
            ) from error
        # Looked at again: another process may have come between.
        found = self._inspect()
        created = found["created"] if found else datetime.now().isoformat(timespec="seconds")
        self._info = {
            "job": self.job,
            "name": self.name,
            "created": created,
            "status": "running",
            "versions": software_versions(),
        }
        if found is None:
            with writing(self.path / "recipe.yaml"):
                (self.path / "recipe.yaml").write_text(dump_recipe(self.recipe), encoding="utf-8")
        write_json(self.path / "run.json", self._info)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _inspect(self) -> dict[str, Any] | None:
        """What is there: None for nothing; errors for what must not be touched."""
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise UserError(
                f"output_dir {self.path} is not a directory",
                found="a file",
                remedy="choose another output_dir",
            )
        marker = self.path / "run.json"
        present = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        if not marker.is_file():
            # A run killed in its first instant leaves only its recipe.
            if set(present) <= {"recipe.yaml"}:
                return None
            raise UserError(
                f"output_dir {self.path} is not empty and holds no run",
                found=", ".join(sorted(present)[:5]),
                remedy="choose another output_dir",
            )
        found = self._read_marker(marker)
        if not self._resume:
            raise UserError(
                f"output_dir {self.path} already holds a run",
                found=f"job {found['job']}, status {found['status']}, created {found['created']}",
                remedy="add --resume to go on with it, or choose another output_dir",
            )
        self._check_same_recipe(found)
        return found

    def _read_marker(self, marker: Path) -> dict[str, Any]:
        try:
            found: Any = json.loads(marker.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not {"job", "status", "created"} <= found.keys():
            raise UserError(
                f"output_dir {self.path} is not empty and holds no run",
                found=f"{marker} is not a run's",
                remedy="choose another output_dir",
            )
        return found

    def _check_same_recipe(self, found: Mapping[str, Any]) -> None:
        if found["job"] != self.job:
            raise UserError(
                f"{self.path} cannot be resumed as {self.job}",
                found=f"job {found['job']}",
                remedy=f"run `quartet {found['job']}`, or choose another output_dir",
            )
        saved = _flatten(parse_yaml((self.path / "recipe.yaml").read_text(encoding="utf-8")))
        current = _flatten(parse_yaml(dump_recipe(self.recipe)))
        free_keys: tuple[str, ...] = _FREE_KEYS
        if "asynchronous" not in (saved.get("placement.type"), current.get("placement.type")):
            free_keys += ("placement",)  # where roles work changes no weight; how far generation is ahead does
        changed = sorted(
            key
            for key in set(saved) | set(current)
            if saved.get(key) != current.get(key) and not any(f"{key}.".startswith(f"{free}.") for free in free_keys)
        )
        if changed:
            raise UserError(
                f"{self.path} was started with another recipe",
                found="; ".join(f"{k}: {saved.get(k)} then, {current.get(k)} now" for k in changed[:5]),
                remedy="resume with the recipe saved beside it (recipe.yaml), or choose another output_dir",
            )

    def __enter__(self) -> RunDirectory:
        try:
            self._claim()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        failure = error
        try:
            try:
                with writing(self.path):
                    self._close_records(abandon=kind is KeyboardInterrupt)
            except UserError as refused:
                # The error on its way out matters more than records that a full disk refuses.
                failure = error or refused
            self._info["status"] = (
                "done"
                if failure is None
                else "interrupted"
                if isinstance(failure, (Interrupted, KeyboardInterrupt))
                else "failed"
            )
            with contextlib.suppress(UserError) if failure else contextlib.nullcontext():
                write_json(self.path / "run.json", self._info)
        finally:
            self._release()
        if isinstance(failure, OSError) and failure.errno in _NO_SPACE:
            with writing(self.path):
                raise failure
        if failure is not None and failure is not error:
            raise failure

    def _close_records(self, *, abandon: bool) -> None:
        with contextlib.ExitStack() as stack:
            if self._tracker is not None:
                stack.callback(self._tracker.close)
            if self._recorder is not None:
                stack.callback(self._recorder.close)
            # Called first: it may still have spans to record.
            stack.callback(self._writer.close, abandon=abandon)

    # Records ---------------------------------------------------------------------------------------------

    @property
    def tracker(self) -> Tracker:
        if self._tracker is None:
            raise RuntimeError("call start(step) before logging")
        return self._tracker

    @property
    def recorder(self) -> SpanRecorder:
        if self._recorder is None:
            raise RuntimeError("call start(step) before recording")
        return self._recorder

    def start(self, step: int) -> None:
        """Opens the records; what was written after ``step`` complete steps (those of the checkpoint) is dropped.

        Metrics and rollouts count complete steps; spans carry the index of the step they belong to, from 0. Without a
        checkpoint everything is written again, the figures from before the first step too.
        """
        truncate_rows_after(self.path / "metrics.jsonl", step or -1)
        truncate_rows_after(self.path / "spans.jsonl", step - 1)
        rollout_store.truncate_after(self.path / "rollouts", step)
        trackers: list[Tracker] = [JsonlTracker(self.path / "metrics.jsonl")]
        if self.recipe.log.tensorboard:
            trackers.append(TensorBoardTracker(self.path / "tensorboard", resume_after=step if step else None))
        self._tracker = MultiTracker(trackers)
        self._recorder = SpanRecorder(self.path / "spans.jsonl")

    def rewind(self, step: int) -> None:
        """Goes back to where ``step`` steps were complete: what was recorded after them is dropped."""
        self.drain()
        self.tracker.close()
        self.recorder.close()
        self.start(step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``, after all that is being written; the run counts as finished from here on."""
        self.drain()
        write_json(self.path / "summary.json", summary)

    # Checkpoints -----------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def latest(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """``(step, parts, info)`` of the newest complete checkpoint."""
        steps = self.saved_steps()
        if not steps:
            return None
        parts, info = load_checkpoint(self.checkpoints, steps[-1])
        return steps[-1], parts, info

    def saved_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending; one that is being written is waited for."""
        self.drain()
        return list_checkpoints(self.checkpoints)

    def save(self, step: int, parts: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Saves a checkpoint after ``step`` complete steps: takes a copy and returns, and writes it in the background.

        It is complete only after everything handed over before, so that a run resumed from it lacks no record.

        Raises:
            UserError: this or something before it could not be written; otherwise the next call that waits for the
                writer raises it (``save``, ``write_later``, ``drain``, ``finish``, the end of the run).
        """
        config = self.recipe.checkpoint
        info = copy.deepcopy({**info, "recipe": self.recipe.model_dump(mode="json")})
        if config.background:
            if not self._writer.has_room(_CHECKPOINT):
                with self.recorder.span("checkpoint_wait", step=step - 1, role=_WRITER):
                    self._writer.wait_for_room(_CHECKPOINT)
            with self.recorder.span("checkpoint_snapshot", step=step - 1, role=_WRITER):
                parts = snapshot(parts)
        self.write_later(
            _CHECKPOINT, step, lambda: save_checkpoint(self.checkpoints, step, parts, info, keep=config.keep)
        )

    def write_later(self, name: str, step: int, work: Callable[[], object]) -> None:
        """Does ``work``, which writes something after ``step`` complete steps, in the background and in order.

        With ``checkpoint.background: false`` at once.

        Args:
            name: of its span.
            work: may read only what does not change any more.

        Raises:
            as ``save``; an error of ``work`` comes out as it is.
        """

        background = self.recipe.checkpoint.background

        def timed() -> None:
            mode = BACKGROUND if background else None
            with self.recorder.span(name, step=step - 1, role=_WRITER, mode=mode):
                work()

        if background:
            self._writer.submit(name, timed)
        else:
            timed()

    def drain(self) -> None:
        """Returns once everything is written that was to be written later; errors as in ``save``."""
        self._writer.drain()

    def due(self, step: int, total_steps: int) -> bool:
        """A checkpoint is due after ``step`` steps: on its cadence, at the end, or because Ctrl-C was pressed."""
        return self._stop_requested or step == total_steps or step % self.recipe.checkpoint.every_steps == 0

    def check_stop(self, step: int) -> None:
        """Raises ``Interrupted`` when Ctrl-C was pressed, once the checkpoint is written; call after ``save``."""
        if self._stop_requested:
            self.drain()
            raise Interrupted(self.path, step)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Inside, the first Ctrl-C lets the step end and be saved; a second one stops at once."""
        try:
            former = signal.signal(signal.SIGINT, self._on_interrupt)
        except ValueError:
            # Not the main thread: signals belong to whoever runs us.
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stop_requested:
            raise KeyboardInterrupt
        self._stop_requested = True


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        pairs = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        pairs = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, child in pairs for k, v in _flatten(child, f"{prefix}.{key}" if prefix else key).items()}


def resident_bytes() -> float:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def use_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start
