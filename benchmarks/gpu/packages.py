"""Makes ``quartet`` importable on a machine that has torch and transformers but is not set up for it.

Such a machine may reach no package index. What is missing there is installed from wheels in the folder ``wheels/`` of
the repository, brought along with it; nothing is changed in the Python that runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels"
NEEDED = ("pydantic",)
"""Of what GPU tests and benchmarks import, what a machine with torch and transformers does not always have."""


def ensure_packages() -> None:
    """
    Raises:
        SystemExit: something is missing and there is no wheel of it; says how to bring one.
    """
    if find_spec("quartet") is None:
        sys.path.insert(0, str(ROOT / "src"))
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    if not any(WHEELS.glob("*.whl")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"{', '.join(missing)} cannot be imported and {WHEELS} holds no wheels.\n"
            "On a machine with a package index: pip download --only-binary=:all: "
            f"--python-version {version} --platform manylinux2014_x86_64 -d wheels {' '.join(missing)}"
        )
    target = tempfile.mkdtemp(prefix="quartet-wheels-")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(WHEELS)]
    subprocess.run([*pip, "--target", target, *missing], check=True)
    sys.path.insert(0, target)
