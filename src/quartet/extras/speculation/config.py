"""The recipe's sections of the drafters ``history`` and ``medusa``, and the recipe by which Medusa heads are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from quartet.config.common import OptimConfig, SamplingConfig, Strict, TrainConfig, untrained
from quartet.config.engines import Speculation, VLLMEngineConfig
from quartet.config.plugins import Starter
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
_VLLM_READS = {"type", "min_match", "max_draft", "path", "depth", "train"}
_Seconds = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class StepCosts(Strict):
    """Seconds by powers of two: the first number is that of 1, the next of 2, of 4 and so on."""

    plain: _Seconds = Field(description="Of a step of so many rows, a token each.")
    drafted: _Seconds = Field(description="Of a step of so many tokens, three drafted ones for each row's newest.")
    drafting: tuple[float, ...] = Field(
        (), description="Of asking heads so often: rows times the depth of their drafts; nothing when left out."
    )


class _Costed(Speculation):
    costs: StepCosts | None = Field(
        None,
        description="What steps cost, by which it is decided when to draft; measured as the run begins when left out. "
        "With them given, runs repeat to the bit on any machine.",
    )

    def misfits_with(self, recipe: RLRecipe) -> Iterator[str]:
        if isinstance(recipe.rollout.engine, VLLMEngineConfig):
            yield from self._misfits_with_vllm()

    def _misfits_with_vllm(self) -> Iterator[str]:
        for name, key in type(self).model_fields.items():
            if name not in _VLLM_READS and (found := getattr(self, name)) != key.default:
                yield (
                    f"rollout.speculation.{name} is the native engine's; vLLM drafts in every step, from each answer's "
                    f"own text or by the likeliest token of each head; found {name} {found!r}: leave it out, or use "
                    "the native engine"
                )


class HistorySpeculation(_Costed):
    """Drafts by what followed the newest tokens elsewhere: in the prompt and in other answers to it, of this step and
    of earlier ones.
    """

    type: Literal["history"] = "history"
    min_match: Tokens = Field(3, ge=1, description="Newest tokens that must stand elsewhere, in this order.")
    max_draft: Tokens = Field(6, ge=1, le=32, description="Tokens of a draft.")
    kept_tokens: Tokens = Field(
        1_000_000,
        ge=1,
        description="Tokens of prompts and answers that are kept; those of the prompt least lately answered go first.",
    )


class HeadTraining(Strict):
    """Medusa heads learn along with the actor, from the hidden states of its own updates."""

    tokens_per_step: Tokens = Field(
        2048, ge=1, description="Most positions of a step that they learn from; fewer while drafts are kept as often."
    )
    depth_decay: float = Field(
        0.8, gt=0, le=1, description="Weight of each head's loss, relative to that of the head before it."
    )
    optim: OptimConfig = OptimConfig(lr=1e-3)


class MedusaSpeculation(_Costed):
    """Drafts by Medusa heads, trained by ``quartet medusa``."""

    type: Literal["medusa"] = "medusa"
    path: str = Field(description="Directory of the heads, its URL, or a hub name (owner/name@revision).")
    depth: Tokens | None = Field(None, ge=1, description="Heads that draft, a token each; all when left out.")
    tree: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = Field(
        None,
        description="In place of depth, a tree: a path per drafted token, of ranks among the heads' tokens. [0, 2] is "
        "the second head's third token behind the first head's first. Every path continues another by one rank.",
    )
    choose: Literal["top", "uniform", "gumbel"] = Field(
        "top",
        description="Which of a head's tokens: the likeliest; what the request would draw from the head's distribution "
        "by its own number (uniform, with rollout.sampling.draw inverse), or its own noise (gumbel, with draw gumbel).",
    )
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
        paths = set(tree)
        if not 0 < len(tree) <= MAX_NODES or len(paths) < len(tree):
            raise ValueError(f"a tree has 1 to {MAX_NODES} paths, each once; found {len(tree)}, {len(paths)} different")
        for path in tree:
            if not path:
                raise ValueError("a path of the tree is empty; leave it out")
            if len(path) > 1 and path[:-1] not in paths:
                raise ValueError(f"{list(path)} continues no other path of the tree; add {list(path[:-1])}")
        return tuple(sorted(tree, key=lambda path: (len(path), path)))

    def _misfits(self) -> Iterator[str]:
        if self.tree is not None and self.depth is not None:
            yield "depth and tree both say what is drafted; leave one out"
        if self.choose == "uniform" and any(map(any, self.tree or ())):
            yield "choose: uniform gives one token per head, so a tree has rank 0 alone; use top or gumbel"

    def misfits_with(self, recipe: RLRecipe) -> Iterator[str]:
        yield from super().misfits_with(recipe)
        fitting, draw = {"uniform": "inverse", "gumbel": "gumbel"}.get(self.choose), recipe.rollout.sampling.draw
        if fitting not in (None, draw):
            yield (
                f"rollout.speculation.choose {self.choose} guesses what a request draws by draw {fitting}, but "
                f"rollout.sampling.draw is {draw}, which hardly ever gives the same token: set either to fit"
            )
        sharding = recipe.actor.sharding
        if self.learns and max(sharding.context, sharding.tensor) > 1:
            yield (
                "rollout.speculation.train learns from hidden states that one process has as a whole, but "
                f"actor.sharding cuts them (context {sharding.context}, tensor {sharding.tensor}): leave train out, or "
                "shard by processes alone"
            )
        if self.learns and isinstance(recipe.rollout.engine, VLLMEngineConfig) and recipe.actor.train.lora is not None:
            yield (
                "rollout.speculation.train sends heads beside the weights, but vLLM is sent adapters alone "
                "(actor.train.lora): leave train out, or use the native engine"
            )


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
