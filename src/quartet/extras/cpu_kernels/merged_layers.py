"""A decoder layer of the common kind as few operations, for engine steps in fp32 on the CPU.

Shapes: R rows (tokens), D hidden, H query heads, Hk key/value heads, Dh head size, I inner width of the MLP.

With a few dozen rows a layer's products take hundreds of microseconds and everything else, some hundred calls of a few
microseconds, as much again. ``MergedLayer`` gives a decoder layer a forward with one product for queries, keys and
values, one for gate and up-projection, the rotary embedding of queries and keys at once, and everything after a product
in its memory. Attention stays the context's.

What is recognised is decided by names (those of Llama, which most families follow) and then by computing: a copy of the
layer with random weights must agree with its own forward. Other layers stay as they are.

Products of few rows with weights in the order that a kernel of the CPU reads.

Shapes: D inputs, O outputs.

Which form each weight of an engine has: in fp32 on the CPU large ones in the order that kernels read, small ones
transposed (``benchmarks/products.py`` compares), and layers of the common kind as fewer operations.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.extras.cpu_kernels.fused import SignedSin
from quartet.models.attention import AttentionContext, AttentionParams, PackedAttention, RecordedAttention
from quartet.models.lora import AdaptedLayer
from quartet.models.packed_model import PackedCausalLM, decoder_layers
from quartet.rollout.compute_dtype_weights import Adapted, CopySource, Form, WeightCopy, convert_parameters, keep_dtype

MIN_PACKED = 2**17
"""Numbers of a weight from which on a packed product is quicker than a transposed one."""
MAX_TRANSPOSED_INPUTS = 768
"""On one thread, sums over more numbers than this take another order in a transposed product, and one that depends on
the number of rows; a request would then get other bits alone than in a batch."""


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def packed_for(num_rows: int) -> Form:
    """Makes the form in the blocks that oneDNN's kernel reads for products of about ``num_rows`` rows.

    A row's bits do not depend on the number of rows, from two rows on, whatever the number of threads.
    """
    return partial(torch.ops.mkldnn._reorder_linear_weight, batch_size=num_rows)


def is_packed_best(num_numbers: int) -> bool:
    """Tells whether a packed product of an fp32 weight on the CPU can be had and is quicker."""
    mkldnn = torch.backends.mkldnn
    return num_numbers >= MIN_PACKED and bool(mkldnn.is_available() and mkldnn.enabled)


def plain_form(num_inputs: int) -> Form:
    """Returns the transposed form where that gives a row the same bits in any batch, else the weight as it is."""
    return transposed if num_inputs <= MAX_TRANSPOSED_INPUTS or torch.get_num_threads() > 1 else keep_dtype


def product(weight: Tensor | None, x: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + bias``: ``[..., D] → [..., O]``."""
    assert weight is not None
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


class PackedProduct(WeightCopy):
    """The weight of a linear layer in the blocks that oneDNN's kernel reads; the module gets another forward."""

    def __init__(self, module: nn.Linear, num_rows: int, layer: AdaptedLayer | None = None) -> None:
        self._module: Any = module
        super().__init__([module], [CopySource(module.weight, layer)], [packed_for(num_rows)])

    def put_in(self) -> None:
        self._module.forward = self._forward

    def take_out(self) -> None:
        # The instance's attribute goes, and the class's method shows again.
        del self._module.forward

    def _forward(self, x: Tensor) -> Tensor:
        return product(self.tensors[0], x, self._module.bias)


