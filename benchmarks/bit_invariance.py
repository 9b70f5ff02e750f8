"""Which computations keep their bits whatever else is computed: what ``numerics: exact`` rests on, on your processor.

    OMP_NUM_THREADS=1 python benchmarks/bit_invariance.py [--threads 1] [--dtype fp32]

Four tables. Products: from how many rows on a row's bits no longer change, per shape, for up to 4096 rows. Activations:
how many outputs change with the amount of other numbers, where a layer's numbers are a multiple of 32 and where not.
Reductions: as products, for what works row by row. Attention: how many queries of a long sequence keep their bits when
they are computed alone, by the number of query rows and by how the number of keys is rounded up; ``exact`` is what
``quartet.models.exact`` uses. Nothing here depends on the weights of a model, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, arguments, machine, markdown, write_results
from torch import Tensor

from quartet.models.attention import AttentionParams
from quartet.models.exact import ExactPackedAttention, additive_mask, exact_masked_attention, padded_key_length

SHAPES = (
    (16, 16), (64, 64), (64, 172), (100, 77), (192, 512), (256, 688), (512, 512), (512, 1408), (1408, 512),
    (896, 128), (896, 4864), (4864, 896), (2048, 2048), (512, 8192), (896, 32000),
)  # fmt: skip
ROWS = (*range(1, 130), 191, 192, 193, 255, 256, 257, 300, 511, 512, 513, 700, 1000, 1024, 2048, 4096)
WIDTHS = (32, 33, 100, 172, 512, 896, 4864, 8192, 32003)
HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
QUERY_ROWS = (1, 2, 4, 8, 16)
LONGEST = 1500

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "cos": torch.cos,
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean of squares": lambda x: x.pow(2).mean(-1),
    "layer norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "softmax": lambda x: x.softmax(-1),
    "log-sum-exp": lambda x: x.logsumexp(-1),
}


class Draw:
    """Normal random numbers, the same on every run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)


