"""Runs `quartet` commands in processes of their own that start at once: imports everything, then forks per command.

Reads one JSON object per line: ``{"argv": […], "cwd": …, "output": path, "kill": [event, n] or null}`` starts a
command and answers ``{"pid": …}``; ``{"wait": pid}`` answers ``{"status": …}`` as ``os.waitpid`` has it. ``kill`` sends
SIGKILL to the command right before the n-th event (from 1): ``fsync``, ``replace``, ``log`` (a row of metrics),
``update`` (an optimizer step) or ``decode`` (an engine step).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from quartet.cli.main import main
from quartet.observe.trackers import JsonlTracker
from quartet.rollout.engine import NativeEngine
from quartet.train.engine import TrainEngine

EVENTS: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "log": (JsonlTracker, "log"),
    "update": (TrainEngine, "train_step"),
    "decode": (NativeEngine, "step"),
}


def kill_before(event: str, n: int) -> None:
    owner, name = EVENTS[event]
    original = getattr(owner, name)
    seen = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def run(command: dict[str, Any]) -> int:
    descriptor = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(command["cwd"])
    sys.argv = ["quartet", *command["argv"]]
    if command["kill"]:
        kill_before(*command["kill"])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        answer = {"status": os.waitpid(request["wait"], 0)[1]}
    else:
        pid = os.fork()
        if pid == 0:
            os._exit(run(request))
        answer = {"pid": pid}
    print(json.dumps(answer), flush=True)
