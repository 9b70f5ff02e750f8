"""Chat templates: rendering messages, and which tokens are the assistant's."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from quartet.config.errors import UserError
from quartet.text.examples import Messages, is_learned

MARKS = re.compile(r"\{%-?\s*generation\b")
"""In a template that says itself which tokens are the assistant's."""


def template_of(tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> str:
    """The tokenizer's chat template; of several the one for conversations with ``tools``.

    Raises:
        UserError: it has none.
    """
    if tokenizer.chat_template is not None and not isinstance(tokenizer.chat_template, str | dict):
        raise _no_template(tokenizer, f"chat_template is {tokenizer.chat_template!r}")
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:
        raise _no_template(tokenizer, str(error).splitlines()[0]) from None


def _no_template(tokenizer: PreTrainedTokenizerBase, found: str) -> UserError:
    return UserError(
        "the tokenizer has no chat template, but the data are messages",
        found=f"{tokenizer.name_or_path or type(tokenizer).__name__}: {found}",
        remedy="put a chat_template.jinja beside the tokenizer, or use plain text prompts",
    )


def not_jinja(error: TemplateSyntaxError, whose: str) -> UserError:
    """The error for a template that is no program."""
    found = f"{whose}, line {error.lineno}: {error.message}"
    return UserError("the chat template is not valid Jinja", found=found, remedy="mend that line")


def tools_of(messages: Messages) -> list[dict[str, Any]] | None:
    """The tools of a conversation, which stand in its first message; None where it has none."""
    tools = messages[0].get("tools") if messages else None
    return tools if isinstance(tools, list) and tools else None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Messages as text.

    Args:
        variables: of the template, for this conversation; they come before the template's own defaults.

    Raises:
        UserError: no template, or one that refuses these messages (some know no system role).
    """
    template_of(tokenizer, tools_of(messages))
    options = {**(variables or {}), "tokenize": False, "add_generation_prompt": generation_prompt}
    return str(_applied(tokenizer, messages, **options))


def _applied(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    if (tools := tools_of(messages)) is not None:
        first = {name: value for name, value in messages[0].items() if name != "tools"}
        messages, options = [first, *messages[1:]], {**options, "tools": tools}
    messages = _with_arguments(tokenizer, messages, options)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateSyntaxError as error:
        raise not_jinja(error, tokenizer.name_or_path or "the tokenizer's own") from error
    except Exception as error:  # a template is a program
        # Its own refusal as it stands, an accident with its kind.
        is_refusal = isinstance(error, TemplateError | ValueError)
        said = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" (line {frame.lineno})" for frame in frames if frame.filename == "<template>"]
        raise UserError(
            "the chat template refuses the messages",
            found=f"{said}{''.join(lines[-1:])}; roles {[message.get('role') for message in messages]}",
            remedy="leave out the roles that the template does not know, or use another template",
        ) from error


def _with_arguments(tokenizer: PreTrainedTokenizerBase, messages: Messages, options: Mapping[str, Any]) -> Messages:
    """The messages, with objects for arguments of tool calls that are JSON text, as OpenAI has them, where the template
    would encode that text once more or cannot read it."""
    texts: list[str] = []

    def parsed(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return {**call, "function": parsed(call["function"])}
        if isinstance(call, dict) and isinstance(text := call.get("arguments"), str):
            try:
                value = json.loads(text)
            except ValueError:
                return call
            if isinstance(value, dict):
                texts.append(text)
                return {**call, "arguments": value}
        return call

    calling = [message.get("tool_calls") for message in messages]
    objects = [
        {**message, "tool_calls": [*map(parsed, calls)]} if isinstance(calls, list) else message
        for message, calls in zip(messages, calling, strict=True)
    ]
    if not texts:
        return messages
    plain = {"tokenize": False, "return_dict": False, "return_assistant_tokens_mask": False}
    try:
        written = str(tokenizer.apply_chat_template(messages, **{**options, **plain}))
    except Exception:  # it reads objects only; what else it refuses, it refuses with them
        return objects
    quoted = (json.dumps(text, ensure_ascii=ascii) for text in texts for ascii in (False, True))
    return objects if any(text in written for text in quoted) else messages


def continuation(head: str, whole: str, what: str, where: str) -> str:
    """What ``whole`` adds to ``head``.

    Raises:
        UserError: ``whole`` does not begin with ``head``: the template rewrites what it wrote before.
    """
    if whole.startswith(head):
        return whole[len(head) :]
    same = next((n for n, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(whole))
    raise UserError(
        f"the chat template writes {where} differently once {what} is there",
        found=f"{head[same : same + 40]!r} became {whole[same : same + 40]!r} at character {same}",
        remedy="use a template with {% generation %} marks, or plain text `prompt` and `completion`",
    )


def marked_by_template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[bool]]:
    """Ids and assistant mask from the template's own ``{% generation %}`` marks.

    Raises:
        UserError: the marks cover nothing, or it is not clear which of them belong to a turn that is not learned.
    """
    encoded = _applied(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    if not any(mask):
        raise UserError(
            "the template's {% generation %} marks cover no token",
            found=f"roles {[message['role'] for message in messages]}",
            remedy="put the assistant's content between {% generation %} and {% endgeneration %}",
        )
    turns = [is_learned(message) for message in messages if message["role"] == "assistant"]
    stretches = [list(run) for is_marked, run in groupby(range(len(mask)), mask.__getitem__) if is_marked]
    if not all(turns) and len(turns) != len(stretches):
        raise UserError(
            "it is not clear which {% generation %} marks are those of the turns that are not to be learned",
            found=f"{len(turns)} turns, {len(stretches)} marked stretches",
            remedy="mark each assistant turn once, or use a template without marks",
        )
    for place in (place for turn, stretch in zip(turns, stretches, strict=False) if not turn for place in stretch):
        mask[place] = False
    return ids, mask


def until_last_learned(messages: Messages) -> Messages:
    """A conversation up to the last turn that carries loss.

    Raises:
        UserError: there is none behind another turn.
    """
    last = max((k for k, message in enumerate(messages) if is_learned(message)), default=-1)
    if last < 1:
        raise UserError(
            "the conversation has nothing to learn from",
            found=f"roles {[message['role'] for message in messages]}",
            remedy="it needs an assistant turn after at least one other turn, and one that is not left out of the loss",
        )
    return messages[: last + 1]
