"""What one example of each kind of training is, before tokenisation.

A *prompt* is plain text or a list of messages (``{"role": …, "content": …}``); messages go through the
tokenizer's chat template, plain text does not. The tools of a conversation, JSON schemas as a template takes them,
stand in its first message under ``tools``, so that they go wherever it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[Message]
PromptText: TypeAlias = str | Messages
AnswerText: TypeAlias = str | Message
"""Text, or an assistant message that has more than its content: thoughts, tool calls."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which assistant messages have their thoughts."""


def answer_turn(answer: AnswerText) -> Message:
    """Returns an answer as the assistant's turn."""
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def is_empty(answer: AnswerText) -> bool:
    """Tells whether an answer says nothing: neither text nor thoughts nor tool calls."""
    turn = answer_turn(answer)
    return not (turn["content"].strip() or turn.get("tool_calls") or any(turn.get(name) for name in THOUGHTS))


def is_image(part: Mapping[str, Any]) -> bool:
    """Tells whether a part of a message's content is a picture."""
    return part.get("type") in ("image", "image_url")


def shown_content(content: str | list[dict[str, Any]]) -> str:
    """Returns a message's content as text; of pictures it says that there is one."""
    if isinstance(content, str):
        return content
    return "".join("[picture]" if is_image(part) else part["text"] for part in content)


def has_loss(message: Message) -> bool:
    """Tells whether a message is an assistant's turn that carries loss."""
    return message["role"] == "assistant" and bool(message.get("train", True))


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to imitate (SFT); ``place`` is its file and line, for messages."""

    prompt: PromptText
    completion: AnswerText
    place: str = ""


@dataclass(frozen=True)
class Conversation:
    """Messages of which the assistant's are to be imitated (SFT), but those with ``train`` False."""

    messages: Messages
    place: str = ""


@dataclass(frozen=True)
class TextDocument:
    """Text of which every token is learned (language modelling)."""

    text: str
    place: str = ""


@dataclass(frozen=True)
class Tokenised:
    """Token ids as they are, and which of them carry loss."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    place: str = ""


Example: TypeAlias = Demonstration | Conversation | TextDocument | Tokenised
"""What SFT learns from."""


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the first preferred; ``margin`` is how clearly, where the data says so."""

    prompt: PromptText
    chosen: AnswerText
    rejected: AnswerText
    margin: float | None = None
    place: str = ""


@dataclass(frozen=True)
class Judgement:
    """An answer to a prompt that was judged by itself: good (``label``) or bad."""

    prompt: PromptText
    completion: AnswerText
    label: bool
    place: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer (RL, evaluation) and the columns that its rewards receive."""

    prompt: PromptText
    columns: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
