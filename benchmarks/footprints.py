"""Memory of a rank by role and placement: the formula of docs/benchmarks.md, and what it says beside what is measured.

    python benchmarks/footprints.py --model 7b --devices 8 --gib 80      the tables
    python benchmarks/footprints.py --model 70b --devices 64 --tokens 32768 --meshes    one role on several meshes
    python benchmarks/footprints.py --model 70b --devices 64 --tokens 32768 --stages    an actor in pipeline stages
    python benchmarks/footprints.py --measure [--shards 1 2 4]           the formula against real processes
    python benchmarks/footprints.py --measure --shards 1,1,2 1,2,2       the same with context and tensor ranks
    python benchmarks/footprints.py --measure --shards 1,1,2,2           the same with two pipeline stages
    python benchmarks/footprints.py --measure --keep-freed               with what the C library keeps of freed memory
    python benchmarks/footprints.py --measure --flat 1 4 16 64           peaks by prompts per step

Measured are processes of one thread over gloo, each with its part of a model of 27.8 M weights in fp32: the kernel's
account of the most that was resident, less what was before the model came. Forward-only passes and updates have
micro-batches of 128 tokens. glibc is told to give freed tensors back at once (``MALLOC_MMAP_THRESHOLD_``), so that what
is resident is what is in use; ``--keep-freed`` leaves it alone.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GIB, MIB = 2**30, 2**20


# The formula ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A decoder as the formula sees it: sizes as in its config."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False

    @property
    def kv(self) -> int:
        return self.kv_heads * self.hidden // self.heads

    @property
    def layer(self) -> int:
        """Weights of a layer's products; norms and biases are a thousandth of these."""
        return 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.inner

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    def around(self, *, scalar: bool = False) -> int:
        """Weights around the layers: the embedding, and a head of its own."""
        return self.embedding * (1 if self.tied or scalar else 2)

    def weights(self, *, scalar: bool = False) -> int:
        return self.layers * self.layer + self.around(scalar=scalar)


SHAPES = {
    "0.5b": Shape(24, 896, 4_864, 14, 2, 151_936, tied=True),
    "1.5b": Shape(28, 1_536, 8_960, 12, 2, 151_936, tied=True),
    "3b": Shape(36, 2_048, 11_008, 16, 2, 151_936, tied=True),
    "7b": Shape(28, 3_584, 18_944, 28, 4, 152_064),
    "32b": Shape(64, 5_120, 27_648, 40, 8, 152_064),
    "70b": Shape(80, 8_192, 28_672, 64, 8, 128_256),
    "small": Shape(8, 512, 1_408, 8, 4, 8_192, tied=True),
}
"""Of Qwen2.5, and of Llama 3 (70b); ``small`` is the model of the measurements."""


