"""Speculation: what proposes tokens of which one forward of the engine verifies several; a class per ``type``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from quartet.config.common import OptimConfig, Strict
from quartet.config.strict import Tokens

MAX_NODES = 64
"""Of a tree of drafts."""
_Seconds = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class StepCosts(Strict):
    """Seconds by powers of two: the first number is that of 1, the next of 2, of 4 and so on."""

    plain: _Seconds = Field(description="Of a step of so many rows, a token each.")
    drafted: _Seconds = Field(description="Of a step of so many tokens, three drafted ones for each row's newest.")
    drafting: tuple[float, ...] = Field(
        (), description="Of asking heads so often: rows times the depth of their drafts; nothing when left out."
    )


class _Speculation(Strict):
    costs: StepCosts | None = Field(
        None,
        description="What steps cost, by which it is decided when to draft; measured as the run begins when left out. "
        "With them given, runs repeat to the bit on any machine.",
    )


class HistorySpeculation(_Speculation):
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


class MedusaSpeculation(_Speculation):
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
    def num_heads(self) -> int | None:
        """Heads that draft; None: all there are."""
        return self.depth if self.tree is None else len(self.tree[-1])

    @field_validator("tree")
    @classmethod
    def _sorted(cls, tree: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        """Shorter paths first."""
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


SpeculationConfig = Annotated[HistorySpeculation | MedusaSpeculation, Field(discriminator="type")]


def head_training(config: SpeculationConfig | None) -> HeadTraining | None:
    """How heads learn along; None where none do."""
    return config.train if isinstance(config, MedusaSpeculation) else None
