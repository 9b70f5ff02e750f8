"""Plans of micro-batches: the dearest part by several ways to divide, passes side by side on ranks, seconds to plan.

    python benchmarks/micro_batches.py [--lengths FILE.jsonl ...] [--measure-attention]

No model runs but for ``--measure-attention``: costs are those of ``batch/partition.py``, in tokens attended to. Lengths
are lognormal (median 245, up to 8192), uniform (1 to 2048) or of two kinds (about 200 and 3000), 2 to 64 parts, 2 to 64
items per part; with ``--lengths`` also those of texts in JSONL files, a token for every four characters.

- *Dearest part*, over the bound that no division can be below (a fair share, or the dearest item): longest first; plain
  Karmarkar-Karp; the same with equally many items in each part, as RLHF trainers often ask for; ours.
- *Side by side*: ranks under a token budget that wait for each other in every micro-batch, so that each costs what its
  dearest rank does. Formerly every rank cut a share of its own, with a number of micro-batches of its own.
- *Token cost*: the cost with waiting of 8 ranks where a token costs otherwise than the plan takes it to.
- *Planning*: processor time for 4,096 sequences, in 512 groups and without groups.
- ``--measure-attention``: processor time of an update of the small model by the lengths of sequences, fitted by least
  squares to tokens and tokens attended to; their ratio beside the one that FLOPs give.
"""

from __future__ import annotations

import gc
import heapq
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from common import arguments, build_model, markdown, write_results

from quartet.batch.partition import TOKEN_COST, AtomTree, balanced_partition, greedy_partition, plan_micro_batches
from quartet.batch.ragged import RaggedBatch

PARTS = (2, 3, 4, 8, 16, 32, 64)
PER_PART = (2, 3, 4, 8, 16, 64)
BUDGET = 16_384
TOKEN_COSTS = (2_000, 8_000, 12_000, 32_000)
PARTS_SHOWN = ("dearest", "side by side", "token cost", "planning")
Parts = list[list[int]]


def lengths_of(kind: str, num: int, draw: random.Random, pool: Sequence[int]) -> list[int]:
    if kind == "lognormal":
        return [min(max(int(draw.lognormvariate(5.5, 1.0)), 1), 8192) for _ in range(num)]
    if kind == "uniform":
        return [draw.randint(1, 2048) for _ in range(num)]
    if kind == "two kinds":
        return [max(int(draw.gauss(*draw.choice(((200, 50), (3000, 400))))), 1) for _ in range(num)]
    return draw.choices(pool, k=num)


def texts(row: object) -> Iterator[str]:
    """Every text in a row of JSON."""
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict | list):
        for value in row.values() if isinstance(row, dict) else row:
            yield from texts(value)


