"""The pad token of a saved reward model or critic: one that no text ends in, the same for its config and tokenizer.

transformers scores a sequence-classification model at the right-most token that is not ``config.pad_token_id``,
whatever the attention mask says. A pad token that ends texts (end-of-text, the unknown token) would move the score to
an earlier token, and one that the tokenizer does not pad with would leave it on the padding.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Collection, Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.config import UserError
from quartet.text.loading import PAD_TOKEN

_USUAL = (PAD_TOKEN, "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
"""Special tokens that families keep for padding, whether or not their tokenizer pads with them."""


def with_pad_token(
    tokenizer: PreTrainedTokenizerBase, seen: Tensor, ends: Collection[int] = ()
) -> PreTrainedTokenizerBase:
    """A copy that pads, on the right unless told otherwise, with a token that no text ends in.

    That is its own pad token where it serves for nothing else, else a special token kept for padding, else a new one.

    Args:
        seen: ``[V]`` bool, token ids that occurred in data.
        ends: ids that texts may end in, beside the tokenizer's own special tokens.

    Raises:
        UserError: it has no such token and takes no new one.
    """
    padded = copy.deepcopy(tokenizer)
    padded.padding_side = "right"
    names = [name for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES if name != "pad_token"]
    taken = {getattr(tokenizer, f"{name}_id") for name in names} | set(ends) | set(seen.nonzero().flatten().tolist())
    known = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    own = {tokenizer.pad_token: tokenizer.pad_token_id} if tokenizer.pad_token_id is not None else {}
    for token, i in [*own.items(), *((name, known[name]) for name in _USUAL if name in known)]:
        if i not in taken:
            padded.pad_token = token
            return padded
    return _with_new_token(padded)


def _with_new_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """``tokenizer`` padding with a token added at the end of its vocabulary, or in a gap of it."""
    former = tokenizer.get_vocab()
    name = next(n for n in (PAD_TOKEN, *(f"<|quartet_pad_{k}|>" for k in range(len(former)))) if n not in former)
    tokenizer.add_special_tokens({"pad_token": name})
    if tokenizer.pad_token_id in former.values():
        # The library numbers new tokens by how many there are, also where ids have gaps.
        _move_token(tokenizer, name, max(former.values()) + 1)
    ids = tokenizer.get_vocab()
    new_id = ids.pop(name, None)
    if new_id is None or new_id != tokenizer.pad_token_id or ids != former or new_id in former.values():
        raise UserError(
            "the reward model's tokenizer needs a pad token, and takes no new one",
            found=f"{type(tokenizer).__name__}; its pad token {tokenizer.pad_token!r} stands for other things too",
            remedy="give the tokenizer a pad token of its own (and the model a row for it), and train with that",
        )
    return tokenizer


def _move_token(tokenizer: PreTrainedTokenizerBase, name: str, new_id: int) -> None:
    """Gives the added token ``name`` another id, through the serialised form: the library has no call for it."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return
    state = json.loads(backend.to_str())
    if not isinstance(state["model"].get("vocab"), dict):
        return
    state["model"]["vocab"][name] = new_id
    for token in state["added_tokens"]:
        if token["content"] == name:
            token["id"] = new_id
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


@contextlib.contextmanager
def padding_with(model: PreTrainedModel, pad_id: int, *, adds_rows: bool = True) -> Iterator[int]:
    """Within, the model's configs name ``pad_id``, and its embedding has a row for it; then both are as they were.

    The new rows are the mean of the others: attention masks keep them out of every result. Gives how many they are.

    Args:
        adds_rows: the embedding gets them; else what saves the model adds them.
    """
    text = model.config.get_text_config()
    # Multimodal configs may keep the pad id in their text part alone.
    holders = [c for c in (text, model.config) if hasattr(c, "pad_token_id")]
    former = [holder.pad_token_id for holder in holders]
    embedding = model.get_input_embeddings()
    weight, size, num_embeddings = embedding.weight, text.vocab_size, embedding.num_embeddings
    missing = pad_id + 1 - weight.shape[0]
    try:
        for holder in holders:
            holder.pad_token_id = pad_id
        if missing > 0 and adds_rows:
            rows = weight.detach().mean(0, keepdim=True).expand(missing, -1)
            embedding.weight = nn.Parameter(torch.cat([weight.detach(), rows]), requires_grad=False)
        if missing > 0:
            text.vocab_size = embedding.num_embeddings = pad_id + 1
        yield max(0, missing)
    finally:
        for holder, own in zip(holders, former, strict=True):
            holder.pad_token_id = own
        if embedding.weight is not weight:
            embedding.weight = weight
        text.vocab_size, embedding.num_embeddings = size, num_embeddings
