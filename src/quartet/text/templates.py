"""Chat templates as programs: read from a file, with defaults of their variables, and applied to conversations.

``chat_template_kwargs`` become part of the template, as defaults of its variables at its head. What is saved beside a
trained model then renders as training did, whoever loads it, and whoever passes a variable himself still decides it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import traceback
from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from quartet.config.errors import UserError
from quartet.config.nearest import missing_file_error
from quartet.text.examples import Message, Messages, has_loss, is_image

MARKS = re.compile(r"\{%-?\s*generation\b")
"""In a template that says itself which tokens are the assistant's."""


def get_chat_template(tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> str:
    """Returns the tokenizer's chat template; of several the one for conversations with ``tools``.

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


def template_error(error: TemplateSyntaxError, whose: str) -> UserError:
    """Makes the error for a template that is no program."""
    found = f"{whose}, line {error.lineno}: {error.message}"
    return UserError("the chat template is not valid Jinja", found=found, remedy="mend that line")


def conversation_tools(messages: Messages) -> list[dict[str, Any]] | None:
    """Returns the tools of a conversation, which stand in its first message; None where it has none."""
    tools = messages[0].get("tools") if messages else None
    return tools if isinstance(tools, list) and tools else None


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Writes messages as text.

    Args:
        variables: of the template, for this conversation; they come before the template's own defaults.

    Raises:
        UserError: no template, or one that refuses these messages (some know no system role).
    """
    get_chat_template(tokenizer, conversation_tools(messages))
    options = {**(variables or {}), "tokenize": False, "add_generation_prompt": generation_prompt}
    return str(_applied(tokenizer, messages, **options))


def _with_objects(message: Message) -> Message:
    """Returns a message with objects for arguments of tool calls that are JSON text, as OpenAI has them: templates
    encode objects.
    """
    calls = copy.deepcopy(message.get("tool_calls") or [])
    for call in calls:
        function = call.get("function", call)
        if isinstance(text := function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(text)
    return {**message, "tool_calls": calls} if calls else message


def in_parts(message: Message, *, takes_text: bool) -> Message:
    """Returns a message as templates that know pictures take it: without the pictures themselves, and with its text as
    a part where the template does not take text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [{"type": "image"} if is_image(part) else part for part in content]
        return {**message, "content": parts}
    return message if takes_text else {**message, "content": [{"type": "text", "text": content or ""}]}


def _applied(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    messages = [_with_objects(message) for message in messages]
    if (tools := conversation_tools(messages)) is not None:
        first = {name: value for name, value in messages[0].items() if name != "tools"}
        messages, options = [first, *messages[1:]], {**options, "tools": tools}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateSyntaxError as error:
        raise template_error(error, tokenizer.name_or_path or "the tokenizer's own") from error
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


def text_after(head: str, whole: str, what: str, where: str) -> str:
    """Returns what ``whole`` adds to ``head``.

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


def encode_with_generation_marks(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[list[int], list[bool]]:
    """Returns the ids and assistant mask from the template's own ``{% generation %}`` marks.

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
    turns = [has_loss(message) for message in messages if message["role"] == "assistant"]
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
    """Returns a conversation up to the last turn that carries loss.

    Raises:
        UserError: there is none behind another turn.
    """
    last = max((k for k, message in enumerate(messages) if has_loss(message)), default=-1)
    if last < 1:
        raise UserError(
            "the conversation has nothing to learn from",
            found=f"roles {[message['role'] for message in messages]}",
            remedy="it needs an assistant turn after at least one other turn, and one that is not left out of the loss",
        )
    return messages[: last + 1]


_DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = ([^%]*) %\}\{% endif %\}")


def with_template(
    tokenizer: PreTrainedTokenizerBase, file: str | None, variables: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Copies the tokenizer with the template in ``file`` (None: its own), whose ``variables`` have these defaults.

    Raises:
        UserError: the file cannot be read or is not Jinja, or there is no template.
    """
    if file is None and not variables:
        return tokenizer
    found = copy.deepcopy(tokenizer)
    if file is not None:
        found.chat_template = _read(Path(file).expanduser())
    get_chat_template(found)
    own: Any = found.chat_template
    named = own if isinstance(own, dict) else {"": own}
    given = {name: _with_defaults(template, variables) for name, template in named.items()}
    found.chat_template = given if isinstance(own, dict) else given[""]
    return found


def _read(path: Path) -> str:
    if not path.is_file():
        raise missing_file_error("there is no such chat template", path)
    try:
        template = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "save it as UTF-8 text that can be read"
        raise UserError("the chat template cannot be read", found=f"{path}: {reason}", remedy=remedy) from None
    if not template.strip():
        raise UserError("the chat template is empty", found=str(path), remedy="write it, or leave chat_template out")
    try:
        free_variables(template)
    except TemplateSyntaxError as error:
        raise template_error(error, str(path)) from None
    return template


def _with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    former, template = split_defaults(template)
    values = former | {name: repr(value).replace("%", r"\x25") for name, value in variables.items()}
    head = "".join(f"{{%- if {n} is not defined %}}{{% set {n} = {v} %}}{{% endif %}}" for n, v in values.items())
    # White space at its beginning keeps its meaning: what blocks take away of it stands on their own lines.
    return head + "\n" * (bool(head) and template[:1].isspace()) + template


def split_defaults(template: str) -> tuple[dict[str, str], str]:
    """Splits a template into the defaults at its head, as they are written, and the rest."""
    values: dict[str, str] = {}
    at = 0
    while (found := _DEFAULT.match(template, at)) is not None:
        values[found[1]], at = found[2], found.end()
    return values, template[at:]


@lru_cache(maxsize=16)
def free_variables(template: str) -> frozenset[str]:
    """Returns what a template reads and does not set itself.

    Raises:
        TemplateSyntaxError: it is not Jinja as transformers has it.
    """
    environment = _compile_jinja_template("").environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))
