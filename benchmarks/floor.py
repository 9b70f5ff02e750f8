"""The least time an update or a decode step can take: its operations, each at the rate measured for its shape.

    python benchmarks/floor.py [--model small] [--dtype fp32] [--threads 2] [--longest 64] [--prompt 512]

The list holds what an unmodified Llama-shaped transformers model (Qwen2, Llama, ...) computes on *useful* tokens: a
prompt once for all of its responses, no padding, the head only where a token is predicted. The modules and their
shapes come from running the model itself on the meta device; attention, rotary embedding, gate and residuals come
from its configuration. Every operation reads its inputs and writes its outputs once and takes
max(FLOPs / measured rate of its product, bytes / measured bandwidth); the floor is the sum. No operation is fused
with another and none is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import DTYPES, MODELS, Group, arguments, markdown, model_config, step_groups, write_results
from rates import Product, Rates
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

LARGEST_PRODUCT = 8192
"""Rows at which a product's rate is measured at most; it no longer changes beyond."""
ATTENTION_TILE = 256
"""Queries and keys of the product at whose rate attention is counted."""
MASTER = 4
"""Bytes per parameter, gradient and optimizer moment: masters stay fp32."""


@dataclass(frozen=True)
class Operation:
    """``count`` equal calls; FLOPs and bytes are those of one call."""

    name: str
    phase: str
    flops: float
    read: float
    written: float
    count: int = 1
    product: Product | None = None


@dataclass(frozen=True)
class Shapes:
    """Sizes of an unmodified model, in elements.

    Attributes:
        linears: ``(name, inputs, outputs) -> calls`` of one forward pass, without the head.
        norms, activations: ``width -> calls``.
    """

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: dict[tuple[str, int, int], int]
    norms: dict[int, int]
    activations: dict[int, int]
    num_parameters: int

    @property
    def linear_parameters(self) -> int:
        return sum(inputs * outputs * n for (_, inputs, outputs), n in self.linears.items()) + self.hidden * self.vocab