_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class MergedLayers:
    """Finds layers of the common kind; each kind is compared with its own forward once."""

    def __init__(self) -> None:
        self._agrees: dict[Hashable, bool] = {}
        self._signed_sin = SignedSin()

    def merge(self, layer: nn.Module, num_rows: int, adapted: Mapping[nn.Module, AdaptedLayer]) -> MergedLayer | None:
        """Makes the merged layer; None where ``layer`` is of another kind.

        Args:
            num_rows: rows that most products have.
            adapted: adapters by the linear layer that they add to; they are out of the model now.
        """
        if not _has_the_parts(layer):
            return None
        rule = _rule_of(layer)
        if rule is None:
            return None
        key = (rule, *((name, type(part), part.extra_repr()) for name, part in layer.named_modules()))
        if key not in self._agrees:
            self._agrees[key] = self._compare(layer, rule)
        return MergedLayer(layer, rule, num_rows, adapted, self._signed_sin) if self._agrees[key] else None

    @torch.no_grad()
    def _compare(self, layer: nn.Module, rule: AttentionParams) -> bool:
        """Tells whether a copy with random weights gives the same merged and on its own."""
        twin = copy.deepcopy(layer)
        generator = torch.Generator().manual_seed(0)
        for parameter in twin.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.normal_(generator=generator).mul_(scale)
        hidden, angles = _example(twin, 7, generator)
        expected = _own(twin, hidden, angles, PackedAttention([7]))
        merged = MergedLayer(twin, rule, 7, {}, self._signed_sin)
        merged.put_in()
        try:
            found = _own(twin, hidden, angles, PackedAttention([7]))
        finally:
            merged.take_out()
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