@dataclass(frozen=True)
class How:
    """How a role computes.

    Attributes:
        shard: data ranks that hold one copy between them.
        context, tensor: ranks that compute one micro-batch between them: its tokens, and every layer's columns.
        pipeline: stages that have some layers each.
        bf16: compute dtype; weights that are trained stay fp32.
        recompute: ``activation_checkpointing``.
        tokens, forward_tokens: of a micro-batch with gradients, and without.
        micro_batches: of an update on a data rank.
        chunk: rows whose logits exist at a time.
        ordered: sums in the order of the ranks, as always on CPUs: the addends of all ranks are held.
    """

    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    bf16: bool = True
    recompute: str = "true"
    tokens: int = 8_192
    forward_tokens: int = 16_384
    micro_batches: int = 8
    chunk: int = 1_024
    ordered: bool = False

    @property
    def width(self) -> int:
        """Bytes of a number that enters products."""
        return 2 if self.bf16 else 4

    @property
    def parts(self) -> int:
        """FSDP's ranks, which share out what a tensor rank has of a stage's weights."""
        return self.shard * self.context

    @property
    def ranks(self) -> int:
        """Of a stage."""
        return self.parts * self.tensor


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage has; one that is alone has a whole model.

    Attributes:
        layers: their number.
        embedding: weights of the embedding, and of a tied head on a stage of its own.
        head: weights of an untied head.
        logits: columns of the head times its rows, where it is computed here.
        tied: the embedding's weight is the head's, too; of several stages the first and the last one have it.
        alive: micro-batches whose activations are kept at a time.
        messages: hidden states and their gradients, of one micro-batch, that are there to be sent or were received.
    """

    layers: int
    embedding: int
    head: int
    logits: int
    tied: bool
    alive: int
    messages: int

    @property
    def around(self) -> int:
        return self.embedding + self.head


def stages_of(shape: Shape, how: How, *, scalar: bool = False) -> list[Stage]:
    from quartet.train.parallel.pipeline import split_layers

    whole, size = how.pipeline == 1, shape.embedding
    head = 0 if scalar else size
    found = []
    # The last norm decides between cuts that are alike without it.
    behind = head + shape.hidden
    for index, layers in enumerate(split_layers((shape.layer,) * shape.layers, how.pipeline, first=size, last=behind)):
        logits = head if index + 1 == how.pipeline else 0
        embedding = (size if index == 0 else 0) + (logits if shape.tied and not whole else 0)
        untied = 0 if shape.tied else logits
        alive = min(how.pipeline - index, how.micro_batches)
        tied = shape.tied and not scalar and embedding > 0
        found.append(Stage(len(layers), embedding, untied, logits, tied, alive, 0 if whole else 3))
    return found


def kept_per_token(shape: Shape, how: How) -> tuple[float, float]:
    """Bytes of activations on a rank per token of the micro-batch: of every layer from its forward to its backward, and
    of the layer that is computed again."""
    d, i, w, ranks = shape.hidden, shape.inner, how.width, how.context * how.tensor
    # Key and value heads are repeated until every rank has one.
    kv = max(shape.kv, ranks * shape.kv // shape.kv_heads)
    # Both norms' inputs in fp32, of own rows; of the span's rows what products read (under autocast each product has
    # a copy of its own); of own heads and columns queries, keys, values, attention's result (before and behind the
    # exchange of heads), and four of the inner width.
    read = 5 if how.bf16 else 2
    results = 3 if how.context > 1 else 2
    everything = 8 * d / ranks + w * (read * d / how.context + (results * d + 2 * kv + 4 * i) / ranks)
    # The results of row layers are there for all of the span's rows until they are added up.
    products = 4 * d / ranks + w * (2 * d / how.context + (2 * d + 2 * kv + 2 * i) / ranks)
    again = everything - products  # what was kept of a layer is not made again
    return {"false": (everything, 0), "selective": (products, again), "true": (4 * d / ranks, everything)}[
        how.recompute
    ]


def exchanged(shape: Shape, how: How) -> tuple[float, float]:
    """Bytes that a layer's exchanges hold per token of the micro-batch: rows of the span that are gathered, and their
    gradients or addends; heads that are sent and received."""
    kv = max(shape.kv, how.context * how.tensor * shape.kv // shape.kv_heads)
    rows = 8 * shape.hidden if how.tensor > 1 else 0
    heads = 2 * how.width * (shape.hidden + 2 * kv) / how.tensor if how.context > 1 else 0
    return rows / how.context, heads / how.context


def within_backward(shape: Shape, how: How) -> float:
    """Bytes that a layer's backward takes per token beside what was kept for it: in the MLP rows that are exchanged,
    or the gradients of two of the inner width; in attention both exchanges, when four of the MLP's are gone."""
    inner = how.width * shape.inner / (how.context * how.tensor)
    rows, heads = exchanged(shape, how)
    return max(rows, 2 * inner, rows + heads - 4 * inner)


def training(shape: Shape, how: How, *, scalar: bool = False) -> dict[str, float]:
    """Bytes of a rank that trains its share, at the peak of an update, by part; of the stage that takes most."""
    return _dearest(training_stage(shape, how, stage) for stage in stages_of(shape, how, scalar=scalar))


