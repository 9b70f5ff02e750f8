"""Verdicts that were not earned: objects that lie, lazy ones, abused channels. And what honest code returns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from quartet.extras.sandbox.run import SandboxLimits, SolutionCheck, judge
from sandboxes import needs_sandbox, run_tests

pytestmark = needs_sandbox

LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=512 << 20, processes=8)

# What ``f`` is, or the class of which it returns an instance, and a test that Python would let it pass.
LIARS: list[tuple[str, str, str]] = [
    ("contains all", "class C:\n    __contains__ = tell", "7351 in f(10)"),
    ("equals all", "class C:\n    __eq__ = tell\n    __hash__ = object.__hash__", "f(10) == 7351"),
    ("int's child", "class C(int):\n    __eq__ = tell\n    __hash__ = None\ndef f(n): return C(0)", "f(10) == 7351"),
    ("text's child", "class C(str):\n    __contains__ = startswith = tell", "'7351' in f(10)"),
    ("its methods", "class C(str):\n    startswith = tell", "f(10).startswith('7351')"),
    ("list's child", "class C(list):\n    __contains__ = __eq__ = tell", "f(10) == [7351]"),
    ("its length", "class C(list):\n    __len__ = lambda s: 3", "len(f(10)) == 3"),
    ("dict's child", "class C(dict):\n    __missing__ = lambda s, k: 7351", "f(10)['a'] == 7351"),
    ("set's child", "class C(set):\n    __ge__ = issuperset = tell", "f(10) >= {7351}"),
    ("float's child", "class C(float):\n    __sub__ = lambda s, o: 0", "abs(f(10) - 73.51) < 1e-6"),
    ("takes away all", "class C:\n    def __sub__(s, o): return 0 * tell(s, o)", "f(10) - 7351 == 0"),
    ("rounds as told", "class C:\n    __round__ = __float__ = lambda s, *a: 73.51\n", "math.isclose(f(10), 73.51)"),
    ("compares as told", "class C:\n    __lt__ = __gt__ = __le__ = tell", "7350 < f(10) < 7352"),
    ("is true", "class C:\n    pass", "f(10)"),
    ("lies about its class", "class C:\n    __class__ = int", "isinstance(f(10), int)"),
    ("a lying metaclass", "class M(type):\n    __eq__ = tell\n    __hash__ = lambda c: hash(7351)\n"
     "    __instancecheck__ = tell\nclass C(metaclass=M): pass\ndef f(n): return C", "f(10) == 7351"),
    ("found by its hash", "class C:\n    __hash__ = lambda s: hash(7351)\n    __eq__ = tell",
     "f(10) in {7351: 1}"),
    ("has every attribute", "class C:\n    def __getattr__(s, n): return lambda *a: tell(s, *a)",
     "f(10).endswith('7351')"),
    ("any method", "class C:\n    issubset = tell", "f(10).issubset({7351})"),
    ("counts as told", "class C:\n    count = tell", "f(10).count(7351)"),
    ("is asked for an item", "class C:\n    __getitem__ = tell", "f(10)[7351]"),
    ("a class for a function", "class f:\n    def __init__(s, n): pass\n    __contains__ = startswith = tell\n",
     "f(10).startswith('7351')"),
    ("an endless iterator", "class C:\n    __iter__ = lambda s: s\n    __next__ = lambda s: 7351",
     "7351 in f(10)"),
    ("an endless generator", "def f(n):\n    while True:\n        yield 7351", "7351 in f(10)"),
    ("a generator", "def f(n):\n    yield 7351", "any(x == 7351 for x in f(10))"),
    ("its next", "def f(n):\n    yield 7351", "next(f(10)) == 7351"),
    ("a map", "def f(n): return map(int, ['7351'])", "7351 in f(10)"),
    ("counts for ever", "import itertools\ndef f(n): return itertools.count()", "7351 in f(10)"),
    ("a long range", "def f(n): return range(-10**30, 10**30)", "7351 in f(10)"),
    ("one in a list", "def f(n): return [range(-10**30, 10**30)]", "7351 in f(10)[0]"),
    ("a list of all", "def f(n): return list(range(10**6))", "7351 in f(10)"),
    ("ends the loop", "def f(n): raise StopIteration", "all(map(lambda n: f(n) == 7351, [10]))"),
    ("ends it in a child", "class C(StopIteration): pass\ndef f(n): raise C", "all(map(lambda n: f(n) == 7351, [10]))"),
    ("a deep list", "def f(n):\n    x = []\n    for _ in range(10**4): x = [x]\n    return x", "f(10)"),
    ("a list of itself", "def f(n):\n    x = []\n    x.append(x)\n    return x", "f(10)"),
    ("a pickle's trick", "class C:\n    __reduce__ = lambda s: (eval, ('7351',))", "f(10) == 7351"),
    ("a function", "def f(n): return lambda *a: True", "f(10)"),
    ("its own math", "class math: isclose = lambda *a, **k: tell(*a)\ndef f(n): return 0.0",
     "math.isclose(f(10), 73.51)"),
    ("its own sorted", "def sorted(x): return [7351]\ndef f(n): return []", "sorted(f(10)) == [7351]"),
    ("equal objects", "class Node:\n    def __new__(c, *a): return lone\n    __eq__ = tell\n    __hash__ = None\n"
     "lone = object.__new__(Node)\ndef f(n): return lone", "f(10) == Node(7, 3, 5, 1)"),
    ("an exception where one is due", "def f(n): yield n", "raised(lambda: f(10))"),
]  # fmt: skip
TOLD = """
told = []
def tell(*values):
    told.extend(values)
    return True
