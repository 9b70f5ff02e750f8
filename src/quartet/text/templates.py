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
from quartet.text.chat import MARKS, not_jinja, render, template_of
from quartet.text.examples import THOUGHTS, Message, Messages

_DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = ([^%]*) %\}\{% endif %\}")
_THOUGHT_END = "</think>"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace"}


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
        _variables(template)
    except TemplateSyntaxError as error:
        raise not_jinja(error, str(path)) from None
    return template


def _with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    former, template = _parted(template)
    values = former | {name: repr(value).replace("%", r"\x25") for name, value in variables.items()}
    head = "".join(f"{{%- if {n} is not defined %}}{{% set {n} = {v} %}}{{% endif %}}" for n, v in values.items())
    # White space at its beginning keeps its meaning: what blocks take away of it stands on their own lines.
    return head + "\n" * (bool(head) and template[:1].isspace()) + template


def _parted(template: str) -> tuple[dict[str, str], str]:
    """Defaults at its head, as they are written, and the rest."""
    values: dict[str, str] = {}
    at = 0
    while (found := _DEFAULT.match(template, at)) is not None:
        values[found[1]], at = found[2], found.end()
    return values, template[at:]


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """What a template reads and does not set itself.

    Raises:
        TemplateSyntaxError: it is not Jinja as transformers has it.
    """
    environment = _compile_jinja_template("").environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


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
        defaults, own = _parted(template_of(tokenizer, [{}] if has_tools else None))
        read = _variables(own)
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


def _talk(thought: str = "") -> Messages:
    turns = (("user", "question 1"), ("assistant", "answer 1"), ("user", "question 2"), ("assistant", "answer 2"))
    contents = [thought.format(text) * (role == "assistant") + text for role, text in turns]
    return [{"role": role, "content": content} for (role, _), content in zip(turns, contents, strict=True)]


def template_effects(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer's template does to conversations and to the masks of their tokens, seen on a small one."""
    try:
        template = template_of(tokenizer)
        defaults, own = _parted(template)
        read = sorted(name for name in _variables(own) - _GIVEN if not name.endswith("_token"))
        talk, thinking = _talk(), _talk("<think>\nthought of {}\n</think>\n\n")
        prompt = render(tokenizer, talk[:1], generation_prompt=True)
        bare, first, earlier, whole = (render(tokenizer, talk[:n], generation_prompt=False) for n in (1, 2, 3, 4))
        thoughts = render(tokenizer, thinking, generation_prompt=False)
    except (UserError, TemplateSyntaxError) as error:
        return [f"cannot be shown on a small conversation: {' '.join(str(error).split())}"]
    shown = [f"{name} (default {defaults[name]})" if name in defaults else name for name in read]
    before, _, _ = prompt.partition("question 1")
    opening = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
    after = first.rpartition("answer 1")[2]
    if MARKS.search(template):
        masks = "on the tokens inside {% generation %}"
    elif not first.startswith(prompt):
        masks = "none: an answer is rendered differently from what a prompt ends with, so rows with answers are refused"
    elif earlier.startswith(first) and whole.startswith(earlier):
        masks = "on every assistant turn, with its end-of-text token"
    else:
        masks = (
            "on one turn: later turns change earlier ones, so conversations with several assistant turns are refused"
        )
    num_kept = thoughts.count("thought of")
    fates = ("left out of every turn", "left out of earlier turns, kept in the last", "kept in every turn")
    return [
        f"variables: {', '.join(shown) or 'none'}; tools: {'used' if 'tools' in _variables(own) else 'not used'}",
        f"before the first message: {before!r}",
        f"before an answer: {opening!r}",
        f"after an answer: {after!r}",
        f"loss: {masks}",
        f"<think> blocks: {fates[num_kept]}",
        *(["date: that of the day on which a row is read"] if _is_dated(tokenizer, template) else []),
    ]


def _is_dated(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template writes today's date into a prompt."""
    given = {**tokenizer.special_tokens_map, "messages": _talk()[:1], "add_generation_prompt": True}
    program = _compile_jinja_template(template)  # apply_chat_template passes no functions on
    one, other = (program.render(given, strftime_now=lambda form, day=day: day) for day in ("one", "another"))
    return bool(one != other)
