"""Tokenizers from a directory or the hub, and what must hold between tokenizer and model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quartet.config.errors import UserError
from quartet.config.nearest import missing_file_error
from quartet.config.plugins import storage_for
from quartet.config.strict import is_url
from quartet.remote.hub import download_model, split_name

OLDER_MODEL = "older_model"
"""In a ``run.json``: the run goes on to another length, and what it has exported is of the former one."""


def has_older_model(run: Path) -> bool:
    """Tells whether the run in that directory has gone on since it exported its model."""
    marker = run / "run.json"
    return marker.is_file() and bool(json.loads(marker.read_text(encoding="utf-8")).get(OLDER_MODEL))


def resolve_model_directory(name: str | Path, what: str, part: str = "model") -> str:
    """Finds the directory that ``name`` stands for: a local one, or the cache's with a model of the hub, which is
    fetched.

    Args:
        name: a path, or ``owner/name`` or ``owner/name@revision`` of the hub.
        what: ``model``, ``tokenizer``, of which weights are not fetched, or another word for messages.
        part: where it is in a run's directory.

    Raises:
        UserError: a local path that does not exist, or a file; what the hub does not have or give.
    """
    return expand_local_path(name, what, part) or str(download_model(str(name), weights=what != "tokenizer"))


def expand_local_path(name: str | Path, what: str, part: str = "model") -> str | None:
    """Returns ``name`` with ``~`` expanded where it is a path, of a run the model that it has exported, of a URL the
    copy on this machine; None of names of the hub.

    Raises:
        UserError: a local path that does not exist, or a file; a URL that cannot be read.
    """
    text = str(storage_for(str(name)).local_copy() if is_url(name) else name)
    path = Path(text).expanduser()
    if path.is_dir():
        exported = path / part
        if (path / "config.json").is_file():
            return str(path)
        if has_older_model(path):
            raise UserError(
                f"this run has gone on since it exported its {part}",
                found=text,
                remedy=f"let it end first (--resume), or name {exported}, which is the older one",
            )
        if exported.is_dir():  # of a run, or of one that was exported while it trained
            return str(exported)
        if (path / "run.json").is_file():
            remedy = f"let the run end first (--resume), or name a directory with {part}/ in it"
            raise UserError(f"this is a run without a {what}", found=text, remedy=remedy)
        if what == "model" and (path / "manifest.json").is_file():
            raise UserError(
                "this is a checkpoint, from which training goes on",
                found=text,
                remedy=f"make a model of it: quartet export {path} DIR",
            )
        return str(path)
    if path.exists():
        raise UserError(
            f"{text} is not a directory", found=f"a file as {what}", remedy="name the directory that holds it"
        )
    directory, revision = split_name(text)
    if revision is not None and Path(directory).expanduser().exists():
        raise UserError(
            "only models of the hub have revisions",
            found=f"revision {revision} of the local {directory}",
            remedy="leave the revision out, or give the model's name on the hub",
        )
    # A hub name is ``name`` or ``owner/name``; a revision may be refs/pr/1.
    text = directory
    is_path = text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith("/") or "\\" in text
    if is_path:
        raise missing_file_error(f"there is no {what} directory here", path)
    return None


def custom_code_error(error: BaseException, name: str) -> UserError | None:
    """Returns the error for a model or tokenizer that brings its own code, where ``error`` is transformers' refusal of
    it.
    """
    if "trust_remote_code" not in str(error):
        return None
    return UserError(
        f"{name!r} comes with Python code of its own, which would run on this machine with your rights",
        found="trust_remote_code is off",
        remedy="read that code, pin it by `revision`, and set trust_remote_code: true beside the model's path "
        "(--trust-remote-code on the command line); or use a model whose architecture transformers has",
    )


def has_custom_code(value: object) -> bool:
    """Tells whether a model or tokenizer is of a class of its own: from its directory, which was trusted when it was
    loaded, or from Python code that registered it to be saved with its models.
    """
    return type(value).__module__.startswith("transformers_modules") or getattr(value, "_auto_class", None) is not None


def drop_unused_auto_map(file: Path, *saved: object) -> None:
    """Takes the code that a config names (``auto_map``) out of it, where none of what was ``saved`` is of such code:
    transformers carries it from directory to directory, also where nobody has trusted it."""
    if any(map(has_custom_code, saved)):
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    if values.pop("auto_map", None) is not None:
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


PAD_TOKEN = "<|quartet_pad|>"
"""Added to the tokenizers of saved reward models and critics that have no pad token for padding alone."""


def have_same_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Tells whether ids of the one are ids of the other; a pad token that saving added does not count."""
    vocabularies = [{t: i for t, i in each.get_vocab().items() if t != PAD_TOKEN} for each in (tokenizer, other)]
    return vocabularies[0] == vocabularies[1]


