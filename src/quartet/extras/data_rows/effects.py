"""What a chat template does to conversations and to the masks of their tokens, seen on a small one."""

from __future__ import annotations

from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from quartet.config.errors import UserError
from quartet.text.examples import Messages
from quartet.text.templates import MARKS, free_variables, render, split_defaults, template_of

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace"}


def _talk(thought: str = "") -> Messages:
    turns = (("user", "question 1"), ("assistant", "answer 1"), ("user", "question 2"), ("assistant", "answer 2"))
    contents = [thought.format(text) * (role == "assistant") + text for role, text in turns]
    return [{"role": role, "content": content} for (role, _), content in zip(turns, contents, strict=True)]


def template_effects(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer's template does to conversations and to the masks of their tokens, seen on a small one."""
    try:
        template = template_of(tokenizer)
        defaults, own = split_defaults(template)
        read = sorted(name for name in free_variables(own) - _GIVEN if not name.endswith("_token"))
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
        f"variables: {', '.join(shown) or 'none'}; tools: {'used' if 'tools' in free_variables(own) else 'not used'}",
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
