"""What the answer of a server must be. Every fault is a ValueError, after which the server is asked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from quartet.rollout.protocol import FinishReason, Request
from quartet.rollout.stop_strings import Decode

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What a server generated for a request. ``ended``: why; None where it broke off and can go on from here."""

    token_ids: list[int]
    logprobs: list[float]
    ended: Literal["stop", "length"] | None


Ended = tuple[Part, FinishReason | None, int | None]
"""What was generated, why it ended (None: it goes on), and where in the text a stop string stands."""


def ending(
    said: Literal["stop", "length"] | None,
    token_ids: Sequence[int],
    request: Request,
    decode: Decode | None,
    room: int,
    *,
    is_exact: bool,
) -> tuple[FinishReason | None, int | None]:
    """Why all of a request's tokens end where they do, and the ``text_end`` of a stop string.

    Args:
        said: by the server; None: they do not.
        room: the most tokens that it may get.
        is_exact: an answer that ends by length has as many.

    Raises:
        ValueError: they cannot end there.
    """
    if said is None:
        return None, None
    sampling = request.sampling
    stop = next((n for n, token in enumerate(token_ids) if token in sampling.stop_token_ids), None)
    if stop is not None:
        if stop < len(token_ids) - 1:
            raise ValueError(f"it goes on after the stop token at place {stop} of {len(token_ids)}")
        return FinishReason.STOP, None
    if sampling.stop_strings and decode is not None:
        text = decode(request.prompt_ids, token_ids)
        places = [place for string in sampling.stop_strings if (place := text.find(string)) >= 0]
        if places:
            return FinishReason.STOP_STRING, min(places)
    if said == "stop":
        raise ValueError(f"it stopped after {len(token_ids)} tokens, where nothing stops it")
    if len(token_ids) > room or (is_exact and len(token_ids) < room):
        raise ValueError(f"{len(token_ids)} tokens, and it ended by length; {room} were asked for")
    return FinishReason.LENGTH, None


def agreed(read: Callable[[Any], T], answer: Any) -> T:
    """``read`` of what a server said; raises ValueError where that has not the agreed form."""
    try:
        return read(answer)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks what was asked for ({type(error).__name__}: {error})") from None


def check_columns(part: Part, vocab_size: int) -> None:
    """Raises ValueError where these are no tokens of the model with their log-probabilities."""
    if len(part.token_ids) != len(part.logprobs):
        raise ValueError(f"{len(part.logprobs)} log-probabilities of {len(part.token_ids)} tokens")
    if part.ended is not None and not part.token_ids:
        raise ValueError("no tokens")
    wrong = [token for token in part.token_ids if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{wrong[0]!r} among the token ids of a model of {vocab_size}")
    # Rounding may leave a little above 0 of a certain token.
    odd = [p for p in part.logprobs if not (isinstance(p, float | int) and -math.inf < p <= 1e-3)]
    if odd:
        raise ValueError(f"{odd[0]!r} among the log-probabilities")
