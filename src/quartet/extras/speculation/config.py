"""The recipe's sections of the drafters ``history`` and ``medusa``, and the recipe by which Medusa heads are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from quartet.config.common import OptimConfig, SamplingConfig, StrictModel, TrainConfig, training_only_settings
from quartet.config.engines import BaseSpeculationConfig, VLLMEngineConfig
from quartet.config.plugins import StarterRecipe
from quartet.config.run import SupervisedRecipe
from quartet.config.strict import Rows, Samples, Tokens

if TYPE_CHECKING:
    from quartet.config.recipe import RLRecipe

MAX_NODES = 64
"""Of a tree of drafts."""
PREFIX = "medusa."
"""First part of the names of heads' tensors, which travel beside their trunk's."""
FOLDER = "medusa"
"""Where a run writes heads, beside its model."""
DECAY = 0.8
"""Weight of each head's loss, relative to that of the head before it."""
_Times = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]


class StepCosts(StrictModel):
    """Times by powers of two: the first number is that of 1, the next of 2, of 4 and so on; only ratios count. The
    defaults are those of a small model on a CPU (``benchmarks/speculation.py``).
    """

    plain: _Times = Field((1.0, 1.1, 1.15, 1.35, 1.7, 2.5, 4.2), description="Of a step of so many rows, a token each.")
    drafted: _Times = Field(
        (1.0, 1.05, 1.1, 1.2, 1.3, 1.8, 2.8, 4.9),
        description="Of a step of so many tokens, three drafted ones for each row's newest.",
    )
    drafting: _Times = Field(
        (0.1, 0.15, 0.2, 0.3, 0.35, 0.4, 0.65, 1.2),
        description="Of asking heads so often: rows times the depth of their drafts.",
    )


_COSTS = Field(StepCosts(), description="What steps cost, by which it is decided when to draft.")


class HistorySpeculation(BaseSpeculationConfig):
    """Drafts by what followed the newest tokens elsewhere: in the prompt and in other answers to it, of this step and
    of earlier ones.
    """

    type: Literal["history"] = "history"
    min_match: Tokens = Field(3, ge=1, description="Newest tokens that must stand elsewhere, in this order.")
    max_draft: Tokens = Field(6, ge=1, le=32, description="Tokens of a draft.")
    costs: StepCosts = _COSTS


class HeadTraining(StrictModel):
    """Medusa heads learn along with the actor, from the hidden states of its own updates."""

    tokens_per_step: Tokens = Field(2048, ge=1, description="Most positions of a step that they learn from.")
    optim: OptimConfig = OptimConfig(lr=1e-3)


class MedusaSpeculation(BaseSpeculationConfig):
    """Drafts by Medusa heads, trained by ``quartet medusa``."""

    type: Literal["medusa"] = "medusa"
    path: str = Field(description="Directory of the heads, its URL, or a hub name (owner/name@revision).")
    depth: Tokens | None = Field(None, ge=1, description="Heads that draft, a token each; all when left out.")
    tree: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = Field(
        None,
        description="In place of depth, a tree: a path per drafted token, of ranks among the heads' tokens. [0, 2] is "
        "the second head's third token behind the first head's first. Every path continues another by one rank.",
    )
    costs: StepCosts = _COSTS
    train: HeadTraining | None = Field(None, description="The heads learn along with the actor; else they stay.")

    @property
    def learns(self) -> bool:
        return self.train is not None

    @property
    def num_heads(self) -> int | None:
        """Heads that draft; None: all there are."""
        return self.depth if self.tree is None else len(self.tree[-1])

    @field_validator("tree")
    @classmethod
    def _sorted(cls, tree: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        """Sorts shorter paths first."""
        if tree is None:
            return None
        paths = {(), *tree}
        if not 0 < len(tree) == len(paths) - 1 <= MAX_NODES or any(path[:-1] not in paths for path in tree):
            raise ValueError(f"a tree has 1 to {MAX_NODES} paths, each once, that continue another by one rank")
        return tuple(sorted(tree, key=lambda path: (len(path), path)))

    def _misfits(self) -> Iterator[str]:
        if self.tree is not None and self.depth is not None:
            yield "depth and tree both say what is drafted; leave one out"

    def misfits_with(self, recipe: RLRecipe) -> Iterator[str]:
        sharding, runs_vllm = recipe.actor.sharding, isinstance(recipe.rollout.engine, VLLMEngineConfig)
        if runs_vllm and self.tree is not None:
            yield "rollout.speculation.tree is the native engine's; vLLM drafts chains: set depth"
        if self.learns and sharding.copy_size > sharding.shard:
            yield (
                "rollout.speculation.train learns from hidden states that one process has as a whole, but "
                f"actor.sharding cuts them ({', '.join(f'{key} {n}' for key, n in sharding.peers.items())}): leave "
                "train out, or use actor.sharding.shard alone"
            )
        if self.learns and runs_vllm and recipe.actor.train.lora is not None:
            yield (
                "rollout.speculation.train sends heads beside the weights, but vLLM is sent adapters alone "
                "(actor.train.lora): leave train out, or use the native engine"
            )


class HeadsConfig(StrictModel):
    """Heads that guess the tokens behind the next one (Cai et al. 2024); the model itself stays as it is."""

    depth: Tokens = Field(3, ge=1, le=16, description="Tokens guessed beyond the next one, each by a head of its own.")
    layers: int = Field(
        1, ge=1, le=8, description="Layers of each head's residual block; 2 make up for a shared head in small models."
    )
    shared_head: bool = Field(
        True, description="All end in the model's own LM head; false: each in a copy of it, which learns too."
    )


class MedusaRecipe(SupervisedRecipe):
    """Medusa heads for a model, trained on its own answers; the model itself stays as it is."""

    job: Literal["medusa"] = "medusa"
    heads: HeadsConfig = HeadsConfig()
    sampling: SamplingConfig = SamplingConfig()
    samples_per_prompt: Samples = Field(1, ge=1, description="Answers to each prompt.")
    answers_per_step: Rows = Field(32, ge=1, description="Answers in each update.")
    train: TrainConfig = TrainConfig(optim=OptimConfig(lr=1e-3))

    @property
    def answered_by(self) -> SamplingConfig:
        return self.sampling

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        found = training_only_settings(self.sampling)
        if self.cluster.type != "local":
            found.append(f"cluster.type is {self.cluster.type}, but heads train in one process: leave cluster out")
        if self.train.lora is not None:
            found.append("train.lora is set, but the model stays as it is: leave it out")
        if found:
            yield "; ".join(found)


STARTER = StarterRecipe(
    "prompts.jsonl",
    ("prompt",),
    {"heads.depth": 3, "sampling.max_new_tokens": 256, "train.optim.lr": 1e-3},
    is_tuned=False,
)