def training_stage(shape: Shape, how: How, stage: Stage) -> dict[str, float]:
    layer, around = shape.layer, stage.around
    weights = stage.layers * layer + around
    every, again = kept_per_token(shape, how)
    twice, apart = (stage.tied and alone for alone in (how.pipeline == 1, how.pipeline > 1))
    # FSDP copies what it gathers, from one rank, too; under bf16 ranks of a mesh gather so, for rounded weights.
    cut = how.parts > 1 or (how.bf16 and how.tensor * how.pipeline > 1)
    # A gathered layer, and the next one: each with the buffer that it is copied from. What is around the layers stays.
    gathered = 4 * around + 4 * how.width * layer if cut else (2 * (weights - around) if how.bf16 else 0)
    # Of a layer: as autograd leaves them, laid out to be sent in fp32, and where order counts the addends. Of what is
    # not cut a matrix's, until it is added to the gradient of other micro-batches.
    sums = 4 * stage.logits + (how.width + 4 + 4 * how.ordered) * layer
    if not cut:
        added = max(stage.logits, shape.hidden * shape.inner) if how.micro_batches > 1 else 0
        sums = 4 * max(around * twice, added)
    kept = how.tokens * every * stage.layers
    read = min(how.chunk, how.tokens) * shape.vocab * how.width + (4 * stage.logits if how.bf16 else 0)
    # Behind the last layer: gradients of what is around the layers, laid out, and the addends. Just before, a tied
    # weight has a gradient of each of its uses.
    last = 4 * around * (3 if how.ordered or twice else 2) / how.tensor if cut else 0
    passing = {
        "gathered": gathered / how.tensor,
        "sums": sums / how.tensor,
        "activations": stage.alive * kept + how.tokens * again,
        "logits": read / how.tensor if stage.logits else 0,
        "within a layer": how.tokens * within_backward(shape, how),
        "messages": stage.messages * message(shape, how, how.tokens),
    }
    nothing = dict.fromkeys(passing, 0.0)
    behind = {**nothing, "sums": last, "activations": (stage.alive - 1) * kept}
    # Behind all passes: the gradient from the other stage that has a tied weight.
    received = {**nothing, "sums": 4 * shape.embedding * apart / how.ranks}
    passing = _dearest((passing, behind, received))
    return {
        "parameters": 4 * weights / how.ranks,
        "moments": 8 * weights / how.ranks,
        "gradients": 4 * weights / how.ranks,
        **passing,
    }


def message(shape: Shape, how: How, tokens: int) -> float:
    """Hidden states between stages, in fp32 under autocast, too, and of a rank's own rows."""
    return 4 * shape.hidden * tokens / (how.context * how.tensor)


def _dearest(stages: Iterable[dict[str, float]]) -> dict[str, float]:
    return max(stages, key=lambda parts: sum(parts.values()))


def scoring(shape: Shape, how: How, *, scalar: bool = False) -> dict[str, float]:
    """Bytes of a rank that only passes forward; of the stage that takes most."""
    return _dearest(scoring_stage(shape, how, stage) for stage in stages_of(shape, how, scalar=scalar))


def scoring_stage(shape: Shape, how: How, stage: Stage) -> dict[str, float]:
    """Products in the compute dtype, the embedding in fp32. Of one layer's activations the residual stream, a sum, and
    three of the inner width are there at a time."""
    around = 4 * stage.embedding + how.width * stage.head
    weights = how.width * stage.layers * shape.layer + around
    gathered = around + 4 * how.width * shape.layer if how.parts > 1 else 0
    logits = min(how.chunk, how.tokens) * shape.vocab * how.width if stage.logits else 0
    per_token = (8 * shape.hidden + 3 * how.width * shape.inner) / (how.context * how.tensor)
    return {
        "parameters": weights / how.ranks,
        "gathered": gathered / how.tensor,
        "activations": how.forward_tokens * per_token,
        "logits": logits / how.tensor,
        "within a layer": how.forward_tokens * sum(exchanged(shape, how)),
        "messages": stage.messages * message(shape, how, how.forward_tokens),
    }


