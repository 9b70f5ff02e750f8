from typing import Literal

from pydantic import Field

from quartet.config.rewards import FallibleReward


class KeywordsReward(FallibleReward):
    """The share of the given words that a completion has."""

    type: Literal["keywords"] = "keywords"
    name: str = "keywords"
    words: tuple[str, ...] = Field(min_length=1, description="What is looked for, in any case.")
