"""Bytes that the ranks of one copy of a model send in an update, by kind of collective: by formula, and counted.

    python benchmarks/model_parallel.py [--meshes 1,1,2 1,2,1 1,2,2 2,1,2 2,2,1] [--tokens 512] [--recompute]

A mesh is shard,context,tensor. Every data rank has one micro-batch of ``--tokens`` tokens (SFT, fp32) of the model of
27.8 M weights, in processes of one thread over gloo. Counted is what all ranks give to their connections in one update,
the formula is the sum over ranks, too. Seconds beside one process and beside FSDP2 alone:
``data_parallel.py --ways shard context tensor``.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from footprints import Shape

Sizes = tuple[int, int, int]
"""Shard, context, tensor."""
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
SEQUENCES = 8
"""Of a micro-batch: of each every token but the first is predicted."""


def formula(model: Shape, sizes: Sizes, tokens: int, rows: int, *, recompute: bool) -> dict[str, int]:
    """Bytes by kind that all ranks of one copy send in an update in fp32, where every data rank has one micro-batch.

    Args:
        model: a Qwen2 with tied embeddings.
        tokens, rows: of a micro-batch; rows are those that the head reads.
    """
    shard, context, tensor = sizes
    d, layers, parts, others = model.hidden, model.layers, shard * context, tensor - 1
    again = layers if recompute else 0
    found = Counter[str]()
    # Rows of hidden size, each to all other tensor ranks: at the doors of attention and MLP, and back through them; the
    # addends of their results, and gradients of these. A layer that is computed again ends before its last sum.
    wide = 4 * others * d * tokens
    found["all-gather"] += wide * (2 * (layers + again) + 2 * layers)
    found["reduce-scatter"] += wide * (2 * layers + again + 2 * layers)
    # The embedding's addends; the rows that the head reads; two numbers of each from every rank, then one.
    found["reduce-scatter"] += wide + 4 * others * d * rows
    found["all-gather"] += wide + 4 * others * d * rows
    found["all-gather"] += 4 * rows * tensor * (2 * others + (context - 1))
    # Queries, keys, values and results, there and back; key and value heads are repeated until each rank has one.
    kv = max(model.kv_heads, context * tensor) * d // model.heads if context > 1 else 0
    heads = 4 * tokens * (context - 1) // context * (2 * d + 2 * kv)
    found["all-to-all"] += heads * (layers + again + layers)
    found = Counter({kind: shard * size for kind, size in found.items()})
    # FSDP: of each tensor rank's part of a layer, gathered twice, and of what is around the layers, gathered once.
    # Beside the products tensor ranks share out biases of queries, keys and values; they all have the norms.
    layer, around = (model.layer + d + 2 * model.kv) // tensor + 2 * d, model.vocab * d // tensor + d
    found["all-gather"] += 4 * tensor * (parts - 1) * (2 * layers * layer + around)
    found["reduce-scatter"] += 4 * tensor * (parts - 1) * (layers * layer + around)
    # Norms, which all tensor ranks have.
    found["all-reduce"] += 8 * others * (2 * layers + 1) * d
    return {kind: found[kind] for kind in KINDS}


# What is counted ------------------------------------------------------------------------------------------


def sent(name: str, sizes: Sizes, tokens: int, recompute: bool) -> dict[str, int]:
    """Bytes by kind that this rank sends in one update."""
    import torch
    from common import build_model

    from quartet.batch.ragged import RaggedBatch
    from quartet.config.common import TrainConfig
    from quartet.models.packed_model import PackedCausalLM
    from quartet.train.engine import TrainEngine
    from quartet.train.objectives import SFTObjective
    from quartet.train.parallel.mesh import DataParallelGroup, Mesh

    shard, context, tensor = sizes
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=shard, context=context, tensor=tensor)
    model = build_model(name)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    packed = PackedCausalLM(model, "fp32", activation_checkpointing=recompute)
    engine = TrainEngine(packed, TrainConfig(token_budget=tokens), total_steps=10, mesh=mesh)
    length = tokens // SEQUENCES
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, packed.vocab_size, (length,), generator=draw).tolist() for _ in range(shard * SEQUENCES)]
    batch = RaggedBatch.from_sequences(texts, [str(i) for i in range(len(texts))])
    batch = batch.with_token(loss_mask=torch.arange(length).repeat(len(texts)) > 0)
    engine.train_step(batch, SFTObjective())
    return dict(packed.work.take(packed.device, "fp32").sent)


def counted_rank(answer: Connection, rank: int, port: int, name: str, sizes: Sizes, *how: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=math.prod(sizes))
    answer.send(sent(name, sizes, *how))
    dist.barrier()
    dist.destroy_process_group()


def counted(name: str, sizes: Sizes, tokens: int, *, recompute: bool) -> dict[str, int]:
    """Of all ranks."""
    from quartet.cluster.worker import free_port

    spawn, port, total = multiprocessing.get_context("spawn"), free_port(), Counter[str]()
    processes, pipes = [], []
    for rank in range(math.prod(sizes)):
        ours, theirs = spawn.Pipe(duplex=False)
        arguments = (theirs, rank, port, name, sizes, tokens, recompute)
        processes.append(spawn.Process(target=counted_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        total.update(pipe.recv())
    for process in processes:
        process.join(30)
    return {kind: total[kind] for kind in KINDS}


def model_of(name: str) -> Shape:
    from common import model_config

    config = model_config(name)
    return Shape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size, tied=True,
    )  # fmt: skip


def main() -> None:
    from common import arguments, markdown, write_results

    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--model", choices=("tiny", "small"), default="small")
    parser.add_argument("--meshes", nargs="+", default=["2,1,1", "1,2,1", "1,1,2", "1,2,2", "2,1,2", "2,2,1"])
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
    parser.add_argument("--recompute", action="store_true")
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.tokens, args.meshes = "tiny", 64, ["1,1,2", "1,2,1"]
    model, rows, results = model_of(args.model), args.tokens - SEQUENCES, []
    lines = []
    for text in args.meshes:
        shard, context, tensor = map(int, text.split(","))
        sizes = shard, context, tensor
        expected = formula(model, sizes, args.tokens, rows, recompute=args.recompute)
        found: dict[str, Any] = counted(args.model, sizes, args.tokens, recompute=args.recompute)
        results.append({"mesh": sizes, "formula": expected, "counted": found})
        for kind in KINDS:
            if expected[kind] or found[kind]:
                lines.append([*map(str, sizes), kind, f"{expected[kind]:,}", f"{found[kind]:,}"])
    write_results(args, {"model_parallel": results})
    print(markdown(["shard", "context", "tensor", "kind", "bytes by formula", "counted"], lines))


if __name__ == "__main__":
    main()
