"""Adapters against training all weights: bytes of states, time of an update and of generation, what merging rounds.

    python benchmarks/lora.py [--model small] [--dtypes fp32 bf16] [--rank 16]

64 responses to 8 prompts, one update per turn. States are counted twice: as the scheduler accounts for them, and by
summing the tensors that are there: weights, gradients right before the optimizer's step, its moments, the reference
(a copy where all weights are trained), and the engine's compute copies. Generation runs with those copies, and for the
adapters also without: then every step computes the products of the adapters beside those of the weights. The gap is
that of log-probabilities of the same tokens by merged weights and by products side by side, after some updates.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import DTYPES, MODELS, Group, arguments, build_model, markdown, prompt_ids, step_groups, write_results

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams
from quartet.schedule.model_worker import TrainWorker
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import SFTObjective

UPDATES = 10
"""Before the gap is measured, at a learning rate usual for adapters."""
LR = 1e-3


class SideBySide(ComputeWeights):
    """No copies: the engine computes with the model as the trainer has it."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


def step_batch(groups: list[Group], vocab_size: int) -> RaggedBatch:
    draw = torch.Generator().manual_seed(2)
    responses = [
        [torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in group.responses]
        for group in groups
    ]
    ids = [f"{g}.{r}" for g, group in enumerate(groups) for r in range(len(group.responses))]
    batch = RaggedBatch.from_groups(prompt_ids(groups, vocab_size), responses, ids)
    return batch.with_token(loss_mask=batch.sequence_index() >= 0)


def generation(packed: PackedCausalLM, groups: list[Group], side_by_side: bool, repeats: int) -> tuple[float, int]:
    """Median tokens per second, and the bytes of compute copies."""
    engine = NativeEngine(packed)
    if side_by_side:
        engine._weights = SideBySide(packed)
    rates = []
    prompts = prompt_ids(groups, packed.vocab_size)
    for turn in range(repeats + 1):
        requests = [
            Request(f"{turn}.{g}.{r}", f"{turn}.{g}", tuple(ids), SamplingParams(max_new_tokens=length, seed=r))
            for g, (group, ids) in enumerate(zip(groups, prompts, strict=True))
            for r, length in enumerate(group.responses)
        ]
        engine.submit(requests)
        start, before = time.perf_counter(), engine.stats().generated_tokens
        while engine.has_work:
            engine.step()
        rates.append((engine.stats().generated_tokens - before) / (time.perf_counter() - start))
    return statistics.median(rates[1:]), engine._weights.num_bytes


def states(engine: TrainEngine[PackedCausalLM], batch: RaggedBatch, reference: Any) -> dict[str, int]:
    gradients: list[int] = []

    def count(*_: Any) -> None:
        gradients.append(sum(p.grad.nbytes for p in engine.packed.model.parameters() if p.grad is not None))

    hook = engine.optimizer.register_step_pre_hook(count)
    engine.train_step(batch, SFTObjective())
    hook.remove()
    moments = (t for state in engine.optimizer.state.values() for t in state.values() if t.dim())
    return {
        "accounted": TrainWorker(engine).sizes()["train"],
        "weights": sum(p.nbytes for p in engine.packed.model.parameters()),
        "gradients": gradients[0],
        "moments": sum(t.nbytes for t in moments),
        "reference": sum(p.nbytes for p in reference.parameters()) if reference is not None else 0,
    }


def gap(packed: PackedCausalLM, batch: RaggedBatch) -> dict[str, float]:
    """Differences of log-probabilities by merged weights and by products side by side."""
    mask, columns = batch.token["loss_mask"], []
    for context in (contextlib.nullcontext, packed.with_merged_adapters):
        with context():
            columns.append(
                forward_only(packed, batch, ForwardNeeds(logprobs=True), 1 << 20).token["logprobs"][mask].double()
            )
    difference = columns[0] - columns[1]
    return {"max": float(difference.abs().max()), "std": float(difference.std()), "bias": float(difference.mean())}


def measure(name: str, dtype: str, rank: int | None, args: argparse.Namespace) -> dict[str, Any]:
    groups = step_groups(2, 2, 8, 12) if args.smoke else step_groups()
    lora = None if rank is None else LoRAConfig(rank=rank, alpha=2.0 * rank)
    model = build_model(name)
    reference = copy.deepcopy(model) if lora is None else None
    packed = packed_causal_lm(model, "bf16" if dtype == "bf16" else "fp32", lora=lora)
    train = TrainConfig(precision="bf16" if dtype == "bf16" else "fp32", lora=lora, optim=OptimConfig(lr=LR))
    engine = TrainEngine(packed, train, total_steps=1 << 20)
    batch = step_batch(groups, packed.vocab_size)
    found: dict[str, Any] = {"model": name, "dtype": dtype, "rank": rank, "states": states(engine, batch, reference)}
    seconds = []
    for _ in range(max(args.repeats, 1 if args.smoke else UPDATES)):
        start = time.perf_counter()
        engine.train_step(batch, SFTObjective())
        seconds.append(time.perf_counter() - start)
    found["update_s"] = statistics.median(seconds)
    found["sent_bytes"] = sum(tensor.nbytes for _, tensor in engine.weights())
    found["tokens_per_s"], found["states"]["copies"] = generation(packed, groups, False, args.repeats)
    if lora is not None:
        found["side_by_side_tokens_per_s"], _ = generation(packed, groups, True, args.repeats)
        found["gap"] = gap(packed, batch)
    weights = ComputeWeights(packed)
    with weights.active():
        pass
    start = time.perf_counter()
    weights.refresh()
    found["refresh_s"] = time.perf_counter() - start
    return found


def state_table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        kinds = part["states"]
        held = kinds["weights"] + kinds["gradients"] + kinds["moments"]
        total = held + kinds["reference"] + kinds["copies"]
        cells = [kinds[k] for k in ("weights", "gradients", "moments", "reference", "copies")]
        rows.append(
            [
                part["dtype"],
                "all weights" if part["rank"] is None else f"rank {part['rank']}",
                *(f"{size / 2**20:,.1f}" for size in (*cells, total)),
                f"{kinds['accounted'] / held:.4f}",
            ]
        )
    head = ["dtype", "trained", "weights", "gradients", "moments", "reference", "engine's copies", "together"]
    return markdown([*head, "accounted for / there"], rows)


def time_table(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        beside = part.get("side_by_side_tokens_per_s")
        differences = part.get("gap")
        rows.append(
            [
                part["dtype"],
                "all weights" if part["rank"] is None else f"rank {part['rank']}",
                f"{part['update_s']:.3f}",
                f"{part['tokens_per_s']:,.0f}",
                "" if beside is None else f"{beside:,.0f}",
                f"{part['refresh_s'] * 1e3:.0f}",
                f"{part['sent_bytes'] / 2**20:.1f}",
                "" if differences is None else f"{differences['max']:.1e}, {differences['std']:.1e}",
            ]
        )
    head = ["dtype", "trained", "update s", "tokens/s", "side by side", "new copies ms", "sent MiB", "gap max, std"]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for dtype in args.dtypes:
        for rank in (None, args.rank):
            parts.append(measure(args.model, dtype, rank, args))
            write_results(args, {"lora": parts})
    print(state_table(parts), time_table(parts), sep="\n\n")


if __name__ == "__main__":
    main()
