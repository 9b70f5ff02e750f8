"""One update of the train engine in one process, and in several of one thread each that train one model together.

    python benchmarks/data_parallel.py [--model small] [--longest 64 128] [--processes 2]

64 responses to 8 prompts of 16 to 30 tokens, GRPO, fp32, gradient clipping and AdamW. The ways to train together:

- ``all_reduce``: every process holds the model and computes its share; gradients are summed behind the last backward.
  This is plain data parallelism, written here for comparison.
- ``replicate``: FSDP2, every process with a whole copy.
- ``shard``: FSDP2, the weights, gradients and states shared out over all processes.
- ``fixed_order``: as ``shard``, with sums taken in the order of the ranks.

All processes stay alive and the ways take turns, so that they meet the same machine. Times are the driver's: from the
call to the last rank's answer; they need as many idle cores as processes. On a busy machine the busiest rank's
processor time says more. Memory is the peak of a process of its own, in its whole life.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import MODELS, arguments, build_model, markdown, model_config, prompt_ids, step_groups, write_results

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.worker import free_port
from quartet.config.algorithms import GRPO
from quartet.config.common import OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.engine import LossTerm, TrainEngine
from quartet.train.metrics import MetricSums
from quartet.train.objectives import PolicyObjective
from quartet.train.parallel.group import DataParallelGroup
from quartet.train.parallel.mesh import Mesh

ALONE, ALL_REDUCE = "one process", "all_reduce"
WAYS = (ALL_REDUCE, "replicate", "shard", "fixed_order")


class AllReduceEngine(TrainEngine[PackedCausalLM]):
    """Plain data parallelism: the same plan as on a mesh, and one all-reduce of all gradients."""

    def _accumulate(self, terms: Sequence[LossTerm]) -> MetricSums:
        batches = [(term.batch, term.objective.atoms(term.batch)) for term in terms]
        denominators = [term.objective.denominators(term.batch) for term in terms]
        sums = self.budget.run_several(
            partial(self._backward, terms, denominators),
            batches,
            share=True,
            token_cost=self.packed.token_cost,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
        )
        under_way = [
            dist.all_reduce(parameter.grad, async_op=True)
            for parameter in self.packed.model.parameters()
            if parameter.grad is not None
        ]
        for work in under_way:
            work.wait()
        return sums


def make_engine(way: str, world: int, model: str) -> TrainEngine[PackedCausalLM]:
    packed, config = PackedCausalLM(build_model(model), "fp32"), TrainConfig(optim=OptimConfig(lr=1e-6))
    if way in (ALONE, ALL_REDUCE):
        return (TrainEngine if way == ALONE else AllReduceEngine)(packed, config, total_steps=1000)
    shard = 1 if way == "replicate" else world
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard, fixed_order=way == "fixed_order")
    return TrainEngine(packed, config, total_steps=1000, mesh=mesh)


def make_batch(model: str, longest: int, smoke: bool) -> RaggedBatch:
    """Random tokens and advantages; every response token is trained on."""
    groups = step_groups(2, 2, 8, 12) if smoke else step_groups(longest=longest)
    generator, vocab = torch.Generator().manual_seed(2), model_config(model).vocab_size
    responses = [[torch.randint(3, vocab, (n,), generator=generator).tolist() for n in g.responses] for g in groups]
    count = sum(len(group.responses) for group in groups)
    batch = RaggedBatch.from_groups(prompt_ids(groups, vocab), responses, [str(i) for i in range(count)])
    action = batch.sequence_index() >= 0
    return batch.with_sequence(trajectory=torch.arange(count)).with_token(
        loss_mask=action,
        action_mask=action,
        advantages=torch.randn(batch.num_tokens, generator=generator) * action,
        rollout_logprobs=torch.zeros(batch.num_tokens),
    )


def rank_process(
    calls: Connection, rank: int, world: int, port: int, way: str, model: str, longest: int, smoke: bool
) -> None:
    """Makes one update per call; answers with seconds of the processor and the process's peak in MiB."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    engine = make_engine(way, world, model)
    batch = make_batch(model, longest, smoke)
    objective = PolicyObjective(GRPO(), len(batch), 1.0, 0.0, True, longest)
    calls.send(engine.train_step(batch, objective)["grad_norm"])
    while calls.recv():
        begun = time.process_time()
        engine.train_step(batch, objective)
        busy = time.process_time() - begun
        calls.send((busy, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    if world > 1:
        dist.destroy_process_group()


class Team:
    """Processes that train one model in one way."""

    def __init__(self, way: str, world: int, model: str, longest: int, smoke: bool) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._calls, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_process, args=(theirs, rank, world, port, way, model, longest, smoke), daemon=True
            )
            process.start()
            theirs.close()
            self._calls.append(ours)
            self._processes.append(process)
        self.grad_norms = [calls.recv() for calls in self._calls]

    def update(self) -> tuple[float, float, float]:
        """Seconds of an update, the busiest rank's of its processor, and the largest rank's peak in MiB."""
        begun = time.perf_counter()
        for calls in self._calls:
            calls.send(True)
        busy, peak = zip(*(calls.recv() for calls in self._calls), strict=True)
        return time.perf_counter() - begun, max(busy), max(peak)

    def end(self) -> None:
        for calls in self._calls:
            calls.send(False)
        for process in self._processes:
            process.join(30)
            process.kill()


def measure(model: str, longest: int, args: Any) -> dict[str, Any]:
    ways = {ALONE: 1, **dict.fromkeys(args.ways, args.processes)}
    teams = {way: Team(way, world, model, longest, args.smoke) for way, world in ways.items()}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in teams}
    try:
        for _ in range(args.repeats):
            for way, team in teams.items():
                found[way].append(team.update())
    finally:
        for team in teams.values():
            team.end()
    return {
        "model": model,
        "longest": longest,
        "tokens": make_batch(model, longest, args.smoke).num_tokens,
        "processes": args.processes,
        "grad_norm": {way: team.grad_norms for way, team in teams.items()},
        **{
            name: {way: statistics.median(turn[i] for turn in turns) for way, turns in found.items()}
            for i, name in enumerate(("seconds", "processor_s", "peak_mib"))
        },
        "all_seconds": {way: [round(turn[0], 4) for turn in turns] for way, turns in found.items()},
    }


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        alone, alone_busy = part["seconds"][ALONE], part["processor_s"][ALONE]
        for way, seconds in part["seconds"].items():
            busy = part["processor_s"][way]
            more = ["", ""] if way == ALONE else [f"{alone / seconds:.2f} ×", f"{alone_busy / busy:.2f} ×"]
            figures = [f"{seconds:.3f}", f"{busy:.3f}", f"{part['peak_mib'][way]:.0f}", *more]
            rows.append([part["model"], str(part["longest"]), str(part["tokens"]), way, *figures])
    head = ["model", "longest", "tokens", "way", "s", "processor s", "peak MiB", "faster", "by processor time"]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--longest", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    parts = []
    for longest in args.longest:
        parts.append(measure(args.model, longest, args))
        write_results(args, {"data_parallel": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
