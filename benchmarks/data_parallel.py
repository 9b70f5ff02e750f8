"""One update of the train engine in one and in several processes of one thread each, which train as one.

    python benchmarks/data_parallel.py [--model small] [--longest 64 128] [--processes 2]

64 responses to 8 prompts of 16 to 30 tokens, GRPO, fp32, gradient clipping and AdamW. All processes stay alive; one
process and several take turns, so that both meet the same machine. Times are the driver's: from the call to the last
rank's answer; they need as many idle cores as processes. On a busy machine the busiest rank's processor time says more.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import MODELS, arguments, build_model, markdown, model_config, prompt_ids, step_groups, write_results
from quartet.train.data_parallel import DataParallelGroup
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.worker import free_port
from quartet.config.algorithms import GRPO
from quartet.config.common import OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.engine import TrainEngine
from quartet.train.objectives import PolicyObjective


class TimedDataParallelGroup(DataParallelGroup):
    """Notes the seconds in which gradients were summed, waiting for the slowest rank left out."""

    seconds = 0.0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self.gather(None)
        begun = time.perf_counter()
        super().add_up(tensors)
        self.seconds += time.perf_counter() - begun


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


def rank_process(calls: Connection, rank: int, world: int, port: int, model: str, longest: int, smoke: bool) -> None:
    """Makes one update per call; answers with seconds of the processor and of summing gradients."""
    torch.set_num_threads(1)
    dp_group = None
    if world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        dp_group = TimedDataParallelGroup()
    config = TrainConfig(optim=OptimConfig(lr=1e-6))
    engine = TrainEngine(PackedCausalLM(build_model(model), "fp32"), config, total_steps=1000, dp_group=dp_group)
    batch = make_batch(model, longest, smoke)
    objective = PolicyObjective(GRPO(), len(batch), 1.0, 0.0, True, longest)
    calls.send(engine.train_step(batch, objective)["grad_norm"])
    while calls.recv():
        if dp_group is not None:
            dp_group.seconds = 0.0
        begun = time.process_time()
        engine.train_step(batch, objective)
        calls.send((time.process_time() - begun, dp_group.seconds if dp_group is not None else 0.0))
    if world > 1:
        dist.destroy_process_group()


class Team:
    """Processes that train one model."""

    def __init__(self, world: int, model: str, longest: int, smoke: bool) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._calls, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_process, args=(theirs, rank, world, port, model, longest, smoke), daemon=True
            )
            process.start()
            theirs.close()
            self._calls.append(ours)
            self._processes.append(process)
        self.grad_norms = [calls.recv() for calls in self._calls]

    def update(self) -> tuple[float, float, float]:
        """Seconds of an update, the busiest rank's of its processor, and those in which gradients were summed."""
        begun = time.perf_counter()
        for calls in self._calls:
            calls.send(True)
        busy, summing = zip(*(calls.recv() for calls in self._calls), strict=True)
        return time.perf_counter() - begun, max(busy), max(summing)

    def end(self) -> None:
        for calls in self._calls:
            calls.send(False)
        for process in self._processes:
            process.join(30)
            process.kill()


def measure(model: str, longest: int, args: Any) -> dict[str, Any]:
    teams = {world: Team(world, model, longest, args.smoke) for world in (1, args.processes)}
    found: dict[int, list[tuple[float, float, float]]] = {world: [] for world in teams}
    try:
        for _ in range(args.repeats):
            for world, team in teams.items():
                found[world].append(team.update())
    finally:
        for team in teams.values():
            team.end()
    return {
        "model": model,
        "longest": longest,
        "tokens": make_batch(model, longest, args.smoke).num_tokens,
        "grad_norm": {world: team.grad_norms for world, team in teams.items()},
        **{
            name: {world: statistics.median(turn[i] for turn in turns) for world, turns in found.items()}
            for i, name in enumerate(("seconds", "processor_s", "summing_s"))
        },
        "all_seconds": {world: [round(turn[0], 4) for turn in turns] for world, turns in found.items()},
    }


def table(parts: Sequence[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        for world, seconds in part["seconds"].items():
            busy, summing = part["processor_s"][world], part["summing_s"][world]
            more = [f"{summing:.3f}", f"{part['seconds'][1] / seconds:.2f} ×", f"{part['processor_s'][1] / busy:.2f} ×"]
            rows.append(
                [part["model"], str(part["longest"]), str(part["tokens"]), str(world), f"{seconds:.3f}", f"{busy:.3f}"]
                + (more if world > 1 else ["", "", ""])
            )
    head = ["model", "longest", "tokens", "processes", "s", "processor s", "s of summing", "faster"]
    return markdown([*head, "by processor time"], rows)


def main() -> None:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--longest", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--processes", type=int, default=2)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    parts = []
    for longest in args.longest:
        parts.append(measure(args.model, longest, args))
        write_results(args, {"data_parallel": parts})
    print(table(parts))


if __name__ == "__main__":
    main()
