"""From text to token ids and back, in the one way that training, generation and scoring share.

Three rules hold everywhere:

* the prompt of a training example has exactly the tokens that ``encode_prompt`` gives the same prompt for
  generation;
* what a model generated is never tokenised again: its token ids are kept, text is only made from them;
* a mask says which tokens count. No token is ever recognised by its id as padding or as the end of a prompt:
  the pad id may be a real token, and a model's end-of-text ids may include the token that every prompt begins
  with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from quartet.config.errors import UserError
from quartet.text import templates
from quartet.text.examples import (
    AnswerText,
    Conversation,
    Example,
    Messages,
    PromptText,
    TextDocument,
    Tokenised,
    answer_turn,
    has_loss,
)
from quartet.text.loading import check_vocabulary, load_generation_config, load_tokenizer
from quartet.text.templates import with_template

__all__ = ["TextCodec", "check_vocabulary", "load_tokenizer"]

_SENTINELS = ("\n", "a", "1", ".")
_SHORT_TEXT = 1 << 16
"""Characters that are tokenised in a moment; a megabyte takes seconds."""
_LONG_TOKEN = 16
"""Characters of a token, few have more: the beginning of a text that shows whether it is too long."""
_CUT_TOKENS = 64
"""Tokens at the end of a text's beginning that may be others in the whole text."""
_REPLACEMENT = "\ufffd"
_CONTEXT = 8
"""Tokens of a prompt's end that are decoded with what follows it; one is mostly enough."""
_NAMED = 8
"""Special tokens that are named; some tokenizers have hundreds."""
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, each possibly a token of its own


