"""The recipe of `quartet iterated-reward-model`, and how `quartet init` begins it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from quartet.config.choices import RewardConfig
from quartet.config.common import DataConfig, StrictModel
from quartet.config.plugins import StarterRecipe
from quartet.config.recipe import RewardModelRecipe, RLRecipe
from quartet.config.run import TrainingRecipe
from quartet.config.strict import Prompts, Samples

REWARD = "reward_model"
"""Name of the trained reward model among the sources."""


class CollectConfig(StrictModel):
    """Where fresh pairs come from: the round's policy answers prompts of ``rl.data`` as in RL, a labeller scores
    the answers, and the best and the worst of a prompt make a pair.
    """

    labeller: RewardConfig = Field(description="Scores every answer, in place of human labellers.")
    prompts_per_round: Prompts = Field(256, ge=1, description="Prompts answered in each round.")
    samples_per_prompt: Samples = Field(4, ge=2, description="Answers to each prompt.")


class IteratedRecipe(TrainingRecipe):
    """``rounds`` times: fresh pairs of the present policy, the reward model on old and new pairs, RL against it.

    The sections ``reward_model`` and ``rl`` are recipes of those jobs; seeds, directories and the device are the
    loop's. The trained reward model joins ``rl.rewards`` as ``reward_model``, and the reference stays the first policy.
    """

    job: Literal["iterated-reward-model"] = "iterated-reward-model"
    rounds: int = Field(2, ge=1, description="Rounds of pairs, reward model and RL.")
    collect: CollectConfig
    reward_model: RewardModelRecipe = RewardModelRecipe()
    rl: RLRecipe = RLRecipe()

    def _misfits(self) -> Iterator[str]:
        for name, section in (("reward_model", self.reward_model), ("rl", self.rl)):
            if section.output_dir is not None or section.seed != 0 or section.device != "auto":
                yield f"{name}.output_dir, {name}.seed, {name}.device are the loop's: set them at the top"
        if self.rl.actor.model is None or self.reward_model.model is None:
            yield "set rl.actor.model.path and reward_model.model.path, where the first round starts"
        if any(part.weight is not None for part in (self.reward_model.data or DataConfig()).sources):
            yield "reward_model.data.sources have weights, but a round learns from all pairs: leave them out"
        if any(source.name == REWARD for source in self.rl.rewards):
            yield f"rl.rewards has one called {REWARD!r}, as the trained one is: rename it"


STARTER = StarterRecipe(
    "prompts.jsonl",
    ("prompt",),
    {
        "rounds": 2,
        "collect.labeller": None,
        "collect.prompts_per_round": 256,
        "collect.samples_per_prompt": 4,
        "reward_model.model.path": "runs/sft/model",
        "reward_model.# data": {"path": "pairs.jsonl"},
        "reward_model.centring": 0.01,
        "reward_model.train.# precision": "bf16",
        "reward_model.train.# lora": {"rank": 16},
        "reward_model.train.optim.lr": 1e-5,
    },
    reward="collect.labeller",
    rl="rl",
)
