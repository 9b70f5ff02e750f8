"""Our side of ``update.py`` and ``prefix.py``: the train engine on one batch of groups, forward and update timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from peers.turns import Turns

turns = Turns()

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quartet.batch.ragged import RaggedBatch  # noqa: E402
from quartet.config.algorithms import GRPO  # noqa: E402
from quartet.config.common import OptimConfig, TrainConfig  # noqa: E402
from quartet.models.packed_model import PackedCausalLM  # noqa: E402
from quartet.train.engine import TrainEngine  # noqa: E402
from quartet.train.objectives import PolicyObjective  # noqa: E402

KINDS = (
    ("attention", ("softmax", "bmm", "baddbmm")),
    ("products", ("mm", "addmm", "linear", "mkldnn_linear")),
    ("optimizer", ("adam", "foreach", "linalg_vector_norm")),
    ("log-softmax, sampling", ("logsumexp", "log_softmax", "exp", "amax", "sum", "gather", "scatter")),
    (
        "copies, casts, layout",
        ("copy", "cat", "clone", "contiguous", "to", "index", "fill", "zero", "slice"),
    ),
    ("element by element", ("mul", "add", "sub", "div", "neg", "silu", "pow", "mean", "rsqrt", "cos", "sin", "lerp")),
)
"""Operators by the beginning of their name (after ``aten::``); the first kind that fits takes it."""


def batch_of(groups: Sequence[tuple[int, Sequence[int]]], vocab: int) -> RaggedBatch:
    """Random tokens and advantages; every response token is trained on."""
    generator = torch.Generator().manual_seed(2)
    lengths, parents, leaves, mask = [], [], [], []
    for prompt, responses in groups:
        root = len(lengths)
        lengths.append(prompt)
        parents.append(-1)
        mask += [False] * prompt
        for response in responses:
            leaves.append(len(lengths))
            lengths.append(response)
            parents.append(root)
            mask += [True] * response
    total = sum(lengths)
    action = torch.tensor(mask)
    numbers = torch.randn(total, generator=generator) * action
    return RaggedBatch(
        input_ids=torch.randint(3, vocab, (total,), generator=generator),
        segment_lengths=tuple(lengths),
        parents=tuple(parents),
        leaves=tuple(leaves),
        ids=tuple(str(i) for i in range(len(leaves))),
        token={
            "loss_mask": action,
            "action_mask": action,
            "advantages": numbers,
            "rollout_logprobs": torch.zeros(total),
        },
        sequence={"trajectory": torch.arange(len(leaves))},
    )


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").lstrip("_")
    if "attention" in name:
        return "attention"
    for kind, beginnings in KINDS:
        if name.startswith(beginnings):
            return kind
    return "other"


def seconds_by_kind() -> dict[str, float]:
    """Where one update spends its time, by kinds of operators."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        engine.train_step(batch, objective)
    kinds: dict[str, float] = {}
    for event in found.key_averages():
        if event.self_cpu_time_total > 0:
            kind = kind_of(event.key) if event.key.startswith("aten::") else "Python, autograd"
            kinds[kind] = kinds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return kinds


job = turns.job
torch.set_num_threads(job["threads"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
batch = batch_of(job["groups"], model.config.vocab_size)
precision = {"float32": "fp32", "bfloat16": "bf16"}[job["dtype"]]
config = TrainConfig(precision=precision, optim=OptimConfig(lr=1e-6), **job["train"])
engine = TrainEngine(PackedCausalLM(model, precision), config, total_steps=1000)
objective = PolicyObjective(GRPO(), len(batch), 1.0, 0.0, True, max(max(r) for _, r in job["groups"]))
if job["forward"]:
    from quartet.train.forward import ForwardNeeds  # Elsewhere in older checkouts, whose updates are measured alone.

    needs = ForwardNeeds(logprobs=True, mask="action_mask")
    engine.forward(batch, needs)
engine.train_step(batch, objective)
turns.report(kinds=seconds_by_kind() if job["profile"] else {})
while turns.wait():
    begun, busy = time.perf_counter(), time.process_time()
    if job["forward"]:
        engine.forward(batch, needs)
    middle = time.perf_counter()
    engine.train_step(batch, objective)
    end = time.perf_counter()
    busy = time.process_time() - busy
    turns.report(seconds=end - begun, forward_s=middle - begun, update_s=end - middle, processor_s=busy)
