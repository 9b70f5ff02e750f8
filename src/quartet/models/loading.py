"""Hugging Face directories in and out: causal LMs, and reward models and critics as sequence classification.

A reward model or critic is saved as ``*ForSequenceClassification`` with one label and reloads with plain
``from_pretrained``, with a pad token that no text ends in (``with_pad_token``): transformers
scores at the right-most token that is not ``config.pad_token_id``, whatever the attention mask says.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import logging as transformers_logging

from quartet.batch.pictures import picture_places
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.attention import original_attention
from quartet.models.directories import (
    WHOLE,
    check_finite,
    check_loaded,
    format_names,
    load_warnings,
    load_weights,
    naming_load_errors,
    read_config,
    save_gathered,
)
from quartet.models.packed_model import (
    Numerics,
    PackedCausalLM,
    PackedModel,
    PackedScalarModel,
    Precision,
    Recomputation,
)
from quartet.models.packing_probe import check_exact, has_relative_positions, probe_packing, tiny_random_model
from quartet.remote.hub import split_name
from quartet.text.loading import (
    PAD_TOKEN,
    drop_unused_auto_map,
    has_custom_code,
    load_generation_config,
    resolve_model_directory,
    save_tokenizer,
)

_USUAL = (PAD_TOKEN, "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
"""Special tokens that families keep for padding, whether or not their tokenizer pads with them."""


def with_pad_token(
    tokenizer: PreTrainedTokenizerBase, seen: Tensor, ends: Collection[int] = ()
) -> PreTrainedTokenizerBase:
    """Copies the tokenizer to one that pads, on the right unless told otherwise, with a token that no text ends in.

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
    """Has ``tokenizer`` pad with a token added at the end of its vocabulary."""
    former = tokenizer.get_vocab()
    tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in former.values():
        raise UserError(
            "the reward model's tokenizer needs a pad token, and takes no new one",
            found=f"{type(tokenizer).__name__}; its pad token {tokenizer.pad_token!r} stands for other things too",
            remedy="give the tokenizer a pad token of its own (and the model a row for it), and train with that",
        )
    return tokenizer


@contextlib.contextmanager
def temporary_pad_token(model: PreTrainedModel, pad_id: int, *, adds_rows: bool = True) -> Iterator[int]:
    """Has the model's configs name ``pad_id``, and its embedding have a row for it, in the ``with`` block; then both
    are as they were.

    The new rows are the mean of the others: attention masks keep them out of every result. Gives how many they are.

    Args:
        adds_rows: the embedding gets them; else what saves the model adds them.
    """
    text = model.config.get_text_config()
    # Multimodal configs may keep the pad id in their text part alone.
    holders = [c for c in (text, model.config) if hasattr(c, "pad_token_id")]
    former = [holder.pad_token_id for holder in holders]
    embedding = model.get_input_embeddings()
    weight, size, num_rows = embedding.weight, text.vocab_size, embedding.weight.shape[0]
    missing = pad_id + 1 - num_rows
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
        text.vocab_size, embedding.num_embeddings = size, num_rows


_OTHER_HEADS = ("score", "classifier", "qa_outputs")
"""Heads of classes that are no language models."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and load tables out of our output; errors still raise."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def load_causal_lm(path: str, *, empty: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads the causal LM at ``path`` in fp32 (master weights), in evaluation mode.

    Args:
        empty: on the meta device, made from config.json and the headers of the weights; contents are not read.
        trust_remote_code: run Python code that comes with the model, where transformers lacks its architecture.

    Raises:
        UserError: not a model, one whose weights do not fit its config, or one without a language-model head (a reward
            model, say): transformers would quietly take embeddings or random numbers for it.
    """
    source = resolve_model_directory(path, "model")
    trust = {"trust_remote_code": trust_remote_code}
    with _quiet(), naming_load_errors(path, "causal language model"):
        config = read_config(source, **trust)
        model, info = load_weights(_causal_class(config), source, config, empty=empty, **trust)
        generation = load_generation_config(source)
        if empty and generation is not None:  # else read beside the weights
            model.generation_config = generation
    stray = sorted(key for key in info["unexpected_keys"] if key.split(".")[0] in _OTHER_HEADS)
    if stray or info["missing_keys"]:
        raise UserError(
            f"{path!r} is not a causal language model",
            found=f"its weights lack {format_names(info['missing_keys'])}"
            if info["missing_keys"]
            else f"a head {stray}",
            remedy="name a whole directory of a language model (what `quartet sft` or `quartet rl` calls model/)",
        )
    check_loaded(model, path, info)
    return _named(model, path).eval()


