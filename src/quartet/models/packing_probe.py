"""What a model must show before it is trusted on packed sequences.

Some architectures accept an attention function and never call it, others let sequences bleed into each other, take
positions from the order of their input, or scale and cap the logits after the head. All of that is silent, so it is
measured at load with a few tokens: three sequences that share their beginnings run side by side, then as one tree, and
both are compared with each sequence alone through the unmodified model.

Where the model itself is not loaded the probe runs a small random one of its architecture (``tiny_random_model``). It
has every type of layer that the config names, in the model's order, with the real ratio of query to key/value heads and
the real factors and caps; widths, vocabulary and windows are small, and all weights are drawn at random.

``check_exact`` says whether ``numerics: exact`` holds here: settings it needs, and its three equalities measured with
the model. Which bits a kernel gives is promised by no library: it depends on the processor, its libraries and
their versions. So nothing is trusted; what the engines rely on is measured before they start, to the bit.

Shapes: M rows, T or P packed tokens, L tokens of one sequence, n sequences, H query heads, Hk key/value heads,
D head size.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quartet.batch.pictures import picture_ids, picture_places
from quartet.config import UserError
from quartet.models import attention
from quartet.models.attention import (
    AttentionParams,
    NoContextError,
    PackedAttention,
    RecordedAttention,
    masked_attention,
    original_attention,
    visibility_mask,
)
from quartet.models.exact import (
    MIN_ROWS,
    ExactContext,
    ExactPackedAttention,
    additive_mask,
    decode_attention,
    padded_key_length,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel
from quartet.models.vision import ImageFeatures, ImageTower

_LENGTHS = (5, 3, 4, 2, 3)
_PARENTS = (-1, 0, 0, 2, 2)
"""A root with two children, of which the second forks once more: sequences of 8, 11 and 12 tokens."""

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Under these names configs keep a factor of the logits; some families multiply by it, others divide."""


def probe_packing(packed: PackedModel) -> float:
    """Compares packed runs with single ones: hidden states and, of a causal LM, logits.

    Hidden states show sequences that bleed whatever the head (a fresh one may be near 0); logits show what the
    model does after its head. Where only the tree is wrong, ``packed`` is told to run without shared prefixes.
    Positions beyond which the rotary embedding would follow the longest sequence of a pack are refused from here on.

    Returns:
        The largest difference among what is used, relative to the largest output.

    Raises:
        UserError: the architecture is refused by name, with what was measured or what it failed with.
    """
    with _measuring(packed):
        return _measure(packed)


def _measure(packed: PackedModel) -> float:
    _bound_positions(packed)
    chains = _chains()
    ids, positions = _tokens(packed)
    sequences = [ids[rows] for rows in chains]
    rows = torch.cat(chains)
    side_by_side = RecordedAttention([len(chain) for chain in chains])
    hidden = packed.hidden(ids[rows], positions[rows], side_by_side)
    num_calls, num_layers = len(side_by_side.calls), int(packed.model.config.get_text_config().num_hidden_layers)
    if num_calls != num_layers:
        raise _refuse(packed, f"the attention function was called {num_calls} times for {num_layers} layers")
    alone, logits = _alone(packed, sequences)
    difference = _difference(hidden, torch.cat(alone))
    _demand(packed, "hidden states", difference)
    _check_leak(packed, hidden, ids[rows], positions[rows], [len(chain) for chain in chains])
    if isinstance(packed, PackedCausalLM) and logits is not None:
        difference = max(difference, _check_logits(packed, hidden[: len(chains[0])], logits))
    if packed.tower is not None:
        packed.tower.unsupported = _pictures_fail(packed, packed.tower)
    tree = _difference(packed.hidden(ids, positions, PackedAttention(_LENGTHS, _PARENTS))[rows], torch.cat(alone))
    if tree <= _tolerance(packed, sharing=True):
        return max(difference, tree)
    packed.shares_prefixes = False
    packed.unshared_because = f"with a shared prompt its hidden states differ by {tree:.3g} of the largest"
    return difference


def check_decoding(packed: PackedModel) -> float:
    """Checks that the model can go on from stored keys and values token by token; implied where prefixes are shared.

    Returns:
        The difference from whole sequences, relative to the largest hidden state.

    Raises:
        UserError: it cannot, so it can be trained but not sampled.
    """
    ids, positions = _tokens(packed)
    chains = _chains()
    before = torch.cat([rows[:-1] for rows in chains])
    last = torch.stack([rows[-1] for rows in chains])
    prefixes = RecordedAttention([len(rows) - 1 for rows in chains])
    with _measuring(packed):
        packed.hidden(ids[before], positions[before], prefixes)
        hidden = packed.hidden(ids[last], positions[last], _Continued(prefixes))
        alone, _ = _alone(packed, [ids[rows] for rows in chains])
    difference = _difference(hidden, torch.stack([states[-1] for states in alone]))
    if not difference <= _tolerance(packed):
        raise UserError(
            f"{type(packed.model).__name__} cannot be sampled by the native engine",
            found=f"continued one token at a time its hidden states differ by {difference:.3g} of the largest from "
            "those of whole sequences, as if it ignored position_ids",
            remedy="use an architecture that takes its positions from position_ids",
        )
    return difference


# Positions -----------------------------------------------------------------------------------------------


def has_relative_positions(packed: PackedModel) -> bool:
    """Tells whether a sequence may begin at any position, as it does in a batch that is padded on the left."""
    ids, positions = _tokens(packed)
    (rows, *_) = _chains()
    with _measuring(packed):
        hidden = packed.hidden(ids[rows], positions[rows], PackedAttention([len(rows)]))
        shifted = packed.hidden(ids[rows], positions[rows] + 1, PackedAttention([len(rows)]))
    return _difference(shifted, hidden) <= _tolerance(packed)


def model_context_length(model: PreTrainedModel) -> int | None:
    """Returns the longest sequence in tokens that the model's positions allow in packed runs; None where nothing limits
    it.
    """
    config = model.config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), _stable_positions(config))
    return min((int(limit) for limit in limits if limit), default=None)


def _stable_positions(config: PreTrainedConfig) -> int | None:
    """Returns the positions for which the rotary frequencies do not depend on the longest sequence of the forward pass.

    "longrope" (Phi-3) changes to its long factors for the whole input as soon as one position passes the original
    context, "dynamic" stretches its base beyond the context. Within these bounds both are fixed, and ``generate`` and
    a packed run agree; beyond, one sequence would change all the others of its pack, and itself while it grows.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Families with local and global layers keep one set for each kind.
    sets = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    limits: list[int] = []
    for parameters in sets:
        if parameters.get("rope_type") == "longrope":
            limits.append(int(parameters.get("original_max_position_embeddings", config.max_position_embeddings)))
        elif parameters.get("rope_type") == "dynamic":
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


_BOUNDED = "quartet_has_bounded_positions"


def _bound_positions(packed: PackedModel) -> None:
    if _stable_positions(packed.model.config.get_text_config()) is None:
        return
    # Copies of a model bring their hooks with them, and this mark.
    if not getattr(packed.body, _BOUNDED, False):
        setattr(packed.body, _BOUNDED, True)
        packed.body.register_forward_pre_hook(_refuse_unstable, with_kwargs=True)


def _refuse_unstable(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses packed runs that are too long for the rotary embedding: a hook of the body, which stays there and lets
    other runs pass.
    """
    position_ids = kwargs.get("position_ids")
    if kwargs.get("quartet_attention") is None or position_ids is None or not isinstance(body, PreTrainedModel):
        return
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    limit = _stable_positions(body.config.get_text_config())
    longest = int(position_ids.max()) + 1
    if limit is not None and longest > limit:
        raise UserError(
            f"{type(body).__name__} cannot run a sequence of {longest} tokens packed",
            found=f"its rotary embedding is the same for all sequences only up to {limit} tokens",
            remedy=f"keep prompt and response within {limit} tokens together (shorter prompts, max_new_tokens)",
        )


# Runs ----------------------------------------------------------------------------------------------------


def _chains() -> list[Tensor]:
    """Returns for each sequence of the tree the rows ``[L]`` of its tokens."""
    starts = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS))]
    rows: list[Tensor] = []
    for length, start, parent in zip(_LENGTHS, starts, _PARENTS, strict=True):
        own = torch.arange(start, start + length)
        rows.append(torch.cat([rows[parent], own]) if parent >= 0 else own)
    return [chain for i, chain in enumerate(rows) if i not in _PARENTS]


def _tokens(packed: PackedModel) -> tuple[Tensor, Tensor]:
    """Returns the ids and positions ``[P]`` of the tree."""
    ids = (torch.arange(sum(_LENGTHS)) * 7 + 3) % packed.vocab_size
    positions = torch.empty_like(ids)
    for chain in _chains():
        positions[chain] = torch.arange(len(chain))
    return ids.to(packed.device), positions.to(packed.device)


def _alone(packed: PackedModel, sequences: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Computes hidden states of each sequence through the model's own attention, and a causal LM's logits
    of the first.
    """
    attention.uninstall_attention(packed.model)
    try:
        hidden = [_one(packed.body, sequence).last_hidden_state.squeeze(0) for sequence in sequences]
        logits = _one(packed.model, sequences[0]).logits.squeeze(0) if isinstance(packed, PackedCausalLM) else None
        return hidden, logits
    finally:
        attention.install_attention(packed.model)


def _one(module: nn.Module, sequence: Tensor) -> Any:
    ids = sequence.unsqueeze(0)
    return module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _check_leak(packed: PackedModel, hidden: Tensor, ids: Tensor, positions: Tensor, lengths: list[int]) -> None:
    """Checks that other tokens in the first sequence leave the rest as it was, to the bit but for kernels that regroup
    rows.

    Sharper than the comparison with single runs: a fresh model barely mixes its tokens, and so bleeds below rounding.
    """
    first = lengths[0]
    other = torch.cat([(ids[:first] + packed.vocab_size // 2) % packed.vocab_size, ids[first:]])
    moved = (packed.hidden(other, positions, PackedAttention(lengths)).float() - hidden.float()).abs()
    leak = float(moved[first:].max()) / max(float(moved[:first].max()), 1e-30)
    if not leak <= _tolerance(packed) / 100:
        raise _refuse(packed, f"a packed sequence moves its neighbours by {leak:.3g} of what it moves itself")


def _check_logits(packed: PackedCausalLM, hidden: Tensor, theirs: Tensor) -> float:
    ours = packed.logits(hidden)
    if not _difference(ours, theirs) <= _tolerance(packed):
        packed.logit_scale = _logit_scale(packed.model.config.get_text_config(), ours, theirs)
        ours = packed.logits(hidden)
    difference = _difference(ours, theirs)
    _demand(packed, "logits", difference)
    return difference


def _logit_scale(config: PreTrainedConfig, ours: Tensor, theirs: Tensor) -> float:
    """Returns the factor between ``ours`` and ``theirs`` (measured) as the config states it; 1 where there is none."""
    measured = float((ours.double() * theirs.double()).sum() / ours.double().square().sum().clamp_min(1e-30))
    stated = [float(value) for name in _SCALES if (value := getattr(config, name, None))]
    factors = [*stated, *(1 / value for value in stated)]
    return min(factors, key=lambda factor: abs(factor - measured), default=1.0)


_GRID = (1, 2, 3)


def _pictures_fail(packed: PackedModel, tower: ImageTower) -> str | None:
    """Compares a sequence with a picture with what the model itself makes of it; the tower, which may be large, is
    left out: both get random features.

    Returns:
        What is wrong; None where nothing is.
    """
    generator = torch.Generator().manual_seed(0)
    vision, width = packed.model.config.vision_config, packed.model.config.get_text_config().hidden_size
    num_deep, num_rows = len(getattr(vision, "deepstack_visual_indexes", None) or ()), _GRID[1] * _GRID[2]
    weight = next(packed.body.parameters())
    rows, *deep = (
        torch.randn(num_rows, width, generator=generator).to(weight.device, weight.dtype) for _ in range(1 + num_deep)
    )
    ids = [3, 10, *picture_ids(0, num_rows), 17, 24]
    features = ImageFeatures(rows, torch.stack(deep) if deep else None, _GRID if tower.has_axes else None)
    try:
        theirs = _with_own_merge(packed, tower, torch.tensor(ids, device=weight.device), rows, deep)
        with tower.with_features({0: features}):
            positions, _ = tower.positions(ids, 0)
            ours = packed.hidden(torch.tensor(ids), positions.to(weight.device), PackedAttention([len(ids)]))
    except MemoryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        line = next(iter(str(error).strip().splitlines()), "no message")
        return f"a forward pass with a picture failed with {type(error).__name__}: {line}"
    difference = _difference(ours, theirs)
    if difference <= _tolerance(packed):
        return None
    return f"with a picture its hidden states differ by {difference:.3g} of the largest"


def _with_own_merge(packed: PackedModel, tower: ImageTower, ids: Tensor, rows: Tensor, deep: list[Tensor]) -> Tensor:
    """Computes hidden states ``[L, D]`` by the model's own way of putting features into a sequence."""
    base, mask = tower.base, picture_places(ids).unsqueeze(0)
    merged = int(getattr(packed.model.config.vision_config, "spatial_merge_size", 1))
    grid = torch.tensor([[_GRID[0], _GRID[1] * merged, _GRID[2] * merged]], device=ids.device)
    given = {
        "image_grid_thw": grid,
        "image_sizes": torch.ones(1, 2, dtype=torch.int64),
        "mm_token_type_ids": mask.int(),
        "token_type_ids": mask.int(),
    }
    known = inspect.signature(type(base).forward).parameters
    # Families differ in whether these are listed by pictures.
    forms: list[Any] = [[rows], rows.unsqueeze(0)]
    attention.uninstall_attention(packed.model)
    try:
        while True:
            output = SimpleNamespace(pooler_output=forms.pop(0), deepstack_features=[[layer] for layer in deep])
            base.get_image_features = lambda *_, output=output, **__: output
            try:
                found: Tensor = base(
                    input_ids=ids.masked_fill(mask[0], tower.placeholder_id).unsqueeze(0),
                    pixel_values=rows.new_zeros(1, 3, 1, 1),
                    use_cache=False,
                    **{name: value for name, value in given.items() if name in known},
                ).last_hidden_state.squeeze(0)
                return found
            except AttributeError:
                if not forms:
                    raise
    finally:
        vars(base).pop("get_image_features", None)
        attention.install_attention(packed.model)


class _Continued:
    """One new token of each recorded sequence, which sees that sequence and itself."""

    def __init__(self, former: RecordedAttention) -> None:
        self._sizes = former.tree.lengths
        self._stored = {layer: (k, v) for layer, k, v, _ in former.calls}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        keys, values = (stored.split(self._sizes, 2) for stored in self._stored[layer])
        out = []
        for i, size in enumerate(self._sizes):
            new = slice(i, i + 1)
            positions = torch.arange(size + 1, device=q.device)
            mask = visibility_mask(positions[-1:], positions, rule)
            seen_k, seen_v = torch.cat([keys[i], k[:, :, new]], 2), torch.cat([values[i], v[:, :, new]], 2)
            out.append(masked_attention(q[:, :, new], seen_k, seen_v, mask, rule))
        return torch.cat(out, 2)


# Judgement -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _measuring(packed: PackedModel) -> Iterator[None]:
    """Runs the model without gradients in the precision of its weights; what it fails with in the ``with`` block
    refuses the architecture by name.
    """
    precision, packed.precision = packed.precision, "fp32"
    try:
        with torch.no_grad():
            yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except NoContextError as error:
        # The run was given one, so it was lost on the way.
        found = "its layers keep the attention context, a keyword argument, from their attention"
        raise _refuse(packed, found) from error
    except Exception as error:  # a model's own code may raise anything
        line = next(iter(str(error).strip().splitlines()), "no message")
        found = f"a forward pass of a few tokens failed with {type(error).__name__}: {line}"
        raise _refuse(packed, found) from error
    finally:
        packed.precision = precision


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference, relative to the largest of ``theirs``; not a number where either is
    not finite.
    """
    return float((ours.float() - theirs.float()).abs().max()) / max(float(theirs.abs().max()), 1e-30)


def _tolerance(packed: PackedModel, *, sharing: bool = False) -> float:
    # Half-precision weights round differently in the two paths; fp32 leaves only the order of summation.
    if next(packed.model.parameters()).dtype not in (torch.float32, torch.float64):
        return 0.1
    # To share wrongly is worse than to run unshared, to refuse wrongly worse than either.
    return 1e-4 if sharing else 1e-3


def _demand(packed: PackedModel, name: str, difference: float) -> None:
    tolerance = _tolerance(packed)
    if not difference <= tolerance:
        raise _refuse(
            packed, f"packed and single {name} differ by {difference:.3g} of the largest, more than {tolerance:.3g}"
        )


def _refuse(packed: PackedModel, found: str) -> UserError:
    return UserError(
        f"{type(packed.model).__name__} cannot be trained or sampled on packed sequences",
        found=found,
        remedy="use an architecture whose attention goes through transformers' attention interface "
        "(docs/models.md lists those that the tests prove)",
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Under these names configs keep the number of experts."""
_EXACT_LENGTHS = (2, 45, 300, 530)
"""Sequences, each the beginning of the next: fewer than 16 tokens, more, half a block of keys, more than a block."""


def check_exact(packed: PackedModel) -> None:
    """Raises unless batch invariance, trainer forward = prefill and decode = prefill hold to the bit.

    Takes about as long as forward passes over three thousand tokens.

    Raises:
        UserError: a setting or the architecture rules it out, or an equality fails on this processor.
    """
    _check_settings(packed)
    limit = model_context_length(packed.model) or max(_EXACT_LENGTHS)
    lengths = [min(length, limit) for length in _EXACT_LENGTHS]
    longest = torch.randint(packed.vocab_size, (lengths[-1],), generator=torch.Generator().manual_seed(0))
    sequences = [longest[:length] for length in lengths]
    with torch.no_grad():
        alone = [_run(packed, [s], ExactPackedAttention([len(s)])) for s in sequences]
        _demand_equal("batch invariance", torch.cat([alone[-1][:length] for length in lengths]), torch.cat(alone))
        before = [length - 1 for length in lengths]
        beginnings = _Recorded(before)
        _run(packed, [s[:-1] for s in sequences], beginnings)
        last, positions = torch.stack([s[-1] for s in sequences]), torch.tensor(before)
        decoded = packed.hidden(last, positions, _ContinuedExactly(beginnings, before))
        _demand_equal("decode = prefill", decoded, torch.stack([states[-1] for states in alone]))
    with torch.enable_grad():
        trained = _run(packed, sequences, ExactPackedAttention(lengths)).detach()
    _demand_equal("trainer forward = prefill", trained, torch.cat(alone))
    if isinstance(packed, PackedCausalLM):
        _check_logprobs(packed, trained, torch.cat(sequences))


def _check_settings(packed: PackedModel) -> None:
    dtypes = {parameter.dtype for parameter in packed.model.parameters()}
    if packed.device.type != "cpu":
        raise _refuse_exact(f"a model on {packed.device.type}", "run on the CPU, or with numerics: fast")
    if packed.precision != "fp32" or dtypes != {torch.float32}:
        found = "bf16 products" if packed.precision != "fp32" else f"parameters of {sorted(str(d) for d in dtypes)}"
        raise _refuse_exact(f"{found}: their rounding depends on a batch's size", "set precision: fp32 for every model")
    if torch.get_num_threads() != 1:
        raise _refuse_exact(
            f"{torch.get_num_threads()} threads, over which a product is divided by its size",
            "set threads: 1 (in Python torch.set_num_threads(1)), or use numerics: fast",
        )
    config = packed.model.config.get_text_config()
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        raise _refuse_exact(
            f"{type(packed.model).__name__} has experts: how many rows each gets depends on the whole batch",
            "use numerics: fast, which measures and corrects the difference",
        )


def _refuse_exact(found: str, remedy: str) -> UserError:
    return UserError("numerics: exact cannot be had here", found=found, remedy=remedy)


def _fails(equality: str, found: str) -> UserError:
    capability = torch.backends.cpu.get_cpu_capability()
    return _refuse_exact(
        f"{equality} does not hold on this processor ({capability}, torch {torch.__version__}): {found}",
        "use numerics: fast, which measures and corrects the difference",
    )


class _Recorded(ExactPackedAttention):
    """Keeps keys and values ``[T, Hk, D]`` of every layer."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        self.layers[layer] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        return super().attend(layer, q, k, v, rule)


class _ContinuedExactly(ExactContext):
    """The last token of each sequence after its stored beginning."""

    def __init__(self, beginnings: _Recorded, lengths: list[int]) -> None:
        self.beginnings = beginnings
        self.lengths = lengths
        self.num_keys = padded_key_length(max(lengths) + 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        num_rows = len(self.lengths)
        keys, values = (
            self._with_last(stored, new[0].transpose(0, 1))
            for stored, new in zip(self.beginnings.layers[layer], (k, v), strict=True)
        )
        mask = additive_mask(torch.tensor(self.lengths).unsqueeze(1), self.num_keys, rule, q.dtype).unsqueeze(1)
        out = decode_attention(q[0].transpose(0, 1)[:num_rows], keys, values, mask, rule)
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[2] - num_rows)).transpose(0, 1).unsqueeze(0)

    def _with_last(self, stored: Tensor, new: Tensor) -> Tensor:
        """Returns ``[n, Hk, K, D]``, stored and new."""
        beginnings = stored[: sum(self.lengths)].split(self.lengths)
        rows = [
            F.pad(torch.cat([part, last.unsqueeze(0)]), (0, 0, 0, 0, 0, self.num_keys - len(part) - 1))
            for part, last in zip(beginnings, new, strict=False)
        ]
        return torch.stack(rows).transpose(1, 2)


def _run(packed: PackedModel, sequences: list[Tensor], context: ExactContext) -> Tensor:
    return packed.hidden(torch.cat(sequences), torch.cat([torch.arange(len(s)) for s in sequences]), context)


@torch.no_grad()
def _check_logprobs(packed: PackedCausalLM, hidden: Tensor, labels: Tensor) -> None:
    """Compares the trainer's log-probabilities by chunks with those of each row's logits, as the sampler takes them."""
    temperature = 0.7
    trained, _ = packed.token_logprobs(hidden, labels, temperature=temperature, chunk=2 * MIN_ROWS)
    for rows, ids, found in zip(hidden.split(7), labels.split(7), trained.split(7), strict=True):
        scaled = packed.logits(rows) / temperature
        picked = (scaled - scaled.logsumexp(-1, keepdim=True)).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        _demand_equal("trainer log-probabilities = sampler's", found, picked)


def _demand_equal(equality: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual, expected):
        difference = float((actual - expected).abs().max())
        raise _fails(equality, f"hidden states or log-probabilities of a few tokens differ by up to {difference:.3g}")


MAX_PARAMETERS = 20_000_000
_WINDOW = 4
"""Tokens: shorter than the probe's sequences, so that windows cut something off."""
_HEAD_DIM = 16
_INITIALIZER_RANGE = 0.2
"""Of widths around 32: attention and soft caps then do something, which fresh models' do not."""
_MOST = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "sliding_window": _WINDOW, "num_experts_per_tok": 2,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(_EXPERTS, 4),
    # Layers with a state instead of attention.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
"""Sizes that may be this small whatever the others are; smaller ones stay."""


def tiny_random_model(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel | None:
    """Makes a model of ``model``'s class of at most ``MAX_PARAMETERS``; None where sizes do not shrink so simply.

    Args:
        model: its weights are not read, so it may be on the meta device.
        seed: of all weights.
    """
    kind, attention_name = type(model), original_attention(model)
    config = copy.deepcopy(model.config)
    try:
        _shrink(config)
        with torch.device("meta"):
            outline = kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention_name)
        if sum(parameter.numel() for parameter in outline.parameters()) > MAX_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            tiny: PreTrainedModel = kind._from_config(
                config, dtype=torch.float32, attn_implementation=attention_name
            ).eval()
            for parameter in tiny.parameters():
                # Norms start as ones and biases as zeros, where a mix-up would not show.
                if parameter.ndim <= 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
            # Sizes that do not go together may show only now.
            tiny(input_ids=torch.arange(2 * _WINDOW).unsqueeze(0), use_cache=False)
        return tiny
    except MemoryError:
        raise
    except Exception:  # families check sizes each in its own way
        return None


def _shrink(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    depth, kinds = text.num_hidden_layers, list(getattr(text, "layer_types", None) or ())
    num_layers = min(depth, max([2, *(1 + kinds.index(kind) for kind in set(kinds))]))
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    _shrink_heads(text)
    for name, most in _MOST.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            setattr(text, name, most)
    if (vision := getattr(config, "vision_config", None)) is not None:
        vision.num_hidden_layers = vision.depth = 1
        if hasattr(vision, "spatial_merge_size"):  # the tower does not run, but counts among the parameters
            setattr(vision, "embed_dim" if hasattr(vision, "embed_dim") else "hidden_size", 4 * vision.num_heads)
        config.image_token_id = text.vocab_size - 1
    if hasattr(text, "initializer_range"):
        text.initializer_range = _INITIALIZER_RANGE
    # Ids beyond the small vocabulary stand for nothing.
    for name, value in list(vars(text).items()):
        if name.endswith("_token_id") and value is not None:
            setattr(text, name, None)


def _shrink_heads(text: PreTrainedConfig) -> None:
    """Leaves as many query heads for a key/value head as before; the width in proportion."""
    heads, width = int(text.num_attention_heads), int(text.hidden_size)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    former = int(getattr(text, "head_dim", None) or width // heads)
    share, size = heads // groups, min(former, _HEAD_DIM)
    few = min(groups, 4 if share <= 2 else 2)
    text.num_attention_heads = few * share
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = few
    if isinstance(getattr(text, "head_dim", None), int):
        text.head_dim = size
    # Where heads together are wider or narrower than the model, the tiny model's are too.
    ratio = 1 if heads * former == width else 2 if width > heads * former else 0.5
    text.hidden_size = int(few * share * size * ratio)
    # Lists of one number for each rotated pair.
    rope = getattr(text, "rope_parameters", None) or {}
    for name, value in rope.items():
        if isinstance(value, list) and name.endswith("_factor"):
            rope[name] = value[: max(1, len(value) * size // former)]
        elif name == "mrope_section":  # how many pairs follow each axis
            rope[name] = [number * size // former for number in value]
