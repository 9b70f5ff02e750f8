"""RMS normalisation and rotary embedding of unmodified transformers models, in fewer passes over memory on the CPU.

Shapes: R rows, D row width, T tokens, H heads (of queries or keys), Dh head size.

A decoder layer spends on these two about as many memory passes as it has matrix products. ``install_fused`` replaces,
on module *instances* whose result it can reproduce, the forward by one that works on a few hundred rows at a time, so
that all passes but the first find them in the processor's cache, and that keeps less for the backward: the input and
one number per row of a normalisation, nothing of queries and keys.

What is recognised is decided by computing: a copy of the module with random weights, and the rotary function on random
arguments, must agree with the replacement. Everything else stays as it is: other modules, instances with a forward of
their own, and, inside a replaced module, other devices and dtypes (a normalisation of anything but fp32, a rotary
embedding with angles in half precision), for which the module's own forward runs.

SiLU times up-projection is not among them: its time is the exponential's, and keeping less for the backward means to
compute that once more.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

Forward = Callable[..., Any]
"""A module's forward, with the module as first argument."""

_CACHED_NUMEL = 128 * 1024
"""Numbers of one tensor of which a handful stay in a core's second-level cache."""
_ROTARY = "apply_rotary_pos_emb"
"""The name under which transformers' attention modules call their rotary function."""


def install_on_cpu(model: nn.Module) -> list[nn.Module]:
    """Does what ``install_fused`` does where the model is on the CPU; one without contents may get them there.

    On a GPU whole layers may be compiled instead.
    """
    return install_fused(model) if next(model.parameters()).device.type in ("cpu", "meta") else []


def install_fused(model: nn.Module) -> list[nn.Module]:
    """Replaces the forward of every recognised module of ``model``; returns these modules, for ``restore_forwards``."""
    replaced: list[nn.Module] = []
    known: dict[Hashable, Forward | None] = {}
    for module in model.modules():
        for describe, build in ((_describe_norm, _build_norm), (_describe_rotary, _build_rotary)):
            # A forward of the instance's own was put there by other code.
            key = None if "forward" in vars(module) else describe(module)
            if key is None:
                continue
            if key not in known:
                known[key] = build(module)
            forward = known[key]
            if forward is not None:
                # A method, so that a copy of the module runs on its own weights.
                module.forward = types.MethodType(forward, module)
                replaced.append(module)
    return replaced