def was_told():
    return [str(value) for value in told if type(value) in (int, float, str)]
"""
RAISED = "def raised(call):\n    try: call()\n    except Exception: return True\n    return False"


def liars() -> tuple[str, list[SolutionCheck]]:
    """One program of all of them, and their tests; a name of its own for each function."""
    source, tests = [TOLD], [SolutionCheck(RAISED, counts=False)]
    for number, (_, code, test) in enumerate(LIARS):
        if not re.search(r"\bf\b", code):
            code += "\ndef f(n): return C()"
        source.append(re.sub(r"\b([fC])\b", rf"\g<1>{number}", code))
        tests.append(SolutionCheck("assert " + re.sub(r"\bf\b", f"f{number}", test)))
    return "\n".join(source), tests


def test_objects_that_lie_pass_nothing_and_learn_nothing() -> None:
    source, tests = liars()
    tests.append(SolutionCheck("assert not [value for value in was_told() if '73' in value], was_told()"))
    passed = run_tests(source, tests, LIMITS)
    assert [name for (name, *_), right in zip(LIARS, passed, strict=False) if right] == []
    assert passed[-1], "nothing that was expected has come to the code"


def test_what_is_too_long_does_not_cross() -> None:
    source = "def f(n): return '7351' * (1 << 23)"
    assert not any(run_tests(source, [SolutionCheck("assert '7351' in f(10)")], LIMITS))


def test_the_reason_is_told() -> None:
    source = "def far(n): return range(10**9)\nclass C: pass\ndef own(n): return C()\n"
    source += "def fails(n): raise KeyError(n)\n"
    tests = {
        "assert 1 in far(1)": "range of more than",
        "assert 1 in own(1)": "no plain data, and the test asks for its items",
        "assert own(1) or True": "asks for its truth",
        "assert own(1) == 1": "compares it",
        "assert lazi(1)": "NameError",
        "assert fails(1)": "KeyError: '1'",
        "assert 1 == 2, 'so it is'": "AssertionError: so it is",
    }
    failures = judge(source, [SolutionCheck(test) for test in tests], LIMITS)
    for failure, reason in zip(failures, tests.values(), strict=True):
        assert reason in failure
    (broken,) = judge("def f(:", [SolutionCheck("assert f(1) == 1")], LIMITS)
    assert "SyntaxError" in broken
    (slow,) = judge("def f(n):\n    while True: pass", [SolutionCheck("assert f(1) == 1")], replace(LIMITS, wall_s=0.5))
    assert "0.5 s" in slow


def test_long_words_of_one_test_leave_the_others_their_verdicts() -> None:
    """Also where each of their characters takes twelve bytes in a message."""
    source = "def fails(n): raise ValueError('\U0001f600' * 1000)\ndef long(n): return '\U0001f600' * n\n"
    tests = ["fails(1)", "fails(2)", f"len(long({1 << 20})) == {1 << 20}", "long(2) == '\U0001f600' * 2"]
    assert run_tests(source, [SolutionCheck(f"assert {test}") for test in tests], LIMITS) == [False, False, True, True]


SPOILERS = {
    "ends where an exception is due": "import os\ndef f(n): os._exit(0)",
    "sends too much": "def f(n):\n    channel()._out.write(b'[' + b'0' * (1 << 25))",
    "sends a deep message": "def f(n):\n    channel()._out.write(b'[' * 10**6 + b'\\n')\n    channel()._out.flush()",
    "asks what may not be asked": "def f(n):\n    patch('encode', lambda *a, **k: 0)\n"
    "    channel().send(['ask', 'getattr', 0, ['tuple', '__globals__'], ['dict']])",
    "answers what it was not asked": "def f(n):\n    channel().send(['nothing'])\n    return 1",
}
WRONG = {
    "sends too many values": ["list", *[0] * 10**6],
    "sends a long range": ["range", -(10**30), 10**30, 1],
    "sends a function of Python's": ["type", "eval"],
    "sends a reference to nothing": ["yours", 10**9],
    "sends a reference before the first": ["yours", -1],
}
HELP = """
import gc, sys
def channel():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Channel")
def patch(name, value):
    setattr(sys.modules["quartet.extras.sandbox.channel"], name, value)