def generating(shape: Shape, *, cache_tokens: int, split: int = 1) -> dict[str, float]:
    """Bytes of a rollout process in bf16: a whole copy of the native engine, or of a served engine its part."""
    return {
        "parameters": (2 * shape.layers * shape.layer + (4 + 2) * shape.embedding) / split,
        "KV cache": cache_tokens * 4 * shape.layers * shape.kv / split,
    }


def sync_buffers(shape: Shape) -> float:
    """On each end of a weight sync: two buckets of 64 MiB, and of a sharded sender one tensor as a whole."""
    return 2 * 64 * MIB + 4 * shape.embedding


# Placements -----------------------------------------------------------------------------------------------

Pools = Mapping[tuple[str, ...], int]
"""The roles of each pool, and its processes; every model is cut over its pool."""

PLANS: dict[tuple[str, int], dict[str, Pools]] = {
    ("7b", 8): {
        "separated": {("actor",): 2, ("critic",): 2, ("reference",): 1, ("reward",): 1, ("rollout",): 2},
        "forward_offload": {("actor", "reference"): 3, ("critic", "reward"): 3, ("rollout",): 2},
        "homogeneous": {("actor", "critic", "reference", "reward"): 6, ("rollout",): 2},
        "pipelined": {("actor",): 3, ("critic", "reference", "reward"): 3, ("rollout",): 2},
        "one pool, all resident": {("actor", "critic", "reference", "reward", "rollout"): 8},
        "full_offload": {("actor", "critic", "reference", "reward", "rollout"): 8},
    },
    ("70b", 64): {
        "separated, GRPO": {("actor",): 32, ("reference",): 16, ("rollout",): 16},
        "homogeneous, GRPO": {("actor", "reference"): 32, ("rollout",): 32},
        "one pool, all resident, GRPO": {("actor", "reference", "rollout"): 64},
        "full_offload": {("actor", "critic", "reference", "reward", "rollout"): 64},
    },
    ("32b", 16): {
        "separated": {("actor",): 12, ("reference",): 2, ("rollout",): 2},
        "homogeneous": {("actor", "reference"): 12, ("rollout",): 4},
        "one pool, all resident": {("actor", "reference", "rollout"): 16},
        "full_offload": {("actor", "critic", "reference", "reward", "rollout"): 16},
    },
}
CACHE_TOKENS = 131_072
"""Of a rollout process."""
TAKES_TURNS = ("full_offload",)
"""Placements in which only the role that computes is on the device; the others are in host memory."""
STAYS = ("parameters", "moments")
"""Between the passes of a role."""


