"""Chat templates as programs: read from a file, with defaults of their variables, and what they do to a conversation.

``chat_template_kwargs`` become part of the template, as defaults of its variables at its head. What is saved beside a
trained model then renders as training did, whoever loads it, and whoever passes a variable himself still decides it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from quartet.config.errors import UserError
from quartet.config.nearest import missing_file
from quartet.text.chat import not_jinja, render, template_of
from quartet.text.examples import THOUGHTS, Message, Messages

_DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = ([^%]*) %\}\{% endif %\}")
_THOUGHT_END = "</think>"


def with_template(
    tokenizer: PreTrainedTokenizerBase, file: str | None, variables: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with the template in ``file`` (None: its own), whose ``variables`` have these defaults.

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
    """Defaults at its head, as they are written, and the rest."""
    values: dict[str, str] = {}
    at = 0
    while (found := _DEFAULT.match(template, at)) is not None:
        values[found[1]], at = found[2], found.end()
    return values, template[at:]


@lru_cache(maxsize=16)
def free_variables(template: str) -> frozenset[str]:
    """What a template reads and does not set itself.

    Raises:
        TemplateSyntaxError: it is not Jinja as transformers has it.
    """
    environment = _compile_jinja_template("").environment
    return frozenset(meta.find_undeclaredfree_variables(environment.parse(template)))


def template_warnings(
    tokenizer: PreTrainedTokenizerBase, variables: Iterable[str] | None = None, *, has_tools: bool
) -> list[str]:
    """What is given to a template that does not read it, in words.

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
    """What the template does not write of a conversation, in words: thoughts, tool calls, text beside them.

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
    """The texts of a message that a template may write or leave out, each by what it is."""
    thought, said = "", message["content"]
    if message["role"] == "assistant":
        thought, _, said = said.rpartition(_THOUGHT_END)
    thoughts = [thought.strip().removeprefix("<think>"), *(message.get(name) for name in THOUGHTS)]
    found = [("text", said), *(("thoughts", text) for text in thoughts)]
    return ((what, text.strip()) for what, text in found if isinstance(text, str) and text.strip())


def _spaced(text: str) -> str:
    """With one space wherever there is white space: templates trim texts and change line breaks around them."""
    return " ".join(text.split())
