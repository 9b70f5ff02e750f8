"""An engine's process itself: what it is made of, what it prints, the way to it, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.rewards.subprocesses import how_it_ended
from quartet.rollout.channel import Channel

_PACKAGE = Path(__file__).parents[1]
_SHOWN_LINES, _SHOWN_BYTES = 30, 3000
_MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's process is made of.

    Attributes:
        target: ``package.module:function``, whose result there, with ``kwargs`` (plain data), is a ``StepEngine``.
        python: the interpreter; None: this one.
        environment: added to this process's variables.
        start_timeout_s: for the engine to be made, and to take weights, sleep or wake.
        stall_timeout_s: for a step, and an answer.
        name: for messages.
    """

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0
    stall_timeout_s: float = 120.0
    name: str = "engine"


class EngineChild:
    """The process itself, what it prints, and the way to it.

    Raises:
        OSError: its interpreter cannot be started.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quartet-engine-")
        # Finds this package there, and nothing else of this environment if it has another one.
        (Path(self._folder.name) / "quartet").symlink_to(_PACKAGE)
        variables, path = {**os.environ, **spec.environment}, [self._folder.name]
        if spec.python is None or "PYTHONPATH" in spec.environment:
            path += filter(None, [variables.get("PYTHONPATH")])
        # It appends: what is read or cut off here does not move where the process writes.
        self._log = open(Path(self._folder.name) / "log", "a+b", buffering=0)  # noqa: SIM115
        self._cut_off = b""
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self.channel = Channel(ours)
        self._process: subprocess.Popen[bytes] | None = None
        stderr = os.dup(2)  # for log records
        command = [spec.python or sys.executable, "-P", "-m", "quartet.rollout.process_main"]
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(lifeline), str(stderr)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), lifeline, stderr),
                env={**variables, "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
            )
        except OSError:
            self.end()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(stderr)

    def drop_folder(self) -> None:
        """It has started, and needs what is in there no more: nothing stays if this process is killed."""
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, patience_s: float = 0.0) -> str:
        """Ends its whole process group, after so long for itself; what became of it, and its last lines."""
        said = "it never ran"
        self.channel.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            ended_itself = self._process.returncode is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            status = self._process.wait()
            said = (how_it_ended(status) if ended_itself else "it was killed") + self._last_lines()
        os.close(self._lifeline)
        self._log.close()
        self._folder.cleanup()
        return said

    def _last_lines(self) -> str:
        text = (self._cut_off + self._end_of_log()).decode(errors="replace")
        lines = text[-_SHOWN_BYTES:].strip().splitlines()[-_SHOWN_LINES:]
        return "; it printed nothing" if not lines else "; its last lines:\n" + "\n".join(lines)

    def _end_of_log(self) -> bytes:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _SHOWN_BYTES))
        return self._log.read()

    def trim_log(self) -> None:
        """An engine may print for weeks; only the end is ever shown."""
        if os.fstat(self._log.fileno()).st_size > _MAX_LOG_BYTES:
            self._cut_off = self._end_of_log()
            os.ftruncate(self._log.fileno(), 0)