def of_role(shape: Shape, role: str, processes: int, how: How, room: float) -> dict[str, float]:
    cut = replace(how, shard=processes // (how.pipeline * how.context * how.tensor))
    if role == "rollout":
        splits = [n for n in range(1, processes + 1) if processes % n == 0]
        found = [generating(shape, cache_tokens=CACHE_TOKENS, split=n) | {"split": n} for n in splits]
        fits = (parts for parts in found if sum(parts.values()) + sync_buffers(shape) < 0.9 * room)
        return {**next(fits, found[-1]), "sync buffers": sync_buffers(shape)}
    if role in ("actor", "critic"):
        return training(shape, cut, scalar=role == "critic")
    return scoring(shape, cut, scalar=role == "reward")


def pool_rows(shape: Shape, placement: str, pools: Pools, how: How, gib: float) -> list[list[str]]:
    rows = []
    for roles, processes in pools.items():
        parts = {role: of_role(shape, role, processes, how, gib * GIB) for role in roles}
        splits = {role: of.pop("split", 0) for role, of in parts.items()}
        stays = {role: sum(of.get(name, 0) for name in STAYS) for role, of in parts.items()}
        cache = sum(of.get("KV cache", 0) for of in parts.values())
        whole = {role: sum(of.values()) for role, of in parts.items()}
        passing = {role: whole[role] - stays[role] for role in roles}
        host = 0.0
        if placement in TAKES_TURNS:
            peak = max(whole.values())
            host = sum(stays.values()) - min(stays.values())
        else:
            passing["rollout"] = passing.get("rollout", 0) - cache
            peak = sum(stays.values()) + cache + max(passing.values())
        for role, of in parts.items():
            cells = [of.get(name, 0.0) for name in COLUMNS]
            engine = f" (split {splits[role]})" if splits[role] > 1 else ""
            rows.append([placement, f"{role}{engine}", str(processes), *_gib([*cells, whole[role]]), "", ""])
        fits = "yes" if peak < gib * GIB else "**no**"
        rows[-1][-2:] = [f"{peak / GIB:.1f} {fits}", f"{host / GIB:.1f}" if host else ""]
    return rows


COLUMNS = (
    "parameters", "moments", "gradients", "gathered", "sums", "activations", "within a layer", "logits",
    "KV cache", "sync buffers",
)  # fmt: skip
OF_STAGES = {
    "state": ("parameters", "moments", "gradients"),
    "gathered, sums": ("gathered", "sums"),
    "activations": ("activations", "within a layer"),
    "logits, messages": ("logits", "messages"),
}


def _gib(values: Sequence[float]) -> list[str]:
    return [f"{value / GIB:.1f}" if value else "" for value in values]


def tables(model: str, devices: int, gib: float, how: How, *, meshes: bool = False, stages: bool = False) -> str:
    from common import markdown

    shape = SHAPES[model]
    size = f"{shape.weights() / 1e9:.1f} B weights, GiB per process\n\n"
    if meshes:
        head = ["role", "shard", "context", "tensor", *COLUMNS[:-2], "peak", f"below 90 % of {gib:g}?"]
        return size + markdown(head, mesh_rows(shape, devices, how, gib))
    if stages:
        head = ["shard", "pipeline", "context", "tensor", "kept", *OF_STAGES, "peak", f"below 90 % of {gib:g}?"]
        return size + markdown(head, stage_rows(shape, devices, how, gib))
    everything = {("actor", "reference", "rollout"): devices}
    plans = PLANS.get((model, devices), {"one pool, all resident": everything, "full_offload": everything})
    rows = [row for name, pools in plans.items() for row in pool_rows(shape, name, pools, how, gib)]
    head = ["placement", "role", "processes", *COLUMNS, "role's peak", f"pool's peak, below {gib:g}?", "on the host"]
    return size + markdown(head, rows)


def mesh_rows(shape: Shape, devices: int, how: How, gib: float) -> list[list[str]]:
    """An actor and a reference on all devices, cut in several ways: where the bytes of a rank go."""
    rows = []
    for context, tensor in ((1, 1), (8, 1), (1, 8), (2, 8), (4, 4), (8, 8)):
        cut = replace(how, shard=devices // (context * tensor), context=context, tensor=tensor)
        for role, parts in (("actor", training(shape, cut)), ("reference", scoring(shape, cut))):
            cells = _gib([*(parts.get(name, 0.0) for name in COLUMNS[:-2]), sum(parts.values())])
            rows.append([role, str(cut.shard), str(context), str(tensor), *cells, _fits(parts, gib)])
    return rows


def stage_rows(shape: Shape, devices: int, how: How, gib: float) -> list[list[str]]:
    """An actor on all devices, without stages and with 2 to 8: the stage that takes most."""
    rows = []
    for context, tensor in ((1, 1), (1, 8), (2, 8)):
        for pipeline in (1, 2, 4, 8):
            ranks = pipeline * context * tensor
            if devices % ranks:
                continue
            cut = replace(how, shard=devices // ranks, context=context, tensor=tensor, pipeline=pipeline)
            stage = max(stages_of(shape, cut), key=lambda one: sum(training_stage(shape, cut, one).values()))
            parts = training_stage(shape, cut, stage)
            cells = _gib([*(sum(parts[name] for name in names) for names in OF_STAGES.values()), sum(parts.values())])
            mesh = [cut.shard, pipeline, context, tensor, f"{stage.alive} × {stage.layers} layers"]
            rows.append([*map(str, mesh), *cells, _fits(parts, gib)])
    return rows


def _fits(parts: Mapping[str, float], gib: float) -> str:
    return "yes" if sum(parts.values()) < 0.9 * gib * GIB else "**no**"


# What is measured -----------------------------------------------------------------------------------------


def status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def anonymous() -> int:
    """Bytes that no file stands behind, once what was freed was given back."""
    import torch

    from quartet.observe.memory import held_bytes

    return held_bytes(torch.device("cpu"))


class Peak:
    """Most that was resident within, above what no file stood behind at ``floor``; pages of files were read before."""

    def __init__(self, floor: int) -> None:
        anonymous()
        self._others = floor + status("VmRSS") - status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel begins to look anew

    def bytes(self) -> int:
        return status("VmHWM") - self._others


Sizes = tuple[int, int, int, int]
"""Shard, context, tensor and pipeline of a mesh with one copy of the model."""
SIZES = ("shard", "context", "tensor", "pipeline")


def build(path: str, sizes: Sizes) -> Any:
    """The model of a directory, of which each rank reads its share."""
    from quartet.config.common import OptimConfig, TrainConfig
    from quartet.models.loading import load_causal_lm, packed_causal_lm
    from quartet.train.engine import TrainEngine
    from quartet.train.parallel.data import shard_model
    from quartet.train.parallel.loading import load_shares
    from quartet.train.parallel.mesh import DataParallelGroup, Mesh

    mesh = None
    if math.prod(sizes) > 1:
        mesh = Mesh.of(DataParallelGroup.of_world(), **dict(zip(SIZES, sizes, strict=True)))
    packed = packed_causal_lm(load_causal_lm(path, empty=mesh is not None), activation_checkpointing=True)
    if mesh is not None:
        shard_model(packed, mesh)
        load_shares(packed, path)
    config = TrainConfig(
        activation_checkpointing=True, token_budget=TOKENS, forward_token_budget=TOKENS, logprob_chunk=256,
        optim=OptimConfig(lr=1e-5),
    )  # fmt: skip
    return TrainEngine(packed, config, total_steps=100, mesh=mesh)


TOKENS = 128
"""Of a micro-batch in the measurements: a prompt with its responses, and not two."""


def measured_rank(answer: Connection, rank: int, sizes: Sizes, port: int, path: str, factors: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist
    from common import model_config, prompt_ids, step_groups

    from quartet.batch.ragged import RaggedBatch
    from quartet.train.forward import ForwardNeeds
    from quartet.train.objectives import SFTObjective

    torch.set_num_threads(1)
    world = math.prod(sizes)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)

    def batch(prompts: int) -> RaggedBatch:
        vocab, groups = model_config("small").vocab_size, step_groups(prompts, 8, 12)
        draw = torch.Generator().manual_seed(0)
        responses = [[torch.randint(3, vocab, (n,), generator=draw).tolist() for n in g.responses] for g in groups]
        found = RaggedBatch.from_groups(
            prompt_ids(groups, vocab), responses, [str(i) for i in range(sum(len(r) for r in responses))]
        )
        return found.with_token(loss_mask=found.sequence_index() >= 0)

    # What only a first use takes: threads, kernels, autograd.
    toy = torch.nn.Linear(8, 8)
    torch.optim.AdamW(toy.parameters(), fused=True).zero_grad()
    toy(torch.randn(4, 8)).sum().backward()
    floor = anonymous()
    engine = build(path, sizes)
    found: dict[str, Any] = {"loaded": anonymous() - floor, "update": {}, "forward": {}, "tokens": {}}
    engine.train_step(batch(1), SFTObjective())
    for factor in factors:
        one = batch(factor)
        found["tokens"][factor] = one.num_tokens
        peak = Peak(floor)
        engine.train_step(one, SFTObjective())
        found["update"][factor] = peak.bytes()
        peak = Peak(floor)
        engine.forward(one, ForwardNeeds(logprobs=True))
        found["forward"][factor] = peak.bytes()
    found["resting"] = anonymous() - floor
    answer.send(found)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(sizes: Sizes, factors: Sequence[int], path: str) -> list[dict[str, Any]]:
    """Of every rank."""
    from quartet.cluster.worker import free_port

    context, port = multiprocessing.get_context("spawn"), free_port()
    processes, pipes = [], []
    for rank in range(math.prod(sizes)):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measured_rank, args=(theirs, rank, sizes, port, path, factors), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    return found


def compared(sizes: Sizes, found: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Name → bytes by the formula and the largest rank's as measured."""
    shape, first = SHAPES["small"], min(found[0]["update"])
    how = How(*sizes, False, "true", TOKENS, TOKENS, micro_batches=first, chunk=256, ordered=True)
    # The stage that takes most need not be the same at all times.
    stages = [training_stage(shape, how, stage) for stage in stages_of(shape, how)]
    return {
        "loaded": (max(of["parameters"] for of in stages), max(of["loaded"] for of in found)),
        "between updates": (
            max(of["parameters"] + of["moments"] for of in stages),
            max(of["resting"] for of in found),
        ),
        "peak of an update": (max(sum(of.values()) for of in stages), max(of["update"][first] for of in found)),
    }


def measurements(meshes: Sequence[Sizes], factors: Sequence[int], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    from common import markdown, saved_model

    path = str(saved_model("small", folder))
    parts, against, flat = [], [], []
    for sizes in meshes:
        found = measure(sizes, factors, path)
        checks, named = compared(sizes, found), [str(size) for size in sizes]
        parts.append({"mesh": sizes, "ranks": found, "checks": checks})
        for name, (formula, real) in checks.items():
            against.append([*named, name, f"{formula / MIB:.0f}", f"{real / MIB:.0f}", f"{real / formula:.2f}"])
        for kind in ("update", "forward") if len(factors) > 1 else ():
            peaks = [max(of[kind][factor] for of in found) for factor in factors]
            rows = [f"{peak / MIB:.0f} ({peak / peaks[0]:.3f})" for peak in peaks]
            flat.append([*named, kind, *rows])
    text = markdown([*SIZES, "what", "formula, MiB", "measured", "measured / formula"], against)
    if flat:
        tokens = parts[0]["ranks"][0]["tokens"]
        head = [*SIZES, "peak of, MiB", *(f"{f} prompts, {tokens[f]:,} tokens" for f in factors)]
        text += "\n\n" + markdown(head, flat)
    return text, parts


def _sizes(text: str) -> Sizes:
    shard, context, tensor, pipeline = [*map(int, text.split(",")), 1, 1, 1][:4]
    return shard, context, tensor, pipeline


def main() -> None:
    from common import arguments, write_results
    from sides import work_folder

    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=SHAPES, default="7b")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--gib", type=float, default=80.0)
    parser.add_argument("--recompute", choices=("false", "selective", "true"), default="true")
    parser.add_argument("--tokens", type=int, default=8_192, help="of a micro-batch")
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8, help="of an update on a data rank")
    parser.add_argument("--meshes", action="store_true", help="one role after the other, cut in several ways")
    parser.add_argument("--stages", action="store_true", help="an actor, cut in pipeline stages")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument(
        "--shards", type=_sizes, nargs="+", default=[(n, 1, 1, 1) for n in (1, 2, 4)],
        help="or shard,context,tensor,pipeline",
    )  # fmt: skip
    parser.add_argument("--flat", type=int, nargs="+", default=[1], help="prompts per step")
    parser.add_argument("--keep-freed", action="store_true")
    args = parser.parse_args()
    if not args.measure:
        how = How(
            context=args.context, tensor=args.tensor, pipeline=args.pipeline, recompute=args.recompute,
            tokens=args.tokens, forward_tokens=max(args.tokens, 16_384), micro_batches=args.micro_batches,
        )  # fmt: skip
        print(tables(args.model, args.devices, args.gib, how, meshes=args.meshes, stages=args.stages))
        return
    if not args.keep_freed:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    text, parts = measurements(args.shards, args.flat, work_folder("models"))
    write_results(args, {"footprints": parts})
    print(text)


if __name__ == "__main__":
    main()
