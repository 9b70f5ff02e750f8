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
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from quartet.batch.pictures import collapsed, is_later_row
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
from quartet.text.pictures import PictureCodec, PictureStore, PlacedPicture, image_parts, text_model_error
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
        pictures: of a vision-language model: how pictures in messages become ids, and ids a mark in texts.
    """

    tokenizer: PreTrainedTokenizerBase
    model_eos_ids: tuple[int, ...] = ()
    enough: int | None = None
    pictures: PictureCodec | None = None
    no_pictures: UserError | None = None
    """Why there are none, once a prompt has one."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        generation_config: GenerationConfig | None = None,
        pictures: PictureCodec | UserError | None = None,
    ) -> TextCodec:
        """Makes a codec over objects that exist already; of ``pictures`` it may be known why they cannot be read."""
        eos = getattr(generation_config, "eos_token_id", None)
        ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),)
        if isinstance(pictures, UserError):
            return cls(tokenizer, ids, no_pictures=pictures)
        return cls(tokenizer, ids, pictures=pictures)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        *,
        trust_remote_code: bool = False,
        pictures: PictureStore | None = None,
    ) -> TextCodec:
        """Loads the codec of a model directory or hub name; ``tokenizer`` and the template's file where they are
        others.

        Args:
            pictures: of a run, where a vision-language model's are to be those.
        """
        own = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
        reads = PictureCodec.of(model, pictures, trust_remote_code=trust_remote_code)
        return cls.of(with_template(own, chat_template, {}), load_generation_config(model), reads)

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
            pictures = self.placed(prompt)
            ids = self._encode_rendered(self._render(prompt, pictures, variables=variables), pictures)
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
        pictures = self.placed(prompt)
        head = self._render(prompt, pictures)
        whole = self._render([*prompt, answer_turn(completion)], pictures, generation_prompt=False)
        text = templates.text_after(head, whole, "the conversation with its answer", "the prompt")
        encode = partial(self._encode_rendered, pictures=pictures)
        return prompt_ids, self._end(self._continue(prompt_ids, encode, head, text))

    def encode_continuation(self, text: str, pictures: Sequence[PlacedPicture] = ()) -> list[int]:
        """Returns the ids of text that follows tokens which stay as they are, such as an observation after
        an action.

        Args:
            pictures: that the text shows.
        """
        # A prepending tokenizer would write a space before text tokenised alone, so put a character before it
        # and take that one's tokens away again.
        for sentinel in _SENTINELS:
            alone, both = self._plain(sentinel), self._plain(sentinel + text, pictures)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self._plain(text, pictures)

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
            ids, mask = self._by_marks(messages)
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
        """Writes messages as the chat template does, with one mark for each picture."""
        pictures = self.placed(messages)
        return self._render(messages, pictures, generation_prompt=generation_prompt, variables=variables)

    def placed(self, messages: Messages) -> list[PlacedPicture]:
        """Returns the pictures of messages.

        Raises:
            UserError: there are some that cannot be used, or any for a model that reads text alone.
        """
        if self.pictures is not None:
            return self.pictures.placed(messages)
        if image_parts(messages):
            raise self.no_pictures or text_model_error(self.tokenizer.name_or_path or type(self.tokenizer).__name__)
        return []

    def _render(
        self,
        messages: Messages,
        pictures: Sequence[PlacedPicture],
        *,
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes messages; ``pictures`` are theirs, perhaps with others behind."""
        messages = self._for_template(messages)
        text = templates.render_messages(
            self.tokenizer, messages, generation_prompt=generation_prompt, variables=variables
        )
        if self.pictures is None:
            return text
        return self.pictures.shown(text, pictures[: len(image_parts(messages))])

    def _for_template(self, messages: Messages) -> Messages:
        """Returns messages as the template takes them: some want parts, and of content that is text write nothing."""
        if self.pictures is None:
            return messages
        return [templates.in_parts(message, takes_text=self._takes_text) for message in messages]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the chat template writes content that is text."""
        turns = [{"role": role, "content": f"({role})"} for role in ("user", "assistant")]
        try:
            text = templates.render_messages(self.tokenizer, turns, generation_prompt=False)
        except UserError:
            return False
        return all(turn["content"] in text for turn in turns)

    # Decoding --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the text of whole token ids, with one mark for each picture; special tokens such as end-of-text are
        left out unless asked for."""
        ids = self._collapsed(ids)
        if skip_special and self.pictures is not None and (mark := self.pictures.processor.placeholder_id) in ids:
            ids = [token for token in ids if token == mark or token not in self._special]
            skip_special = False
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)

    def _collapsed(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns ids with a mark for each picture."""
        return ids if self.pictures is None else collapsed(ids, self.pictures.processor.placeholder_id)

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
            One piece per id; their concatenation is the decoded text wherever its bytes are valid UTF-8. The first row
            of a picture adds its mark, the others add ``""``.
        """
        own, ids = ids, self._collapsed(ids)

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
        if len(own) == len(ids):
            return pieces
        left = iter(pieces)
        return ["" if is_later_row(token) else next(left) for token in own]

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
        prompt_ids = self._collapsed(prompt_ids[-_CONTEXT:])
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

    def _plain(self, text: str, pictures: Sequence[PlacedPicture] = ()) -> list[int]:
        return self._with_pictures(text, pictures, special=False)

    def _with_pictures(self, text: str, pictures: Sequence[PlacedPicture], *, special: bool) -> list[int]:
        """Tokenises a text; the ids of ``pictures`` stand where it shows them."""
        if self.pictures is None:
            return self._tokenize(text, special=special)
        ids = self._tokenize(self.pictures.written(text, pictures), special=special)
        is_beginning = self.enough is not None and len(ids) > self.enough
        return ids if is_beginning else self.pictures.place(ids, pictures)

    def _encode_text(self, text: str, pictures: Sequence[PlacedPicture] = ()) -> list[int]:
        """Returns the ids of plain text with what the tokenizer adds in front, unless the text begins with it already.

        What it adds behind is cut off: a prompt must not end with end-of-text.
        """
        start = self.tokenizer.bos_token
        if start and text.startswith(start):
            return self._plain(text, pictures)
        ids = self._with_pictures(text, pictures, special=True)
        return ids[: len(ids) - self._num_added_behind]

    def _encode_rendered(self, text: str, pictures: Sequence[PlacedPicture]) -> list[int]:
        """Returns the ids of what a chat template wrote, as they are or, of vision-language models, with what the
        tokenizer adds in front: so do their processors.
        """
        return self._plain(text) if self.pictures is None else self._encode_text(text, pictures)

    def _continue(
        self,
        before: list[int],
        encode: Callable[[str], list[int]],
        head: str,
        tail: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[int]:
        """Returns the ids of ``tail``, which shows ``pictures``, after the ids ``before`` of ``head``, which stay."""
        whole = encode(head + tail)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode_continuation(tail, pictures)

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

    def _by_marks(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Returns ids and mask by the template's marks.

        Raises:
            UserError: the processor writes more for a picture than its mark, which the template knows nothing of.
        """
        pictures = self.placed(messages)
        ids, mask = templates.encode_with_generation_marks(self.tokenizer, self._for_template(messages))
        if self.pictures is None:
            return ids, mask
        if odd := [picture.written for picture in pictures if picture.written != self.pictures.processor.placeholder]:
            raise UserError(
                "a chat template with {% generation %} marks cannot be used with the pictures of this model",
                found=f"the processor writes {odd[0][:80]!r} for a picture",
                remedy="use a template without marks",
            )
        start = self._encode_text("")
        start = start if ids[: len(start)] != start else []
        num_rows = iter([picture.runs[0] for picture in pictures])
        is_mark = [token == self.pictures.processor.placeholder_id for token in ids]
        ids = self.pictures.place(ids, pictures)
        spread = [
            each
            for is_one, learned in zip(is_mark, mask, strict=True)
            for each in [learned] * (next(num_rows) if is_one else 1)
        ]
        return [*start, *ids], [*([False] * len(start)), *spread]

    def _turn_by_turn(self, messages: Messages) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        text = ""
        pictures, num_before = self.placed(messages), 0
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            num = len(image_parts(messages[:k]))
            encode = partial(self._encode_rendered, pictures=pictures[:num])
            head = self._render(messages[:k], pictures)
            between = templates.text_after(text, head, f"the text before turn {k + 1}", "the turns before")
            whole = self._render(messages[: k + 1], pictures, generation_prompt=False)
            turn = templates.text_after(head, whole, f"turn {k + 1}", "the generation prompt")
            lead = self._continue(ids, encode, text, between, pictures[num_before:num]) if ids else encode(between)
            ids, mask, num_before = ids + lead, mask + [False] * len(lead), num
            answer = self._continue(ids, encode, head, turn)
            stop = next((n + 1 for n, token in enumerate(answer) if token in self.eos_ids), len(answer))
            ids, mask = ids + answer, mask + [has_loss(message)] * stop + [False] * (len(answer) - stop)
            text = whole
        return ids, mask
