"""Pictures in sequences of token ids.

A picture takes as many places in a sequence as its features have rows. Each of these places has an id of its own, below
zero, that says which picture and which row it is::

    ids   5 6 <picture 9, row 0> <picture 9, row 1> 7

So pictures go wherever ids go: prompts that are stored once, caches that find prompts by their ids, selections, joins,
ranks; and none of these knows of them. What embeds ids puts the rows of features in their places, and what writes text
a mark for each picture.

A picture is named by its key, 48 bits of a digest of what its features depend on besides weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

_ROW_BITS = 14
MAX_ROWS = 1 << _ROW_BITS
"""Rows that the features of a picture may have."""
_FIRST = -2
"""Of the ids; -1 stands for ids that are elsewhere."""


def picture_key(*parts: bytes) -> int:
    """Returns the key of what ``parts`` say: 48 bits of their digest."""
    digest = blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little")


def picture_ids(key: int, num_rows: int) -> list[int]:
    """Returns the ids of a picture's places, row by row."""
    if not 0 < num_rows <= MAX_ROWS:
        raise ValueError(f"a picture takes 1 to {MAX_ROWS} places, found {num_rows}")
    return [_FIRST - (key << _ROW_BITS | row) for row in range(num_rows)]


def is_picture(token: int) -> bool:
    """Tells whether an id is a place of a picture."""
    return token <= _FIRST


def key_of(token: int) -> int:
    """Returns the key of the picture that an id below zero is a place of."""
    return (_FIRST - token) >> _ROW_BITS


def keys_in(ids: Sequence[int]) -> list[int]:
    """Returns the keys of the pictures in a sequence, each once, in the order in which they come."""
    return list(dict.fromkeys(key_of(token) for token in ids if token <= _FIRST))


def picture_places(ids: Tensor) -> Tensor:
    """Returns ``[...]`` bool: which of the ids are places of pictures."""
    return ids <= _FIRST


def split_picture_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``keys [n]`` and ``rows [n]`` of ids ``[n]`` that are places of pictures."""
    numbers = _FIRST - ids
    return numbers >> _ROW_BITS, torch.bitwise_and(numbers, MAX_ROWS - 1)


def collapsed(ids: Sequence[int], mark: int) -> list[int]:
    """Returns the ids with one ``mark`` for each picture, in place of its first row."""
    return [mark if is_picture(token) else token for token in ids if not is_later_row(token)]


def is_later_row(token: int) -> bool:
    """Tells whether an id is a place of a picture behind its first."""
    return is_picture(token) and (_FIRST - token) & (MAX_ROWS - 1) != 0
