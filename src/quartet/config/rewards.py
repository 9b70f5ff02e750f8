"""Sources of reward: one class per ``type``, each with only its own fields.

==================== ==================================================================== ==================
types                where a score is made                                                a failure
==================== ==================================================================== ==================
``model``            the trainer's own forward pass                                       stops the run
``exact_match``,     this process: rules about the text                                   stops the run
``numeric``,
``regex``,
``format``,
``length``
``function``,        processes of their own beside the trainer                            stops the run
``math``, ``code``
``http``, ``judge``  a server                                                             leaves samples out
==================== ==================================================================== ==================

Servers that are asked over HTTP: where they are, how patiently and how often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from quartet.config.common import HubConfig, ShardingConfig, StrictModel
from quartet.config.strict import HTTPAddress, Processes, Responses, Tokens

DAY_S = 86_400.0
"""Systems refuse to wait for very long times; no wait of a recipe is longer than this."""


class RetryConfig(StrictModel):
    """Waits of ``first_wait_s · 2^n``, at most ``longest_wait_s``, less a random part of up to a half. A server that
    answers with Retry-After sets the wait itself, up to ``longest_wait_s``.
    """

    attempts: int = Field(4, ge=1, description="Most attempts at one request, the first included.")
    first_wait_s: float = Field(
        0.5, ge=0, le=DAY_S, description="Wait before the second attempt; it doubles each time."
    )
    longest_wait_s: float = Field(
        20.0, gt=0, le=DAY_S, description="Longest wait, also where the server asks for more."
    )


class RemoteServer(StrictModel):
    """What every server has."""

    url: HTTPAddress = Field(description="http://host:port/path or https://…, without a query.")
    api_key_env: str | None = Field(
        None, description="Environment variable whose value is sent as `Authorization: Bearer …`; never logged."
    )
    timeout_s: float = Field(
        30.0, gt=0, le=DAY_S, description="Most seconds of one attempt, the whole answer included."
    )
    retry: RetryConfig = RetryConfig()
    concurrency: int = Field(8, ge=1, description="Requests under way at a time.")


OnError = Literal["stop", "leave_out"]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises ``ValueError`` where it is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None


class RewardSourceConfig(StrictModel):
    """What every source has."""

    if TYPE_CHECKING:
        type: str
    name: str | None = Field(None, description="Name in metrics and files; no two sources share one.")
    weight: float = Field(1.0, description="Factor of the score in the sum.")


class FallibleReward(RewardSourceConfig):
    """A source that may fail or take long; what is failed, and what of it is left out, is counted and logged."""

    on_error: OnError = Field("stop", description="leave_out: samples that fail get no score from this source.")
    deadline_s: float | None = Field(
        None, gt=0, description="Most seconds for one chunk; samples without a score by then have failed."
    )


# In this process ------------------------------------------------------------------------------------------


class BaseModelReward(HubConfig, RewardSourceConfig):
    """A source that is a model among the run's own, run in the trainer's own forward."""

    pays_steps: ClassVar[bool] = False
    """Whether it says where in a response its score was earned."""

    if TYPE_CHECKING:  # fields of every subclass, in their order there
        type: str
        path: str
        tokenizer: str | None
        name: str
        forward_token_budget: int
        sharding: ShardingConfig


class ModelReward(BaseModelReward):
    """A sequence-classification model with one label, run in the trainer's own forward."""

    type: Literal["model"] = "model"
    path: str = Field(description="Model directory or hub name.")
    tokenizer: str | None = Field(None, description="Directory or hub name; the model's own when left out.")
    name: str = "reward_model"
    forward_token_budget: Tokens = Field(16384, ge=1, description="Most tokens of one forward-only micro-batch.")
    sharding: ShardingConfig = ShardingConfig()


