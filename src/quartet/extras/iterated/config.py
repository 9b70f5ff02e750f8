"""The recipe of `quartet iterated-reward-model`, and how `quartet init` begins it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from quartet.config.choices import EngineConfig, RewardConfig
from quartet.config.common import DataConfig, SamplingConfig, Strict, untrained
from quartet.config.engines import NativeEngineConfig, draw_misfits
from quartet.config.plugins import Starter
from quartet.config.recipe import RewardModelRecipe, RLRecipe
from quartet.config.run import TrainingRecipe
from quartet.config.strict import Prompts, Samples


class CollectConfig(Strict):
    """Where fresh pairs come from: the round's policy answers prompts, a labeller scores the answers."""

    labeller: RewardConfig = Field(description="Scores every answer, in place of human labellers.")
    data: DataConfig | None = Field(None, description="Prompts; those of rl.data when left out.")
    prompts_per_round: Prompts = Field(256, ge=1, description="Prompts answered in each round.")
    samples_per_prompt: Samples = Field(4, ge=2, description="Answers to each prompt, of which two make a pair.")
    sampling: SamplingConfig = SamplingConfig()
    pairs: Literal["best_worst", "random"] = Field(
        "best_worst", description="The best and the worst answer of a prompt, or two drawn at random."
    )
    least_difference: float = Field(0.0, ge=0, description="Labels must differ by more than this to make a pair.")
    engine: EngineConfig = Field(NativeEngineConfig(), description="What generates, with its own keys.")

    def _misfits(self) -> Iterator[str]:
        if found := untrained(self.sampling):
            yield found[0]
        yield from draw_misfits("sampling", self.sampling, self.engine)


class IteratedRecipe(TrainingRecipe):
    """``rounds`` times: fresh pairs of the present policy, the reward model on old and new pairs, RL against it.

    The sections ``reward_model`` and ``rl`` are recipes of those jobs; seeds, directories and the device are the
    loop's. The trained reward model joins ``rl.rewards`` as ``reward_name``, and the reference stays the first policy.
    """

    job: Literal["iterated-reward-model"] = "iterated-reward-model"
    rounds: int = Field(2, ge=1, description="Rounds of pairs, reward model and RL.")
    collect: CollectConfig
    reward_model: RewardModelRecipe = RewardModelRecipe()
    rl: RLRecipe = RLRecipe()
    reward_name: str = Field("reward_model", description="Name of the trained reward model among rl.rewards.")
    reward_weight: float = Field(1.0, description="Its weight among them.")
    keep_training: bool = Field(
        False, description="A round goes on with the reward model before; else it starts from reward_model.model."
    )

    def _misfits(self) -> Iterator[str]:
        for name, section in (("reward_model", self.reward_model), ("rl", self.rl)):
            if section.output_dir is not None or section.seed != 0 or section.device != "auto":
                yield f"{name}.output_dir, {name}.seed, {name}.device are the loop's: set them at the top"
        if self.rl.actor.model is None or self.reward_model.model is None:
            yield "set rl.actor.model.path and reward_model.model.path, where the first round starts"
        if any(source.name == self.reward_name for source in self.rl.rewards):
            yield f"rl.rewards has one called {self.reward_name!r}, as the trained one is: rename either"
        if self.collect.sampling.temperature == 0:
            yield "collect.sampling.temperature is 0: all answers to a prompt would be the same"
        if self.collect.engine.has_own_weights:
            yield (
                f"collect.engine {self.collect.engine.type} answers with its own weights, and each round has another "
                "policy: use native or vllm"
            )


STARTER = Starter(
    "prompts.jsonl",
    ("prompt",),
    {
        "rounds": 2,
        "collect.labeller": None,
        "collect.prompts_per_round": 256,
        "collect.samples_per_prompt": 4,
        "collect.sampling.max_new_tokens": 256,
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