def spans(numbers: list[int], all_numbers: tuple[int, ...]) -> str:
    """``numbers`` as runs of neighbours in ``all_numbers``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and all_numbers.index(number) == all_numbers.index(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:6]) + (" …" if len(texts) > 6 else "") if texts else "none"


def changing_rows(function: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...]) -> list[int]:
    """Numbers of rows among which some row has other bits than among all; first and last rows are looked at."""
    whole = function(rows)
    return [
        n
        for n in counts
        if not (torch.equal(function(rows[:n]), whole[:n]) and torch.equal(function(rows[-n:]), whole[-n:]))
    ]


def products(draw: Draw, counts: tuple[int, ...]) -> list[list[str]]:
    """The bits among many rows are the reference; fewer rows may differ."""
    found = []
    for inputs, outputs in SHAPES:
        weight, bias = draw(outputs, inputs), draw(outputs)
        rows = draw(max(counts), inputs)
        plain = changing_rows(lambda x, w=weight: F.linear(x, w), rows, counts)  # type: ignore[misc]
        biased = changing_rows(lambda x, w=weight, b=bias: F.linear(x, w, b), rows, counts)  # type: ignore[misc]
        found.append([f"{inputs} → {outputs}", spans(plain, counts), spans(biased, counts)])
    return found


def activations(draw: Draw) -> list[list[str]]:
    """Outputs that change with the number of rows, of a width of 172 (no multiple of 32) and of 512."""
    found = []
    for name, function in ACTIVATIONS.items():
        texts = []
        for width in (172, 512):
            rows = draw(130, width)
            whole = function(rows)
            parts = [(start, n) for n in range(1, 66) for start in (0, 65)]
            changed = [int((function(rows[s : s + n].clone()) != whole[s : s + n]).sum()) for s, n in parts]
            total = sum(n * width for _, n in parts)
            texts.append("none" if not any(changed) else f"{sum(changed)} of {total}")
        found.append([name, *texts])
    return found


def reductions(draw: Draw, counts: tuple[int, ...]) -> list[list[str]]:
    counts = tuple(n for n in counts if n <= 300)
    return [
        [name, *(spans(changing_rows(function, draw(300, width), counts), counts) for width in WIDTHS)]
        for name, function in REDUCTIONS.items()
    ]


def in_32s(num_keys: int) -> int:
    return -(-num_keys // 32) * 32


def attention(draw: Draw, positions: list[int]) -> list[list[str]]:
    """Shares of queries that keep their bits, 2 query heads for each of 2 key/value heads."""
    found = []
    for size in HEAD_SIZES:
        rules = {"plain": AttentionParams(size**-0.5), "window of 300": AttentionParams(size**-0.5, 300)}
        rules["soft-capped"] = AttentionParams(size**-0.5, None, 20.0)
        q, k, v = draw(1, 4, LONGEST, size), draw(1, 2, LONGEST, size), draw(1, 2, LONGEST, size)
        for kind, rule in rules.items():
            whole = ExactPackedAttention([LONGEST]).attend(0, q, k, v, rule)
            shares = []
            for num_rows in QUERY_ROWS:
                for rounded in (in_32s, padded_key_length):
                    same = sum(
                        torch.equal(_single(q, k, v, p, num_rows, rounded(p + 1), rule), whole[0, :, p])
                        for p in positions
                    )
                    shares.append("all" if same == len(positions) else f"{same / len(positions):.0%}")
            found.append([str(size), kind, *(" / ".join(shares[i : i + 2]) for i in range(0, len(shares), 2))])
    return found


def _single(
    q: Tensor, k: Tensor, v: Tensor, position: int, num_rows: int, num_keys: int, rule: AttentionParams
) -> Tensor:
    """One query's output ``[4, D]``, computed with ``num_rows`` query rows per key/value head, 2 of them its own."""
    query = q[:, :, position].unflatten(1, (2, 2))
    missing = (0, 0, 0, max(0, num_keys - LONGEST))
    keys, values = (F.pad(x, missing)[:, :, :num_keys] for x in (k, v))
    mask = additive_mask(torch.tensor([[position]]), num_keys, rule, q.dtype).unsqueeze(1)
    if num_rows == 1:
        # Each query head on its own.
        heads = [exact_masked_attention(query[:, :, i : i + 1], keys, values, mask, rule) for i in range(2)]
        return torch.cat(heads, 2).flatten(1, 2)[0]
    rows = F.pad(query, (0, 0, 0, num_rows - 2))
    return exact_masked_attention(rows, keys, values, mask, rule)[:, :, :2].flatten(1, 2)[0]


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    draw = Draw(DTYPES[args.dtype])
    counts = tuple(n for n in ROWS if n <= 64) if args.smoke else ROWS
    positions = list(range(5, LONGEST, 300 if args.smoke else 37))
    here = machine(args.threads)
    print(f"{here['processor']} ({torch.backends.cpu.get_cpu_capability()}), torch {here['torch']}, "
          f"{args.threads} threads, {args.dtype}\n")  # fmt: skip
    tables: dict[str, tuple[list[str], list[list[str]]]] = {
        f"Products: numbers of rows with other bits than {max(counts)}": (
            ["shape", "plain", "with bias"],
            products(draw, counts),
        ),
        "Activations: outputs that change with what else is computed": (
            ["", "width 172", "width 512"],
            activations(draw),
        ),
        "Reductions: numbers of rows with other bits than 300, by width": (
            ["", *map(str, WIDTHS)],
            reductions(draw, counts),
        ),
    }
    if args.dtype == "fp32":
        tables["Attention: queries that keep their bits alone, keys rounded up to 32s / exact"] = (
            ["head size", "", *(f"{n} query row{'s' * (n > 1)}" for n in QUERY_ROWS)],
            attention(draw, positions),
        )
    results: dict[str, Any] = {"dtype": args.dtype}
    for title, (head, rows) in tables.items():
        print(f"{title}\n\n{markdown(head, rows)}\n")
        results[title] = {"head": head, "rows": rows}
    write_results(args, results)


if __name__ == "__main__":
    main()
