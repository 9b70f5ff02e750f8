"""One rank of ``test_data_parallel_processes.py``: ``data_parallel_ranks.py JOB RANK WORLD PORT FOLDER``.

Every case is run by all ranks together and, in the test, by one process alone; results go to ``FOLDER/rank<RANK>.pt``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.preference import DPOLoss
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.train.data_parallel import DataParallelGroup, RankFailed
from quartet.train.engine import LossTerm, Objective, TrainEngine
from quartet.train.objectives import PolicyObjective, SFTObjective, ValueObjective
from quartet.train.preference_objectives import PreferenceObjective

VOCAB = 31
RESPONSES = ((40, 2, 5), (1,), (3, 4, 6, 2), (17, 1))
"""Tokens of the responses to each prompt: one sequence is half of the batch."""
KL_LOSS = KLConfig(coef=0.2, estimator="k3", place="loss")
AGGREGATIONS = (
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm",
)  # fmt: skip


def make_engine(
    kind: str, dp_group: DataParallelGroup | None, *, dtype: torch.dtype = torch.float64, **config: Any
) -> Any:
    """The same tiny model on every call; in fp64 its norms are, too."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(sizes).eval()
    if kind == "scalar":
        model = scalar_model_from(model, seed=0)
    model = model.to(dtype)
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    settings = TrainConfig(optim=OptimConfig(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1), **config)
    holder = PackedCausalLM if kind == "causal" else PackedScalarModel
    return TrainEngine(holder(model, settings.precision), settings, total_steps=10, dp_group=dp_group)


def make_batch() -> RaggedBatch:
    """Ten sequences of four prompts with everything that an objective reads."""
    generator = torch.Generator().manual_seed(7)

    def tokens(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    responses = [[tokens(n) for n in of_prompt] for of_prompt in RESPONSES]
    batch = RaggedBatch.from_groups(
        [tokens(3), tokens(1), tokens(5), tokens(2)], responses, [f"r{i}" for i in range(10)]
    )
    action = batch.sequence_index() >= 0

    def normal(shift: float = 0.0) -> Tensor:
        return (shift + torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)) * action

    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    return batch.with_token(
        action_mask=action,
        loss_mask=action & (torch.rand(batch.num_tokens, generator=generator) < 0.8),
        **{name: normal(-3.0) for name in names},
        **{name: normal() for name in ("advantages", "values", "returns")},
    ).with_sequence(
        trajectory=torch.tensor([0, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
        pair=torch.arange(5).repeat_interleave(2),
        chosen=torch.tensor([True, False] * 5),
        ref_logprobs=torch.linspace(-9, -5, 10, dtype=torch.float64),
    )


def policy(**config: Any) -> PolicyObjective:
    return PolicyObjective(PPO(**config), 9, 0.9, kl_coef=0.2, is_first=False, max_new_tokens=40)


def cases() -> dict[str, tuple[str, Objective, tuple[LossTerm, ...]]]:
    """Kind of model, objective, and losses that are added."""
    shown = LossTerm(make_batch().select([1, 3]), SFTObjective("loss/ptx"), 0.3)
    policies = {f"policy-{name}": policy(aggregation=name, kl=KL_LOSS, entropy_coef=0.1) for name in AGGREGATIONS}
    return {
        **{name: ("causal", objective, ()) for name, objective in policies.items()},
        "policy-and-shown": ("causal", policy(), (shown,)),
        "sft": ("causal", SFTObjective(), ()),
        "value": ("scalar", ValueObjective(PPO(), 9), ()),
        "pairs": ("causal", PreferenceObjective(DPOLoss(beta=0.5, label_smoothing=0.1)), ()),
    }


def updates(name: str, dp_group: DataParallelGroup | None) -> dict[str, Any]:
    """Two updates of one case: metrics and weights after them."""
    kind, objective, also = cases()[name]
    engine = make_engine(kind, dp_group, token_budget=50)
    batch = make_batch()
    metrics = [engine.train_step(batch, objective, also) for _ in range(2)]
    return {"metrics": metrics, "weights": {key: value.clone() for key, value in engine.weights()}}


def _single_precision(dp_group: DataParallelGroup) -> Any:
    """Three updates in fp32: the whole state."""
    engine = make_engine("causal", dp_group, dtype=torch.float32, token_budget=50)
    for _ in range(3):
        engine.train_step(make_batch(), policy())
    return engine.state()


def _few(dp_group: DataParallelGroup) -> Any:
    """One sequence: all ranks but one have nothing to do."""
    engine = make_engine("causal", dp_group)
    return engine.train_step(make_batch().select([0]), SFTObjective())


def _out_of_memory(dp_group: DataParallelGroup) -> Any:
    engine = make_engine("causal", dp_group, token_budget=13)
    batch, hidden = make_batch().select([1, 2, 3, 4, 5, 6, 7, 9]), engine.packed.hidden
    if dp_group.rank == dp_group.size - 1:

        def once(*args: Any) -> Any:
            engine.packed.hidden = hidden
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        engine.packed.hidden = once
    metrics = engine.train_step(batch, policy())
    smaller = make_engine("causal", dp_group, token_budget=engine.budget.tokens)
    return {
        "num_oom": engine.num_oom,
        "tokens": engine.budget.tokens,
        "as_the_smaller": metrics == smaller.train_step(batch, policy()),
    }


def _failure(dp_group: DataParallelGroup) -> Any:
    """The last rank fails at once; the others learn of it, and all go on together."""
    engine = make_engine("causal", dp_group)
    objective = policy() if dp_group.rank < dp_group.size - 1 else policy(kl=KL_LOSS)
    batch = make_batch()
    if dp_group.rank == dp_group.size - 1:
        batch, _ = batch.pop("ref_logprobs")
    begun = time.monotonic()
    try:
        engine.train_step(batch, objective)
        found = "nothing"
    except (RankFailed, KeyError) as error:
        found = f"{type(error).__name__}: {error}"
    return {"error": found, "seconds": time.monotonic() - begun, "after": engine.train_step(make_batch(), policy())}


def _loss(dp_group: DataParallelGroup) -> Any:
    """Rank 0 is gone in the middle of an update."""
    engine = make_engine("causal", dp_group)
    engine.train_step(make_batch(), policy())
    if dp_group.rank == 0:
        engine.packed.hidden = lambda *_: os._exit(7)
    begun = time.monotonic()
    try:
        engine.train_step(make_batch(), policy())
    except RankFailed as error:
        return {"error": str(error), "seconds": time.monotonic() - begun}
    return {"error": "nothing"}


JOBS: dict[str, Callable[[DataParallelGroup], dict[str, Any]]] = {
    "all": lambda dp_group: {
        "updates": {name: updates(name, dp_group) for name in cases()},
        "state": _single_precision(dp_group),
        "few": _few(dp_group),
        "out_of_memory": _out_of_memory(dp_group),
        "failure": _failure(dp_group),
    },
    "loss": lambda dp_group: {"loss": _loss(dp_group)},
}


def main(job: str, rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    torch.save(JOBS[job](DataParallelGroup.of_world()), folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
