"""Refuses requests and proposals that a model cannot compute, and words failures of those it could not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quartet.config import UserError
from quartet.rollout.protocol import GenerationError, Request
from quartet.rollout.scheduler import Response


def check_request(request: Request, *, context: int | None, vocab_size: int, decodes: bool) -> None:
    """
    Args:
        context: tokens of the model's context, if it has an end.
        decodes: tokens can be turned into text.

    Raises:
        UserError: the prompt fills the context or has unknown tokens, or stop strings could not be found.
    """
    num_prompt = len(request.prompt_ids)
    if context is not None and num_prompt >= context:
        raise UserError(
            "a prompt leaves no room in the model's context",
            found=f"request {request.request_id!r}: {num_prompt} tokens, a context of {context}",
            remedy="shorten or drop such prompts (generation that reaches the context's end stops there)",
        )
    _check_tokens("a prompt", request.request_id, request.prompt_ids, vocab_size)
    if request.sampling.stop_strings and not decodes:
        raise UserError(
            "stop strings need a way to decode tokens",
            found=f"request {request.request_id!r} with stop strings, engine without decode",
            remedy="build the engine with decode=tokenizer.decode, or use stop_token_ids",
        )


def check_proposals(proposed: Mapping[str, Sequence[int]], vocab_size: int) -> None:
    """Raises UserError where a proposal has unknown tokens."""
    for request_id, tokens in proposed.items():
        if tokens:
            _check_tokens("a proposal", request_id, tokens, vocab_size)


def _check_tokens(what: str, request_id: str, tokens: Sequence[int], vocab_size: int) -> None:
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            f"{what} holds tokens the model does not have",
            found=f"request {request_id!r}: ids {lowest} to {highest}, {vocab_size} tokens",
            remedy="use the tokenizer that belongs to the model",
        )


def not_finite(responses: Sequence[Response]) -> GenerationError:
    """The error about responses whose logits were not finite."""
    ids = [response.request.request_id for response in responses]
    first = responses[0]
    return GenerationError(
        f"logits of request {ids[0]!r} are not finite at response token {len(first.token_ids)}"
        + (f" ({len(ids)} requests in all)" if len(ids) > 1 else ""),
        ids,
    )
