"""Fresh preference pairs from the policy that is being trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quartet.config.common import DataConfig, SamplingConfig, Strict
from quartet.config.rewards import RewardConfig
from quartet.config.units import Prompts, Samples, Sequences


class CollectConfig(Strict):
    """Where fresh pairs come from: the round's policy answers prompts, a labeller scores the answers."""

    labeller: RewardConfig = Field(description="Scores every answer; it stands for the people one would ask.")
    data: DataConfig | None = Field(None, description="Prompts; those of rl.data when left out.")
    prompts_per_round: Prompts = Field(256, ge=1, description="Prompts answered in each round.")
    samples_per_prompt: Samples = Field(4, ge=2, description="Answers to each prompt, of which two make a pair.")
    sampling: SamplingConfig = SamplingConfig()
    pairs: Literal["best_worst", "random"] = Field(
        "best_worst", description="The best and the worst answer of a prompt, or two drawn at random."
    )
    least_difference: float = Field(0.0, ge=0, description="Labels must differ by more than this to make a pair.")
    max_running: Sequences = Field(64, ge=1, description="Sequences that decode together.")
