"""Products of a decode step: the weight as it is, transposed in memory, and packed
for products of 1 and of 64 rows (``extras/cpu_kernels``).

    python benchmarks/products.py [--model small] [--rows 16 32 48 64] [--threads 2]

Every product of the model, with as many copies of its weight as fill ``--working-set`` MiB, used in turn: in a step,
too, each weight was last read a whole model ago. Median GFLOP/s of each form.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import MODELS, arguments, markdown, model_config, write_results
from floor import trace
from torch import Tensor

from quartet.extras.cpu_kernels.merged_layers import PackedProduct, transposed

FORMS = ("as it is", "transposed", "packed for 1", "packed for 64")


def median_rate(calls: Sequence[Callable[[], Tensor]], flops: float, rounds: int) -> float:
    """GFLOP/s of one call, every round taking each of ``calls`` once."""
    seconds = []
    for _ in range(rounds):
        for call in calls:
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
    return flops / statistics.median(seconds) / 1e9


@torch.no_grad()
def rates(rows: int, inputs: int, outputs: int, *, working_set: int, rounds: int) -> dict[str, float]:
    """GFLOP/s by form; ``working_set`` in bytes."""
    num = max(2, working_set // (inputs * outputs * 4))
    layers = [torch.nn.Linear(inputs, outputs, bias=False) for _ in range(num)]
    x, flops = torch.randn(rows, inputs), 2.0 * rows * inputs * outputs
    packed = {num: [PackedProduct(layer, num) for layer in layers] for num in (1, 64)}
    turned = [transposed(layer.weight) for layer in layers]
    forms: dict[str, list[Callable[[], Tensor]]] = {
        "as it is": [lambda w=layer.weight: F.linear(x, w) for layer in layers],
        "transposed": [lambda w=weight: F.linear(x, w) for weight in turned],
        **{f"packed for {num}": [lambda p=copy: p._forward(x) for copy in copies] for num, copies in packed.items()},
    }
    return {name: median_rate(calls, flops, rounds) for name, calls in forms.items()}


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = [[str(p["rows"]), f"{p['inputs']} x {p['outputs']}", *(f"{p[form]:,.0f}" for form in FORMS)] for p in parts]
    return markdown(["rows", "weight", *FORMS], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 48, 64])
    parser.add_argument("--working-set", type=int, default=64, help="MiB")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = trace(model_config(args.model))
    sizes = sorted({(i, o) for _, i, o in shapes.linears} | {(shapes.hidden, shapes.vocab)}, key=lambda s: s[0] * s[1])
    working_set, rounds = (2**20, 1) if args.smoke else (args.working_set * 2**20, 5)
    parts = [
        {"rows": rows, "inputs": i, "outputs": o, **rates(rows, i, o, working_set=working_set, rounds=rounds)}
        for rows in args.rows
        for i, o in sizes
    ]
    print(table(parts))
    write_results(args, {"products": parts})


if __name__ == "__main__":
    main()
