"""Evaluation: how held-out prompts are answered, what counts as right, what two models are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from quartet.config.choices import EngineConfig, RewardConfig
from quartet.config.common import (
    DataConfig,
    HubConfig,
    ModelConfig,
    PrecisionChoice,
    SamplingConfig,
    ShardingConfig,
    StrictModel,
    training_only_settings,
)
from quartet.config.engines import NativeEngineConfig, sampling_conflicts
from quartet.config.rewards import JudgeReward, PairwiseJudge, compile_pattern
from quartet.config.run import Recipe
from quartet.config.strict import Prompts, Samples

# What counts as right --------------------------------------------------------------------------------------


class TextAnswer(StrictModel):
    """The whole completion, white space around it aside."""

    type: Literal["text"] = "text"


class NumberAnswer(StrictModel):
    """The last number of the completion, compared by value: ``1,234`` and ``1234.0`` are one answer."""

    type: Literal["number"] = "number"


class RegexAnswer(StrictModel):
    r"""The last match of ``pattern``, its first group if it has one, e.g. ``\\boxed\{(.*?)\}``."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(description="Regular expression; its first group is the answer, else the whole match.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        return compile_pattern(pattern).pattern


AnswerConfig = Annotated[TextAnswer | NumberAnswer | RegexAnswer, Field(discriminator="type")]


class GradingConfig(StrictModel):
    """From scores to right and wrong, and from several samples to figures."""

    threshold: float = Field(1.0, description="An answer is right for a source that scores it at least this.")
    sources: tuple[str, ...] | None = Field(
        None, description="Sources that judge right and wrong; all but reward models when left out."
    )
    pass_at: tuple[int, ...] | None = Field(
        None, description="k of pass@k; samples_per_prompt when left out and above 1."
    )
    majority_at: tuple[int, ...] | None = Field(
        None, description="k of maj@k; samples_per_prompt when left out and above 2."
    )
    answer: AnswerConfig = Field(TextAnswer(), description="What a majority vote counts as one answer.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence of every interval.")

    def passes(self, samples: int) -> tuple[int, ...]:
        return self.pass_at if self.pass_at is not None else (samples,) if samples > 1 else ()

    def majorities(self, samples: int) -> tuple[int, ...]:
        return self.majority_at if self.majority_at is not None else (samples,) if samples > 2 else ()


def _sampling_misfits(config: EvaluationConfig | EvalRecipe) -> Iterator[str]:
    """Tells in one text what of ``samples_per_prompt``, ``sampling`` and ``grading`` does not fit together."""
    samples, grading, found = config.samples_per_prompt, config.grading, training_only_settings(config.sampling)
    if samples > 1 and config.sampling.temperature == 0:
        found.append(
            f"sampling.temperature is 0, so all {samples} samples of a prompt would be the same; "
            "set a temperature or samples_per_prompt: 1"
        )
    for name, ks in (("pass_at", grading.pass_at), ("majority_at", grading.majority_at)):
        wrong = [k for k in ks or () if not 1 <= k <= samples]
        if wrong:
            found.append(f"grading.{name} has {wrong[0]}, which is not within 1 and samples_per_prompt ({samples})")
    if found:
        yield "; ".join(found)


# During training -------------------------------------------------------------------------------------------


class AlarmConfig(StrictModel):
    """Reward-hacking alarm: the training reward rises while the held-out score falls, both beyond noise."""

    false_alarm_rate: float = Field(
        0.01, gt=0, lt=0.5, description="Most probability of any false alarm in a whole run."
    )
    source: str | None = Field(
        None, description="Held-out source that is watched; the evaluation's score when left out."
    )
    examples: Prompts = Field(8, ge=0, description="Held-out prompts shown with an alarm.")


