"""Medusa heads: guesses of the tokens that follow the next one, from the trunk's hidden state (Cai et al. 2024).

Shapes: B rows, M rows that are trained on, D hidden, V vocabulary, K depth.

Head ``k``, from 0, guesses the token ``2 + k`` places behind the hidden state's own, since the trunk's head has the
next one::

    logits_k(h) = head_k(h + silu(W_k h)),    W_k = 0 at first, so that every head begins as the trunk's

``head_k`` is the trunk's LM head, or a copy of it that learns. The trunk gets no gradient: its hidden states and its
head are detached here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM


class ResidualBlock(nn.Module):
    """``x + silu(W x)``, as the published heads have it; names as in vLLM."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        linear = nn.Linear(hidden_size, hidden_size, bias=False, device=device)
        nn.init.zeros_(linear.weight)
        self.layers = nn.ModuleList([linear])

    def forward(self, x: Tensor) -> Tensor:
        """``[…, D] → […, D]``."""
        return x + F.silu(self.layers[0](x))


class MedusaHeads(nn.Module):
    """Heads of a trunk, which is not among their parameters.

    Args:
        trunk: whose hidden states they read, in its precision; with ``shared_head`` its LM head as it is at the time.
        depth: number of heads.
        shared_head: all heads end in the trunk's LM head; else each has a copy of its own, which learns too.

    Raises:
        UserError: the trunk's head is not a plain linear layer.
    """

    def __init__(self, trunk: PackedCausalLM, depth: int, *, shared_head: bool = True) -> None:
        super().__init__()
        head = trunk.head
        if type(head) is not nn.Linear:
            raise UserError(
                f"Medusa heads need a trunk with a linear LM head, which {type(trunk.model).__name__} has not",
                found=f"its head is a {type(head).__name__}",
                remedy="draft from history: rollout.speculation.type: history",
            )
        self.trunk = trunk
        self.depth = depth
        self.hidden_size, self.vocab_size = head.in_features, head.out_features
        self.blocks = nn.ModuleList([ResidualBlock(self.hidden_size, trunk.device) for _ in range(depth)])
        self.lm_heads: nn.ModuleList | None = None
        if not shared_head:
            with_bias = head.bias is not None
            shape = self.hidden_size, self.vocab_size
            self.lm_heads = nn.ModuleList([nn.Linear(*shape, with_bias, head.weight.device) for _ in range(depth)])
            for own in self.lm_heads:
                own.load_state_dict(head.state_dict())

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, D] → [B, K, V]`` logits in fp32 (fp64 stays), without gradients."""
        with self.trunk.autocast():
            states = torch.stack([block(hidden) for block in self.blocks])
            if self.lm_heads is None:
                # One product for all heads: the weight is read once.
                logits = F.linear(states.flatten(0, 1), *self._head(0)).unflatten(0, states.shape[:2])
            else:
                logits = torch.stack([F.linear(x, *self._head(k)) for k, x in enumerate(states)])
        return self.trunk.scaled(logits).transpose(0, 1)

    def logits_of(self, k: int, hidden: Tensor) -> Tensor:
        """``[M, D] → [M, V]`` logits of head ``k``, with gradients for the heads alone."""
        with self.trunk.autocast():
            return self.trunk.scaled(F.linear(self.blocks[k](hidden.detach()), *self._head(k)))

    def _head(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Weight ``[V, D]`` and bias of head ``k``."""
        head = self.trunk.head if self.lm_heads is None else self.lm_heads[k]
        assert isinstance(head, nn.Linear), "looked at when the heads were made"
        if self.lm_heads is not None:
            return head.weight, head.bias
        return head.weight.detach(), None if head.bias is None else head.bias.detach()
