"""``manifest.json`` of a checkpoint: which files it has, how large they are, and the SHA-256 of each.

::

    {
      "format": "quartet-checkpoint-2",
      "step": 50,
      "parts": [],                                               files of the driver's
      "shares": ["actor"],                                       directories that workers wrote
      "files": {"actor/.metadata": {"bytes": 1234, "sha256": "…"}, "info.json": …, …},
      "sha256": "…"                                              of this text without its last key
    }

It knows files, not what is in them, so it holds for every format that parts may be written in. It tells damage, not
malice: who can write the files can write a manifest, too.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quartet.observe.digests import FileDigest, digest_file, digested_file, seal, unseal

NAME, METADATA = "manifest.json", ".metadata"
"""Names of the manifest, and of what every share has."""
FORMAT: Literal["quartet-checkpoint-2"] = "quartet-checkpoint-2"


class Damage(Exception):
    """A checkpoint is not as it was written; the text says in what, and names the file."""


class CheckpointManifest(BaseModel):
    """The files of one checkpoint, by their path inside it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["quartet-checkpoint-2"] = FORMAT
    step: Annotated[int, Field(ge=0)]
    parts: list[str]
    shares: list[str]
    files: dict[str, FileDigest]

    def write(self, path: Path) -> None:
        """Into the file ``path``, synced."""
        with digested_file(path) as file:
            file.write(seal(self.model_dump()))

    @classmethod
    def read(cls, path: Path) -> CheckpointManifest:
        """Raises ``Damage`` for anything but what ``write`` has written, OSError where it cannot be read."""
        try:
            found = unseal(path.read_bytes())
        except ValueError as error:
            raise Damage(f"{NAME} {error}") from error
        try:
            return cls.model_validate_json(json.dumps(found))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise Damage(f"{NAME} is not one of this version ({where}: {first['msg']})") from error

    def check_names(self, directory: Path) -> None:
        """Compares names and sizes; opens no file.

        Raises:
            Damage: a file is missing, was added, is of another size, or is a link or something else than a file.
        """
        found = sizes(directory)
        found.pop(NAME, None)
        if missing := sorted(self.files.keys() - found.keys()):
            raise Damage(f"{', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} missing")
        if added := sorted(found.keys() - self.files.keys()):
            raise Damage(f"{NAME} does not name {', '.join(added[:3])}")
        for name, digest in self.files.items():
            if found[name] != digest.bytes:
                raise Damage(f"{name} has {found[name]:,} bytes instead of {digest.bytes:,}")

    def check_content(self, directory: Path) -> None:
        """Reads every file once and compares the digests; call ``check_names`` before.

        Raises:
            Damage: a file's content has changed.
        """
        for name, digest in self.files.items():
            if digest_file(directory / name) != digest:
                raise Damage(f"the content of {name} is not what was written (SHA-256)")


def sizes(directory: Path, below: str = "") -> dict[str, int]:
    """Size in bytes of every file in ``directory`` by its path inside.

    Raises:
        Damage: there is an empty directory, a symbolic link or a device among them.
    """
    found: dict[str, int] = {}
    with os.scandir(directory) as listed:
        for entry in listed:
            name, status = f"{below}{entry.name}", entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found[name] = status.st_size
            elif stat.S_ISDIR(status.st_mode) and (inside := sizes(Path(entry.path), f"{name}/")):
                found.update(inside)
            else:
                raise Damage(f"{name} is {_kind(status.st_mode)} instead of a file")
    return found


def _kind(mode: int) -> str:
    return "a symbolic link" if stat.S_ISLNK(mode) else "an empty directory" if stat.S_ISDIR(mode) else "a device"
