"""The shape of the code base: layers, sizes, what may be imported where, how fast the command answers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quartet.config.plugins import installed_plugins, load_object
from quartet.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quartet"
LEVELS = {
    "extras": 8,
    "cli": 7,
    "trainers": 6,
    "schedule": 5,
    "train": 4,
    "rollout": 4,
    "models": 3,
    "data": 3,
    "rewards": 3,
    "envs": 3,
    "algorithms": 2,
    "cluster": 2,
    "weights": 2,
    "text": 2,
    "observe": 1.5,
    "batch": 1,
    "remote": 1,
    "config": 0,
}
RESTRICTED = {
    "ray": {"cluster"},
    "vllm": {"rollout"},
    "torch.distributed": {"cluster", "weights", "train", "extras"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 800
MAX_SPINE_LINES = 32_100
MAX_FUNCTION_LINES = 80


def imports_of(path: Path) -> set[str]:
    """Every imported module of a file, those inside functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def folder_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_strictly_down(path: Path) -> None:
    folder = folder_of(path)
    if not folder:
        return  # the public face of the package may name everything
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "quartet" or len(parts) < 2 or parts[1] == folder or parts[1] not in LEVELS:
            continue
        assert LEVELS[parts[1]] < LEVELS[folder], f"{path.relative_to(ROOT)} imports {name}"


def test_every_folder_has_a_level() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert folders <= set(LEVELS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_restricted_libraries(path: Path) -> None:
    for name in imports_of(path):
        for library, allowed in RESTRICTED.items():
            if name == library or name.startswith(library + "."):
                assert folder_of(path) in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_quickstart_knows_its_checker() -> None:
    """The learned reward model is the reward: no code that trains can reach the checker."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(name.startswith("quartet.extras.quickstart.checker") for name in imports_of(path))
    }
    assert users, "somebody evaluates with the checker"
    assert all(user.startswith("extras/quickstart/") for user in users), users


EXTRAS = sorted(path.name for path in (PACKAGE / "extras").iterdir() if path.is_dir() and path.name[0] != "_")


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_is_imported_by_itself_alone(name: str) -> None:
    """The spine knows extras by what they fill in, never by name; an extra never knows another one."""
    own = PACKAGE / "extras" / name
    users = [
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for path in MODULES
        if not path.is_relative_to(own)
        for imported in imports_of(path)
        if f"{imported}.".startswith(f"quartet.extras.{name}.")
    ]
    assert users == []
    assert len((own / "README.md").read_text(encoding="utf-8").splitlines()) <= 12


def test_what_plug_ins_name_is_there() -> None:
    """Else it is missed by whoever uses it first, since it is imported then."""
    targets = set(re.findall(r"quartet(?:\.\w+)+:\w+", repr(installed_plugins())))
    assert len(targets) > 50
    for target in targets:
        load_object(target)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_MODULE_LINES, f"{path} is too long"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


def test_the_spine_does_not_grow() -> None:
    """Whoever needs more removes something first; 30,500 is what it has without pictures, which may take 1,600."""
    found = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "code_lines.py", ROOT], capture_output=True, text=True, check=True
    ).stdout
    row = next(line for line in found.splitlines() if line.startswith("| spine |"))
    assert int(row.split("|")[3].replace(",", "")) <= MAX_SPINE_LINES, row


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest refuses two of one name as soon as one call collects both, as ``make test-slow`` and ``test-vllm`` do."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []


def test_config_imports_without_torch() -> None:
    code = "import sys, quartet.config, quartet.config.load, quartet.config.recipe; assert 'torch' not in sys.modules"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_core_needs_neither_ray_nor_vllm() -> None:
    code = (
        "import sys\nsys.modules['ray'] = None\nsys.modules['vllm'] = None\n"
        "import quartet, quartet.trainers.rl, quartet.cli.main, quartet.extras.quickstart.run\n"
        "quartet.RLTrainer, quartet.SFTTrainer, quartet.RewardModelTrainer"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_help_answers_within_a_second() -> None:
    """Best of three, since the machine may be busy."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "quartet.cli.main", "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "quickstart" in done.stdout
    assert min(seconds) < 1.0, f"quartet --help took {min(seconds):.2f} s at best"


def test_every_metric_of_the_table_is_logged_somewhere() -> None:
    """A documented figure that no code writes is a promise nobody keeps."""
    folders = ("train", "trainers", "schedule", "extras")
    code = "\n".join(path.read_text(encoding="utf-8") for path in MODULES if folder_of(path) in folders)
    written = {name for name in METRICS if "<" not in name and f'"{name}"' not in code}
    # Built from parts: the role's prefix, what is counted, or numerical and drift of one f-string.
    assert written <= {
        "critic/grad_norm",
        "engine/rerouted",
        "engine/restarts",
        "engine/retries",
        "policy/grad_norm",
        "policy/clip_frac_numerical",
        "policy/clip_frac_drift",
        "eval/exact_match",
    }, sorted(written)