class EvaluationConfig(StrictModel):
    """Held-out evaluation during training."""

    data: DataConfig | None = Field(None, description="Held-out prompts; left out where Python passes them.")
    every_steps: int = Field(50, ge=1, description="Steps between evaluations; one more at the end.")
    sampling: SamplingConfig = Field(
        default_factory=lambda values: SamplingConfig(),
        description="How answers are drawn; a key that is left out is that of rollout.sampling.",
    )
    samples_per_prompt: Samples = Field(1, ge=1, description="Answers to each prompt; above 1 needs a temperature.")
    rewards: tuple[RewardConfig, ...] = Field(
        (),
        description="Sources that only evaluation uses; their sum is eval/score_mean. The training rewards if empty.",
    )
    grading: GradingConfig = GradingConfig()
    alarm: AlarmConfig | None = Field(AlarmConfig(), description="Reward-hacking alarm; null: none.")

    def _misfits(self) -> Iterator[str]:
        return _sampling_misfits(self)

    def drawn_as(self, training: SamplingConfig) -> Self:
        """Returns the same with every key of ``sampling`` that was not set taken from ``training``, and still counted
        as not set: ``model_copy`` with other rollouts changes it, too.
        """
        given = {name: getattr(self.sampling, name) for name in self.sampling.model_fields_set}
        values = {**dict(training), "truncated_logprobs": False, **given}
        sampling = SamplingConfig.model_construct(_fields_set=set(given), **values)
        return self.model_copy(update={"sampling": sampling})


# On its own ------------------------------------------------------------------------------------------------


class ComparisonConfig(HubConfig):
    """Good, same, bad of the evaluated model against another one, prompt by prompt."""

    model: str = Field(description="Model directory or hub name.")
    tokenizer: str | None = Field(None, description="Directory or hub name; that model's own when left out.")
    source: str | None = Field(
        None, description="Reward whose higher score wins; the weighted sum of all when left out."
    )
    judge: JudgeReward | None = Field(
        None, description="A language model compares the answers in both orders, in place of a reward."
    )
    tie_margin: float = Field(0.0, ge=0, description="Scores, or preferences, that differ by no more are the same.")

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if self.judge is not None and not isinstance(self.judge.method, PairwiseJudge):
            yield "judge compares two answers: set judge.method.name: pairwise"
        if self.judge is not None and self.source is not None:
            yield "source and judge both decide who wins: give one of them"

    def as_model(self) -> ModelConfig:
        """Returns the section of the model compared with."""
        return ModelConfig(
            path=self.model,
            tokenizer=self.tokenizer,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )


class EvalRecipe(Recipe):
    """Generates answers to held-out prompts and scores them with rewards."""

    job: Literal["eval"] = "eval"
    model: ModelConfig | None = Field(None, description="Model to evaluate; left out where Python passes one.")
    data: DataConfig | None = Field(None, description="Prompts; left out where Python passes them.")
    rewards: tuple[RewardConfig, ...] = Field(
        (), description="Sources that score the answers; an answer's score is their sum."
    )
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    samples_per_prompt: Samples = Field(1, ge=1, description="Answers to each prompt; above 1 needs a temperature.")
    grading: GradingConfig = GradingConfig()
    compare: ComparisonConfig | None = Field(None, description="Another model to compare with; none when left out.")
    engine: EngineConfig = Field(NativeEngineConfig(), description="What generates, with its own keys.")
    precision: PrecisionChoice = Field(
        "auto", description="Of the model and of reward models; auto: bf16 on a GPU that has it, fp32 on the CPU."
    )

    def _misfits(self) -> Iterator[str]:
        yield from sampling_conflicts("sampling", self.sampling, self.engine)
        if self.compare is not None and self.engine.has_own_weights:
            yield f"engine {self.engine.type} would answer for compare.model, too: evaluate each by itself"
        for i, source in enumerate(self.rewards):
            sharding: ShardingConfig | None = getattr(source, "sharding", None)
            if sharding is not None and (reason := sharding.misfit(f"rewards.{i}.sharding", 1)) is not None:
                yield reason
        yield from _sampling_misfits(self)
