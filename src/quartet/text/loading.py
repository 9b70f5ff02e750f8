"""Tokenizers from a directory or the hub, and what must hold between tokenizer and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from quartet.config.errors import UserError
from quartet.config.nearest import missing_file


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a local path: a hub name is ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def local_or_hub(name: str | Path, what: str) -> str:
    """``name`` with ``~`` expanded, after checking that a local path is a directory.

    Raises:
        UserError: a local path that does not exist, or a file.
    """
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise UserError(f"the {what} is not a directory", found=text, remedy="name the directory that holds it")
    if looks_like_path(text):
        raise missing_file(f"there is no {what} directory here", path)
    return text


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name.

    Raises:
        UserError: no such directory, no tokenizer in it, or a hub name that cannot be fetched.
    """
    source = local_or_hub(path, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        found = f"{path}: {_first_line(error)}"
        if Path(source).is_dir():
            remedy = "put tokenizer.json and tokenizer_config.json there, or name another `tokenizer:`"
        else:
            remedy = "check the name and the network, or give a local directory"
        raise UserError("the tokenizer cannot be loaded", found=found, remedy=remedy) from error
    if not len(tokenizer):
        raise UserError(
            "the tokenizer has no vocabulary",
            found=str(path),
            remedy="put tokenizer.json there, or name another `tokenizer:`",
        )
    return tokenizer


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """The model's generation config (its end-of-text ids), or None where the model has none.

    A model directory may hold only ``config.json``; its end-of-text ids are read from there then.
    """
    source = local_or_hub(path, "model")
    for name in ("generation_config.json", "config.json"):
        is_local = Path(source).is_dir()
        if is_local and not (Path(source) / name).is_file():
            continue
        try:
            return GenerationConfig.from_pretrained(source, config_file_name=name)
        except (OSError, ValueError) as error:
            if not is_local:  # a hub model without that file
                continue
            raise UserError(
                "the model's generation config cannot be read",
                found=f"{path}/{name}: {_first_line(error)}",
                remedy="correct that file",
            ) from error
    return None


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuses a tokenizer that can emit ids which the model has no embedding row for.

    Args:
        vocab_size: rows of the model's input embedding; more than the tokenizer has is fine (padding of the
            matrix).

    Raises:
        UserError: with the largest such token.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise UserError(
            "the tokenizer does not fit the model",
            found=f"token {token!r} has id {largest}, the model's embedding has {vocab_size} rows",
            remedy="use the model's own tokenizer, or resize the model's embeddings and save it",
        )


def _first_line(error: BaseException) -> str:
    text: Any = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
