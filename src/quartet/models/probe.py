"""What a model must show before it is trusted on packed sequences.

Some architectures accept an attention function and never call it, others let sequences bleed into each other, and some
scale or cap the logits after the head. All of that is silent, so it is measured at load with a few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models import attention
from quartet.models.attention import PackedAttention
from quartet.models.packed import PackedCausalLM, PackedModel, PackedScalarModel

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
    """Runs two short sequences packed and alone, and compares.

    Returns:
        The largest absolute difference of the outputs (logits or scalars).

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
    except TypeError as error:
        raise _refuse(model, f"its forward does not take the attention context ({error})") from error
    finally:
        packed.precision = precision
    num_layers = int(config.num_hidden_layers)
    if context.num_calls != num_layers:
        raise _refuse(model, f"the attention function was called {context.num_calls} times for {num_layers} layers")
    ours = _outputs(packed, hidden)
    theirs = torch.cat([_alone(packed, s) for s in sequences])
    difference = float((ours - theirs).abs().max())
    # Half-precision weights round differently in the two paths; fp32 leaves only the order of summation.
    tolerance = (1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.1) * max(
        1.0, float(theirs.abs().max())
    )
    if not difference <= tolerance:
        raise _refuse(model, f"packed and single outputs differ by {difference:.3g}, more than {tolerance:.3g}")
    return difference


def _sequences(vocab_size: int, device: torch.device) -> list[Tensor]:
    return [(torch.arange(length, device=device) * 7 + 3 + i) % vocab_size for i, length in enumerate(_LENGTHS)]


def _outputs(packed: PackedModel, hidden: Tensor) -> Tensor:
    if isinstance(packed, PackedCausalLM):
        precision, packed.precision = packed.precision, "fp32"
        try:
            return packed.logits(hidden)
        finally:
            packed.precision = precision
    if isinstance(packed, PackedScalarModel):
        return packed.scalars(hidden)
    return hidden


def _alone(packed: PackedModel, sequence: Tensor) -> Tensor:
    """The model's own output for one sequence through its own attention."""
    model = packed.release()
    try:
        batch = {"input_ids": sequence.unsqueeze(0), "attention_mask": torch.ones_like(sequence).unsqueeze(0)}
        if isinstance(packed, PackedCausalLM):
            return model(**batch, use_cache=False).logits.squeeze(0).float()
        body = packed.body(**batch, use_cache=False).last_hidden_state.squeeze(0)
        return packed.scalars(body) if isinstance(packed, PackedScalarModel) else body
    finally:
        attention.install(model)
