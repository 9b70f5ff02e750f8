"""The recipe's section of code rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quartet.config.rewards import DAY_S, Fallible
from quartet.config.strict import Processes, Responses


class CodeReward(Fallible):
    """The completion's code is run against tests in a sandbox."""

    type: Literal["code"] = "code"
    name: str = "code"
    column: str = Field("tests", description="Column of the data with asserts, or with pairs of input and output.")
    score: Literal["fraction", "all"] = Field("fraction", description="Share of tests passed, or 1 only for all.")
    timeout_s: float = Field(5.0, gt=0, le=DAY_S, description="Most seconds for one run of the code.")
    cpu_s: int = Field(5, ge=1, description="Most processor seconds of each process.")
    memory_mb: int = Field(512, ge=64, description="Most address space of each process.")
    disk_mb: int = Field(16, ge=1, description="Most that it may write to disk, a part of memory, in all.")
    output_kb: int = Field(256, ge=1, description="Most output that is read; more is a failure.")
    processes: Processes = Field(16, ge=1, description="Most processes and threads at a time.")
    concurrency: Responses = Field(2, ge=1, description="Completions that are run at a time.")