_VOCABULARIES = {"tokenizer.json", "tekken.json", "tiktoken.model"}
"""Files that classes read without naming them."""


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory or hub name; with a ``tokenizer.json`` there, texts get that file's ids.

    Args:
        trust_remote_code: run Python code that comes with it, where it needs that.

    Raises:
        UserError: no such directory, no tokenizer in it, one that cannot be read, or a hub name that cannot be fetched.
    """
    source = resolve_model_directory(path, "tokenizer")
    tokenizer = _read_tokenizer(AutoTokenizer, source, trust_remote_code=trust_remote_code)
    own = set(type(tokenizer).vocab_files_names.values())
    # Without files some classes come with a vocabulary of their special tokens alone; a few (bytes) need none.
    if not len(tokenizer) or (own and all(_file(source, name) is None for name in own | _VOCABULARIES)):
        raise UserError(
            "the tokenizer has no vocabulary",
            found=f"{path} has no tokenizer.json",
            remedy="put tokenizer.json and tokenizer_config.json there, or name another `tokenizer:`",
        )
    saved = _file(source, "tokenizer.json")
    found = tokenizer if saved is None else _as_its_file(tokenizer, saved, source)
    if found.chat_template is None and (file := _file(source, "chat_template.json")) is not None:  # of older processors
        found.chat_template = _read(lambda: json.loads(file.read_bytes())["chat_template"], source)
    return found


def _read_tokenizer(reader: Any, source: str, **options: Any) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _read(partial(reader.from_pretrained, source, **options), source)
    return tokenizer


def _read(read: Callable[[], Any], source: str) -> Any:
    try:
        return read()
    # The tokenizers library raises plain exceptions, transformers whatever a broken file leads it to.
    except Exception as error:
        if (refused := custom_code_error(error, source)) is not None:
            raise refused from None
        raise UserError(
            "the tokenizer cannot be loaded",
            found=f"{source}: {_first_line(error)}",
            remedy="put tokenizer.json and tokenizer_config.json there, or name another `tokenizer:`; a lone "
            "tokenizer.model needs sentencepiece and protobuf",
        ) from error


def _file(source: str, name: str) -> Path | None:
    """Finds ``name`` in a directory; None where there is none."""
    file = Path(source, name)
    return file if file.is_file() else None


# As the directory's own file tokenises --------------------------------------------------------------------

PROBE_TEXTS = (
    "Hello, world!",
    " a leading space",
    "  two spaces  inside   three, behind ",
    "lines\n\n  and\ttabs\r\n",
    "\n",
    "Ünïcödé, ﬁne ½ e\u0301 日本語 🙂 ＡＢＣ",
    "12345 3.14159, 1,000,000",
    "don't I'LL we've CamelCase snake_case",
    "def f(x):\n    return x**2  # code",
    "",
)
"""Where normalisers and pre-tokenisers differ, they differ on one of these."""


def _as_its_file(tokenizer: PreTrainedTokenizerBase, file: Path, source: str) -> PreTrainedTokenizerBase:
    """Returns ``tokenizer`` if it gives the ids of ``tokenizer.json``, else that file without the class that changes
    them.

    transformers takes a directory's ``tokenizer_class`` at its word: classes with rules of their own are built from the
    file's vocabulary, with their normaliser and pre-tokeniser in the place of the file's.

    Raises:
        UserError: the file cannot be followed either way.
    """
    theirs: Tokenizer = _read(partial(Tokenizer.from_file, str(file)), source)
    if find_tokenizer_difference(tokenizer, theirs) is None:
        return tokenizer
    known = theirs.get_vocab()
    bare = _read_tokenizer(PreTrainedTokenizerFast, source)
    lost = {"padding_side": tokenizer.padding_side} | {
        name: token
        for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
        if getattr(bare, name) is None and (token := getattr(tokenizer, name)) in known
    }
    plain = _read_tokenizer(PreTrainedTokenizerFast, source, **lost)
    if (text := find_tokenizer_difference(plain, theirs)) is not None:
        raise UserError(
            "the tokenizer does not do what its tokenizer.json says",
            found=f"{source}: {text!r} becomes {_ids(plain, text)[:8]}, by the file {_ids(theirs, text)[:8]}",
            remedy="make tokenizer_config.json agree with tokenizer.json (tokenizer_class, added tokens), or remove it",
        )
    return plain


def find_tokenizer_difference(
    tokenizer: PreTrainedTokenizerBase, other: Tokenizer | PreTrainedTokenizerBase
) -> str | None:
    """Finds the first probe text of which the two make different ids, with or without what they put around
    it, or None.
    """
    special = [token for token in tokenizer.all_special_tokens if token in other.get_vocab()][:20]
    texts = [*PROBE_TEXTS, *(f"a{token} b {token}c" for token in special)]
    for text in texts:
        if any(_ids(tokenizer, text, around) != _ids(other, text, around) for around in (False, True)):
            return text
    return None


def _ids(tokenizer: Tokenizer | PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Returns the ids of ``text``; none where it cannot be tokenised (an unknown word without an unknown token)."""
    try:
        if isinstance(tokenizer, Tokenizer):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return list(tokenizer.encode(text, add_special_tokens=special).ids)
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception:  # what the tokenizers library raises
        return []


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, directory: Path, *, trust_remote_code: bool = False
) -> str | None:
    """Writes it beside a model that is there already, so that plain ``AutoTokenizer`` makes the same ids.

    Args:
        trust_remote_code: that model is of a class of its own, which was trusted.

    Returns:
        None, or which class makes the same ids where ``AutoTokenizer`` does not: for some kinds of models it takes one
        class whatever the directory says.

    Raises:
        UserError: no class makes the same ids of what was written.
    """
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    drop_unused_auto_map(settings, tokenizer)
    read = partial(AutoTokenizer.from_pretrained, directory, trust_remote_code=trust_remote_code)
    if has_custom_code(tokenizer) or find_tokenizer_difference(tokenizer, read()) is None:
        return None
    # Its class has rules of its own, which this object does not follow: the file alone says them.
    values = {**json.loads(settings.read_text(encoding="utf-8")), "tokenizer_class": PreTrainedTokenizerFast.__name__}
    settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    auto = read()
    if (text := find_tokenizer_difference(tokenizer, auto)) is None:
        return None
    reloaded = PreTrainedTokenizerFast.from_pretrained(directory)
    if find_tokenizer_difference(tokenizer, reloaded) is not None:
        raise UserError(
            "the tokenizer cannot be saved as it is",
            found=f"{text!r} is {_ids(tokenizer, text)[:8]}, and {_ids(reloaded, text)[:8]} reloaded from {directory}",
            remedy="pass one whose tokenizer.json says all it does (PreTrainedTokenizerFast); the checkpoint is kept",
        )
    return (
        f"AutoTokenizer reads the saved tokenizer as {type(auto).__name__}, which makes other ids of {text!r}; "
        "load it with PreTrainedTokenizerFast.from_pretrained"
    )


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """Loads the model's generation config (its end-of-text ids), or None where the model has none.

    A model directory may hold only ``config.json``; its end-of-text ids are read from there then.
    """
    source = resolve_model_directory(path, "model")
    for name in ("generation_config.json", "config.json"):
        if not (Path(source) / name).is_file():
            continue
        try:
            found = GenerationConfig.from_pretrained(source, config_file_name=name)
        except Exception as error:  # as many kinds as a file can be broken
            raise _no_generation_config(f"{path}/{name}: {_first_line(error)}") from error
        eos = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id or 0]
        if not all(isinstance(token, int) for token in eos):
            raise _no_generation_config(f"{path}/{name}: eos_token_id {found.eos_token_id!r}")
        return found
    return None


def _no_generation_config(found: str) -> UserError:
    return UserError("the model's generation config cannot be read", found=found, remedy="correct that file")


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
