"""Runs `quartet` commands in processes of their own that start at once: imports everything, then forks per command.

Reads one JSON object per line: ``{"argv": […], "cwd": …, "output": path, "kill": [event, n] or null}`` starts a
command and answers ``{"pid": …}``; ``{"wait": pid}`` answers ``{"status": …}`` as ``os.waitpid`` has it. ``kill`` sends
SIGKILL to the command right before the n-th event (from 1): ``fsync``, ``replace``, ``log`` (a row of metrics),
``update`` (an optimizer step), ``decode`` (an engine step), ``snapshot`` (the copy for a checkpoint), ``meanwhile`` (an
engine step or an update while a checkpoint is being written, which is slowed down so that there are such), ``finish``
(the summary), ``upload`` or ``manifest`` (a file of a checkpoint to a store, and what makes it count). ``env`` holds
variables.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


import preload
from quartet.cli.main import main
from quartet.extras.speculation.head_trainer import Companion, HeadTrainer
from quartet.extras.storage.store import Store
from quartet.observe.trackers import JsonlTracker
from quartet.rollout.engine import NativeEngine
from quartet.train import checkpoint
from quartet.train.engine import TrainEngine
from quartet.trainers import checkpoints as saving_module
from quartet.trainers import run as run_module

EVENTS: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "log": (JsonlTracker, "log"),
    "update": (TrainEngine, "train_step"),
    "heads": (Companion, "learn"),
    "head": (HeadTrainer, "learn"),
    "decode": (NativeEngine, "step"),
    "snapshot": (checkpoint, "copy_to_host"),
    "upload": (Store, "upload"),
    "manifest": (Store, "write"),
    "finish": (run_module.RunDirectory, "finish"),
}
ABOUT = {"upload": "checkpoints/", "manifest": "manifest.json"}
"""What an argument must hold for the event to count."""
SLOWED_S = 0.5


def kill_before(event: str, n: int) -> None:
    saving = threading.Event()
    if event == "meanwhile":
        slow_down(saving)
        owners = [EVENTS["decode"], EVENTS["update"]]
    else:
        owners = [EVENTS[event]]
        saving.set()
    seen = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += saving.is_set() and any(ABOUT.get(event, "") in str(argument) for argument in args)
            if seen == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for owner, name in owners:
        setattr(owner, name, counted(getattr(owner, name)))


def slow_down(saving: threading.Event) -> None:
    """Sets ``saving`` from the copy for a checkpoint until it is written, and makes each of its files take its time."""
    snapshot, complete, fsync = checkpoint.copy_to_host, saving_module.complete_checkpoint, os.fsync

    def begin(state: Any) -> Any:
        saving.set()
        return snapshot(state)

    def end(*args: Any, **kwargs: Any) -> Any:
        try:
            return complete(*args, **kwargs)
        finally:
            saving.clear()

    def slow_fsync(descriptor: int) -> None:
        time.sleep(SLOWED_S * saving.is_set())
        fsync(descriptor)

    checkpoint.copy_to_host, saving_module.complete_checkpoint, os.fsync = begin, end, slow_fsync


def run(command: dict[str, Any]) -> int:
    descriptor = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(command["cwd"])
    os.environ.update(command["env"])
    sys.argv = ["quartet", *command["argv"]]
    if command["kill"]:
        kill_before(*command["kill"])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    except KeyboardInterrupt:  # It came before this was a command.
        return 128 + signal.SIGINT
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


preload.load()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        answer = {"status": os.waitpid(request["wait"], 0)[1]}
    else:
        # Callbacks of a fork drop a Ctrl-C, and may leave their locks held.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        pid = os.fork()
        if pid == 0:
            os._exit(run(request))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        answer = {"pid": pid}
    print(json.dumps(answer), flush=True)
