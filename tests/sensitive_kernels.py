"""Kernels of a processor on which everything that exact numerics take care of shows.

Real ones differ: with one, a product of 4 rows has the bits of 500, with another it takes 16. A fault planted in a rule
would show on some and pass on others. Here a result's last bits change wherever a rule of ``quartet.models.exact`` says
that they may, so a test of a fault does not depend on the machine, and without a fault every equality still holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.models import exact

MIN_ROWS, VECTOR, UNSPLIT_KEYS = 16, 32, 256
"""The rules, in numbers of their own: a fault is planted in those of the module."""
_NEXT = 1 + torch.finfo(torch.float32).eps


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    linear, silu, flash = F.linear, F.silu, exact.cpu_flash

    def sensitive_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(x, weight, bias)
        return out * _NEXT if x.numel() // x.shape[-1] < MIN_ROWS else out

    def sensitive_silu(x: Tensor, inplace: bool = False) -> Tensor:
        """What is left over of vectors of 32 numbers is computed one by one."""
        out = silu(x)
        left = out.numel() % VECTOR
        scale = torch.ones(out.numel())
        scale[out.numel() - left :] = _NEXT
        return out * scale.view_as(out)

    def sensitive_flash(q: Tensor, k: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, logsumexp = flash(q, k, *args, **options)
        splits = k.shape[2] % exact.KEY_BLOCK > UNSPLIT_KEYS
        return (out * _NEXT if q.shape[2] < MIN_ROWS or splits else out), logsumexp

    monkeypatch.setattr(F, "linear", sensitive_linear)
    monkeypatch.setattr(F, "silu", sensitive_silu)
    monkeypatch.setattr(exact, "cpu_flash", sensitive_flash)