class MergedLayer(WeightCopy):
    """Holds the layer's weights in the forms of its products; the layer gets another forward."""

    def __init__(
        self,
        layer: nn.Module,
        rule: AttentionParams,
        num_rows: int,
        adapted: Mapping[nn.Module, AdaptedLayer],
        signed_sin: SignedSin,
    ) -> None:
        self._layer: Any = layer
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self._rule = rule
        self._signed_sin = signed_sin
        self._head_size = int(attention.head_dim)
        self._parts: tuple[list[nn.Linear], ...] = (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )
        linears = [linear for part in self._parts for linear in part]
        numels = [sum(linear.weight.numel() for linear in part) for part in self._parts]
        forms = [
            packed_for(num_rows) if is_packed_best(numel) else plain_form(part[0].in_features)
            for numel, part in zip(numels, self._parts, strict=True)
        ]
        self._num_heads = [attention.q_proj.out_features // self._head_size]
        self._num_heads += [attention.k_proj.out_features // self._head_size] * 2
        self._former: Any = None
        sources = [CopySource(linear.bias) for linear in linears if linear.bias is not None]
        sources += [CopySource(linear.weight, adapted.get(linear)) for linear in linears]
        super().__init__(linears, sources, forms)

    def _read(self) -> Iterator[Tensor]:
        values = super()._read()
        self._biases = [
            None if part[0].bias is None else torch.cat([next(values) for _ in part]) for part in self._parts
        ]
        return (_joined([next(values) for _ in part]) for part in self._parts)

    def put_in(self) -> None:
        # Activation checkpointing puts a forward of its own on the instance.
        self._former = vars(self._layer).get("forward")
        self._layer.forward = self._forward

    def take_out(self) -> None:
        if self._former is None:
            del self._layer.forward
        else:
            self._layer.forward = self._former

    def _forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        quartet_attention: AttentionContext,
        **_: Any,
    ) -> Tensor:
        """Maps ``[1, R, D] → [1, R, D]``."""
        layer, hidden = self._layer, hidden_states.squeeze(0)
        attended = self._attend(layer.input_layernorm(hidden), position_embeddings, quartet_attention)
        hidden = self._product(1, attended).add_(hidden)
        gate, up = self._product(2, layer.post_attention_layernorm(hidden)).tensor_split(2, -1)
        return self._product(3, F.silu(gate).mul_(up)).add_(hidden).unsqueeze(0)

    def _product(self, i: int, x: Tensor) -> Tensor:
        return product(self.tensors[i], x, self._biases[i])

    def _attend(self, x: Tensor, angles: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
        """Maps ``[R, D] → [R, H Dh]``."""
        attention, heads = self._layer.self_attn, self._num_heads
        qkv = self._product(0, x).view(len(x), sum(heads), self._head_size)
        qk = qkv[:, : heads[0] + heads[1]]
        if hasattr(attention, "q_norm"):
            q, k = qk.split(heads[:2], 1)
            qk = torch.cat([attention.q_norm(q), attention.k_norm(k)], 1)
        cos, signed = angles[0].transpose(0, 1), self._signed_sin(angles[1]).transpose(0, 1)
        qk = (qk * cos).addcmul_(qk.roll(self._head_size // 2, -1), signed)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (*qk.split(heads[:2], 1), qkv[:, -heads[2] :]))
        out = context.attend(attention.layer_idx, q, k, v, self._rule)
        return out.squeeze(0).transpose(0, 1).reshape(len(x), -1)


def _joined(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


# Recognition ---------------------------------------------------------------------------------------------


def _has_the_parts(layer: Any) -> bool:
    """Tells whether the layer has the parts of the common kind, and nothing else."""
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    own = {name for name, _ in attention.named_children()}
    if own not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or {name for name, _ in mlp.named_children()} != _MLP:
        return False
    linears = [getattr(attention, name) for name in sorted(_ATTENTION)]
    linears += [getattr(mlp, name) for name in sorted(_MLP - {"act_fn"})]
    groups = ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
    return (
        all(type(linear) is nn.Linear and "forward" not in vars(linear) for linear in linears)
        and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in layer.parameters())
        and all(len({linear.bias is None for linear in group}) == 1 for group in groups)
        and isinstance(getattr(attention, "head_dim", None), int)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


@torch.no_grad()
def _rule_of(layer: nn.Module) -> AttentionParams | None:
    """Returns what the layer asks of its context; None where it cannot be called as layers of the common kind are."""
    context = RecordedAttention([1])
    try:
        _own(layer, *_example(layer, 1, torch.Generator().manual_seed(0)), context)
    except (RuntimeError, TypeError):
        return None
    rules = [rule for _, _, _, rule in context.calls]
    return rules[-1] if rules else None


def _example(layer: Any, num_rows: int, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Draws random hidden states ``[1, R, D]`` and angles ``[1, R, Dh]`` twice alike, as a rotary embedding
    gives them.
    """
    hidden = torch.randn(1, num_rows, layer.self_attn.q_proj.in_features, generator=generator)
    half = torch.randn(1, num_rows, layer.self_attn.head_dim // 2, generator=generator)
    angles = torch.cat((half, half), -1)
    return hidden, (angles.cos(), angles.sin())


def _own(layer: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor], context: PackedAttention) -> Tensor:
    out: Tensor = layer(
        hidden_states=hidden, attention_mask=None, position_embeddings=angles, quartet_attention=context
    )
    return out


def copies(packed: PackedCausalLM, adapted: Adapted, num_rows: int, in_place: bool) -> Iterator[WeightCopy]:
    """Yields the copies of what computes in fp32 on the CPU.

    Args:
        adapted: adapters by the layer that they add to.
        num_rows: rows that most products have.
        in_place: nothing else uses the model.
    """
    if packed.precision != "fp32":
        return
    done: set[nn.Module] = set()
    if packed.device.type == "cpu":
        kinds = MergedLayers()
        with packed.without_adapters():
            for module in decoder_layers(packed.body):
                layer = kinds.merge(module, num_rows, adapted)
                if layer is not None:
                    done.update(layer.modules)
                    yield layer
    factors = {id(factor) for layer in adapted.values() for factor in layer.factors}
    for module in packed.model.modules():
        is_single = module not in done and (type(module) is nn.Linear or module in adapted)
        if is_single and isinstance(module, nn.Linear) and id(module.weight) not in factors and _packs(module):
            done.add(module)
            yield PackedProduct(module, num_rows, adapted.get(module))

    def form_of(module: nn.Module, parameter: nn.Parameter) -> Form:
        is_linear = type(module) is nn.Linear or (isinstance(module, nn.Linear) and module in adapted)
        is_plain = parameter.dtype == torch.float32 and parameter.dim() == 2 and parameter.device.type == "cpu"
        return plain_form(parameter.shape[1]) if is_linear and is_plain else keep_dtype

    yield from convert_parameters(packed, adapted, done, form_of, in_place=in_place)


def _packs(module: nn.Linear) -> bool:
    """Tells whether a packed product can be had and is quicker."""
    weight = module.weight
    return (
        "forward" not in vars(module)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and is_packed_best(weight.numel())
    )
