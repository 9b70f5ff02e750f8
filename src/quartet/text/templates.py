"""Chat templates as programs: read from a file, with defaults of their variables, and what they do to a conversation.

``chat_template_kwargs`` become part of the template, as defaults of its variables at its head. What is saved beside a
trained model then renders as training did, whoever loads it, and whoever passes a variable himself still decides it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from quartet.config.errors import UserError
from quartet.config.nearest import missing_file
from quartet.text.examples import THOUGHTS, Message, Messages, is_learned

MARKS = re.compile(r"\{%-?\s*generation\b")
"""In a template that says itself which tokens are the assistant's."""


def template_of(tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> str:
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


def not_jinja(error: TemplateSyntaxError, whose: str) -> UserError:
    """Makes the error for a template that is no program."""
    found = f"{whose}, line {error.lineno}: {error.message}"
    return UserError("the chat template is not valid Jinja", found=found, remedy="mend that line")


def tools_of(messages: Messages) -> list[dict[str, Any]] | None:
    """Returns the tools of a conversation, which stand in its first message; None where it has none."""
    tools = messages[0].get("tools") if messages else None
    return tools if isinstance(tools, list) and tools else None


def render(
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
    """Returns the messages, with objects for arguments of tool calls that are JSON text, as OpenAI has them, where the
    template would encode that text once more or cannot read it.
    """
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


def marked_by_template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[bool]]:
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
    """Returns a conversation up to the last turn that carries loss.

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


_DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = ([^%]*) %\}\{% endif %\}")
_THOUGHT_END = "</think>"


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
    template_of(found)
    own: Any = found.chat_template
    named = own if isinstance(own, dict) else {"": own}
    given = {name: _with_defaults(template, variables) for name, template in named.items()}
    found.chat_template = given if isinstance(own, dict) else given[""]
    return found


def _read(path: Path) -> str:
    if not path.is_file():
        raise missing_file("there is no such chat template", path)
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
        raise not_jinja(error, str(path)) from None
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


def template_warnings(
    tokenizer: PreTrainedTokenizerBase, variables: Iterable[str] | None = None, *, has_tools: bool
) -> list[str]:
    """Tells in words what is given to a template that does not read it.

    Args:
        variables: names of those that are given; the defaults that it was saved with when left out.
    """
    if tokenizer.chat_template is None:
        return []
    try:
        defaults, own = split_defaults(template_of(tokenizer, [{}] if has_tools else None))
        read = free_variables(own)
    except (UserError, TemplateSyntaxError):
        return []  # whoever renders is told
    unread = [name for name in (defaults if variables is None else variables) if name not in read]
    found = [f"the chat template does not read `{name}` of chat_template_kwargs" for name in unread]
    if has_tools and "tools" not in read:
        found.append("the chat template does not read `tools`: no prompt tells of them")
    return found


# What it does ---------------------------------------------------------------------------------------------


def left_out(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, generation_prompt: bool) -> list[str]:
    """Tells in words what the template does not write of a conversation: thoughts, tool calls, text beside them.

    Raises:
        UserError: it leaves out a whole message.
    """
    whole = render(tokenizer, messages, generation_prompt=generation_prompt)
    text, lost = _spaced(whole), set[tuple[int, str]]()
    parts = [(n, what, part) for n, message in enumerate(messages) for what, part in _parts(message)]
    # Each part needs a place of its own: of "yes, they do" and "yes" the longer one is looked for first, and is gone.
    for n, what, part in sorted(parts, key=lambda found: -len(found[2])):
        # Some templates write what a tool said as JSON.
        forms = [_spaced(part), _spaced(json.dumps(part, ensure_ascii=False)[1:-1])]
        if (form := next((form for form in forms if form in text), None)) is None:
            lost.add((n, what))
        else:
            text = text.replace(form, "\0", 1)
    calling = [n for n, message in enumerate(messages) if message.get("tool_calls")]
    if calling:
        silent = [{name: value for name, value in one.items() if name != "tool_calls"} for one in messages]
        with contextlib.suppress(UserError):  # who refuses answers of tools that were not called reads the calls
            unread = render(tokenizer, silent, generation_prompt=generation_prompt) == whole
            lost |= {(n, "tool calls") for n in calling if unread}
    for n, message in enumerate(messages):
        said = {what for at, what, _ in parts if at == n} | {"tool calls" for at in calling if at == n}
        if said and all((n, what) in lost for what in said):
            raise UserError(
                "the chat template leaves out a whole message",
                found=f"turn {n + 1}, role {message['role']!r}: {message['content'][:80]!r}",
                remedy="name roles as the template does (user, assistant), put a system turn into the user's, or use "
                "another template (chat_template)",
            )
    which = {True: "the last turn", False: "earlier turns"}
    return sorted({f"the chat template leaves out {what} of {which[n == len(messages) - 1]}" for n, what in lost})


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yields the texts of a message that a template may write or leave out, each by what it is."""
    thought, said = "", message["content"]
    if message["role"] == "assistant":
        thought, _, said = said.rpartition(_THOUGHT_END)
    thoughts = [thought.strip().removeprefix("<think>"), *(message.get(name) for name in THOUGHTS)]
    found = [("text", said), *(("thoughts", text) for text in thoughts)]
    return ((what, text.strip()) for what, text in found if isinstance(text, str) and text.strip())


def _spaced(text: str) -> str:
    """Leaves one space wherever there is white space: templates trim texts and change line breaks around them."""
    return " ".join(text.split())
