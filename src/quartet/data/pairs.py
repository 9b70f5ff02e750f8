"""The prompt and the two answers of a pair, also where the answers hold the prompt."""

from __future__ import annotations

from itertools import takewhile

from quartet.data.dialogues import as_dialogue, is_dialogue, is_whole_dialogue, split_dialogues, split_texts
from quartet.data.fields import Fields, Skip, answer_of, as_chat, as_messages, prompt_field
from quartet.text.examples import AnswerText, PromptText

SIDES = ("chosen", "rejected")
SAME = "chosen and rejected are the same"
OWN_PROMPT = "the answers were whole conversations, of which the prompt was taken, not the one beside them"
EARLIER = "the conversations differ before their last turn"


def pair_field(fields: Fields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Prompt and answers.

    Raises:
        Skip: the answers are the same, or differ before their last turn.
        UserError: there is no prompt, or values are neither text nor messages.
    """
    sides = [fields.get(name) for name in ("chosen", "rejected")]
    if all(isinstance(side, (list, dict)) for side in sides):
        return _conversations(fields)
    chosen, rejected = fields.text("chosen", empty=True), fields.text("rejected", empty=True)
    prompt: PromptText
    given, has_prompt = fields.get("prompt"), fields.has("prompt") or fields.has("messages")
    if isinstance(given, str) and is_dialogue(given) and chosen.startswith(given) and rejected.startswith(given):
        fields.notes.append("both answers began with their prompt, which was taken off")
        prompt, chosen, rejected = prompt_field(fields), chosen[len(given) :], rejected[len(given) :]
    elif not has_prompt or (is_whole_dialogue(chosen) and is_whole_dialogue(rejected)):
        fields.notes += [OWN_PROMPT] if has_prompt else []
        cut = _num_prompt(fields, chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        prompt = prompt_field(fields)
    if fields.as_turns:
        prompt = as_dialogue(prompt) if isinstance(prompt, str) else prompt
        chosen, rejected = chosen.strip(), rejected.strip()
    return prompt, chosen, rejected


def _num_prompt(fields: Fields, chosen: str, rejected: str) -> int:
    """Characters of the prompt with which two texts begin."""
    if chosen == rejected:
        raise Skip(SAME)
    if is_dialogue(chosen) and is_dialogue(rejected):
        cut = split_dialogues(chosen, rejected)
        if cut is None:
            raise Skip(EARLIER)
        return cut
    # Where another column could be the prompt, words that both answers happen to begin with are none.
    others = [name for name, value in fields.values.items() if isinstance(value, str) and name not in SIDES]
    cut = None if others or {"prompt", "messages"} & set(fields.values) else split_texts(chosen, rejected)
    if cut is None:
        raise fields.missing("`prompt` or `messages`, with which `chosen` and `rejected` could also both begin")
    return cut


def _conversations(fields: Fields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Prompt and answers of conversations: what both begin with, and the one turn in which they differ.

    Where they begin with the assistant's turn, they continue ``prompt``.
    """
    chosen, rejected = fields.messages("chosen"), fields.messages("rejected")
    if chosen == rejected:
        raise Skip(SAME)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if len(chosen) != shared + 1 or len(rejected) != shared + 1:
        raise Skip(EARLIER)
    prompt: PromptText = chosen[:shared]
    if not shared or chosen[0]["role"] == "assistant":
        prompt = [*as_chat(prompt_field(fields)), *chosen[:shared]]
    elif isinstance(beside := fields.get("prompt"), (list, dict)):
        given = as_messages(beside, fields.place)
        if given[-shared:] == prompt:
            prompt = given  # which may have a system's turn more
        elif given != prompt[: len(given)]:
            fields.notes.append(OWN_PROMPT)
    elif isinstance(beside, str) and beside.strip() not in {turn["content"].strip() for turn in chosen[:shared]}:
        fields.notes.append(OWN_PROMPT)
    return prompt, answer_of(chosen[shared:], fields.place), answer_of(rejected[shared:], fields.place)
