"""Peak activation memory of one long sequence: on one rank, and on ranks that have its tokens between them.

    python benchmarks/context_memory.py [--tokens 32768] [--contexts 1 4] [--recompute true]

One update (SFT of every token, AdamW, fp32) of a small Llama on a single sequence, in fresh processes of one thread for
every figure. Measured is the most that is resident during the update above what was before, pages of files left out; an
update of 64 tokens went before, so weights, gradients' buffers and the optimizer's state are not in it. Every layer
keeps its input alone (``--recompute true``), as one would set it for such a length. glibc is told to give freed tensors
back at once (``MALLOC_MMAP_THRESHOLD_``), so that what is resident is what is in use; ``--keep-freed`` leaves it alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, markdown, write_results
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.worker import free_port
from quartet.config.common import TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.memory import held_bytes, peak_resident_bytes
from quartet.train.engine import TrainEngine
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import DataParallelGroup, Mesh

MIB = 1 << 20
VOCAB = 512


def batch(num_tokens: int) -> RaggedBatch:
    """One sequence of random tokens; all but the first are trained on."""
    tokens = torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return RaggedBatch.from_sequences([tokens], ["0"], token={"loss_mask": torch.arange(num_tokens) > 0})


def engine(args: argparse.Namespace, context: int) -> TrainEngine[PackedCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=args.tokens,
    )  # fmt: skip
    recompute: Any = {"true": True, "false": False}.get(args.recompute, args.recompute)
    packed = PackedCausalLM(LlamaForCausalLM(config).eval(), "fp32", activation_checkpointing=recompute)
    mesh = Mesh.of(DataParallelGroup.of_world(), context=context) if context > 1 else None
    return TrainEngine(packed, TrainConfig(token_budget=args.tokens), total_steps=10, mesh=mesh)


def measured_rank(answer: Connection, rank: int, context: int, port: int, args: argparse.Namespace) -> None:
    """Sends bytes and seconds of one update."""
    torch.set_num_threads(1)
    if context > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=context)
    trained, objective = engine(args, context), SFTObjective()
    trained.train_step(batch(64), objective)
    long = batch(args.tokens)
    held_bytes(torch.device("cpu"))  # gives back what was freed
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel begins to look anew
    before, begun = peak_resident_bytes(), time.perf_counter()
    loss = trained.train_step(long, objective)["grad_norm"]
    answer.send((peak_resident_bytes() - before, time.perf_counter() - begun, loss))
    if context > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(context: int, args: argparse.Namespace) -> dict[str, Any]:
    """The largest rank's bytes."""
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    processes, pipes = [], []
    for rank in range(context):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=measured_rank, args=(theirs, rank, context, port, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    peaks, seconds, norms = zip(*(pipe.recv() for pipe in pipes), strict=True)
    for process in processes:
        process.join(30)
    return {"context": context, "peaks": peaks, "peak": max(peaks), "seconds": max(seconds), "grad_norm": norms[0]}


def table(found: list[dict[str, Any]], tokens: int) -> str:
    rows = [
        [str(of["context"]), f"{of['peak'] / MIB:.1f}", f"{of['peak'] / found[0]['peak']:.3f}",
         f"{of['peak'] / tokens:,.0f}", f"{of['seconds']:.1f}"]
        for of in found
    ]  # fmt: skip
    return markdown(["context", "peak, MiB", f"over context {found[0]['context']}", "bytes a token", "s"], rows)


def main() -> None:
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recompute", choices=("true", "selective", "false"), default="true")
    parser.add_argument("--keep-freed", action="store_true")
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.contexts = 1024, [1, 2]
    if not args.keep_freed:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    found = [measure(context, args) for context in args.contexts]
    write_results(args, {"context_memory": found, "tokens": args.tokens, "recompute": args.recompute})
    print(table(found, args.tokens))


if __name__ == "__main__":
    main()
