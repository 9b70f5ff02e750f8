"""torchrun in a process that has imported torch, Ray and the product already, and so have the ranks that it starts.

All is torchrun's own but that a rank is forked in the place of starting Python, which takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from quartet.cluster.torchrun import LauncherRank, run_under_torchrun


def torchrun(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """``torchrun arguments… COMMAND…``, where every rank runs the command as ``run_under_torchrun``.

    Each leaves its process id beside the log, in a file ``rank<number>``.
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
            os._exit(_status([sys.executable, *args[3:]]))  # behind ``python -u entry.py``

        return subprocess.Popen(args, env=env, preexec_fn=rank, **options)

    subprocess_handler.Popen = forked  # type: ignore[assignment, misc]
    torch.distributed.run.main(list(arguments))


def _status(command: Sequence[str]) -> int:
    try:
        return run_under_torchrun(command, LauncherRank.found(os.environ))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