def _chunks(width: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yields the tensors' rows, as many at a time as fit the cache with ``width`` numbers each."""
    step = max(_CACHED_NUMEL // width, 1)
    if len(tensors[0]) <= step:
        return [tensors]
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


# ---- RMS normalisation ----


def _describe_norm(module: nn.Module) -> Hashable | None:
    """Tells what a normalisation's formula depends on, if the module can be one: a weight vector and an epsilon."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weights = dict(module.named_parameters())
    if not isinstance(eps, float) or list(weights) != ["weight"] or weights["weight"].dim() != 1:
        return None
    return type(module), eps


def _build_norm(module: nn.Module) -> Forward | None:
    """Makes a forward that gives what the module's own gives in fp32, or None where neither known formula does."""
    eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
    # Also rows so small that epsilon decides.
    width, generator = 24, torch.Generator().manual_seed(0)
    x = torch.randn(6, width, generator=generator) * torch.tensor([3.0, 1.0, 0.1, 1e-3, 1e-4, 0.0]).unsqueeze(1)
    stand_in = copy.deepcopy(module)
    stand_in.weight = nn.Parameter(torch.randn(width, generator=generator), requires_grad=False)
    # Only torch's own class looks at it.
    vars(stand_in)["normalized_shape"] = (width,)
    with torch.no_grad():
        try:
            expected = type(module).forward(stand_in, x)
        except (RuntimeError, TypeError):
            return None
        for offset in (0.0, 1.0):
            forward = _norm_forward(type(module).forward, eps, offset)
            if _equal(forward(stand_in, x), expected):
                return forward
    return None


def _norm_forward(own: Forward, eps: float, offset: float) -> Forward:
    """Makes a forward of ``x / sqrt(mean(x²) + eps) * (offset + weight)`` for fp32 on the CPU; the module's own for the
    rest.
    """
    epsilon = torch.tensor(eps, device="cpu")

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        weight = module.weight
        if len(args) != 1 or kwargs or weight is None or not _is_plain(args[0], weight):
            return own(module, *args, **kwargs)
        x: Tensor = args[0]
        scale = weight + offset if offset else weight
        if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
            return _by_rows(_RMSNorm.apply, x, scale, epsilon)
        if x.numel() > _CACHED_NUMEL:
            return _by_rows(_normalise, x, scale, epsilon)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, torch.addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(scale)

    return forward


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return x.dtype is torch.float32 and weight.dtype is torch.float32 and x.is_cpu and weight.is_cpu


def _by_rows(normalise: Callable[..., tuple[Tensor, Tensor]], x: Tensor, scale: Tensor, epsilon: Tensor) -> Tensor:
    """Applies ``normalise``, which takes ``[R, D]``; keeps the memory order of a transposed view ``[B, H, T, D]``."""
    swapped = x.dim() == 4 and not x.is_contiguous()
    rows = x.transpose(1, 2) if swapped else x
    out = normalise(rows.reshape(-1, x.shape[-1]), scale, epsilon)[0].view(rows.shape)
    return out.transpose(1, 2) if swapped else out


def _normalise(x: Tensor, scale: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    """Normalises and scales ``x [R, D]``; returns that and the factor of each row ``[R, 1]``."""
    width = x.shape[1]
    out, factors = torch.empty_like(x), x.new_empty(len(x), 1)
    for rows, normalised, factor in _chunks(width, x, out, factors):
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        torch.addcmul(epsilon, norm, norm, value=1 / width, out=factor).rsqrt_()
        torch.mul(rows, factor, out=normalised).mul_(scale)
    return out, factors


class _RMSNorm(torch.autograd.Function):
    """Keeps the input, the weight and one number per row.

    With the factor ``r`` of a row and ``g = grad * scale``, the gradient of the row is
    ``r * (g - x * r² * sum(g * x) / D)``, and that of the scale sums ``grad * x * r`` over rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        out, factors = _normalise(x, scale, epsilon)
        ctx.save_for_backward(x, scale, factors)
        ctx.mark_non_differentiable(factors)
        ctx.set_materialize_grads(False)
        return out, factors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        x, scale, factors = ctx.saved_tensors
        width = x.shape[1]
        grad_x, grad_scale = torch.empty_like(x), torch.zeros_like(scale)
        for rows, incoming, factor, outgoing in _chunks(width, x, grad, factors, grad_x):
            products = incoming * rows
            grad_scale.addmv_(products.t(), factor.squeeze(1))
            along = torch.mv(products, scale).unsqueeze(1).mul_(factor).mul_(factor)
            torch.mul(incoming, scale, out=outgoing).addcmul_(rows, along, value=-1 / width).mul_(factor)
        return grad_x, grad_scale, None


# ---- rotary embedding ----


def _describe_rotary(module: nn.Module) -> Hashable | None:
    """Returns the module's forward, if it calls a function of the name that transformers gives the rotary embedding."""
    own = type(module).forward
    if not isinstance(own, types.FunctionType) or _ROTARY not in own.__code__.co_names:
        return None
    return own if callable(own.__globals__.get(_ROTARY)) else None


def _build_rotary(module: nn.Module) -> Forward | None:
    """Makes the module's own forward with a quicker rotary function, or None where that computes something else."""
    own: Any = type(module).forward
    rotary = _Rotary(own.__globals__[_ROTARY])
    if not rotary.agrees():
        return None
    # The same code with one name bound otherwise: nothing outside this module sees the change.
    names = {**own.__globals__, _ROTARY: rotary}
    forward = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


class SignedSin:
    """``sin [..., Dh]`` with its first half negated, computed once for all layers of a pass.

    And for all of its recomputations, whatever other passes were made meanwhile: they have to call the same operations.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()

    def __call__(self, sin: Tensor) -> Tensor:
        version, signed = self._known.get(sin, (-1, sin))
        if sin.is_inference() or version != sin._version:
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            if not sin.is_inference():
                self._known[sin] = sin._version, signed
        return signed


class _Rotary:
    """``x * cos + rotate_half(x) * sin`` for queries and keys; the model's own function where it is not on the CPU.

    Queries and keys are ``[B, H, T, Dh]``, ``cos`` and ``sin`` fp32 or fp64 ``[B, T, Dh]``.
    """

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._own = own
        self._keeps_dtype = False
        self._signed_sin = SignedSin()

    def agrees(self) -> bool:
        """Compares with the model's own function and takes over whether results have the dtype of the arguments."""
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 3, 5, 8, generator=generator), torch.randn(2, 1, 5, 8, generator=generator)
        cos, sin = torch.randn(2, 2, 5, 8, generator=generator)
        q_half, k_half = q.bfloat16(), k.bfloat16()
        try:
            exact, mixed = self._own(q, k, cos, sin), self._own(q_half, k_half, cos, sin)
        except (RuntimeError, TypeError):
            return False
        self._keeps_dtype = mixed[0].dtype == torch.bfloat16
        found, found_mixed = self(q, k, cos, sin), self(q_half, k_half, cos, sin)
        return all(_equal(a, b) for a, b in zip((*found, *found_mixed), (*exact, *mixed), strict=True))

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self._fits(q, k, cos, sin):
            return self._own(q, k, cos, sin, *args, **kwargs)
        cos, signed = cos.unsqueeze(1), self._signed_sin(sin).unsqueeze(1)
        return self._turn(q, cos, signed), self._turn(k, cos, signed)

    def _fits(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        return (
            cos.dtype == sin.dtype
            and cos.dtype in (torch.float32, torch.float64)
            and not (cos.requires_grad or sin.requires_grad)
            and q.device.type == "cpu"
            and cos.dim() == 3
            and all(x.dim() == 4 and x.shape[2:] == cos.shape[1:] and len(x) == len(cos) for x in (q, k))
            and all(torch.promote_types(x.dtype, cos.dtype) == cos.dtype for x in (q, k))
        )

    def _turn(self, x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        turned = _Turn.apply(x, cos, signed) if needs_grad else _turn(x, cos, signed)
        return turned.to(x.dtype) if self._keeps_dtype else turned


def _turn(x: Tensor, cos: Tensor, signed: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes ``x [B, H, T, Dh] * cos`` plus ``x`` with its halves exchanged ``* signed``, both of these
    ``[B, 1, T, Dh]``.
    """
    half, step = x.shape[-1] // 2, max(_CACHED_NUMEL // (x.shape[0] * x.shape[1] * x.shape[3]), 1)
    if out is None:
        if x.shape[2] <= step:
            return (x * cos).addcmul_(x.roll(half, -1), signed)
        out = torch.empty_like(x, dtype=cos.dtype)
    parts = (tensor.split(step, 2) for tensor in (x, cos, signed, out))
    for tokens, along, across, turned in zip(*parts, strict=True):
        torch.mul(tokens, along, out=turned).addcmul_(tokens.roll(half, -1), across)
    return out


class _Turn(torch.autograd.Function):
    """Keeps nothing of ``x``: the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed)
        ctx.dtype, ctx.tokens_first = x.dtype, x.transpose(1, 2).is_contiguous()
        return _turn(x, cos, signed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, signed = ctx.saved_tensors
        batch, heads, tokens, size = grad.shape
        # In the memory order of ``x``, so that the backward of the product before it need not copy.
        out = grad.new_empty(batch, tokens, heads, size).transpose(1, 2) if ctx.tokens_first else None
        return _turn(grad, cos, signed.roll(size // 2, -1), out).to(ctx.dtype), None, None


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Tells whether both are of one dtype, and to its rounding the same."""
    tolerance = 16 * torch.finfo(expected.dtype).eps
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
