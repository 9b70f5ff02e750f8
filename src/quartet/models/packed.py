"""transformers models run on packed sequences: a causal LM with its head, and a body with a scalar head.

Shapes: P packed tokens, M selected rows, D hidden, V vocabulary.

Both the train engine and the native rollout engine call the same object, so sampler and trainer share one forward path,
one autocast policy and one set of weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models import attention
from quartet.models.attention import AttentionContext

Precision = Literal["fp32", "bf16"]


class PackedModel:
    """Owns a transformers model while an engine works with it; ``release`` gives it back as it was.

    Dropout is set to 0: log-probabilities of sampler and trainer must agree.
    """

    def __init__(self, model: PreTrainedModel, precision: Precision = "fp32") -> None:
        self.model = model
        self.precision: Precision = precision
        self.own_attention = attention.install(model)
        self.body: nn.Module = getattr(model, model.base_model_prefix, model)
        self.disabled_dropout = disable_dropout(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states ``[P, D]`` of packed tokens ``[P]``; the context decides who sees whom.

        Raises:
            RuntimeError: the model was released, so its own attention would ignore the context.
        """
        if not attention.is_installed(self.model):
            raise RuntimeError(f"{type(self.model).__name__} was released; take it over again to run it packed")
        with self.autocast():
            output = self.body(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                attention_mask=None,
                use_cache=False,
                quartet_attention=context,
            )
        return output.last_hidden_state.squeeze(0)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was changed about the model, in words, for whoever runs it."""
        if not self.disabled_dropout:
            return ()
        first = self.disabled_dropout[0]
        return (f"dropout set to 0 in {len(self.disabled_dropout)} places (first {first.name}, was {first.rate:g})",)

    def release(self) -> PreTrainedModel:
        """The model with its former attention and dropout, usable on its own again."""
        attention.restore(self.model, self.own_attention)
        for dropout in self.disabled_dropout:
            setattr(dropout.module, dropout.attribute, dropout.rate)
        return self.model


class PackedCausalLM(PackedModel):
    """A causal LM: hidden states, logits, log-probabilities."""

    def __init__(self, model: PreTrainedModel, precision: Precision = "fp32") -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(
                f"{type(model).__name__} has no language-model head",
                found="get_output_embeddings() is None",
                remedy="load it with AutoModelForCausalLM",
            )
        super().__init__(model, precision)
        self.head: nn.Module = head
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, D] → [M, V]`` fp32 (fp64 stays); the product itself runs in the compute dtype."""
        with self.autocast():
            logits = self.head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def token_logprobs(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        temperature: float = 1.0,
        chunk: int = 1024,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of the temperature-scaled, untruncated distribution.

        Args:
            hidden: ``[M, D]`` rows that predict ``labels``.
            labels: ``[M]`` token ids.
            chunk: rows whose logits exist at a time; with several chunks the backward recomputes them.

        Returns:
            ``logprobs [M]``, and ``entropies [M]`` in nats or None.
        """

        def rows(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            scaled = self.logits(h) / temperature
            normaliser = scaled.logsumexp(-1)
            picked = scaled.gather(-1, y.unsqueeze(-1)).squeeze(-1) - normaliser
            if not entropy:
                return picked, picked.new_zeros(0)
            probabilities = (scaled - normaliser.unsqueeze(-1)).exp()
            return picked, normaliser - (probabilities * scaled).sum(-1)

        if hidden.shape[0] <= chunk:
            parts = [rows(hidden, labels)]
        else:
            recompute = torch.is_grad_enabled()
            parts = [
                checkpoint(rows, h, y, use_reentrant=False) if recompute else rows(h, y)
                for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)
            ]
        logprobs = torch.cat([part[0] for part in parts])
        return logprobs, torch.cat([part[1] for part in parts]) if entropy else None


class PackedScalarModel(PackedModel):
    """A sequence-classification model with one label: reward model or critic. The head runs wholly in fp32."""

    def __init__(self, model: PreTrainedModel, precision: Precision = "fp32") -> None:
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
            raise UserError(
                f"{type(model).__name__} has no scalar head",
                found=f"score = {head}",
                remedy="load it with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)",
            )
        super().__init__(model, precision)
        self.head: nn.Linear = head

    def scalars(self, hidden: Tensor) -> Tensor:
        """``[M, D] → [M]`` fp32 (fp64 stays)."""
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return (hidden.to(dtype) @ self.head.weight.to(dtype).T).squeeze(-1)


@dataclass(frozen=True)
class DisabledDropout:
    """One dropout that was above 0: ``module.attribute``, its dotted name, its rate."""

    module: nn.Module
    attribute: str
    name: str
    rate: float


def disable_dropout(model: PreTrainedModel) -> list[DisabledDropout]:
    """Sets every dropout of the model to 0; returns what was above it, for saying so and for putting it back."""
    disabled = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        rate = getattr(module, attribute, None)
        if isinstance(rate, float) and rate > 0:
            disabled.append(DisabledDropout(module, attribute, f"{name}.{attribute}", rate))
            setattr(module, attribute, 0.0)
    return disabled
