"""Makes ``quartet`` importable on a machine that has torch and transformers but is not set up for it.

Such a machine may reach no package index. What is missing there is installed from wheels in the folder ``wheels/`` of
the repository, brought along with it; nothing is changed in the Python that runs.

    python benchmarks/gpu/packages.py --download [PYTHON_VERSION]   fills wheels/ (5 MB), where there is an index
    python benchmarks/gpu/packages.py                               installs them, prints the PYTHONPATH to use
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels"
NEEDED = ("pydantic", "httpx2", "lazy_loader", "typer", "rich", "yaml", "jinja2", "fsspec", "tensorboard")
"""What GPU tests and benchmarks import; a machine with torch and transformers does not always have all of it."""
BROUGHT = (
    "pydantic==2.12.5", "pydantic-core==2.41.5", "annotated-types", "typing-inspection", "typing-extensions",
    "httpx2", "httpcore2", "truststore", "anyio", "h11", "idna", "lazy-loader",
    "trl==1.16.0", "datasets==4.8.4", "dill==0.4.1", "multiprocess==0.70.19",
)  # fmt: skip
"""Wheels without their own needs, TRL and ``datasets`` among them; numpy, pandas and pyarrow are expected there."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


def download(version: str) -> None:
    """Fills ``wheels/`` for a Python of ``version`` (as in 3.12) on x86-64 Linux."""
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    target = ["--python-version", version, "--implementation", "cp", "--dest", str(WHEELS)]
    subprocess.run([*pip, *target, *platforms, *BROUGHT], check=True)


def ensure_packages() -> None:
    """Puts ``quartet`` and what it needs on the path of this process and of those that it starts.

    Raises:
        SystemExit: something is missing and there is no wheel of it; says how to bring one.
    """
    if find_spec("quartet") is None:
        _put_first(ROOT / "src")
    if not (missing := [name for name in NEEDED if find_spec(name) is None]):
        return
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels:
        target = tempfile.mkdtemp(prefix="quartet-wheels-")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", target, *wheels], check=True, stdout=sys.stderr)
        _put_first(Path(target))
        missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"{', '.join(missing)} cannot be imported, and {WHEELS} holds {'none of it' if wheels else 'no wheels'}.\n"
            f"On a machine with a package index: python benchmarks/gpu/packages.py --download {version}"
        )


def _put_first(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--download"]:
        download(sys.argv[2] if sys.argv[2:] else "3.12")
    else:
        ensure_packages()
        print(os.environ.get("PYTHONPATH", ""))