def trace(config: PretrainedConfig) -> Shapes:
    """Runs the model of ``config`` on the meta device and notes every call of a leaf module."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linears: dict[tuple[str, int, int], int] = {}
    norms: dict[int, int] = {}
    activations: dict[int, int] = {}
    head = model.get_output_embeddings()

    def note(name: str, module: nn.Module, output: torch.Tensor) -> None:
        width = int(output.shape[-1])
        if isinstance(module, nn.Linear):
            key = (name.rsplit(".", 1)[-1], module.in_features, width)
            linears[key] = linears.get(key, 0) + 1
        elif type(module).__name__.endswith("Norm"):
            norms[width] = norms.get(width, 0) + 1
        elif not isinstance(module, nn.Embedding):
            activations[width] = activations.get(width, 0) + 1

    for name, module in model.named_modules():
        if module is not head and not any(module.children()) and "rotary" not in name:
            module.register_forward_hook(lambda m, _, output, name=name: note(name, m, output))
    # A ready-made mask keeps transformers from looking at values, which meta tensors do not have.
    ids, mask = torch.zeros(1, 4, dtype=torch.int64, device="meta"), torch.zeros(1, 1, 4, 4, device="meta")
    model(ids, attention_mask=mask, use_cache=False)
    heads = config.num_attention_heads
    return Shapes(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        linears=linears,
        norms=norms,
        activations=activations,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )


def useful_tokens(groups: Sequence[Group]) -> int:
    return sum(g.prompt + sum(g.responses) for g in groups)


def unshared_tokens(groups: Sequence[Group]) -> int:
    return sum(g.prompt + r for g in groups for r in g.responses)


def attention_pairs(groups: Sequence[Group]) -> int:
    """Query-key pairs: each token sees itself and what stands before it; a prompt's own pairs count once."""
    prompts = sum(g.prompt * (g.prompt + 1) // 2 for g in groups)
    return prompts + sum(g.prompt * r + r * (r + 1) // 2 for g in groups for r in g.responses)


def update_operations(shapes: Shapes, groups: Sequence[Group], dtype: torch.dtype) -> list[Operation]:
    """Forward, backward and AdamW of one update on ``groups``, every response token being trained on."""
    operations = forward_operations(shapes, groups, dtype)
    tokens, predicted = useful_tokens(groups), sum(sum(g.responses) for g in groups)
    size = dtype.itemsize
    for (name, inputs, outputs), count in [*shapes.linears.items(), (("head", shapes.hidden, shapes.vocab), 1)]:
        rows = predicted if name == "head" else tokens
        operations += _linear_backward(name, rows, inputs, outputs, count, size)
    operations += _streamed("norm", "backward", tokens, shapes.norms, 8, 2 * size, size)
    operations += _streamed("activation", "backward", tokens, shapes.activations, 6, 2 * size, size)
    operations += _streamed("gate", "backward", tokens, shapes.activations, 2, 3 * size, 2 * size)
    heads, kv = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    operations += [
        # Four products without the recomputation of a fused kernel: dV, dP, dQ, dK.
        _attention("backward", shapes, groups, 8, (3 * heads + 2 * kv) * size, (heads + 2 * kv) * size),
        _plain("rotary", "backward", tokens * (heads + kv), 3, size, size, shapes.layers),
        _plain("residual", "backward", tokens * shapes.hidden, 1, 2 * size, size, 2 * shapes.layers),
        _plain("log-softmax", "backward", predicted * shapes.vocab, 3, size, size),
        Operation(
            "embedding", "backward", 0, tokens * shapes.hidden * size, shapes.vocab * shapes.hidden * MASTER
        ),
        _plain("gradient norm", "optimizer", shapes.num_parameters, 2, MASTER, 0),
        _plain("AdamW", "optimizer", shapes.num_parameters, 12, 4 * MASTER, 3 * MASTER),
    ]  # fmt: skip
    if size < MASTER:
        operations.append(_plain("weights cast", "optimizer", shapes.linear_parameters, 0, MASTER, size))
    return operations


def forward_operations(shapes: Shapes, groups: Sequence[Group], dtype: torch.dtype) -> list[Operation]:
    """One forward pass that ends in the log-probabilities of all response tokens."""
    tokens, predicted = useful_tokens(groups), sum(sum(g.responses) for g in groups)
    size = dtype.itemsize
    operations = _row_operations(shapes, tokens, predicted, size)
    heads, kv = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    operations.append(_attention("forward", shapes, groups, 4, (heads + 2 * kv) * size, heads * size))
    operations.append(
        Operation("log-softmax", "forward", 3.0 * predicted * shapes.vocab, predicted * shapes.vocab * size, 0)
    )
    return operations


def decode_operations(
    shapes: Shapes, contexts: Sequence[int], dtype: torch.dtype, *, shared: int = 0
) -> list[Operation]:
    """One decode step.

    Args:
        contexts: tokens each running request attends to, those of shared prompts included.
        shared: of all these, how many are reads of a prompt another request of the group reads as well.
    """
    rows, size = len(contexts), dtype.itemsize
    kv = shapes.kv_heads * shapes.head_dim
    heads = shapes.heads * shapes.head_dim
    attention = Operation(
        "attention",
        "decode",
        4.0 * sum(contexts) * heads,
        (sum(contexts) - shared) * 2 * kv * size,
        rows * (heads + 2 * kv) * size,
        shapes.layers,
    )
    sampling = Operation("sampling", "decode", 3.0 * rows * shapes.vocab, rows * shapes.vocab * size, 0)
    return [*_row_operations(shapes, rows, rows, size, "decode"), attention, sampling]


def _row_operations(
    shapes: Shapes, tokens: int, predicted: int, size: int, phase: str = "forward"
) -> list[Operation]:  # fmt: skip
    """What acts on each token alone: embedding, linears, norms, rotary embedding, activation, gate, residuals, head."""
    operations = [
        Operation(
            name,
            phase,
            2.0 * rows * inputs * outputs,
            (rows * inputs + inputs * outputs) * size,
            rows * outputs * size,
            count,
            Product(min(rows, LARGEST_PRODUCT), inputs, outputs),
        )
        for (name, inputs, outputs), count, rows in [
            *((key, count, tokens) for key, count in shapes.linears.items()),
            (("head", shapes.hidden, shapes.vocab), 1, predicted),
        ]
    ]
    operations += _streamed("norm", phase, tokens, shapes.norms, 4, size, size)
    operations += _streamed("activation", phase, tokens, shapes.activations, 4, size, size)
    operations += _streamed("gate", phase, tokens, shapes.activations, 1, 2 * size, size)
    rotated = tokens * (shapes.heads + shapes.kv_heads) * shapes.head_dim
    return [
        *operations,
        _plain("embedding", phase, tokens * shapes.hidden, 0, size, size),
        _plain("rotary", phase, rotated, 3, size, size, shapes.layers),
        _plain("residual", phase, tokens * shapes.hidden, 1, 2 * size, size, 2 * shapes.layers),
    ]


def _linear_backward(name: str, rows: int, inputs: int, outputs: int, count: int, size: int) -> list[Operation]:
    flops = 2.0 * rows * inputs * outputs
    measured = min(rows, LARGEST_PRODUCT)
    return [
        Operation(
            f"{name} (input)",
            "backward",
            flops,
            (rows * outputs + inputs * outputs) * size,
            rows * inputs * size,
            count,
            Product(measured, outputs, inputs, transposed="neither"),
        ),
        Operation(
            f"{name} (weight)",
            "backward",
            flops,
            rows * (inputs + outputs) * size,
            inputs * outputs * MASTER,
            count,
            Product(outputs, measured, inputs, transposed="left"),
        ),
    ]


def _attention(
    phase: str, shapes: Shapes, groups: Sequence[Group], flops_per_pair: int, read: int, written: int
) -> Operation:
    """Bytes are per token; the rate is that of ``queries x keys`` products of one tile, whatever the lengths."""
    tokens = useful_tokens(groups)
    return Operation(
        "attention",
        phase,
        float(flops_per_pair) * attention_pairs(groups) * shapes.heads * shapes.head_dim,
        tokens * read,
        tokens * written,
        shapes.layers,
        Product(ATTENTION_TILE, shapes.head_dim, ATTENTION_TILE, batch=shapes.heads),
    )


def _streamed(
    name: str, phase: str, tokens: int, widths: dict[int, int], flops: int, read: int, written: int
) -> list[Operation]:
    return [_plain(name, phase, tokens * width, flops, read, written, count) for width, count in widths.items()]


def _plain(name: str, phase: str, elements: int, flops: int, read: int, written: int, count: int = 1) -> Operation:
    """An operation without a product; FLOPs and bytes are per element."""
    return Operation(name, phase, float(flops * elements), read * elements, written * elements, count)


@dataclass(frozen=True)
class Line:
    """An operation with the time it cannot go below; seconds are of all its calls."""

    operation: Operation
    flops_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.flops_s, self.memory_s)


@dataclass(frozen=True)
class Floor:
    lines: list[Line]
    peak_flops_per_s: float

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def product_flops(self) -> float:
        """FLOPs of linears and attention, the useful ones."""
        return sum(line.operation.flops * line.operation.count for line in self.lines if line.operation.product)

    @property
    def product_seconds(self) -> float:
        """The useful FLOPs at the rate of a large square product."""
        return self.product_flops / self.peak_flops_per_s

    def as_dict(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "useful_flops": self.product_flops,
            "useful_flops_at_peak_s": self.product_seconds,
            "peak_flops_per_s": self.peak_flops_per_s,
            "lines": [
                {**asdict(line.operation), "flops_s": line.flops_s, "memory_s": line.memory_s} for line in self.lines
            ],
        }


def floor_of(operations: Sequence[Operation], rates: Rates, dtype: torch.dtype) -> Floor:
    peak, plain = rates.peak_flops_per_s(dtype), rates.peak_flops_per_s(torch.float32)
    lines = []
    for operation in operations:
        rate = rates.flops_per_s(operation.product, dtype) if operation.product else plain
        seconds = rates.memory_seconds(operation.read, operation.written)
        lines.append(Line(operation, operation.count * operation.flops / rate, operation.count * seconds))
    return Floor(lines, peak)


def table(floor: Floor) -> str:
    """Every operation of the floor, the longest first within its phase."""
    rows = []
    for line in sorted(floor.lines, key=lambda line: (line.operation.phase, -line.seconds)):
        o = line.operation
        rate = f"{o.flops * o.count / line.flops_s / 1e9:,.0f}" if line.flops_s and o.product else ""
        rows.append(
            [
                o.phase,
                o.name,
                str(o.count),
                f"{o.flops * o.count / 1e9:,.2f}",
                f"{(o.read + o.written) * o.count / 1e6:,.1f}",
                rate,
                f"{line.seconds * 1e3:,.2f}",
                "FLOPs" if line.flops_s >= line.memory_s else "bytes",
            ]
        )
    return markdown(["phase", "operation", "calls", "GFLOP", "MB", "GFLOP/s", "ms", "bound by"], rows)


def summary_table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        update, decode, memory = part["update"], part["decode"], part["bytes_per_s"]
        rows.append(
            [
                part["model"],
                part["dtype"],
                f"{update['peak_flops_per_s'] / 1e9:,.0f}",
                f"{memory['read'] / 1e9:,.0f} / {memory['copy'] / 1e9:,.0f}",
                str(part["tokens"]),
                f"{update['seconds'] * 1e3:,.0f}",
                f"{update['useful_flops_at_peak_s'] * 1e3:,.0f}",
                f"{decode['seconds'] * 1e3:,.2f}",
            ]
        )
    head = ["model", "dtype", "GEMM GFLOP/s", "read / copy GB/s", "useful tokens", "update ms", "its FLOPs alone ms"]
    return markdown([*head, "decode step ms"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest response")
    parser.add_argument("--prompt", type=int, help="tokens of every prompt; 16 to 30 when left out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = Rates(budget_s=0.01, working_sets=(2**18, 2**22)) if args.smoke else Rates()
    shapes, dtype = trace(model_config(args.model)), DTYPES[args.dtype]
    groups = step_groups(longest=args.longest, prompt=args.prompt)
    update = floor_of(update_operations(shapes, groups, dtype), rates, dtype)
    contexts = [g.prompt + r // 2 for g in groups for r in g.responses]
    shared = sum(g.prompt * (len(g.responses) - 1) for g in groups)
    decode = floor_of(decode_operations(shapes, contexts, dtype, shared=shared), rates, dtype)
    print(f"{args.model}: {shapes.num_parameters / 1e6:.2f} M parameters, {args.dtype}, {args.threads} threads")
    print(f"update: {useful_tokens(groups)} useful tokens ({unshared_tokens(groups)} unshared)\n\n{table(update)}\n")
    print(f"decode step: {len(contexts)} running\n\n{table(decode)}\n")
    largest = rates.working_sets[-1]
    part = {
        "model": args.model,
        "dtype": args.dtype,
        "tokens": useful_tokens(groups),
        "bytes_per_s": {"read": rates.read_bytes_per_s(largest), "copy": rates.copy_bytes_per_s(largest)},
        "update": update.as_dict(),
        "decode": decode.as_dict(),
    }
    print(summary_table([part]))
    write_results(args, {"floor": [part]})


if __name__ == "__main__":
    main()
