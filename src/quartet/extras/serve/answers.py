"""What the server answers: OpenAI's objects with vLLM's further keys (``token_ids``, ``prompt_token_ids``,
``stop_reason``, ``weight_versions``), whole or as a stream of deltas.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from quartet.extras.serve.bodies import AnyBody, ChatBody
from quartet.rollout.protocol import Completion, FinishReason, Generated, Request
from quartet.text.tokenizer import TextCodec

_REASONS = {FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
_INCOMPLETE = "\ufffd"


@dataclass
class Choice:
    """One answer as it grows: what of it was said already, and tokens seen, some of which may wait for their text."""

    index: int
    request: Request
    num_tokens: int = 0
    num_seen: int = 0
    text: str = ""
    is_new: bool = True


class Answers:
    """Makes the objects of one HTTP request.

    Args:
        name: of the answer, ``cmpl-…`` or ``chatcmpl-…``.
    """

    def __init__(self, name: str, body: AnyBody, codec: TextCodec, requests: Sequence[Request]) -> None:
        self._name, self._body, self._codec = name, body, codec
        self._is_chat = isinstance(body, ChatBody)
        self._created = int(time.time())
        self.choices = {request.request_id: Choice(i, request) for i, request in enumerate(requests)}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer, not streamed."""
        done = sorted((self.choices[c.request_id].index, c) for c in completions)
        choices = [self._choice(self.choices[c.request_id], c, c.finish_reason, c.text_end) for _, c in done]
        return {**self._head(""), "choices": choices, "usage": self.usage(completions)}

    def chunk(self, request_id: str, tokens: Generated | Completion) -> dict[str, Any] | None:
        """What is new of a choice, as an event of a stream; None where nothing is."""
        choice = self.choices[request_id]
        reason, text_end = None, None
        if isinstance(tokens, Completion):
            reason, text_end = tokens.finish_reason, tokens.text_end
        if reason is None and len(tokens.token_ids) == choice.num_seen:
            return None
        choice.num_seen = len(tokens.token_ids)
        return {**self._head(".chunk"), "choices": [self._choice(choice, tokens, reason, text_end, is_delta=True)]}

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompts = {choice.request.group: len(choice.request.prompt_ids) for choice in self.choices.values()}
        num_prompt, num_new = sum(prompts.values()), sum(len(c.token_ids) for c in completions)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {"id": self._name, "object": kind, "created": self._created, "model": self._body.model}

    def _choice(
        self,
        choice: Choice,
        tokens: Generated | Completion,
        reason: FinishReason | None,
        text_end: int | None,
        *,
        is_delta: bool = False,
    ) -> dict[str, Any]:
        """Moves ``choice`` on."""
        text, num_tokens = self._grown(choice, tokens.token_ids, reason, text_end), len(tokens.token_ids)
        said: dict[str, Any] = {"index": choice.index, **self._said(choice, text, is_delta=is_delta), "logprobs": None}
        if self._body.wants_logprobs:
            pieces = self._codec.completion_pieces(choice.request.prompt_ids, tokens.token_ids)
            ends = list(accumulate(map(len, pieces)))
            if reason is None:  # a token comes with its text
                num_tokens = max(choice.num_tokens, bisect_right(ends, len(choice.text)))
            elif text_end is not None:
                pieces = [piece[: max(0, len(piece) - end + text_end)] for piece, end in zip(pieces, ends, strict=True)]
            said["logprobs"] = self._logprobs(tokens, pieces, slice(choice.num_tokens, num_tokens))
        new = slice(choice.num_tokens, num_tokens)
        said["finish_reason"] = None if reason is None else _REASONS.get(reason, "stop")
        said["stop_reason"] = self._stop_reason(choice.request, tokens, reason, text_end)
        if self._body.return_token_ids:
            said["token_ids"] = list(tokens.token_ids[new])
            said["weight_versions"] = _spans(tokens.versions[:num_tokens], choice.num_tokens)
            if choice.is_new:
                said["prompt_token_ids"] = list(choice.request.prompt_ids)
        choice.num_tokens, choice.is_new = num_tokens, False
        return said

    def _grown(
        self, choice: Choice, token_ids: Sequence[int], reason: FinishReason | None, text_end: int | None
    ) -> str:
        """The text behind what was said already, as far as it is settled."""
        text = self._codec.decode_completion(choice.request.prompt_ids, token_ids)
        if reason is None:
            # Half a character, or what may turn out to begin a stop string.
            held = max((len(string) - 1 for string in choice.request.sampling.stop_strings), default=0)
            text = text.rstrip(_INCOMPLETE)
            text = text[: len(text) - held] if held else text
            if not text.startswith(choice.text):
                return ""
        elif text_end is not None:
            text = text[:text_end]
        new = text[len(choice.text) :]
        choice.text += new
        return new

    def _said(self, choice: Choice, text: str, *, is_delta: bool) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        role = {"role": "assistant"} if choice.is_new else {}
        return {"delta" if is_delta else "message": {**role, "content": text}}

    def _logprobs(self, tokens: Generated | Completion, texts: Sequence[str], new: slice) -> dict[str, Any]:
        logprobs = list(tokens.logprobs[new])
        if self._is_chat:
            pairs = zip(texts[new], logprobs, strict=True)
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in pairs
            ]
            return {"content": content, "refusal": None}
        offsets = [0, *accumulate(map(len, texts))][:-1][new]
        return {"tokens": texts[new], "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def _stop_reason(
        self, request: Request, tokens: Generated | Completion, reason: FinishReason | None, text_end: int | None
    ) -> int | str | None:
        """The stop string, or the token of ``stop_token_ids``; None for end-of-text, as in vLLM."""
        if reason is FinishReason.STOP and tokens.token_ids[-1] in self._body.stop_token_ids:
            return tokens.token_ids[-1]
        if reason is FinishReason.STOP_STRING:
            text = self._codec.decode_completion(request.prompt_ids, tokens.token_ids)
            return next((s for s in request.sampling.stop_strings if text.startswith(s, text_end)), None)
        return None


def _spans(versions: Sequence[int], start: int) -> list[dict[str, Any]]:
    """``versions[start:]`` as vLLM's spans of output tokens."""
    spans = []
    for version, members in groupby(versions[start:]):
        end = start + len(list(members))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans
