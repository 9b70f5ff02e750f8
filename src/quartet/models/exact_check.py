"""Whether ``numerics: exact`` holds here: settings it needs, and its three equalities measured with the model's shapes.

Which bits a kernel gives is promised by no library: it depends on the processor, its libraries and their versions. So
nothing is trusted; what the engines rely on is measured before they start, to the bit.

Shapes: M rows, T packed tokens, H query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.config import UserError
from quartet.models.attention import LayerRule
from quartet.models.exact import (
    MIN_ROWS,
    ExactContext,
    ExactPackedAttention,
    additive_mask,
    decode_attention,
    key_length,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel
from quartet.models.packing_probe import model_context_length

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Under these names configs keep the number of experts."""
_LENGTHS = (2, 19, 45)
"""Sequences of the runs of the whole model: fewer than 16 tokens, more, and more than 32."""
_PRODUCT_ROWS = 520
_POSITIONS = (0, 40, 299, 511, 512, 1099)
"""Queries that attention is checked for: in a first block of keys, in a half and a whole one, and behind."""


def check_exact(packed: PackedModel) -> None:
    """Raises unless batch invariance, trainer forward = prefill and decode = prefill hold to the bit.

    Takes about as long as a forward pass over a few hundred tokens.

    Raises:
        UserError: a setting or the architecture rules it out, or an equality fails on this processor.
    """
    _check_settings(packed)
    _check_products(packed.model)
    for shape in _attention_shapes(packed):
        _check_attention(*shape)
    _check_model(packed)


# Settings --------------------------------------------------------------------------------------------------


def _check_settings(packed: PackedModel) -> None:
    dtypes = {parameter.dtype for parameter in packed.model.parameters()}
    if packed.device.type != "cpu":
        raise _refuse(f"a model on {packed.device.type}", "run on the CPU, or with numerics: fast")
    if packed.precision != "fp32" or dtypes != {torch.float32}:
        found = "bf16 products" if packed.precision != "fp32" else f"parameters of {sorted(str(d) for d in dtypes)}"
        raise _refuse(f"{found}: their rounding depends on a batch's size", "set precision: fp32 for every model")
    if torch.get_num_threads() != 1:
        raise _refuse(
            f"{torch.get_num_threads()} threads, over which a product is divided by its size",
            "set threads: 1 (in Python torch.set_num_threads(1)), or use numerics: fast",
        )
    config = packed.model.config.get_text_config()
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        raise _refuse(
            f"{type(packed.model).__name__} has experts: how many rows each gets depends on the whole batch",
            "use numerics: fast, which measures and corrects the difference",
        )


def _refuse(found: str, remedy: str) -> UserError:
    return UserError("numerics: exact cannot be had here", found=found, remedy=remedy)


def _fails(equality: str, found: str) -> UserError:
    capability = torch.backends.cpu.get_cpu_capability()
    return _refuse(
        f"{equality} does not hold on this processor ({capability}, torch {torch.__version__}): {found}",
        "use numerics: fast, which measures and corrects the difference",
    )


# Parts -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _check_products(model: nn.Module) -> None:
    """Rows of each distinct linear layer, among few and among many."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, int, bool]] = set()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module.out_features == 1:
            continue
        shape = (module.in_features, module.out_features, module.bias is not None)
        if shape in seen:
            continue
        seen.add(shape)
        rows = torch.randn(_PRODUCT_ROWS, module.in_features, generator=generator)
        many = module(rows)
        for num_rows in (MIN_ROWS, MIN_ROWS + 1, 33, 257):
            # From the end, where what is left over of many rows is computed.
            if not torch.equal(module(rows[-num_rows:]), many[-num_rows:]):
                raise _fails(
                    "batch invariance",
                    f"a product {shape[0]} → {shape[1]} has other bits for {num_rows} rows than for {_PRODUCT_ROWS}",
                )


class _Recorded(ExactPackedAttention):
    """Keeps the rule, the number of query heads, and keys and values ``[T, Hk, D]`` of every layer."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.layers: dict[int, tuple[LayerRule, int, Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        self.layers[layer] = rule, q.shape[1], k[0].transpose(0, 1), v[0].transpose(0, 1)
        return super().attend(layer, q, k, v, rule)


@torch.no_grad()
def _attention_shapes(packed: PackedModel) -> set[tuple[LayerRule, int, int, int]]:
    """What distinguishes layers: rule, H, Hk, D."""
    context, token = _Recorded([1]), torch.zeros(1, dtype=torch.int64)
    packed.hidden(token, token, context)
    return {(rule, num_heads, k.shape[1], k.shape[2]) for rule, num_heads, k, _ in context.layers.values()}


@torch.no_grad()
def _check_attention(rule: LayerRule, num_heads: int, num_kv: int, size: int) -> None:
    """Queries of a long sequence against those of its beginnings, and against single ones as decode computes them."""
    generator = torch.Generator().manual_seed(0)
    longest = max(_POSITIONS) + 1
    q, k, v = (torch.randn(1, n, longest, size, generator=generator) for n in (num_heads, num_kv, num_kv))
    whole = ExactPackedAttention([longest]).attend(0, q, k, v, rule)
    padding = (0, 0, 0, key_length(longest) - longest)
    keys, values = F.pad(k, padding), F.pad(v, padding)
    kind = f"attention with {num_heads} heads of {size} over {num_kv}"
    for position in _POSITIONS:
        length = position + 1
        part_q, part_k, part_v = (x[:, :, :length] for x in (q, k, v))
        part = ExactPackedAttention([length]).attend(0, part_q, part_k, part_v, rule)
        if not torch.equal(part, whole[:, :, :length]):
            raise _fails("batch invariance", f"{kind} has other bits in a sequence of {length} than in a longer one")
        for num_keys in (key_length(length), key_length(longest)):
            mask = additive_mask(torch.tensor([[position]]), num_keys, rule, q.dtype).unsqueeze(1)
            row = decode_attention(q[:, :, position], keys[:, :, :num_keys], values[:, :, :num_keys], mask, rule)
            if not torch.equal(row, whole[:, :, position]):
                raise _fails("decode = prefill", f"{kind} has other bits for one query at position {position}")


# The whole model -------------------------------------------------------------------------------------------


class _Continued(ExactContext):
    """The last token of each sequence after its stored beginning."""

    def __init__(self, beginnings: _Recorded, lengths: list[int]) -> None:
        self.beginnings = beginnings
        self.lengths = lengths
        self.num_keys = key_length(max(lengths) + 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        num_rows = len(self.lengths)
        keys, values = (
            self._with_last(stored, new[0].transpose(0, 1))
            for stored, new in zip(self.beginnings.layers[layer][2:], (k, v), strict=True)
        )
        mask = additive_mask(torch.tensor(self.lengths).unsqueeze(1), self.num_keys, rule, q.dtype).unsqueeze(1)
        out = decode_attention(q[0].transpose(0, 1)[:num_rows], keys, values, mask, rule)
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[2] - num_rows)).transpose(0, 1).unsqueeze(0)

    def _with_last(self, stored: Tensor, new: Tensor) -> Tensor:
        """``[n, Hk, K, D]``"""
        beginnings = stored[: sum(self.lengths)].split(self.lengths)
        rows = [
            F.pad(torch.cat([part, last.unsqueeze(0)]), (0, 0, 0, 0, 0, self.num_keys - len(part) - 1))
            for part, last in zip(beginnings, new, strict=False)
        ]
        return torch.stack(rows).transpose(1, 2)


def _check_model(packed: PackedModel) -> None:
    limit = model_context_length(packed.model) or max(_LENGTHS)
    lengths = [min(length, limit) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(packed.vocab_size, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        alone = [_run(packed, [s], ExactPackedAttention([len(s)])) for s in sequences]
        together = _run(packed, sequences, ExactPackedAttention(lengths))
        _demand("batch invariance", together, torch.cat(alone))
        before = [length - 1 for length in lengths]
        beginnings = _Recorded(before)
        _run(packed, [s[:-1] for s in sequences], beginnings)
        last, positions = torch.stack([s[-1] for s in sequences]), torch.tensor(before)
        decoded = packed.hidden(last, positions, _Continued(beginnings, before))
        _demand("decode = prefill", decoded, torch.stack([states[-1] for states in alone]))
    with torch.enable_grad():
        trained = _run(packed, sequences, ExactPackedAttention(lengths)).detach()
    _demand("trainer forward = prefill", trained, together)
    if isinstance(packed, PackedCausalLM):
        _check_logprobs(packed, together, torch.cat(sequences))


def _run(packed: PackedModel, sequences: list[Tensor], context: ExactContext) -> Tensor:
    return packed.hidden(torch.cat(sequences), torch.cat([torch.arange(len(s)) for s in sequences]), context)


@torch.no_grad()
def _check_logprobs(packed: PackedCausalLM, hidden: Tensor, labels: Tensor) -> None:
    """The trainer's log-probabilities by chunks against those of each row's logits, as the sampler takes them."""
    temperature = 0.7
    trained, _ = packed.token_logprobs(hidden, labels, temperature=temperature, chunk=2 * MIN_ROWS)
    for rows, ids, found in zip(hidden.split(7), labels.split(7), trained.split(7), strict=True):
        scaled = packed.logits(rows) / temperature
        picked = (scaled - scaled.logsumexp(-1, keepdim=True)).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        _demand("trainer log-probabilities = sampler's", found, picked)


def _demand(equality: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual, expected):
        difference = float((actual - expected).abs().max())
        raise _fails(equality, f"hidden states or log-probabilities of a few tokens differ by up to {difference:.3g}")
