"""What a process reward model's directory says beside its weights: how the steps end that it was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.utils import cached_file

from quartet.config import UserError
from quartet.text.loading import local_or_hub

FILE_NAME = "process_reward.json"
_KIND = "process reward model: the score at a step's last token is the logit of the step being right"


@dataclass(frozen=True)
class ProcessSettings:
    """``separator`` ends every step but perhaps the last."""

    separator: str


def save_process_settings(settings: ProcessSettings, directory: Path) -> None:
    text = json.dumps({"kind": _KIND, **asdict(settings)}, indent=2, ensure_ascii=False)
    (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def load_process_settings(path: str) -> ProcessSettings | None:
    """The settings of a model directory or hub name; None where it has none.

    Raises:
        UserError: the file is there, but does not say how steps end.
    """
    try:
        file = cached_file(local_or_hub(path, "model"), FILE_NAME)
    except OSError:
        return None
    try:
        separator = json.loads(Path(file).read_text(encoding="utf-8"))["separator"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(separator, str) or not separator:
        raise _damaged(path, f"separator: {separator!r}")
    return ProcessSettings(separator)


def _damaged(path: str, found: str) -> UserError:
    return UserError(
        f"{FILE_NAME} of a process reward model cannot be read",
        found=f"{path}: {found}",
        remedy='write {"separator": "…"} there, what ends a step',
    )
