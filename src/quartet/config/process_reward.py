"""Process rewards: how the scores of steps are combined, and the job that trains a model of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quartet.config.common import Strict
from quartet.config.supervised import SupervisedRecipe
from quartet.config.units import Rows

# Combination ---------------------------------------------------------------------------------------------


class SumSteps(Strict):
    """The scores of all steps are added up."""

    name: Literal["sum"] = "sum"


class MinSteps(Strict):
    """A response is worth its worst step."""

    name: Literal["min"] = "min"


class DiscountedSteps(Strict):
    """A sum in which step k counts gamma^(k-1): many steps cannot pay more than 1 / (1 - gamma) good ones."""

    name: Literal["discounted"] = "discounted"
    gamma: float = Field(0.9, gt=0, lt=1, description="Discount per step.")


CombineConfig = Annotated[SumSteps | MinSteps | DiscountedSteps, Field(discriminator="name")]


# Training ------------------------------------------------------------------------------------------------


class ProcessRewardRecipe(SupervisedRecipe):
    """Process reward model from step-labelled answers."""

    job: Literal["process-reward"] = "process-reward"
    separator: str = Field("\n\n", min_length=1, description="Ends every step but the last, which may have none.")
    answers_per_step: Rows = Field(32, ge=1, description="Answers in each update.")
