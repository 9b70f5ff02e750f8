"""Chat templates: rendering messages, and which tokens are the assistant's."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from quartet.config.errors import UserError
from quartet.text.examples import Messages


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template.

    Raises:
        UserError: it has none.
    """
    if tokenizer.chat_template is not None and not isinstance(tokenizer.chat_template, str | dict):
        raise _no_template(tokenizer, f"chat_template is {tokenizer.chat_template!r}")
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise _no_template(tokenizer, str(error).splitlines()[0]) from None


def _no_template(tokenizer: PreTrainedTokenizerBase, found: str) -> UserError:
    return UserError(
        "the tokenizer has no chat template, but the data are messages",
        found=f"{tokenizer.name_or_path or type(tokenizer).__name__}: {found}",
        remedy="put a chat_template.jinja beside the tokenizer, or use plain text prompts",
    )


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, generation_prompt: bool) -> str:
    """Messages as text.

    Raises:
        UserError: no template, or one that refuses these messages (some know no system role).
    """
    template_of(tokenizer)
    return str(_applied(tokenizer, messages, tokenize=False, add_generation_prompt=generation_prompt))


def _applied(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program
        # Its own refusal as it stands, an accident with its kind.
        is_refusal = isinstance(error, TemplateError | ValueError)
        said = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        raise UserError(
            "the chat template refuses the messages",
            found=f"{said}; roles {[message.get('role') for message in messages]}",
            remedy="leave out the roles that the template does not know, or use another template",
        ) from error


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
        UserError: the marks cover nothing.
    """
    encoded = _applied(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    if not any(mask):
        raise UserError(
            "the template's {% generation %} marks cover no token",
            found=f"roles {[message['role'] for message in messages]}",
            remedy="put the assistant's content between {% generation %} and {% endgeneration %}",
        )
    return ids, mask
