"""One update of the train engine in one process, and in several of one thread each that train one model together.

    python benchmarks/data_parallel.py [--model small] [--longest 224] [--prompts 8] [--processes 2]

8 responses to each of ``--prompts`` prompts of 16 to 30 tokens, responses of an eighth of ``--longest`` to all of it;
GRPO, fp32, gradient clipping and AdamW. The ways to train together:

- ``all_reduce``: every process holds the model and computes its share; gradients are summed behind the last backward.
  This is plain data parallelism by the library's all-reduce, written here for comparison.
- ``replicate``: the engine's way of the same.
- ``fixed_order``: as ``replicate``, with sums taken in the order of the ranks; on CPUs they always are.
- ``shard``: FSDP2, the weights, gradients and states shared out over all processes.
- ``context``: as ``shard``, and the processes compute every micro-batch together, each some of its tokens.
- ``tensor``: the same, each some columns and rows of every layer, and some tokens between layers.

All processes stay alive; ways and sizes take turns, so that they meet the same machine. Times are the driver's: from
the call to the last rank's answer; they need as many idle cores as processes. On a busy machine the busiest rank's
processor time says more. Of the seconds of the rank that waited least, those within exchanges (``exchanged``) hold its
waiting for the others, too; the rest is computation. Whether time grows with the batch alone:
``--model tiny --longest 64 --prompts 8 64 512``.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from quartet.train.parallel import messages
from quartet.train.parallel.mesh import DataParallelGroup, Mesh

ALONE, ALL_REDUCE = "one process", "all_reduce"
WAYS = (ALL_REDUCE, "replicate", "fixed_order", "shard", "context", "tensor")


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
    cut = {way: world} if way in ("shard", "context", "tensor") else {}
    mesh = Mesh.of(DataParallelGroup.of_world(), **cut, fixed_order=way == "fixed_order")
    return TrainEngine(packed, config, total_steps=1000, mesh=mesh)


@dataclass(frozen=True)
class Case:
    """What an update is made on."""

    model: str
    longest: int
    prompts: int

    def batch(self) -> RaggedBatch:
        """Random tokens and advantages; every response token is trained on."""
        groups = step_groups(self.prompts, longest=self.longest)
        generator, vocab = torch.Generator().manual_seed(2), model_config(self.model).vocab_size
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


class Clock:
    """Seconds that this process is within functions, by kind."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        messages.swap = self._timed("exchanged", messages.swap)

    def _timed(self, kind: str, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            begun = time.perf_counter()
            try:
                function(*args)
            finally:
                self.seconds[kind] += time.perf_counter() - begun

        return timed


def rank_process(calls: Connection, rank: int, world: int, port: int, way: str, cases: Sequence[Case]) -> None:
    """Makes one update on the case of each number that it is sent; answers with seconds of the processor."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    engine, batches = make_engine(way, world, cases[0].model), [case.batch() for case in cases]
    objectives = [
        PolicyObjective(GRPO(), len(b), 1.0, 0.0, True, c.longest) for b, c in zip(batches, cases, strict=True)
    ]
    first = Case(cases[0].model, 12, 2)
    engine.train_step(first.batch(), PolicyObjective(GRPO(), 16, 1.0, 0.0, True, first.longest))
    clock = Clock()
    calls.send("ready")
    while (number := calls.recv()) is not None:
        begun = time.process_time()
        clock.seconds.clear()
        grad_norm = engine.train_step(batches[number], objectives[number])["grad_norm"]
        calls.send((time.process_time() - begun, grad_norm, clock.seconds["exchanged"]))
    if world > 1:
        dist.destroy_process_group()


class Team:
    """Processes that train one model in one way."""

    def __init__(self, way: str, world: int, cases: Sequence[Case]) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._calls, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_process, args=(theirs, rank, world, port, way, cases), daemon=True)
            process.start()
            theirs.close()
            self._calls.append(ours)
            self._processes.append(process)
        for calls in self._calls:
            assert calls.recv() == "ready"

    def update(self, number: int) -> tuple[float, ...]:
        """Seconds of an update, the busiest rank's of its processor, the norm of the gradient, and the rank's seconds
        within exchanges that waited least."""
        begun = time.perf_counter()
        for calls in self._calls:
            calls.send(number)
        answers = [calls.recv() for calls in self._calls]
        least = min(answers, key=lambda answer: answer[2])
        return time.perf_counter() - begun, max(answer[0] for answer in answers), *least[1:]

    def end(self) -> None:
        for calls in self._calls:
            calls.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()


def measure(cases: Sequence[Case], args: Any) -> list[dict[str, Any]]:
    worlds = {ALONE: 1, **dict.fromkeys(args.ways, args.processes)}
    teams = {way: Team(way, world, cases) for way, world in worlds.items()}
    found: dict[tuple[int, str], list[tuple[float, ...]]] = {(n, way): [] for n in range(len(cases)) for way in teams}
    try:
        for _ in range(args.repeats):
            for number, way in found:
                found[number, way].append(teams[way].update(number))
    finally:
        for team in teams.values():
            team.end()
    parts = []
    for number, case in enumerate(cases):
        medians = {way: [statistics.median(t) for t in zip(*found[number, way], strict=True)] for way in teams}
        parts.append(
            {
                **asdict(case),
                "tokens": case.batch().num_tokens,
                "processes": args.processes,
                "grad_norm_of_first": {way: found[number, way][0][2] for way in teams},
                "seconds": {way: of_way[0] for way, of_way in medians.items()},
                "processor_s": {way: of_way[1] for way, of_way in medians.items()},
                "exchanged_s": {way: of_way[3] for way, of_way in medians.items()},
                "all_seconds": {way: [round(turn[0], 4) for turn in found[number, way]] for way in teams},
            }
        )
    return parts


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        alone, alone_busy = part["seconds"][ALONE], part["processor_s"][ALONE]
        for way, seconds in part["seconds"].items():
            busy = part["processor_s"][way]
            more = ["", ""] if way == ALONE else [f"{alone / seconds:.2f} ×", f"{alone_busy / busy:.2f} ×"]
            figures = [f"{seconds:.3f}", f"{busy:.3f}", f"{1e6 * busy / part['tokens']:.0f}", *more]
            figures.append(f"{part['exchanged_s'][way]:.3f}")
            rows.append([part["model"], str(8 * part["prompts"]), str(part["tokens"]), way, *figures])
    head = [
        "model",
        "sequences",
        "tokens",
        "way",
        "s",
        "processor s",
        "µs a token",
        "faster",
        "by processor time",
        "exchanged s",
    ]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--longest", type=int, nargs="+", default=[224])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", choices=WAYS, nargs="*", default=WAYS)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    cases = [Case(args.model, longest, prompts) for longest in args.longest for prompts in args.prompts]
    parts = measure(cases if not args.smoke else [Case("tiny", 12, 2)], args)
    write_results(args, {"data_parallel": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
