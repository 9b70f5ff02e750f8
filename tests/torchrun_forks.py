"""torchrun in a process that has imported torch, Ray and the product already, and so have the ranks that it starts.

All is torchrun's own but that a rank is forked in the place of starting Python, which takes seconds.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import preload
from quartet.cli.main import main
from quartet.cluster.torchrun import TorchrunRank, run_under_torchrun
from quartet.train import engine
from quartet.trainers.supervised import SupervisedWorker

for module in preload.MODULES:
    importlib.import_module(module)


def torchrun(
    arguments: Sequence[str],
    log: str,
    environment: Mapping[str, str],
    cwd: str | None = None,
    kill: int | None = None,
    no_memory: bool = False,
) -> None:
    """``torchrun arguments… COMMAND…``, where every rank runs the command as ``run_under_torchrun``, or in ``cwd`` as
    ``quartet``.

    Each leaves its process id beside the log, in a file ``rank<number>``.

    Args:
        kill: SIGKILL hits the last rank before its update of this number, from 1; not once it was started anew.
        no_memory: memory runs out there instead, in the update's passes.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.environ.update(environment)

    def forked(args: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        def rank() -> None:
            os.closerange(3, 4096)  # as a program that is started has none of these
            os.environ.clear()
            os.environ.update(env)
            Path(log).with_name(f"rank{env['RANK']}").write_text(str(os.getpid()))
            command = args[3:]  # behind ``python -u entry.py``
            if cwd is None:
                os._exit(_status(partial(run_under_torchrun, [sys.executable, *command], TorchrunRank.found(env))))
            os.chdir(cwd)
            sys.argv = ["quartet", *command]
            is_last = env["RANK"] == str(int(env["WORLD_SIZE"]) - 1)
            if kill is not None and is_last and env["TORCHELASTIC_RESTART_COUNT"] == "0":
                _fail_in(kill, no_memory)
            os._exit(_status(main))

        return subprocess.Popen(args, env=env, preexec_fn=rank, **options)

    subprocess_handler.Popen = forked  # type: ignore[assignment, misc]
    torch.distributed.run.main(list(arguments))


def _fail_in(update: int, no_memory: bool) -> None:
    step = SupervisedWorker.step

    def fail(*_: Any, **__: Any) -> Any:
        if no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(worker: Any, number: int) -> dict[str, float]:
        if number == update - 1:
            engine.PackedPass = fail
        return step(worker, number)

    SupervisedWorker.step = counted  # type: ignore[method-assign]


def _status(run: Callable[[], int | None]) -> int:
    try:
        return run() or 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
