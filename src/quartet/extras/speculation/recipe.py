"""Medusa heads: how they are made and trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from quartet.config.common import OptimConfig, SamplingConfig, Strict, SupervisedRecipe, TrainConfig
from quartet.config.evaluation import untrained
from quartet.config.plugins import Starter
from quartet.config.strict import Rows, Samples, Tokens


class HeadsConfig(Strict):
    """Heads that guess the tokens behind the next one (Cai et al. 2024); the model itself stays as it is."""

    depth: Tokens = Field(3, ge=1, le=16, description="Tokens guessed beyond the next one, each by a head of its own.")
    layers: int = Field(
        1, ge=1, le=8, description="Layers of each head's residual block; 2 make up for a shared head in small models."
    )
    shared_head: bool = Field(
        True, description="All end in the model's own LM head; false: each in a copy of it, which learns too."
    )
    depth_decay: float = Field(
        0.8, gt=0, le=1, description="Weight of each head's loss, relative to that of the head before it."
    )
    tokens_per_step: Tokens | None = Field(
        None, ge=1, description="Most positions that an update learns from, drawn by the seed; all when left out."
    )


class MedusaRecipe(SupervisedRecipe):
    """Medusa heads for a model, trained on its own answers; the model itself stays as it is."""

    job: Literal["medusa"] = "medusa"
    heads: HeadsConfig = HeadsConfig()
    answers: Literal["sample", "data"] = Field(
        "sample", description="sample: the model answers the prompts of the data itself; data: rows hold its answers."
    )
    sampling: SamplingConfig = SamplingConfig()
    samples_per_prompt: Samples = Field(1, ge=1, description="Answers to each prompt; above 1 needs a temperature.")
    answers_per_step: Rows = Field(32, ge=1, description="Answers in each update.")
    train: TrainConfig = TrainConfig(optim=OptimConfig(lr=1e-3))
    for_vllm: bool = Field(
        False, description="Write the model's LM head beside heads that share it, without which vLLM cannot load them."
    )

    @property
    def answered_by(self) -> SamplingConfig | None:
        return self.sampling if self.answers == "sample" else None

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        found = untrained(self.sampling)
        if self.cluster.type != "local":
            found.append(f"cluster.type is {self.cluster.type}, but heads train in one process: leave cluster out")
        if self.train.lora is not None:
            found.append("train.lora is set, but the model stays as it is: leave it out")
        if self.answers == "sample" and self.samples_per_prompt > 1 and self.sampling.temperature == 0:
            found.append(
                f"sampling.temperature is 0, so all {self.samples_per_prompt} samples of a prompt would be the same; "
                "set a temperature or samples_per_prompt: 1"
            )
        if found:
            yield "; ".join(found)


STARTER = Starter(
    "prompts.jsonl",
    ("prompt",),
    {"heads.depth": 3, "sampling.max_new_tokens": 256, "train.optim.lr": 1e-3},
    is_tuned=False,
)