def _named(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Gives the model its name on the hub, where it is from there, in place of a directory of this machine's cache."""
    if not Path(path).expanduser().is_dir():
        model.name_or_path = model.config.name_or_path = split_name(path)[0]
    return model


def load_on_meta(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Makes the causal LM that config.json at ``path`` describes, on the meta device; weights need not be there.

    Raises:
        UserError: it describes none.
    """
    trust = {"trust_remote_code": trust_remote_code}
    with _quiet(), naming_load_errors(path, "causal language model"), torch.device("meta"):
        config = read_config(resolve_model_directory(path, "model"), **trust)
        outline: PreTrainedModel = _causal_class(config).from_config(config, **trust)
    return outline


def _causal_class(config: PreTrainedConfig) -> Any:
    """Returns the auto class of a causal LM, or of a vision-language model where transformers has no other for it."""
    with_pictures = type(config) in AutoModelForImageTextToText._model_mapping
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if with_pictures and not known else AutoModelForCausalLM


def _know_scalar_class(config: PreTrainedConfig) -> None:
    """Has ``AutoModelForSequenceClassification`` of this process know vision-language models, of which transformers
    has no such class: body and head, named as in its own classes.
    """
    kinds = AutoModelForSequenceClassification._model_mapping
    if getattr(config, "vision_config", None) is None or type(config) in kinds:
        return
    body = AutoModel._model_mapping[type(config)]
    family = next(kind for kind in body.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = body.__name__.removesuffix("Model") + "ForSequenceClassification"
    made = type(name, (GenericForSequenceClassification, family), {"config_class": type(config)})
    AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)


def load_scalar_model(path: str, *, empty: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads the reward model or critic at ``path`` in fp32; arguments as of ``load_causal_lm``.

    Raises:
        UserError: the directory holds no scalar head (a causal LM, say), more than one label, or no whole model.
    """
    source = resolve_model_directory(path, "model")
    trust = {"trust_remote_code": trust_remote_code}
    with _quiet(), naming_load_errors(path, "sequence-classification model"):
        config = read_config(source, **trust)
        if config.num_labels != 1:
            raise UserError(
                f"{path!r} is not a reward model",
                found=f"architectures {config.architectures}, num_labels {config.num_labels}",
                remedy="train one with `quartet reward-model`, or save a sequence-classification model with one label",
            )
        _know_scalar_class(config)
        model, info = load_weights(AutoModelForSequenceClassification, source, config, empty=empty, **trust)
    if info["missing_keys"]:
        raise UserError(
            f"{path!r} is not a reward model",
            found=f"its weights lack {format_names(info['missing_keys'])}",
            remedy="train one with `quartet reward-model`",
        )
    check_loaded(model, path, info)
    return _named(model, path).eval()


def scalar_model_from(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Makes a sequence-classification model with the body of ``model`` (copied) and a zero-mean head drawn from
    ``seed``.

    Head entries have standard deviation ``1 / (hidden size + 1)``, so that first scores are near 0.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    _know_scalar_class(config)
    made = torch.device("meta") if model.device.type == "meta" else contextlib.nullcontext()
    with _quiet(), torch.random.fork_rng(devices=[]), made:
        torch.manual_seed(seed)
        try:
            # The body may be held, and its config may name another dtype than its weights have.
            scalar = AutoModelForSequenceClassification.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=original_attention(model),
                trust_remote_code=has_custom_code(model),
            )
            head = scalar.score
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"{type(model).__name__} has no sequence-classification class with a head `score`",
                found=str(error).splitlines()[0],
                remedy="use an architecture that has one (docs/models.md lists them) for reward model and critic",
            ) from error
    body = getattr(model, model.base_model_prefix)
    getattr(scalar, scalar.base_model_prefix).load_state_dict(body.state_dict())
    with torch.no_grad():
        head.weight.copy_(init_scalar_head(head.weight.shape, seed))
    vars(scalar)["quartet_load_remarks"] = load_warnings(model)
    return scalar.float().eval()


def init_scalar_head(shape: torch.Size, seed: int) -> Tensor:
    """Draws the head ``[1, D]`` of a new scalar model; entries have standard deviation ``1 / (D + 1)``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (shape[1] + 1)


_P = TypeVar("_P", bound=PackedModel)


def _take_over(
    kind: type[_P],
    model: PreTrainedModel,
    precision: Precision = "fp32",
    *,
    numerics: Numerics = "fast",
    activation_checkpointing: Recomputation = False,
    lora: LoRAConfig | None = None,
    seed: int = 0,
) -> _P:
    """Takes ``model`` over for packed runs as a ``kind``, after probing it; ``release`` gives it back as it was.

    Args:
        lora: train adapters, whose first factors are drawn from ``seed``, instead of all weights but a scalar head.

    Raises:
        UserError: the architecture is refused by the probe, or by the check of exact numerics.
    """
    packed = kind(model, precision, numerics=numerics, activation_checkpointing=activation_checkpointing)
    try:
        if lora is not None:
            packed.adapt(lora, seed=seed)
        if packed.device.type == "meta":
            _probe_tiny_model(packed)
            return packed
        # Fresh adapters add zeros, which would hide what they do to the bits.
        with packed.adapters.stirred() if packed.adapters is not None else contextlib.nullcontext():
            probe_packing(packed)
            # Measured now: a model that is saved may be away from its device.
            packed.relative_positions = has_relative_positions(packed)
            if packed.numerics == "exact":
                check_exact(packed)
    except BaseException as error:
        packed.release()
        if isinstance(error, UserError):
            check_finite(model, model.name_or_path or type(model).__name__)  # which no check of results survives
        raise
    return packed


packed_causal_lm = partial(_take_over, PackedCausalLM)
"""Takes over a policy or its reference; arguments as for ``_take_over``, without ``kind``."""
packed_scalar_model = partial(_take_over, PackedScalarModel)
"""The same of a reward model or critic."""


def _probe_tiny_model(packed: PackedModel) -> None:
    """Probes a small random model of the same architecture, and takes over what was found out about it.

    The process that loads the weights probes the model itself.
    """
    tiny = tiny_random_model(packed.model)
    if tiny is None:
        return
    lora = packed.adapters.config.model_copy(update={"rank": 1}) if packed.adapters is not None else None
    small = _take_over(type(packed), tiny, lora=lora)
    packed.shares_prefixes, packed.unshared_because = small.shares_prefixes, small.unshared_because
    packed.relative_positions = small.relative_positions
    if packed.tower is not None and small.tower is not None:
        packed.tower.unsupported = small.tower.unsupported
    if isinstance(packed, PackedCausalLM) and isinstance(small, PackedCausalLM):
        packed.logit_scale = small.logit_scale


# Saving --------------------------------------------------------------------------------------------------


def save_causal_lm(
    packed: PackedCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path, *, eos_ids: Collection[int] = ()
) -> str | None:
    """Writes a directory that plain ``AutoModelForCausalLM.from_pretrained`` loads.

    Adapters are merged into it, or saved beside it in ``adapter_path(path)``, or both, as their ``export`` says. All
    ranks of a sharded model call it, and the first one writes.

    Args:
        eos_ids: ids at which answers end, which its generation config names, too.

    Returns:
        None, or a warning for users of the directory.
    """
    with _stopping_at(packed.model, eos_ids):
        return _save(packed, tokenizer, path)


@contextlib.contextmanager
def _stopping_at(model: PreTrainedModel, eos_ids: Collection[int]) -> Iterator[None]:
    """Has the generation config name all of ``eos_ids`` in the ``with`` block, so that plain ``generate`` stops at
    them.
    """
    config = model.generation_config
    former = config.eos_token_id if config is not None else None
    named_ids = former if isinstance(former, list | tuple) else [] if former is None else [former]
    if config is None or not (more := sorted(set(eos_ids) - set(named_ids))):
        yield
        return
    ids = [*named_ids, *more]
    config.eos_token_id = ids if len(ids) > 1 else ids[0]
    try:
        yield
    finally:
        config.eos_token_id = former


def adapter_path(path: Path) -> Path:
    """Returns where the adapters of the model saved at ``path`` go: ``adapter`` beside ``model``, ``critic_adapter``
    beside ``critic``.
    """
    return path.with_name("adapter" if path.name == "model" else f"{path.name}_adapter")


def saved_paths(packed: PackedModel, path: Path) -> tuple[Path, ...]:
    """Returns the directories that saving ``packed`` at ``path`` writes."""
    beside = adapter_path(path)
    export = packed.adapters.config.export if packed.adapters is not None else "merged"
    return {"merged": (path,), "adapter": (beside,), "both": (path, beside)}[export]


def _save(packed: PackedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, num_new_rows: int = 0) -> str | None:
    """
    Args:
        num_new_rows: that the embedding of a sharded model gets while it is written.
    """
    warning, gather = None, packed.gather
    with _quiet():
        for written in saved_paths(packed, path):
            if gather.is_first:
                written.mkdir(parents=True, exist_ok=True)  # transformers only logs that a file has its name
            if packed.adapters is not None and written != path:
                packed.adapters.save(written, gather)
            elif gather is not WHOLE:
                save_gathered(packed, path, gather, num_new_rows=num_new_rows)
            else:
                with packed.with_merged_adapters():
                    packed.model.save_pretrained(path)
            if gather.is_first:
                if (config := written / "config.json").is_file():
                    drop_unused_auto_map(config, packed.model, packed.model.config)
                trust = has_custom_code(packed.model)
                warning = save_tokenizer(tokenizer, written, trust_remote_code=trust) or warning
    return warning


def load_saved_model(path: Path, load: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Loads the model that ``save_causal_lm`` or ``save_scalar_model`` has written at ``path``, in evaluation mode.

    Args:
        load: of its kind, ``load_causal_lm`` or ``load_scalar_model``.

    Raises:
        UserError: it is not there any more, or only its adapters were saved.
    """
    if adapter_path(path).is_dir() and not path.is_dir():
        raise UserError(
            "the trained model was not saved as a whole",
            found=f"lora.export: adapter, so {adapter_path(path)} holds its adapters alone",
            remedy="load the base model and PeftModel.from_pretrained on top of it, or set lora.export to both",
        )
    return load(str(path))


def save_scalar_model(
    packed: PackedScalarModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    seen: Tensor,
    eos_ids: Collection[int] = (),
) -> str | None:
    """Writes a directory that ``AutoModelForSequenceClassification.from_pretrained`` loads with the same outputs for
    texts alone and in batches that the tokenizer saved beside it pads. Adapters are saved as by ``save_causal_lm``.

    Args:
        seen: ``[V]`` bool, token ids that occurred in data.
        eos_ids: ids at which answers end, beside the tokenizer's own.

    Returns:
        None, or a warning for users of the directory.

    Raises:
        UserError: the tokenizer has no token to pad with, and takes no new one.
    """
    padded = with_pad_token(tokenizer, seen, {*eos_ids, *_config_eos_ids(packed.model)})
    pad_id, num_rows = int(padded.pad_token_id), packed.model.get_input_embeddings().weight.shape[0]
    with temporary_pad_token(packed.model, pad_id, adds_rows=packed.gather is WHOLE) as num_new_rows:
        warning = _save(packed, padded, path, num_new_rows=num_new_rows)
    warnings = [warning] if warning is not None else []
    if pad_id >= num_rows:
        warnings.append(f"saved with a new pad token, {padded.pad_token} (id {pad_id}), and an embedding row for it")
    if saved_paths(packed, path) != (path,):
        rows = f"model.resize_token_embeddings({pad_id + 1}) and " if pad_id >= num_rows else ""
        warnings.append(f"to score batches by the adapter, call {rows}set model.config.pad_token_id = {pad_id} first")
    if type(packed.model).__module__ == __name__:
        warnings.append(f"transformers has no {type(packed.model).__name__}: load_scalar_model of Quartet loads it")
    if not packed.relative_positions:
        warnings.append("its positions are counted from the left, so pad batches on the right, as its tokenizer does")
    return "; ".join(warnings) or None


def _config_eos_ids(model: PreTrainedModel) -> set[int]:
    found = getattr(model.config.get_text_config(), "eos_token_id", None)
    return set(found) if isinstance(found, list | tuple) else set() if found is None else {int(found)}


def seen_token_mask(vocab_size: int, batches: Iterator[Tensor]) -> Tensor:
    """Returns ``[V]`` bool: ids that occur in any of the id tensors, besides places of pictures."""
    seen = torch.zeros(vocab_size, dtype=torch.bool)
    for ids in batches:
        seen[ids[~picture_places(ids)]] = True
    return seen