def file_lengths(path: Path) -> list[int]:
    rows = path.read_text(encoding="utf-8").splitlines()
    return [max(sum(map(len, texts(json.loads(row)))) // 4, 1) for row in rows if row]


# Other ways to divide ------------------------------------------------------------------------------------


def karmarkar_karp(costs: Sequence[int], num_parts: int, equal_counts: bool = False) -> Parts:
    """As it is usually written, with all parts of every division; ``equal_counts``: so many items begin together."""
    order = sorted(range(len(costs)), key=costs.__getitem__)
    size = num_parts if equal_counts else 1
    heap = []
    for first in range(0, len(order), size):
        taken = order[first : first + size]
        parts = sorted([(costs[i], [i]) for i in taken] + [(0, [])] * (num_parts - len(taken)), reverse=True)
        heap.append((parts[-1][0] - parts[0][0], first, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, number, other) = heapq.heappop(heap), heapq.heappop(heap)
        parts = sorted(((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))
    return [items for _, items in heap[0][2]]


WAYS: dict[str, Callable[[Sequence[int], int], Parts]] = {
    "longest first": greedy_partition,
    "Karmarkar-Karp": karmarkar_karp,
    "the same, equal counts": lambda costs, num_parts: karmarkar_karp(costs, num_parts, equal_counts=True),
    "ours": balanced_partition,
}


def cost_of(length: int, token_cost: int = TOKEN_COST) -> int:
    return length * token_cost + length * (length + 1) // 2


def dearest_parts(kinds: Sequence[str], pools: dict[str, list[int]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """``[kind][way]`` the dearest part over the bound, one number per case."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in kinds:
        draw = random.Random(7)
        ratios: dict[str, list[float]] = {way: [] for way in WAYS}
        for num_parts in PARTS:
            for per_part in PER_PART:
                for _ in range(repeats):
                    costs = list(map(cost_of, lengths_of(kind, num_parts * per_part, draw, pools.get(kind, ()))))
                    bound = max(sum(costs) / num_parts, max(costs))
                    for way, divide in WAYS.items():
                        parts = divide(costs, num_parts)
                        ratios[way].append(max(sum(costs[i] for i in part) for part in parts) / bound)
        found[kind] = ratios
    return found


def dearest_table(found: dict[str, dict[str, list[float]]]) -> str:
    rows = []
    for kind, ratios in found.items():
        for way, values in ratios.items():
            ours = ratios["ours"]
            larger = sum(mine > other * (1 + 1e-12) for mine, other in zip(ours, values, strict=True))
            smaller = sum(mine < other * (1 - 1e-12) for mine, other in zip(ours, values, strict=True))
            against = "" if way == "ours" else f"{larger} / {len(values) - larger - smaller} / {smaller}"
            rows.append([kind, way, f"{statistics.mean(values):.4f}", f"{max(values):.3f}", against])
    return markdown(["lengths", "way", "dearest over bound, mean", "most", "ours larger / equal / smaller"], rows)


# Side by side --------------------------------------------------------------------------------------------


def former_plan(lengths: Sequence[int], budget: int, num_ranks: int) -> list[Parts]:
    """Shares by tokens, longest first; each cut by itself into few micro-batches."""
    plan = []
    for share in greedy_partition(lengths, num_ranks):
        tokens = [lengths[i] for i in sorted(share)]
        num_parts = max(-(-sum(tokens) // budget), sum(2 * n > budget for n in tokens), 1)
        while True:
            parts = greedy_partition(tokens, min(num_parts, len(tokens)))
            if all(sum(tokens[i] for i in part) <= budget for part in parts):
                break
            num_parts += max(num_parts // 32, 1)
        plan.append(sorted(sorted(sorted(share)[i] for i in part) for part in parts))
    return plan


def waiting(plan: list[Parts], lengths: Sequence[int], token_cost: int = TOKEN_COST) -> tuple[int, float]:
    """Micro-batches, and their cost with waiting over an equal share of all cost."""
    num, of = max(map(len, plan)), [cost_of(n, token_cost) for n in lengths]
    costs = [[sum(of[i] for i in part) for part in parts] + [0] * (num - len(parts)) for parts in plan]
    fair = sum(of) / len(plan)
    return num, sum(map(max, zip(*costs, strict=True))) / fair


def present_plan(lengths: Sequence[int], num_ranks: int, token_cost: int = TOKEN_COST) -> list[Parts]:
    batch = RaggedBatch.from_sequences([[0] * n for n in lengths])
    atoms = [[s] for s in range(len(batch))]
    plan = plan_micro_batches(
        [(batch, atoms)], BUDGET, num_ranks=num_ranks, share=False, budget_key="token_budget", token_cost=token_cost
    )
    return [parts for (parts,) in plan]


def other_costs(kinds: Sequence[str], pools: dict[str, list[int]], repeats: int) -> list[list[str]]:
    """What a plan costs by the default cost of a token, and by longest first over tokens, where another one is true."""
    rows = []
    for kind in kinds:
        for true in TOKEN_COSTS:
            draw, found = random.Random(3), []
            for _ in range(repeats):
                lengths = lengths_of(kind, 128 * 8, draw, pools.get(kind, ()))
                plans = present_plan(lengths, 8, true), present_plan(lengths, 8), former_plan(lengths, BUDGET, 8)
                found.append([waiting(plan, lengths, true)[1] for plan in plans])
            rows.append([kind, str(true), *(f"{statistics.mean(column):.4f}" for column in zip(*found, strict=True))])
    return rows


def side_by_side(kinds: Sequence[str], pools: dict[str, list[int]], repeats: int) -> list[list[str]]:
    rows = []
    for kind in kinds:
        for num_ranks in (1, 2, 8, 64):
            draw, former, ours = random.Random(3), [], []
            for _ in range(repeats):
                lengths = lengths_of(kind, 128 * num_ranks, draw, pools.get(kind, ()))
                former.append(waiting(former_plan(lengths, BUDGET, num_ranks), lengths))
                ours.append(waiting(present_plan(lengths, num_ranks), lengths))
            columns = [f(x) for f in (_mean_count, _mean_ratio) for x in (former, ours)]
            rows.append([kind, str(num_ranks), *columns])
    return rows


def _mean_count(found: Sequence[tuple[int, float]]) -> str:
    return f"{statistics.mean(num for num, _ in found):.1f}"


def _mean_ratio(found: Sequence[tuple[int, float]]) -> str:
    return f"{statistics.mean(ratio for _, ratio in found):.3f}"


# Planning ------------------------------------------------------------------------------------------------


def planning_rows(repeats: int, num_groups: int) -> list[list[str]]:
    draw = random.Random(1)

    def some(shortest: int, longest: int) -> list[int]:
        return [0] * min(max(int(draw.lognormvariate(6.0, 0.8)), shortest), longest)

    num = 8 * num_groups
    groups = RaggedBatch.from_groups(
        [some(50, 400) for _ in range(num_groups)],
        [[some(1, 4096) for _ in range(8)] for _ in range(num_groups)],
        [str(i) for i in range(num)],
    )
    alone = RaggedBatch.from_sequences([some(1, 4096) for _ in range(num)])
    rows = []
    # Python's full collections fall anywhere and take 90 ms with torch loaded: what is there now is left out of them.
    gc.freeze()
    for name, batch in ((f"{num_groups} groups of 8", groups), (f"{num} alone", alone)):
        atoms = [[s] for s in range(num)]
        for budget in (8192, 32_768, 131_072):
            for num_ranks in (1, 8, 64):
                seconds = []
                for _ in range(repeats):
                    start = time.thread_time()
                    plan = plan_micro_batches(
                        [(batch, atoms)], budget, num_ranks=num_ranks, share=True, budget_key="token_budget"
                    )
                    seconds.append(time.thread_time() - start)
                tree = AtomTree(batch, atoms, share=True)
                costs = [[tree.block(part).cost for part in parts] for (parts,) in plan]
                waited = sum(map(max, zip(*costs, strict=True))) * num_ranks / tree.block(range(num)).cost
                counts = [str(budget), str(num_ranks), str(len(costs[0])), f"{waited:.3f}"]
                rows.append([name, *counts, f"{statistics.median(seconds) * 1e3:.0f}"])
    return rows


# Attention -----------------------------------------------------------------------------------------------


def measure_attention(repeats: int, total: int) -> dict[str, float]:
    """Processor time of forward and backward of the small model, by the lengths into which ``total`` tokens are cut."""
    from quartet.models.packed_model import PackedCausalLM
    from quartet.train.forward import ForwardNeeds, forward_packed

    packed = PackedCausalLM(build_model("small"))
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096) if n <= total]
    batches = {}
    for n in lengths:
        batch = RaggedBatch.from_sequences([[7] * n for _ in range(total // n)])
        # One token in each sequence has a label: the head's cost is not a token's.
        labels = torch.zeros(batch.num_tokens, dtype=torch.bool)
        labels[n - 1 :: n] = True
        batches[n] = batch.with_token(loss_mask=labels)
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for turn in range(repeats + 1):
        for n, batch in batches.items():
            start = time.process_time()
            outputs = forward_packed(packed, batch, ForwardNeeds(logprobs=True), 1024)
            assert outputs.logprobs is not None
            outputs.logprobs.sum().backward()
            if turn:
                seconds[n].append(time.process_time() - start)
    medians = torch.tensor([statistics.median(seconds[n]) for n in lengths], dtype=torch.float64)
    counts = torch.tensor([[total, total * (n + 1) / 2] for n in lengths], dtype=torch.float64)
    per_token, per_attended = torch.linalg.lstsq(counts, medians.unsqueeze(1)).solution.flatten().tolist()
    print(markdown(["sequences of", "s"], [[str(n), f"{s:.3f}"] for n, s in zip(lengths, medians, strict=True)]))
    return {"by FLOPs": packed.token_cost, "measured": per_token / per_attended}


def main() -> None:
    parser = arguments(__doc__, repeats=10)
    parser.add_argument("--lengths", nargs="*", type=Path, default=[], help="JSONL files whose texts' lengths are used")
    parser.add_argument("--parts", nargs="+", choices=PARTS_SHOWN, default=PARTS_SHOWN)
    parser.add_argument("--measure-attention", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_attention:
        found = measure_attention(args.repeats if not args.smoke else 1, 4096 if not args.smoke else 256)
        print(markdown(list(found), [[f"{value:,.0f}" for value in found.values()]]))
        write_results(args, {"token_cost": found})
        return
    repeats = 1 if args.smoke else args.repeats
    pools = {path.stem: file_lengths(path) for path in args.lengths}
    kinds = ["lognormal", "uniform", "two kinds", *pools]
    results: dict[str, object] = {}
    if "dearest" in args.parts:
        results["dearest"] = dearest = dearest_parts(kinds, pools, repeats)
        print(dearest_table(dearest))
    if "side by side" in args.parts:
        results["side_by_side"] = waited = side_by_side(kinds, pools, repeats)
        head = ["lengths", "ranks", "micro-batches formerly", "now", "cost with waiting over fair, formerly", "now"]
        print("", markdown(head, waited), sep="\n")
    if "token cost" in args.parts:
        results["other_costs"] = others = other_costs(kinds, pools, repeats)
        head = ["lengths", "true cost of a token", "planned with it", "with the default", "formerly, by tokens"]
        print("", markdown(head, others), sep="\n")
    if "planning" in args.parts:
        results["planning"] = planned = planning_rows(repeats, 8 if args.smoke else 512)
        print("", markdown(["sequences", "budget", "ranks", "micro-batches", "with waiting", "ms"], planned), sep="\n")
    write_results(args, results)


if __name__ == "__main__":
    main()
