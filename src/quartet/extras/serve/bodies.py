"""What the server is asked: OpenAI's completions and chats with vLLM's further keys. All other keys are errors."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, JsonValue

from quartet.config import UserError
from quartet.config.common import StrictModel, TemplateVariables
from quartet.data.fields import without_nulls
from quartet.rollout.protocol import Request, SamplingParams
from quartet.rollout.scheduler import check_request
from quartet.text.tokenizer import TextCodec

MAX_SEED = (1 << 63) - 1
_MAX_CHOICES = 256
_UNLIMITED = 1 << 20
T = TypeVar("T")
_Many = Annotated[tuple[T, ...], Field(fail_fast=True)]


class StreamOptions(StrictModel):
    include_usage: bool = False


class _Body(StrictModel):
    model: str
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    seed: int | None = None
    stop: str | _Many[str] = ()
    stop_token_ids: _Many[int] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    session_id: str | None = None
    user: str | None = None
    skip_special_tokens: Literal[False] = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop


class CompletionBody(_Body):
    prompt: str | _Many[int] | _Many[str] | _Many[_Many[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def prompts(self, codec: TextCodec) -> list[list[int]]:
        """Returns the token ids of each prompt."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: Sequence[Any] = [self.prompt] if is_one else self.prompt
        return [codec.encode_prompt(each) if isinstance(each, str) else list(each) for each in prompts]

    @property
    def most_tokens(self) -> int:
        return self.max_tokens


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: str
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {**{name: value for name, value in self if value is not None}, "content": text}


class ChatBody(_Body):
    messages: _Many[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, JsonValue]] = Field([])
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: TemplateVariables = Field({})

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def prompts(self, codec: TextCodec) -> list[list[int]]:
        """Returns the token ids of the conversation, those that training gives the same messages, tools and variables.

        Raises:
            UserError: the template refuses it.
        """
        first, *rest = (each.for_template for each in self.messages)
        # As in rows of data.
        tools = without_nulls(self.tools) if self.tool_choice == "auto" else []
        return [codec.encode_prompt([{**first, "tools": tools} if tools else first, *rest], self.chat_template_kwargs)]

    @property
    def most_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or _UNLIMITED


AnyBody = CompletionBody | ChatBody


@dataclass(frozen=True)
class ModelLimits:
    """``context``: tokens of prompt and answer together; None: no end."""

    context: int | None
    vocab_size: int


def requests_of(body: AnyBody, name: str, codec: TextCodec, limits: ModelLimits) -> list[Request]:
    """Makes one request per prompt and choice; choice k of a prompt has the seed of its first one plus k, as in vLLM.

    Raises:
        UserError: what is asked cannot be.
    """
    prompts = body.prompts(codec if limits.context is None else codec.limited(limits.context))
    if not 1 <= len(prompts) * body.n <= _MAX_CHOICES:
        raise UserError(
            "a request asks for too much or for nothing",
            found=f"{len(prompts)} prompts, {body.n} answers each",
            remedy=f"ask for 1 to {_MAX_CHOICES} answers in all",
        )
    return [request for i, ids in enumerate(prompts) for request in _group(body, f"{name}-{i}", ids, codec, limits)]


def _group(body: AnyBody, group: str, ids: list[int], codec: TextCodec, limits: ModelLimits) -> Iterator[Request]:
    # A prompt without room is refused below, with both numbers.
    room = _UNLIMITED if limits.context is None else max(1, limits.context - len(ids))
    seed = secrets.randbits(63) if body.seed is None else body.seed
    for k in range(body.n):
        sampling = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            max_new_tokens=min(body.most_tokens, room),
            stop_token_ids=tuple(sorted({*body.stop_token_ids, *(() if body.ignore_eos else codec.eos_ids)})),
            stop_strings=body.stops,
            seed=(seed + k) & MAX_SEED,
        )
        request = Request(f"{group}-{k}", group, tuple(ids), sampling, session=body.session_id)
        check_request(request, context=limits.context, vocab_size=limits.vocab_size, decodes=True)
        yield request
