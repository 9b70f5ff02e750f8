"""What a model must show before it is trusted on packed sequences.

Some architectures accept an attention function and never call it, others let sequences bleed into each other, and some
scale or cap the logits after the head. All of that is silent, so it is measured at load with a few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models import attention
from quartet.models.attention import PackedAttention
from quartet.models.packed import PackedCausalLM, PackedModel

_LENGTHS = (5, 7)
_LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


def _refuse(model: PreTrainedModel, found: str) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained or sampled on packed sequences",
        found=found,
        remedy="use an architecture whose attention goes through transformers' attention interface "
        "(Llama, Qwen2, Gemma-2 are proven by the tests)",
    )


@torch.no_grad()
def probe(packed: PackedModel) -> float:
    """Runs two short sequences packed and alone, and compares hidden states and, of a causal LM, logits.

    Hidden states show sequences that bleed whatever the head (a fresh one may be near 0); logits show what the
    model does after its head.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        UserError: the architecture is refused by name, with what was measured.
    """
    model = packed.model
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = str(rope.get("rope_type", "default"))
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise _refuse(model, f"{rope_type!r} rotary embedding: one pack's longest sequence would change all the others")
    sequences = _sequences(int(model.get_input_embeddings().weight.shape[0]), packed.device)
    precision, packed.precision = packed.precision, "fp32"
    context = PackedAttention(_LENGTHS)
    try:
        positions = torch.cat([torch.arange(len(s), device=packed.device) for s in sequences])
        hidden = packed.hidden(torch.cat(sequences), positions, context)
    except (TypeError, RuntimeError) as error:
        raise _refuse(model, f"its layers do not work with the attention context ({error})") from error
    finally:
        packed.precision = precision
    num_layers = int(config.num_hidden_layers)
    if context.num_calls != num_layers:
        raise _refuse(model, f"the attention function was called {context.num_calls} times for {num_layers} layers")
    # Half-precision weights round differently in the two paths; fp32 leaves only the order of summation.
    tolerance = 1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.1
    difference = 0.0
    for name, ours, theirs in _outputs(packed, hidden, sequences):
        found = float((ours.float() - theirs.float()).abs().max()) / max(float(theirs.abs().max()), 1e-30)
        if not found <= tolerance:
            raise _refuse(
                model, f"packed and single {name} differ by {found:.3g} of the largest, more than {tolerance:.3g}"
            )
        difference = max(difference, found)
    return difference


def _sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    return [(torch.arange(length, device=device) * 7 + 3 + i) % vocab_size for i, length in enumerate(_LENGTHS)]


def _outputs(packed: PackedModel, hidden: Tensor, sequences: list[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """What to compare: name, packed, and each sequence alone through the model's own attention and head."""
    model, precision = packed.model, packed.precision
    attention.restore(model, packed.own_attention)
    packed.precision = "fp32"
    try:
        alone = [_alone(packed.body, s).last_hidden_state for s in sequences]
        found = [("hidden states", hidden, torch.cat(alone, dim=1).squeeze(0))]
        if isinstance(packed, PackedCausalLM):
            logits = [_alone(model, s).logits for s in sequences]
            found.append(("logits", packed.logits(hidden), torch.cat(logits, dim=1).squeeze(0)))
        return found
    finally:
        packed.precision = precision
        attention.install(model)


def _alone(module: nn.Module, sequence: Tensor) -> Any:
    ids = sequence.unsqueeze(0)
    return module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
