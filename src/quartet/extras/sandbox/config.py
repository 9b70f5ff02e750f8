"""The recipe's section of code rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quartet.config.rewards import DAY_S, FallibleReward
from quartet.config.strict import Responses


class CodeReward(FallibleReward):
    """The completion's code is run against tests in a sandbox."""

    type: Literal["code"] = "code"
    name: str = "code"
    column: str = Field("tests", description="Column of the data with asserts, or with pairs of input and output.")
    score: Literal["fraction", "all"] = Field("fraction", description="Share of tests passed, or 1 only for all.")
    timeout_s: float = Field(5.0, gt=0, le=DAY_S, description="Most seconds for one run of the code.")
    memory_mb: int = Field(512, ge=64, description="Most address space of each process.")
    concurrency: Responses = Field(2, ge=1, description="Completions that are run at a time.")
