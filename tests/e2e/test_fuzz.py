"""Random damage to recipes and to the files of runs: no traceback, no hang, and no result that differs without a word.

Every case is a function of its number, which the failure prints. Refusals are user errors with status 2. A recipe that
is accepted means the same when it is written and read again; a damaged run that goes on ends with the weights of the
undamaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.config.plugins import recipe_classes
from quartet.config.strict import dotted_fields

HANG_S = 60.0
"""A case takes a fraction of a second; machines are shared."""
MEMORY = 16 << 30

LONG, HUGE = "9" * 500, 10**30
JUNK: list[Any] = [
    *(None, True, -1, 0, 1.5, -0.0, 1e-320, 1e308, HUGE, -HUGE, float("nan"), float("inf")),
    *("", " ", "x", "0", "true", "\x00", "\x1b[2J", "\u202etxet", "../..", "/dev/null", "x" * 5000, "🙂", "a\nb", LONG),
    *([], [[]], [1], ["x"], [None], {}, {"x": 1}, {"path": "x"}, {"type": "x"}, {"name": []}, [{"type": "function"}]),
]
"""Values that most keys cannot take."""


def cases(kind: str, num: int) -> Iterator[random.Random]:
    """Generators of random numbers, one per case."""
    for number in range(num):
        print(case := f"{kind}:{number}")
        yield random.Random(case)


# Damage ------------------------------------------------------------------------------------------------------


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """A flip, a cut, a hole, a copy or an insertion somewhere in ``data``."""
    if not data:
        return draw.randbytes(3)
    at, length = draw.randrange(len(data)), draw.choice([1, 2, 8, 200])
    match draw.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + data[at : at + length] * 2 + data[at + length :]
        case 4:
            return data[:at] + draw.randbytes(length) + data[at:]
        case _:
            return data[:at] + b"\0" * length + data[at + length :]


def damaged_value(value: Any, draw: random.Random) -> Any:
    """``value`` (of JSON) in which one value or key is another."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        rest = {name: child for name, child in value.items() if name != key}
        match draw.randrange(8):
            case 0:
                return rest
            case 1:
                return {**rest, draw.choice([key + "s", key[::-1], "", "x" * 3000, "\x1b[1m"]): value[key]}
            case _:
                return {**value, key: damaged_value(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        match draw.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], damaged_value(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.4:
        return value + draw.choice([-1, 1, 7, 10**6])
    return draw.choice(JUNK)


def damaged_tree(root: Path, draw: random.Random) -> str:
    """Damages one file below ``root``; says which, and how."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    path, other = draw.choice(files), draw.choice(files)
    kind = draw.choice(["bytes"] * 6 + ["json"] * 6 + ["removed", "empty", "directory", "swapped", "link", "renamed"])
    if kind == "json" and path.suffix in (".json", ".jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = draw.randrange(len(lines)) if lines else 0
        with contextlib.suppress(ValueError, IndexError):
            lines[at] = json.dumps(damaged_value(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif kind in ("bytes", "json"):
        path.write_bytes(damaged_bytes(path.read_bytes(), draw))
    elif kind == "swapped":
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif kind == "renamed":
        path.rename(path.with_name(path.name + draw.choice(["~", ".bak", "2"])))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()
        if kind == "link":
            path.symlink_to(path.name)
    return f"{path.relative_to(root)}: {kind}"


# Recipes, in this process ------------------------------------------------------------------------------------


def refused_or_kept(job: str, path: Path | None, overrides: list[str]) -> None:
    try:
        recipe = load_recipe(job, path, overrides)
    except UserError as error:
        assert error.problem and error.found and error.remedy
        assert len(str(error)) < 20_000
        return
    again = path.with_suffix(".again.yaml") if path is not None else None
    if again is not None:
        again.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(job, again) == recipe, "what was accepted means the same when it is written and read again"


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def test_recipes(tmp_path: Path, recipes: Any) -> None:
    valid = {job: make() for job, make in recipes.items()}
    path = tmp_path / "recipe.yaml"
    for draw in cases("recipes", 200):
        job = draw.choice(sorted(valid))
        value = valid[job]
        for _ in range(draw.choice([1, 1, 2, 4])):
            value = damaged_value(value, draw)
        text = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
        path.write_bytes(damaged_bytes(text, draw) if draw.random() < 0.4 else text)
        refused_or_kept(job, path, [])


def test_overrides() -> None:
    names = {job: sorted(dict(dotted_fields(model))) for job, model in recipe_classes().items()}
    for draw in cases("overrides", 200):
        job = draw.choice(sorted(names))
        overrides = [f"{draw.choice(names[job])}={shown(draw.choice(JUNK))}" for _ in range(draw.choice([1, 1, 3]))]
        if draw.random() < 0.3:
            overrides[0] = damaged_bytes(overrides[0].encode(), draw).decode("utf-8", "surrogateescape")
        refused_or_kept(job, None, overrides)


# Commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(processes: Any, tmp_path: Path) -> Callable[..., int]:
    """Runs a command in a process of its own; fails on a traceback, a hang, or an error that is not in three parts."""

    def run(*argv: object, told: str) -> int:
        output = tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        pid = processes.start(*argv, cwd=tmp_path, output=output)
        resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
        timer = threading.Timer(HANG_S, os.kill, (pid, signal.SIGKILL))
        timer.start()
        status = int(processes.wait(pid))
        timer.cancel()
        text = output.read_text(encoding="utf-8", errors="replace")
        assert "Traceback" not in text, f"{told}\n{text}"
        assert status in (0, 2), f"{told}: status {status}\n{text[-3000:]}"
        assert not set("\x1b\u202e\x00") & set(text), f"{told}: control characters reach the terminal"
        if status == 2:
            assert all(part in text for part in ("error: ", "\n  found: ", "\n  do: ")), f"{told}\n{text}"
        return status

    return run


def fresh(source: Path, path: Path) -> Path:
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(source, path, symlinks=True)
    return path


QUICK = ["steps=3", "checkpoint.every_steps=1", "checkpoint.keep=3", "log.tensorboard=false"]


def run_job(job: str, world: Any, recipes: Any, command: Any, tmp_path: Path) -> int:
    recipe = recipes[job]("grpo") if job == "rl" else recipes[job]()
    (tmp_path / f"{job}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    for name in ("model", "demonstrations.jsonl", "prompts.jsonl", "rewards.py", "held_out.jsonl"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(world.path / name)
    status: int = command(job, f"{job}.yaml", *QUICK, "output_dir=run", told=job)
    return status


def weights(run: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((run / "model").glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def test_run_directories(world: Any, recipes: Any, command: Any, tmp_path: Path) -> None:
    # Two runs that stopped after their second checkpoint, and what they come to.
    halted: dict[str, tuple[Path, str]] = {}
    for job in ("sft", "rl"):
        assert run_job(job, world, recipes, command, tmp_path) == 0
        final = weights(tmp_path / "run")
        path = (tmp_path / "run").rename(tmp_path / f"halted-{job}")
        for name in ("model", "critic"):
            shutil.rmtree(path / name, ignore_errors=True)
        (path / "summary.json").unlink()
        shutil.rmtree(path / "checkpoints" / "step_00000003")
        halted[job] = path, final
    for draw in cases("runs", 8):
        job = draw.choice(sorted(halted))
        source, final = halted[job]
        run = fresh(source, tmp_path / "run")
        told = damaged_tree(run, draw)
        command("report", "run", told=f"report of {told}")
        if command(job, f"{job}.yaml", *QUICK, "output_dir=run", "--resume", told=told) == 0:
            assert weights(run) == final, f"{told}: resumed without a word to other weights"
