"""Speculation: what proposes tokens that a forward of the native engine verifies several of; a class per ``type``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quartet.config.common import OptimConfig, Strict
from quartet.config.units import Tokens

_Seconds = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class StepCosts(Strict):
    """Seconds by powers of two: the first number is that of 1, the next of 2, of 4 and so on."""

    plain: _Seconds = Field(description="Of a step of so many rows, a token each.")
    drafted: _Seconds = Field(description="Of a step of so many tokens, drafted ones included.")
    drafting: tuple[float, ...] = Field((), description="Of making the drafts of so many rows; none when left out.")


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

    @property
    def longest(self) -> int:
        return self.max_draft


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
    path: str = Field(description="Directory of the heads.")
    depth: Tokens | None = Field(None, ge=1, description="Heads that draft, a token each; all when left out.")
    choose: Literal["top", "uniform", "gumbel"] = Field(
        "top",
        description="Which of a head's tokens: the likeliest; what the request would draw from the head's distribution "
        "by its own number (uniform, with rollout.sampling.draw inverse), or its own noise (gumbel, with draw gumbel).",
    )
    train: HeadTraining | None = Field(None, description="The heads learn along with the actor; else they stay.")


SpeculationConfig = Annotated[HistorySpeculation | MedusaSpeculation, Field(discriminator="type")]


def head_training(config: SpeculationConfig | None) -> HeadTraining | None:
    """How heads learn along; None where none do."""
    return config.train if isinstance(config, MedusaSpeculation) else None