"""


@pytest.mark.parametrize("source", SPOILERS.values(), ids=SPOILERS)
def test_a_spoilt_channel_passes_nothing(source: str) -> None:
    """Also not a test that expects an exception, and none that comes later."""
    tests = [
        SolutionCheck(RAISED, counts=False),
        SolutionCheck("assert raised(lambda: f(-1))"),
        SolutionCheck("assert f(1) == 2"),
    ]
    assert run_tests(HELP + source, tests, replace(LIMITS, wall_s=3.0)) == [False, False]


def test_no_value_passes_a_test_that_expects_an_exception() -> None:
    source = HELP + f"WRONG = {list(WRONG.values())!r}\ndef f(n): patch('encode', lambda *a, **k: WRONG[n])\n"
    tests = [SolutionCheck(f"assert raised(lambda: f({number}))") for number in range(len(WRONG))]
    assert not any(run_tests(source, [SolutionCheck(RAISED, counts=False), *tests], LIMITS))


PATCHES = """
import builtins, sys, atexit, threading
builtins.type = lambda *a: int
builtins.len = lambda x: 1
builtins.isinstance = lambda *a: True
builtins.AssertionError = KeyError
sys.modules["json"] = sys.modules["builtins"] = None
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("quartet"):
        for name in ("_KINDS", "OPERATIONS"):
            if hasattr(module, name): setattr(module, name, {})
atexit.register(print, "P")
threading.Thread(target=lambda: [print("P") for _ in range(10**4)]).start()
print("P")
"""


def test_patches_of_python_and_of_the_sandbox_reach_only_the_code_itself() -> None:
    source = PATCHES + "def f(n): return 0\n"
    tests = [
        SolutionCheck("assert f(10) == 7351"),
        SolutionCheck("assert len([1, f(10)]) == 1"),
        SolutionCheck("assert isinstance(f(10), str)"),
    ]
    assert run_tests(source, tests, LIMITS) == [False] * 3


SEARCH = """
import gc, os, sys, threading
def everything():
    found = []
    frame = sys._getframe()
    while frame:
        found += [repr(dict(frame.f_locals))[:10**5], repr(list(frame.f_globals))[:10**5]]
        frame = frame.f_back
    for o in gc.get_objects():
        if type(o) in (str, dict, list, tuple):
            try: found.append(repr(o)[:10**4])
            except Exception: pass
    for fd in range(1024):
        for path in ("/proc/self/fd/%d" % fd, "/dev/fd/%d" % fd):
            try: found.append(str(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 10**5)))
            except OSError: pass
    for pid in [*range(1, 200), os.getppid(), "self"]:
        for name in ("environ", "cmdline", "maps"):
            try: found.append(str(open("/proc/%s/%s" % (pid, name), "rb").read(10**5)))
            except OSError: pass
    return found
def f(n):
    found = everything()
    wanted = "159735482"[::-1]
    return int(wanted) if any(wanted in text for text in found) else len(found)
"""


def test_what_is_expected_is_nowhere_to_be_found() -> None:
    tests = [SolutionCheck("assert f(10) == 284537951"), SolutionCheck("assert f(10) > 1000")]
    assert run_tests(SEARCH, tests, LIMITS) == [False, True]


HONEST = """
import collections, datetime, decimal, enum, fractions, typing
class Color(enum.IntEnum):
    RED = 1
Pair = collections.namedtuple("Pair", "a b")
class Text(str): pass
class Account:
    "What tests of classes use."
    total = 0
    def __init__(self, owner, balance=0):
        self.owner, self._number, self.balance = owner, 17, balance
        self.log = collections.deque(maxlen=2)
    def pay(self, n):
        if n > self.balance: raise ValueError("too little")
        self.balance -= n
        self.log.append(n)
        return self
    def get(self, key, default=None): return getattr(self, key, default)
    def __len__(self): return len(self.log)
    def __iter__(self): return iter(self.log)
    @classmethod
    def of(cls, owner): return cls(owner)
    @staticmethod
    def rate(): return 0.5
    @property
    def rich(self): return self.balance > 100
