"""The sandbox against code that wants out of it. Every hostile program does what it says where nothing stops it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.extras.sandbox.run import SandboxLimits, SolutionCheck, judge, run_program
from sandboxes import needs_sandbox, run_tests

pytestmark = needs_sandbox

LIMITS = SandboxLimits(wall_s=2.0, memory_bytes=256 << 20, disk_bytes=4 << 20, output_bytes=1 << 16, processes=8)
ADD = "def add(a, b):\n    return a + b\n"
TWO_TESTS = [SolutionCheck("assert add(2, 3) == 5"), SolutionCheck("assert add(10, 1) == 11")]


def says(source: str, text: str = "") -> str:
    """What an honest little program finds in there."""
    run = run_program(source, text, LIMITS)
    assert (run.ended, run.status) == ("by itself", 0), run
    return run.output.decode()


def alive(mark: str) -> list[int]:
    """Processes anywhere on this machine with ``mark`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# Honest code ---------------------------------------------------------------------------------------------


def test_a_program_reads_and_writes() -> None:
    assert says("print(sum(map(int, input().split())))", "1 2 3\n") == "6\n"
    assert says("import sys; print(sys.stdin.read()[::-1], end='')", "äöü") == "üöä"
    assert says("print(repr(input()), repr(input()))", "ab\r\nc\r\n") == "'ab' 'c'\n"
    assert says("import sys; print(len(sys.argv))", "") == "1\n"
    assert says("import math, json, re, collections, ctypes, decimal; print(math.comb(5, 2))") == "10\n"
    assert says(
        "print(__name__); import os; print(os.getcwd()); open('x', 'w').write('y'); print(open('x').read())"
    ) == ("__main__\n/tmp\ny\n")


def test_a_program_ends_as_python_does() -> None:
    """Output that threads and exit handlers write belongs to it."""
    assert says("import threading as t; t.Thread(target=lambda: print('late')).start()") == "late\n"
    assert says("import atexit; atexit.register(print, 'last')") == "last\n"
    run = run_program("print('half'); raise ValueError", "", LIMITS)
    assert (run.output, run.ended, run.status) == (b"half\n", "by itself", 1)


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_a_program_ends_where_it_says_so(name: str) -> None:
    run = run_program(f"print('done')\nif 1: {name}()\nprint('more')", "", LIMITS)
    assert (run.output, run.status) == (b"done\n", 0)
    assert run_program(f"{name}(3)", "", LIMITS).status == 3


def test_annotations_are_what_the_code_says() -> None:
    """The sandbox's own ``from __future__`` imports are not the code's."""
    assert says("def f(n: int): pass\nprint(f.__annotations__)") == "{'n': <class 'int'>}\n"
    checked = "def f(n: int):\n    if not isinstance(n, f.__annotations__['n']): raise TypeError\n    return n\n"
    types = "class A:\n    n: int\nassert A.__annotations__['n'] is int"
    assert run_tests(checked, [SolutionCheck("assert f(1) == 1"), SolutionCheck(types)], LIMITS) == [True, True]


def test_a_solution_is_tested_call_by_call() -> None:
    assert run_tests(ADD, TWO_TESTS, LIMITS) == [True, True]
    wrong = "def add(a, b):\n    return a * b - 1\n"
    assert run_tests(wrong, [*TWO_TESTS, SolutionCheck("assert add(2, 3) == 5")], LIMITS) == [True, False, True]
    assert run_tests("def add(a, b:", TWO_TESTS, LIMITS) == [False, False]
    assert run_tests("", TWO_TESTS, LIMITS) == [False, False]


def test_tests_may_use_what_tests_use() -> None:
    solution = """
import enum, math, heapq
from collections import Counter, deque, namedtuple
LIMIT = 7
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self):
        return len(self.items)
    def __getitem__(self, n):
        return self.items[n]
    def __str__(self):
        return "-".join(map(str, self.items))
class Error(ValueError):
    pass
class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
Point = namedtuple("Point", "x y")
def linked(values):
    return Node(values[0], linked(values[1:]) if values[1:] else None)
def adder(n):
    return lambda m: n + m
def memoized(f):
    known = {}
    def g(n):
        if n not in known: known[n] = f(n)
        return known[n]
    return g
def average(xs):
    return sum(xs) / len(xs)
def same(x):
    return x
def origin():
    return Point(0, 0)
def refuse(x):
    raise Error(f"not {x}")
def apply(f, xs):
    return [f(x) for x in xs]
def kinds():
    return {1: (2.5, None, True), "s": {1, 2}, "c": Counter("aab"), "d": deque([1]), "z": 3 + 4j, "b": b"x"}
"""
    tests = [
        "assert LIMIT == 7 and math.isclose(math.pi, 3.14159, abs_tol=1e-4)",
        "s = Stack([1]); s.push(2).push(3); assert len(s) == 3 and s[0] == 1 and s.items == [1, 2, 3]",
        "assert list(s) == [1, 2, 3] and 2 in s and 4 not in s and sum(s) == 6 and str(s) == '1-2-3'",
        "s.items = [9]; assert s[0] == 9 and isinstance(s, Stack) and not isinstance(3, Stack)",
        "assert Shade.DARK.value == 1 and Shade['LIGHT'].name == 'LIGHT' and len(Shade) == 2",
        "n = linked([1, 2]); assert n.next.value == 2 and n.next.next is None and n != None and isinstance(n, Node)",
        "assert adder(2)(3) == 5 and Point(1, 2).x == 1 and origin() == (0, 0)",
        "@memoized\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\nassert fib(30) == 832040",
        "class Own: pass\nown = Own()\nassert same(own) is own and same(range(3)) == range(3)",
        "assert abs(average([1, 2]) - 1.5) < 1e-6 and math.isclose(average([0.1, 0.2]), 0.15)",
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError): refuse(1)",
        "assert statistics.mean([average([4, 4]), 4]) == 4",
        "try:\n    refuse(3)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'not 3'",
        "assert apply(lambda x: x * x, [1, 2, 3]) == [1, 4, 9]",
        "assert apply(len, ['a', 'bc']) == [1, 2]",
        "import collections\nassert kinds() == {1: (2.5, None, True), 's': {1, 2}, 'c': collections.Counter('aab'), "
        "'d': collections.deque([1]), 'z': 3 + 4j, 'b': b'x'}",
        "assert isinstance(kinds()['s'], set)",
        "def check(candidate):\n    assert candidate([2]) is not None\ncheck(average)",
    ]
    assert judge(solution, [SolutionCheck(test) for test in tests], LIMITS) == [""] * len(tests)


# Code that wants a verdict it has not earned ---------------------------------------------------------------

CHEATS = {
    "ends before the tests": "import sys; sys.exit(0)",
    "ends inside a call": "import os\ndef add(a, b):\n    os._exit(0)",
    "raises what nobody catches": "def add(a, b):\n    raise SystemExit(0)",
    "kills": "import os\ndef add(a, b):\n    os.kill(os.getpid(), 9)",
    "prints verdicts": "import os\nfor fd in range(1024):\n    for text in (b'PP', b'ok', b'11'):\n"
    "        try: os.write(fd, text)\n        except OSError: pass",
    "looks up the stack": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name in list(frame.f_locals) + list(frame.f_globals):\n            if 'expect' in name: return 1 / 0\n"
    "        frame = frame.f_back\n    return None",
    "answers before it is asked": "import json, os, struct\nbody = json.dumps(['value', True]).encode()\n"
    "for fd in range(3, 1024):\n    try: os.write(fd, (struct.pack('>I', len(body)) + body) * 50)\n"
    "    except OSError: pass",
    "never answers": "def add(a, b):\n    while True: pass",
    "never starts": "while True: pass",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
def test_nothing_but_right_answers_passes_a_test(source: str) -> None:
    start = time.monotonic()
    assert run_tests(source, TWO_TESTS, LIMITS) == [False, False]
    assert time.monotonic() - start < 30


def test_pythons_own_names_mean_pythons_own() -> None:
    """In the tests, whatever the solution calls so."""
    source = "def all(x): return True\ndef add(a, b): return 0\ndef sorted(x): return [5]\n"
    tests = [
        SolutionCheck("assert all([add(2, 3) == 5])"),
        SolutionCheck("assert sorted([add(2, 3)]) == [5]"),
        SolutionCheck("assert add(1, 1) == 0"),
    ]
    assert run_tests(source, tests, LIMITS) == [False, False, True]


def test_a_right_function_passes_whatever_surrounds_it() -> None:
    """Threads that never end, a changed print and much output are no reason to fail."""
    noise = "import threading, time\nthreading.Thread(target=lambda: time.sleep(1e6)).start()\n"
    noise += "import builtins\nbuiltins.print = None\nimport sys\nsys.stdout.write('x' * 10**7)\n"
    assert run_tests(noise + ADD, TWO_TESTS, LIMITS) == [True, True]


# Code that wants to do harm --------------------------------------------------------------------------------


def test_the_number_of_threads_is_limited() -> None:
    threads = "import os, threading, time\nn = 1\ntry:\n    while True:\n"
    threads += "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        n += 1\n"
    threads += "except RuntimeError:\n    os.write(1, b'%d' % n)\n    os._exit(0)\n"
    assert run_program(threads, "", replace(LIMITS, memory_bytes=4 << 30)).output == b"8"


def test_orphans_end_too() -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, subprocess, time
if os.fork() == 0:
    if os.fork() == 0:
        subprocess.Popen(["/bin/sh", "-c", "sleep 61; : {mark}"])
        time.sleep(60)
    os._exit(0)
time.sleep(1)
print("over")
"""
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(says, source)
        seen = False
        while not running.done():
            seen = seen or bool(alive(mark))
            time.sleep(0.02)
    assert running.result() == "over\n"
    assert seen, "they did exist"
    assert alive(mark) == []


def test_the_disk_is_limited_in_all() -> None:
    fill = """
import os
written = 0
try:
    for n in range(100):
        with open(f"file{n}", "wb") as file:
            for _ in range(10):
                written += file.write(b"x" * 100_000)
                file.flush()
except OSError as error:
    print(written < 5 * 2**20)
"""
    assert says(fill) == "True\n"
    grow = (
        "file = open('one', 'wb')\ntry:\n    while True: file.write(b'x' * 100_000)\nexcept OSError:\n    print('full')"
    )
    assert says(grow) == "full\n"
    memory = "import os, tempfile\nfd, n = tempfile.TemporaryFile().fileno(), 0\n"
    memory += "try:\n    while n < 10**8: n += os.write(fd, b'x' * 100_000)\n"
    memory += "except OSError: pass\nprint(n)"
    assert int(says(memory)) <= LIMITS.disk_bytes, "files that have no name, too"


def test_nothing_of_the_machine_can_be_written(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    target = tmp_path / "planted"
    source = f"""
import os, sys
for path in ({str(target)!r}, "/usr/planted", "/planted", sys.prefix + "/planted", "/dev/shm/planted"):
    try:
        open(path, "w").write("x")
        print(path)
    except OSError:
        pass
"""
    written = says(source).split()
    assert written in ([], ["/planted"]), "its own root directory at most, which is gone afterwards"
    assert not target.exists() and not Path("/planted").exists()


def test_what_is_shown_of_the_machine_is_read_only() -> None:
    """Also to a user who owns the Python installation."""
    source = "import os, sys; print([bool(os.statvfs(p).f_flag & os.ST_RDONLY) for p in ('/usr', sys.prefix, '/tmp')])"
    assert says(source) == "[True, True, False]\n"


def test_there_is_no_way_back_to_privileges() -> None:
    """Where root runs it the code is another user."""
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() != 0 or open("/dev/null") is None, libc.setuid(0) if os.getuid() else -1)
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/tmp"), libc.ptrace(16, 1, 0, 0))
"""
    assert says(source) == "True -1\n-1 -1 -1\n"


def test_files_of_the_machine_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    paths = [str(secret), "/etc/passwd", "/etc/hostname", str(Path.home()), "/root/.ssh", __file__, "/proc", "/sys"]
    assert says(f"import os; print([p for p in {paths!r} if os.path.exists(p) and p != '/root'])") == "[]\n"
    assert says("import os; print(sorted(os.listdir('/tmp')))") == "[]\n", "not the machine's /tmp"


def test_nothing_of_the_parents_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_SECRET", "hunter2")
    assert says("import os; print('QUARTET_SECRET' in os.environ, len(os.environ) < 3)") == "False True\n"
    search = """
import glob, os
found = []
for path in glob.glob("/proc/*/environ") + [f"/proc/{pid}/environ" for pid in range(1, 4000)]:
    try: found.append(open(path, "rb").read())
    except OSError: pass
print(len(found), os.getpid(), os.getppid())
"""
    assert says(search) == "0 2 1\n", "and its processes are numbered from one"


def test_open_files_of_the_parent_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.write_text("secret")
    with open(path) as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import os
found = b""
for fd in range(3, 1024):
    try: found += os.read(fd, 100)
    except OSError: pass
print(found)
"""
        assert says(source) == "b''\n"


def test_nothing_is_left_of_many_runs() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_tests(ADD, TWO_TESTS, LIMITS)
        run_program("print(1)", "", LIMITS)
    assert len(os.listdir("/proc/self/fd")) == len(before)