class FunctionReward(FallibleReward):
    """A Python function ``f(prompts, completions, **columns) -> list[float | None]``, sync or async."""

    type: Literal["function"] = "function"
    target: str = Field(description="path/to/file.py:name or package.module:name")
    name: str | None = Field(None, description="The function's own name when left out.")
    processes: Processes = Field(1, ge=1, le=64, description="Processes that call it, each with what its module keeps.")
    batch_size: Responses | None = Field(None, ge=1, description="Completions per call; a whole chunk when left out.")
    concurrency: int = Field(4, ge=1, description="Most calls that are under way at a time.")


class ExactMatchReward(RewardSourceConfig):
    """1 where completion and column are the same text, white space around both aside, else 0."""

    type: Literal["exact_match"] = "exact_match"
    name: str = "exact_match"
    column: str = Field("answer", description="Column of the data with the right answer.")
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")


class NumericReward(RewardSourceConfig):
    """1 where the last number of the completion is that of the column, else 0."""

    type: Literal["numeric"] = "numeric"
    name: str = "numeric"
    column: str = Field("answer", description="Column of the data with the right answer.")
    tolerance: float = Field(0.0, ge=0, description="Most that the numbers may differ.")
    relative_tolerance: float = Field(
        0.0, ge=0, description="The same as a share of the right number; either suffices."
    )


class RegexReward(RewardSourceConfig):
    """1 where ``pattern`` is found. With ``column``: where the last match's first group is that column's text."""

    type: Literal["regex"] = "regex"
    name: str = "regex"
    pattern: str = Field(description="Regular expression, looked for anywhere in the completion.")
    column: str | None = Field(None, description="Column of the data with the text that the group must be.")
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")

    def _misfits(self) -> Iterator[str]:
        groups = compile_pattern(self.pattern).groups
        if self.column is not None and groups != 1:
            yield (f"pattern {self.pattern!r} has {groups} groups; with `column` it needs one, what is compared")


class FormatReward(RewardSourceConfig):
    """1 where the whole completion has the form: ``pattern`` matches all of it, or every tag of ``tags`` stands in it
    once, ``<tag>…</tag>``, in that order and not inside one another. Else 0.
    """

    type: Literal["format"] = "format"
    name: str = "format"
    pattern: str | None = Field(
        None, description="Regular expression of the whole completion; `.` also stands for a line break."
    )
    tags: tuple[str, ...] | None = Field(None, description="Names without brackets, as in [think, answer].")

    def _misfits(self) -> Iterator[str]:
        if (self.pattern is None) == (self.tags is None):
            yield "a format is either a `pattern` or a list of `tags`; give one of them"
        if self.pattern is not None:
            compile_pattern(self.pattern)
        if self.tags is not None and not self.tags:
            yield "tags is empty; name at least one"
        wrong = [tag for tag in self.tags or () if not re.fullmatch(r"[\w.:-]+", tag)]
        if wrong:
            yield f"tags are names without brackets, e.g. think; found {wrong}"


class LengthReward(RewardSourceConfig):
    """Between 0 and 1. ``max``: 1 up to it, then falling, 0 at twice it. ``target``: 1 there, falling to both sides, 0
    at nothing and at twice it.
    """

    type: Literal["length"] = "length"
    name: str = "length"
    max: int | None = Field(None, ge=1, description="Length, in `unit`, up to which a completion scores 1.")
    target: int | None = Field(None, ge=1, description="The one length, in `unit`, that scores 1.")
    unit: Literal["characters", "words"] = Field("characters", description="What length counts.")

    def _misfits(self) -> Iterator[str]:
        if (self.max is None) == (self.target is None):
            yield "a length is judged by `max` or by `target`; give one of them"


# Beside this process --------------------------------------------------------------------------------------


class MathReward(FallibleReward):
    """1 where the completion's answer is mathematically equal to the column's (math-verify), else 0."""

    type: Literal["math"] = "math"
    name: str = "math"
    column: str = Field("answer", description="Column of the data with the right answer.")
    extract: tuple[Literal["latex", "expr"], ...] = Field(
        ("latex", "expr"), min_length=1, description="What an answer may be: LaTeX in its delimiters, a plain number."
    )
    digits: int = Field(6, ge=1, description="Decimal places to which numbers are compared.")
    timeout_s: float = Field(5.0, gt=0, le=DAY_S, description="Most seconds for one completion; it scores 0 then.")
    concurrency: Processes = Field(2, ge=1, description="Processes that compare, about 100 MB each.")