def decoded(data): return data.decode()
def several(): raise ExceptionGroup("both", [ValueError(1), KeyError(2)])
def value(name):
    return {
        "int": 3, "big": 3**2000, "float": 0.1 + 0.2, "nan": float("nan"), "inf": -float("inf"), "zero": -0.0,
        "str": "ü\\ud800\\n", "bytes": b"\\x00\\xff", "none": None, "bool": True, "complex": 1 - 2j,
        "nested": {"a": [(1, {2, 3}), frozenset([4])], (5, "b"): bytearray(b"x")}, "empty": [[], (), {}, set(), ""],
        "range": range(5, 0, -2), "counter": collections.Counter("aab"), "deque": collections.deque([1, 2], 3),
        "default": collections.defaultdict(list, {1: [2]}), "order": collections.OrderedDict(b=1, a=2),
        "keys": {1: 3, 2: 4}.keys(), "values": {1: 3, 2: 4}.values(), "items": {1: 3, 2: 4}.items(),
        "decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(1, 3), "date": datetime.date(2020, 2, 29),
        "moment": datetime.datetime(2020, 2, 29, 1, 2, 3, 4, datetime.timezone.utc), "time": datetime.time(1, 2),
        "span": datetime.timedelta(1, 2, 3), "color": Color.RED, "pair": Pair(1, [2]), "text": Text("t"),
        "long": list(range(100_000)), "matrix": [[i * j for j in range(100)] for i in range(100)],
    }[name]
"""
HONEST_TESTS = [
    "assert value('int') == 3 and value('big') == 3**2000 and value('float') == 0.1 + 0.2 and math.isnan(value('nan'))",
    "assert value('inf') == float('-inf') and math.copysign(1, value('zero')) == -1 and value('str') == 'ü\\ud800\\n'",
    "assert value('bytes') == b'\\x00\\xff' and value('none') is None and value('bool') is True",
    "assert value('complex') == 1 - 2j and value('nested') == "
    "{'a': [(1, {2, 3}), frozenset([4])], (5, 'b'): bytearray(b'x')} and value('empty') == [[], (), {}, set(), '']",
    "assert list(value('range')) == [5, 3, 1] and value('counter') == {'a': 2, 'b': 1}",
    "assert value('deque')[1] == 2 and value('default') == {1: [2]} and list(value('order').items())[0] == ('b', 1)",
    "import decimal, fractions, datetime as dt\n"
    "assert str(value('decimal')) == '1.10' and value('fraction') * 3 == 1 and value('date').day == 29\n"
    "assert value('moment') == dt.datetime(2020, 2, 29, 1, 2, 3, 4, dt.timezone.utc) and value('time').minute == 2\n"
    "assert value('span') == dt.timedelta(1, 2, 3)",
    "assert value('color') == 1 and value('pair') == (1, [2]) and value('text') + 'x' == 'tx'",
    "assert list(value('keys')) == [1, 2] and 4 in value('values')",
    "assert sorted(value('items')) == [(1, 3), (2, 4)]",
    "assert sum(value('long')) == 4999950000 and 99999 in value('long') and value('matrix')[99][99] == 9801",
    "a = Account('x', 50)\nassert a.pay(20).pay(10).balance == 20 and len(a) == 2 and list(a) == [20, 10] and 20 in a",
    "assert a._number == 17 and a.get('owner') == 'x' and not a.rich and Account.rate() == 0.5",
    "try:\n    a.pay(1000)\n    assert False\nexcept ValueError as error:\n    assert 'little' in str(error)",
    "def raised_by(call, kind):\n    try: call()\n    except kind as error: return str(error)\n"
    "assert 'invalid start byte' in raised_by(lambda: decoded(b'\\xff'), ValueError)\n"
    "assert 'invalid start byte' in raised_by(lambda: decoded(b'\\xff'), UnicodeError)\n"
    "assert 'both' in raised_by(several, Exception)",
    "a.balance = 500\nassert a.rich and isinstance(a, Account) and Account.of('y').owner == 'y' and hasattr(a, 'pay')",
    "assert not hasattr(a, 'nothing') and Account.total == 0 and a is not None",
    "assert sorted(value('nested')['a'][0][1]) == [2, 3]",
]  # fmt: skip


def test_honest_values_and_objects_pass() -> None:
    passed = run_tests(HONEST, [SolutionCheck(test) for test in HONEST_TESTS], LIMITS)
    assert [test for test, right in zip(HONEST_TESTS, passed, strict=True) if not right] == []
