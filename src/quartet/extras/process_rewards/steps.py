"""The steps of a worked answer, and the tokens at which they end.

A *separator* (``"\\n\\n"``, ``" ки"``) ends a step and belongs to it. What stands behind the last separator is the last
step. A stretch of nothing but white space is no step, so a row of separators counts once; an answer without any step
is one step as a whole. With ``;`` as separator ``a;b;;c`` has the steps ``a;``, ``b;`` and ``c``.

A step ends at the token that holds its separator's last character; a last step without separator ends with the
answer's last token (its end-of-text).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from quartet.config import UserError
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.text.loading import local_or_hub
from quartet.text.tokenizer import TextCodec

_CONTEXT = 8
"""Tokens before an answer that decide how its first tokens are decoded."""


@dataclass(frozen=True)
class Step:
    """``text`` without the separator; ``end`` is the offset behind the separator, None where there is none."""

    text: str
    end: int | None


def split_steps(text: str, separator: str) -> list[Step]:
    """The steps of ``text``, at least one."""
    found: list[Step] = []
    start = 0
    while (place := text.find(separator, start)) >= 0:
        if text[start:place].strip():
            found.append(Step(text[start:place], place + len(separator)))
        start = place + len(separator)
    if text[start:].strip() or not found:
        found.append(Step(text[start:], None))
    return found


def join_steps(steps: Sequence[Step], separator: str) -> str:
    """Text that has these steps under another separator."""
    return separator.join(step.text for step in steps) + (separator if steps[-1].end is not None else "")


def last_tokens(pieces: Sequence[str], steps: Sequence[Step]) -> list[int]:
    """Index of the token that ends each step.

    Args:
        pieces: what each token adds to the text.
        steps: of the joined pieces.
    """
    stops = list(accumulate(map(len, pieces)))
    return [len(pieces) - 1 if step.end is None else bisect_left(stops, step.end) for step in steps]


def answer_pieces(codec: TextCodec, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What each token of an answer adds to its text; end-of-text tokens add nothing.

    Args:
        before: token ids that the answer continues.
        ids: the answer's.
    """
    context = list(before[-_CONTEXT:])
    pieces = codec.token_texts([*context, *ids])[len(context) :]
    return ["" if token in codec.eos_ids else piece for token, piece in zip(ids, pieces, strict=True)]


# In a model's directory: how the steps end that it was trained on -------------------------------------------

_PROCESS_FILE = "process_reward.json"
_PROCESS_KIND = "process reward model: the score at a step's last token is the logit of the step being right"


def save_step_separator(separator: str, directory: Path) -> None:
    """Writes what ends every step but perhaps the last into a model's directory."""
    text = json.dumps({"kind": _PROCESS_KIND, "separator": separator}, indent=2, ensure_ascii=False)
    (directory / _PROCESS_FILE).write_text(text + "\n", encoding="utf-8")


def load_step_separator(path: str) -> str | None:
    """The separator of a model directory or hub name; None where it has none.

    Raises:
        UserError: the file is there, but does not say how steps end.
    """
    file = Path(local_or_hub(path, "model"), _PROCESS_FILE)
    if not file.is_file():
        return None
    try:
        separator = json.loads(file.read_text(encoding="utf-8"))["separator"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(separator, str) or not separator:
        raise _damaged(path, f"separator: {separator!r}")
    return separator


def _damaged(path: str, found: str) -> UserError:
    return UserError(
        f"{_PROCESS_FILE} of a process reward model cannot be read",
        found=f"{path}: {found}",
        remedy='write {"separator": "…"} there, what ends a step',
    )


def write_separator(recipe: ProcessRewardRecipe, directory: Path) -> None:
    """Writes beside a trained model what its steps end with."""
    save_step_separator(recipe.separator, directory)
