"""Recipe sections of process reward models: the job that trains one, and the source of reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quartet.config.common import ShardingConfig, StrictModel
from quartet.config.plugins import StarterRecipe
from quartet.config.rewards import BaseModelReward
from quartet.config.run import SupervisedRecipe
from quartet.config.strict import Rows, Tokens


class ProcessRewardRecipe(SupervisedRecipe):
    """Process reward model from step-labelled answers."""

    is_scalar: ClassVar[bool] = True
    job: Literal["process-reward"] = "process-reward"
    separator: str = Field("\n\n", min_length=1, description="Ends every step but the last, which may have none.")
    answers_per_step: Rows = Field(32, ge=1, description="Answers in each update.")


STARTER = StarterRecipe("steps.jsonl", ("prompt", "steps", "labels"), {"separator": "\n\n"})


class SumSteps(StrictModel):
    """The scores of all steps are added up."""

    name: Literal["sum"] = "sum"


class MinSteps(StrictModel):
    """A response is worth its worst step."""

    name: Literal["min"] = "min"


class DiscountedSteps(StrictModel):
    """A sum in which step k counts gamma^(k-1): many steps cannot pay more than 1 / (1 - gamma) good ones."""

    name: Literal["discounted"] = "discounted"
    gamma: float = Field(0.9, gt=0, lt=1, description="Discount per step.")


CombineConfig = Annotated[SumSteps | MinSteps | DiscountedSteps, Field(discriminator="name")]


class ProcessModelReward(BaseModelReward):
    """A model that judges every step of a completion, as `quartet process-reward` trains it.

    A step's score is the probability that it is right, and lands on its last token where the method has rewards of
    tokens; elsewhere the combined score is one number. Either is added to the outcome's rewards with its weight.
    """

    pays_steps: ClassVar[bool] = True
    type: Literal["process_model"] = "process_model"
    path: str = Field(description="Model directory or hub name.")
    tokenizer: str | None = Field(None, description="Directory or hub name; the model's own when left out.")
    name: str = "process_reward"
    separator: str | None = Field(
        None, min_length=1, description="Ends a step; needed where no process_reward.json beside the model says it."
    )
    combine: CombineConfig = Field(MinSteps(), description="How the steps' scores make one number.")
    forward_token_budget: Tokens = Field(16384, ge=1, description="Most tokens of one forward-only micro-batch.")
    sharding: ShardingConfig = ShardingConfig()
