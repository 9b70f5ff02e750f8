"""Reward functions as users write them, the well-behaved and the others; run in processes of their own."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time


def lengths(completions, answer, **_):
    time.sleep(0.05)
    return [None if a is None else float(len(str(c))) for c, a in zip(completions, answer, strict=True)]


async def lengths_async(completions, answer, **_):
    await asyncio.sleep(0.05)
    return [None if a is None else float(len(str(c))) for c, a in zip(completions, answer, strict=True)]


def share_of_digits(completions):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


# What a process of its own keeps away from the trainer -----------------------------------------------------


def every_state(completions):
    """Changes whatever belongs to a process or its main thread."""
    os.chdir("/")
    os.environ["QUARTET_TEST"] = "changed"
    os.umask(0)
    random.seed(0)
    gc.disable()
    sys.setrecursionlimit(200)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.close()
    sys.stderr = None
    os.closerange(0, 3)
    return [1.0] * len(completions)


def leaves_a_child(completions):
    """The child holds all that this process has open, and does not end by itself."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return [1.0] * len(completions)


def leaves_apart(completions):
    """A program of a session, of a process group of its own, and one whose parent has ended: their numbers."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    kept.append(subprocess.Popen(sleep, start_new_session=True, **quiet))
    kept.append(subprocess.Popen(sleep, process_group=0, **quiet))
    start = f"import os, subprocess; os.setsid(); print(subprocess.Popen({sleep!r}, stdout=2, process_group=0).pid)"
    daemon = subprocess.run([sys.executable, "-S", "-c", start], stdout=subprocess.PIPE, text=True, check=True)
    return [*(float(program.pid) for program in kept), float(daemon.stdout)]


kept = []


def leaves_a_child_and_ends(completions):
    leaves_a_child(completions)
    os._exit(3)


def own_signals(completions):
    """Its own alarm rings, its own programs end by SIGTERM."""
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as program:
        program.terminate()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    return [float(len(rung) == 1 and program.returncode == -15 and status == 15)] * len(completions)


# How a call can fail ---------------------------------------------------------------------------------------


class NoNumber:
    def __init__(self, text="no number"):
        self.text = text

    def __float__(self):
        raise ValueError(self.text)

    def __repr__(self):
        raise ValueError(self.text)


def raises(completions, error):
    """Raises or returns what the column names."""
    made = {
        "SystemExit": SystemExit(0),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "GeneratorExit": GeneratorExit("over"),
        "CancelledError": asyncio.CancelledError(),
        "StopIteration": StopIteration(),
        "long": ValueError("x" * 10_000_000),
        "recursion": None,
    }[error[0]]
    if made is None:
        return raises(completions, error)
    raise made


async def raises_async(completions, error):
    await asyncio.sleep(0)
    return raises(completions, error)


def returns(completions, kind):
    made = {
        "NoNumber": lambda: [NoNumber()],
        "complex": lambda: [1j],
        "text": lambda: ["1.0"],
        "huge": lambda: [10**5000],
        "Decimal": lambda: [__import__("decimal").Decimal("0.5")],
        "endless": lambda: iter(int, 1),
        "nothing": lambda: None,
    }[kind[0]]
    return made()


def ends(completions, how):
    if how[0] == "exit":
        os._exit(0)
    if how[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how[0] == "close":
        os.closerange(3, 256)
    return [1.0] * len(completions)


def forges(completions):
    """Writes to whatever is open, the socket to the trainer among it."""
    for fd in sorted({int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}):
        with contextlib.suppress(OSError):
            os.write(fd, b"\0" * 7 + b"\x09[1, [1]]]")
    return [1.0] * len(completions)


# Time ------------------------------------------------------------------------------------------------------


def sleeps(completions):
    time.sleep(600 if "slow" in completions else 0.02)
    return [float(os.getpid())] * len(completions)


def holds_the_interpreter(completions):
    """One step of Python's: no signal handler and no other thread comes in between."""
    sum(range(10**18))
    return [1.0] * len(completions)


async def sleeps_async(completions):
    if "slow" in completions:
        time.sleep(600)  # without await, as users do
    await asyncio.sleep(0.4)
    return [float(os.getpid())] * len(completions)


def waits_in_threads(completions):
    time.sleep(0.4)
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)


def shows_itself(completions):
    print("printed", " and written", sep="")
    print("to standard error", file=sys.stderr)
    return [1.0] * len(completions)


def threads_of_torch(completions):
    return [float(os.environ["OMP_NUM_THREADS"])] * len(completions)


def class_of(completions, thing):
    return [float(type(value).__name__ == "date") for value in thing]