@lru_cache(maxsize=1 << 16)
def _decode_window(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    """Decodes a window: these are a token or two long and come again and again, so they are worth remembering."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class TextCodec:
    """A Hugging Face tokenizer with the end-of-text ids of the model it serves.

    Args:
        tokenizer: any Hugging Face tokenizer.
        model_eos_ids: the model's own end-of-text ids (``generation_config.eos_token_id``, a number or a
            list).
        enough: tokens from which on the exact number does not matter; see ``limited``.
    """

    tokenizer: PreTrainedTokenizerBase
    model_eos_ids: tuple[int, ...] = ()
    enough: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> TextCodec:
        """Makes a codec over objects that exist already."""
        eos = getattr(generation_config, "eos_token_id", None)
        return cls(tokenizer, tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> TextCodec:
        """Loads the codec of a model directory or hub name; ``tokenizer`` and the template's file where they are
        others.
        """
        own = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
        return cls.of(with_template(own, chat_template, {}), load_generation_config(model))

    def limited(self, max_tokens: int) -> TextCodec:
        """Returns the same codec, for a caller that throws away what has more than ``max_tokens``.

        Of a very long text whose beginning alone has more, only the beginning is tokenised.
        """
        return replace(self, enough=max_tokens)

    # End of text -----------------------------------------------------------------------------------------

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every id at which generation stops: the tokenizer's and the model's. Says nothing about prompts."""
        own = self.tokenizer.eos_token_id
        return frozenset(self.model_eos_ids) | (frozenset() if own is None else frozenset([int(own)]))

    @cached_property
    def eos_id(self) -> int:
        """The id that ends a training completion: the tokenizer's own, else the model's only one.

        Raises:
            UserError: neither names one.
        """
        own = self.tokenizer.eos_token_id
        if own is not None:
            return int(own)
        starts = {self.tokenizer.bos_token_id, self.tokenizer.pad_token_id}
        candidates = [token for token in self.model_eos_ids if token not in starts]
        if len(candidates) == 1:
            return candidates[0]
        raise UserError(
            "the tokenizer has no end-of-text token",
            found=f"eos_token is not set; the model's end-of-text ids are {list(self.model_eos_ids)}",
            remedy="set eos_token in tokenizer_config.json to the token that ends an answer",
        )

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The end-of-text tokens as texts."""
        return tuple(filter(None, (self.decode([token], skip_special=False).strip() for token in self.eos_ids)))

    def holds_end(self, text: str) -> bool:
        """Tells whether the ids of a text hold an end-of-text token, at which generation would stop."""
        return any(end in text for end in self._ends) and not self.eos_ids.isdisjoint(self._plain(text))

    def without_end(self, text: str) -> str:
        """Returns an answer without the end-of-text tokens that it ends with: encoding adds one."""
        while self.holds_end(text) and text.rstrip().endswith(self._ends):
            end = max((end for end in self._ends if text.rstrip().endswith(end)), key=len)
            text = text.rstrip().removesuffix(end)
        return text

    # Encoding --------------------------------------------------------------------------------------------

    def encode_prompt(self, prompt: PromptText, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the token ids of a prompt, ready to be continued.

        Plain text gets what the tokenizer adds in front (a begin-of-text token) and nothing behind; messages
        go through the chat template with its generation prompt and these ``variables``.

        Raises:
            UserError: no tokens at all, messages without a chat template, or messages the template refuses.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        else:
            ids = self._plain(self.render(prompt, variables=variables))
        if not ids:
            raise UserError("the prompt has no tokens", found=repr(prompt), remedy="give it some text")
        return ids

    def encode_completion(self, prompt: PromptText, completion: AnswerText) -> tuple[list[int], list[int]]:
        """Returns ``encode_prompt(prompt)`` and the ids of its completion, which end with an end-of-text id.

        The completion's tokens are those it has in the joined text where the prompt's tokens do not change by
        joining; otherwise (a token would span the boundary) it is tokenised as text that continues something.
        """
        prompt_ids = self.encode_prompt(prompt)
        if isinstance(prompt, str):
            assert isinstance(completion, str), "an answer that is a message has a prompt of messages"
            return prompt_ids, [*self._continue(prompt_ids, self._encode_text, prompt, completion), self.eos_id]
        head = self.render(prompt)
        whole = self.render([*prompt, answer_turn(completion)], generation_prompt=False)
        text = templates.text_after(head, whole, "the conversation with its answer", "the prompt")
        return prompt_ids, self._end(self._continue(prompt_ids, self._plain, head, text))

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the ids of text that follows tokens which stay as they are, such as an observation after
        an action.
        """
        # A prepending tokenizer would write a space before text tokenised alone, so put a character before it
        # and take that one's tokens away again.
        for sentinel in _SENTINELS:
            alone, both = self._plain(sentinel), self._plain(sentinel + text)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self._plain(text)

    def encode_example(self, example: Example) -> tuple[list[int], list[bool]]:
        """Returns ``(input_ids, loss_mask)`` of equal length for SFT: completions and assistant turns carry loss, with
        their end-of-text token, and nothing else does. Of a document everything does but the first token, which nothing
        predicts; token ids stay as they are.
        """
        if isinstance(example, Conversation):
            return self.encode_conversation(example.messages)
        if isinstance(example, TextDocument):
            ids = self._encode_text(example.text)
            if ids and ids[-1] not in self.eos_ids:
                ids = [*ids, self.eos_id]
            if len(ids) < 2:
                raise UserError("the text has nothing to learn from", found=repr(example.text), remedy="remove the row")
            return ids, [False] + [True] * (len(ids) - 1)
        if isinstance(example, Tokenised):
            # Only ids that the tokenizer has; the model has a row for each of those.
            unknown = next((n for n, token in enumerate(example.input_ids) if not 0 <= token < self._num_ids), None)
            if unknown is not None:
                raise UserError(
                    "a token id is not in the vocabulary",
                    found=f"id {example.input_ids[unknown]} at place {unknown} of `input_ids`; the ids end at "
                    f"{self._num_ids - 1}",
                    remedy="use data that were tokenised for this model, or text",
                )
            return list(example.input_ids), list(example.loss_mask)
        prompt_ids, completion_ids = self.encode_completion(example.prompt, example.completion)
        return prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids)

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Returns ``(input_ids, loss_mask)`` of a conversation whose assistant turns carry loss.

        Those with ``train`` False do not. A template with ``{% generation %}`` marks decides itself. Otherwise the
        conversation is rendered turn by turn; loss begins behind the generation prompt and ends with the turn's
        end-of-text token, which is appended where the template writes none after the last turn. Turns after the last
        that is learned are left out.

        Raises:
            UserError: no assistant turn, one before any other turn, or a template that changes earlier text
                when a turn is added.
        """
        messages = templates.until_last_learned(messages)
        if templates.MARKS.search(templates.get_chat_template(self.tokenizer, templates.conversation_tools(messages))):
            ids, mask = templates.encode_with_generation_marks(self.tokenizer, messages)
        else:
            ids, mask = self._turn_by_turn(messages)
        if True not in mask:  # cut off before the answer, see ``limited``
            return ids, mask
        start = len(mask) - 1 - mask[::-1].index(True)
        while start > 0 and mask[start - 1]:
            start -= 1
        if not any(token in self.eos_ids for token in ids[start:]):
            ids, mask = [*ids, self.eos_id], [*mask, True]
        return ids, mask

    def render(
        self, messages: Messages, *, generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Writes messages as the chat template does."""
        return templates.render_messages(
            self.tokenizer, messages, generation_prompt=generation_prompt, variables=variables
        )

    # Decoding --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the text of whole token ids; special tokens such as end-of-text are left out unless asked for."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)

    def decode_completion(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, whole: bool = False
    ) -> str:
        """Returns what a completion adds to its prompt's text: the text that stop strings, rewards and readers have.

        End-of-text, padding and the unknown token are left out unless ``whole``; other special tokens (``<think>``)
        are text. Decoders of the SentencePiece kind strip the first token's space, so the prompt's end is decoded as
        well.
        """
        if not whole:
            completion_ids = [token for token in completion_ids if token not in self._silent]
        context_ids, context = self._context(prompt_ids)
        joined = self.decode([*context_ids, *completion_ids], skip_special=False)
        if joined.startswith(context):
            return joined[len(context) :]
        return self.decode(completion_ids, skip_special=False)  # its bytes make the prompt's no characters

    def completion_pieces(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds to ``decode_completion``, which is their concatenation."""
        text = self.decode_completion(prompt_ids, completion_ids)
        context, _ = self._context(prompt_ids)
        pieces, place = list[str](), 0
        for token, piece in zip(
            completion_ids, self.token_texts([*context, *completion_ids])[len(context) :], strict=True
        ):
            # Bytes that are no characters may be other replacements among all than by themselves.
            at = -1 if token in self._silent else text.find(piece, place, place + len(piece) + _LONGEST_CHARACTER)
            end = place if at < 0 else at + len(piece)
            pieces.append(text[place:end])
            place = end
        return [*pieces[:-1], pieces[-1] + text[place:]] if pieces else []

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, special tokens included.

        A character spread over several tokens belongs to the token that completes it; the tokens before it add
        ``""``. Bytes that never become a character show as U+FFFD.

        Returns:
            One piece per id; their concatenation is the decoded text wherever its bytes are valid UTF-8.
        """

        def decode(start: int, stop: int) -> str:
            return _decode_window(self.tokenizer, tuple(ids[start:stop]))

        pieces: list[str] = []
        # Decoding starts a little before the new token, because decoders treat the first token differently (they
        # strip its leading space) and join bytes: [start, done) was shown, [done, i] is new.
        start = done = 0
        for i in range(len(ids)):
            shown, text = decode(start, done), decode(start, i + 1)
            held = i + 1 - done
            incomplete = text.endswith(_REPLACEMENT) and held < _LONGEST_CHARACTER and i + 1 < len(ids)
            if incomplete:
                pieces.append("")
                continue
            if not text.startswith(shown):
                text, shown = decode(done, i + 1), ""
            pieces.append(text[len(shown) :])
            start, done = done, i + 1
        return pieces

    @property
    def kept_special(self) -> str:
        """What to tell of special tokens that stand in the text of completions: all but those for no text."""
        kept = sorted(self._special - self._silent)
        names = list(map(str, self.tokenizer.convert_ids_to_tokens(kept[:_NAMED])))
        more = f" and {len(kept) - len(names)} more" if len(kept) > len(names) else ""
        return f"; special tokens that stay in their text: {', '.join(names)}{more}" if names else ""

    # Details ---------------------------------------------------------------------------------------------

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset([*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)])

    @cached_property
    def _silent(self) -> frozenset[int]:
        """End-of-text, padding and the unknown token, which stand for no text."""
        return self._special & (self.eos_ids | {self.tokenizer.pad_token_id, self.tokenizer.unk_token_id})

    def _context(self, prompt_ids: Sequence[int]) -> tuple[Sequence[int], str]:
        """Returns the prompt's last tokens that are text by themselves, and the text; nothing where there are none."""
        silent = self._silent | {self.tokenizer.bos_token_id}
        for start in range(len(prompt_ids) - 1, max(-1, len(prompt_ids) - 1 - _CONTEXT), -1):
            # From the first byte of a character on.
            context = "" if prompt_ids[start] in silent else _decode_window(self.tokenizer, tuple(prompt_ids[start:]))
            if context and _REPLACEMENT not in context:
                return prompt_ids[start:], context
        return (), ""

    @cached_property
    def _num_added_behind(self) -> int:
        """Special tokens that the tokenizer puts behind a text (end-of-text, a separator)."""
        full, plain = self._tokenize("a", special=True), self._tokenize("a", special=False)
        before = next((n for n in range(len(full)) if full[n : n + len(plain)] == plain), len(full) - len(plain))
        return len(full) - len(plain) - before

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        if self.enough is not None and len(text) > (cut := max(_SHORT_TEXT, _LONG_TOKEN * self.enough)):
            beginning = self._tokenize(text[:cut], special=special)
            if len(beginning) > self.enough + _CUT_TOKENS:
                return beginning
        # verbose=False: lengths are checked against the model's context, not the tokenizer's own notion of
        # one.
        try:
            return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        except Exception as error:  # what the tokenizers library raises
            raise UserError(
                "the tokenizer cannot read a text",
                found=f"{str(error) or type(error).__name__}: {text[:40]!r}",
                remedy="give the tokenizer an unknown token (unk_token), or leave such texts out",
            ) from error

    def _plain(self, text: str) -> list[int]:
        return self._tokenize(text, special=False)

    def _encode_text(self, text: str) -> list[int]:
        """Returns the ids of plain text with what the tokenizer adds in front, unless the text begins with it already.

        What it adds behind is cut off: a prompt must not end with end-of-text.
        """
        start = self.tokenizer.bos_token
        if start and text.startswith(start):
            return self._plain(text)
        ids = self._tokenize(text, special=True)
        return ids[: len(ids) - self._num_added_behind]

    def _continue(self, before: list[int], encode: Callable[[str], list[int]], head: str, tail: str) -> list[int]:
        """Returns the ids of ``tail`` after the ids ``before`` of ``head``, which stay as they are."""
        whole = encode(head + tail)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode_continuation(tail)

    @cached_property
    def _num_ids(self) -> int:
        return 1 + max(self.tokenizer.get_vocab().values())

    def _end(self, ids: list[int]) -> list[int]:
        """Returns a turn up to its first end-of-text token, which is added where the template wrote none.

        What templates write behind it (a line break) is never generated, because generation stops there.
        """
        for position, token in enumerate(ids):
            if token in self.eos_ids:
                return ids[: position + 1]
        return [*ids, self.eos_id]

    def _turn_by_turn(self, messages: Messages) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        text = ""
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            head = self.render(messages[:k])
            between = templates.text_after(text, head, f"the text before turn {k + 1}", "the turns before")
            whole = self.render(messages[: k + 1], generation_prompt=False)
            turn = templates.text_after(head, whole, f"turn {k + 1}", "the generation prompt")
            lead = self._continue(ids, self._plain, text, between) if ids else self._plain(between)
            ids, mask = ids + lead, mask + [False] * len(lead)
            answer = self._continue(ids, self._plain, head, turn)
            stop = next((n + 1 for n, token in enumerate(answer) if token in self.eos_ids), len(answer))
            ids, mask = ids + answer, mask + [has_loss(message)] * stop + [False] * (len(answer) - stop)
            text = whole
        return ids, mask