# On a server ----------------------------------------------------------------------------------------------


class BaseRemoteReward(RemoteServer, FallibleReward):
    """What every source on a server has."""

    on_error: OnError = Field("leave_out", description="stop: a sample that fails stops the run before the update.")


class HTTPReward(BaseRemoteReward):
    """A server that takes ``{"prompts", "completions", "columns"}`` and answers ``{"scores": [1.0, null, …]}``."""

    type: Literal["http"] = "http"
    name: str = "http"
    batch_size: Responses = Field(16, ge=1, description="Completions per request.")


class PointwiseJudge(StrictModel):
    """Each completion gets a score of its own."""

    name: Literal["pointwise"] = "pointwise"
    rubric: str = Field("Is the answer correct, complete and clear?", description="What the judge is asked.")
    template: str | None = Field(None, description="Own prompt with {rubric}, {prompt}, {completion} and columns.")
    pattern: str = Field(
        # All that could belong to the number: of "1,000" and "1e400" the 1 alone would be another score.
        r"(?i)score\W{0,5}?(-?\d(?:(?:[\d.,]|e[+-]?)*\d)?)",
        description="The last match's group is the score in the judge's answer.",
    )
    lowest: float = Field(0.0, description="Worst score of the judge's scale, which counts 0.")
    highest: float = Field(10.0, description="Best score of the judge's scale, which counts 1.")

    def _misfits(self) -> Iterator[str]:
        if not self.lowest < self.highest:
            yield f"lowest ({self.lowest}) must be less than highest ({self.highest})"
        if not math.isfinite(self.highest - self.lowest):
            yield f"from lowest ({self.lowest}) to highest ({self.highest}) is too far for a number"
        if compile_pattern(self.pattern).groups != 1:
            yield f"pattern {self.pattern!r} needs one group, the score"
        if self.template is not None and "{completion}" not in self.template:
            yield "template lacks {completion}, so the judge would not see what it judges"


class PairwiseJudge(StrictModel):
    """Each completion is compared with the text in ``column``, once in each place: 1 better, 0 equal, −1 worse, the
    mean of both places.
    """

    name: Literal["pairwise"] = "pairwise"
    column: str = Field("answer", description="Column of the data with the answer to compare with.")
    rubric: str = Field("Which answer is more correct, complete and clear?", description="What the judge is asked.")
    template: str | None = Field(None, description="Own prompt with {rubric}, {prompt}, {a}, {b} and columns.")
    pattern: str = Field(
        r"\[\[(A|B|C)\]\]", description="The last match's group is the verdict: A, B, anything else for equal."
    )

    def _misfits(self) -> Iterator[str]:
        if compile_pattern(self.pattern).groups != 1:
            yield f"pattern {self.pattern!r} needs one group, the verdict"
        if self.template is not None and not ("{a}" in self.template and "{b}" in self.template):
            yield "template lacks {a} or {b}, so the judge would not see what it compares"


JudgeMethod = Annotated[PointwiseJudge | PairwiseJudge, Field(discriminator="name")]


class JudgeReward(BaseRemoteReward):
    """A language model as a judge, behind an OpenAI-compatible endpoint: ``url`` + ``/chat/completions``."""

    type: Literal["judge"] = "judge"
    name: str = "judge"
    url: str = Field(description="Up to and without /chat/completions, e.g. http://localhost:8000/v1.")
    model: str = Field(description="Name of the model at the server.")
    method: JudgeMethod = Field(PointwiseJudge(), description="How completions are judged.")
    temperature: float = Field(0.0, ge=0, description="Temperature of the judge's answer; 0 is greedy.")
    max_tokens: int = Field(512, ge=1, description="Longest answer of the judge.")
    timeout_s: float = Field(
        60.0, gt=0, le=DAY_S, description="Most seconds of one attempt, the whole answer included."
    )
