"""What a recipe reads: data, models, functions. A resumed run tells when one of them is not what the run began with.

The recipe names them, and stays the same when their content changes; the rest of the run would then be another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.trainers.run_files import flatten

_KEYS = ("path", "tokenizer", "target")
_BLOCK, _NUM_BLOCKS = 1 << 16, 64
"""Of a file larger than all of them so many bytes are read at so many places: weights that were trained differ
everywhere."""


def input_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Key → digest, of every local file or directory that the recipe names as data, model, tokenizer or function.

    What cannot be read, or is on the hub, is left out.
    """
    found = {}
    for key, value in flatten(recipe).items():
        if key.rpartition(".")[2] not in _KEYS or not isinstance(value, str):
            continue
        # A function is file.py:name.
        name = value.rpartition(":")[0] if key.endswith("target") else value
        try:
            path = Path(name).expanduser()
            files = [path] if path.is_file() else sorted(path.iterdir()) if name and path.is_dir() else []
            if files := [file for file in files if file.is_file()]:
                found[key] = _digest(files)
        except (OSError, ValueError):
            continue  # whoever needs it says what is wrong
    return found


def changed_inputs(then: object, now: Mapping[str, str], recipe: Mapping[str, Any]) -> list[str]:
    """What is to be said about them.

    Args:
        then: ``inputs`` in the run's ``run.json``; earlier versions have none.
    """
    if not isinstance(then, Mapping):
        return []
    values = flatten(recipe)
    return [
        f"{key} ({values[key]}) has changed since the run began: the steps from here on use what is there now"
        for key, digest in now.items()
        if then.get(key, digest) != digest
    ]


def _digest(files: list[Path]) -> str:
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            whole = size <= _BLOCK * _NUM_BLOCKS
            for n in range(-(-size // _BLOCK) if whole else _NUM_BLOCKS):
                file.seek(n * _BLOCK if whole else n * (size - _BLOCK) // (_NUM_BLOCKS - 1))
                state.update(file.read(_BLOCK))
    return state.hexdigest()
