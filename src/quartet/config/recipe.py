"""Typed recipes: one per job. Every default of the project lives in this folder; nothing rewrites a recipe once it is
resolved.

Batch words: ``prompts_per_step`` prompts are answered ``responses_per_prompt`` times each; the step's groups are cut
into ``minibatches`` (one optimizer update each), and the whole is gone through ``epochs`` times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from quartet.config.algorithms import PPO, AlgorithmConfig
from quartet.config.cluster import ClusterConfig, LocalCluster, OffloadConfig, WeightSyncConfig
from quartet.config.common import CheckpointConfig as CheckpointConfig
from quartet.config.common import (
    DataConfig,
    HubConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    ShardingConfig,
    Strict,
    TrainConfig,
)
from quartet.config.cross_checks import misfits
from quartet.config.engine_types import EngineConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import EvaluationConfig
from quartet.config.placement import PlacementConfig
from quartet.config.plugins import sections
from quartet.config.preference import DoubtfulPairs
from quartet.config.reward_types import RewardConfig
from quartet.config.run import LogConfig as LogConfig
from quartet.config.run import Recipe as Recipe
from quartet.config.run import TrainingRecipe
from quartet.config.speculation import DRAFTERS, Speculation
from quartet.config.strict import Batches, Groups, Nats, Pairs, Prompts, Rows
from quartet.config.supervised import SupervisedRecipe


class SFTRecipe(SupervisedRecipe):
    """Supervised fine-tuning on demonstrations; only the demonstrator's tokens carry loss."""

    job: Literal["sft"] = "sft"
    examples_per_step: Rows = Field(32, ge=1, description="Rows in each update.")


class RewardModelRecipe(SupervisedRecipe):
    """Pairwise (Bradley-Terry) reward model."""

    is_scalar: ClassVar[bool] = True
    job: Literal["reward-model"] = "reward-model"
    pairs_per_step: Pairs = Field(32, ge=1, description="Pairs in each update.")
    centring: float = Field(0.0, ge=0, description="Weight of (chosen + rejected)², keeps scores near 0.")
    margin_scale: float = Field(1.0, ge=0, description="Factor of the data's column `margin`; 0 ignores it.")
    doubtful_pairs: DoubtfulPairs = Field(
        "keep", description="Pairs with an empty answer, or a chosen one that begins the rejected one."
    )


if TYPE_CHECKING:
    SpeculationConfig = Speculation
else:
    _ADDED = sections("a drafter", DRAFTERS, Speculation, ()) or (Speculation,)
    SpeculationConfig = reduce(or_, _ADDED)
    if len(_ADDED) > 1:
        SpeculationConfig = Annotated[SpeculationConfig, Field(discriminator="type")]


class RolloutConfig(Strict):
    """The engine that samples, and its sampling."""

    engine: EngineConfig = Field(NativeEngineConfig(), description="What generates, with its own keys.")
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig | None = Field(
        None, description="What drafts tokens that are verified several at a time, with the same answers; none."
    )


class ActorConfig(Strict):
    """The policy that is trained."""

    model: ModelConfig | None = Field(None, description="Where it starts; left out where Python passes a model.")
    train: TrainConfig = TrainConfig()
    sharding: ShardingConfig = ShardingConfig()


class CriticConfig(HubConfig):
    """PPO's value model: one value for every token."""

    path: str | None = Field(
        None, description="Its start; a copy of the reward model, else of the actor's body, when left out."
    )
    train: TrainConfig = TrainConfig(optim=OptimConfig(lr=2e-5))
    warmup_steps: int = Field(0, ge=0, description="First steps, in which only the critic learns.")
    sharding: ShardingConfig = ShardingConfig()


class ReferenceConfig(HubConfig):
    """The frozen policy that KL is measured against; the teacher of distillation."""

    path: str | None = Field(None, description="Model directory or hub name; the actor as it starts when left out.")
    sharding: ShardingConfig = ShardingConfig()


class PTXConfig(Strict):
    """Demonstrations mixed into every update of the actor (Ouyang et al. 2022): ``loss = policy + coef · sft``."""

    data: DataConfig | None = Field(None, description="Rows to train on; left out where Python passes them.")
    coef: float = Field(gt=0, description="Weight of the demonstrations' loss, a mean over their loss tokens.")
    examples_per_minibatch: Rows = Field(ge=1, description="Demonstrations in each update of the actor.")
    prefetch: Batches = Field(2, ge=0, description="Tokenised batches prepared ahead, in a thread.")


class EnvironmentConfig(Strict):
    """A Python class that answers the policy's actions; ``rollout.sampling`` holds for each of its turns."""

    target: str | None = Field(
        None, description="path/to/file.py:Class or package.module:Class; left out only from Python, which passes it."
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")
    max_turns: int = Field(8, ge=1, description="Actions of an episode; one that is not done then is truncated.")
    max_tokens: int | None = Field(
        None, ge=2, description="Longest sequence, state and action together; the model's context when left out."
    )
    max_environments: int = Field(64, ge=1, description="Episodes that run at a time.")
    timeout_s: float = Field(60.0, gt=0, description="Longest reset or step, of the environment's own time.")
    on_error: Literal["stop", "retry", "leave_out"] = Field(
        "stop",
        description="retry: an episode in which a call fails is played again, twice at most; leave_out: nothing is "
        "learned from it.",
    )
    weight: float = Field(1.0, description="Factor of the environment's own rewards in the score.")


class RLRecipe(TrainingRecipe):
    """Reinforcement learning of one actor against rewards."""

    job: Literal["rl"] = "rl"
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rewards: tuple[RewardConfig, ...] = Field((), description="Sources of reward; a response's score is their sum.")
    algorithm: AlgorithmConfig = Field(PPO(), description="The method, with its own keys.")
    data: DataConfig | None = Field(None, description="Prompts; left out where Python passes them.")
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig | None = Field(None, description="Episodes of several turns, in place of answers.")
    ptx: PTXConfig | None = Field(None, description="Demonstrations mixed into the updates; none when left out.")
    evaluation: EvaluationConfig | None = Field(None, description="Held-out evaluation; none when left out.")
    steps: int = Field(100, ge=1, description="Iterations: sample, score, update.")
    prompts_per_step: Prompts = Field(32, ge=1, description="Prompts answered in each step.")
    responses_per_prompt: int = Field(
        default_factory=lambda values: getattr(values.get("algorithm"), "default_responses", 1),
        ge=1,
        description="Answers to each prompt, the group of group-relative methods; the method's own number if left out.",
    )
    minibatches: int = Field(1, ge=1, description="Updates that a step's groups are cut into; divides the prompts.")
    epochs: int = Field(1, ge=1, description="Passes over a step's responses.")
    chunk_size: Groups = Field(8, ge=1, description="Groups that are scored together.")
    numerics: Literal["fast", "exact"] = Field(
        "fast", description="exact: sampler and trainer agree to the last bit (CPU, fp32, one thread; slower)."
    )
    canary_tolerance: Nats | None = Field(
        None,
        gt=0,
        description="Most that a log-probability of the engine may differ from the trainer's after an update; "
        "when left out 1e-3 with fp32, 0.25 with bf16.",
    )
    placement: PlacementConfig | None = Field(
        None, description="Which role works where; left out: all in one process, taking turns."
    )
    cluster: ClusterConfig = Field(LocalCluster(), description="Where the processes of the run are.")
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    offload: OffloadConfig = OffloadConfig()

    @field_validator("evaluation")
    @classmethod
    def _drawn_as_in_training(cls, value: EvaluationConfig | None, info: ValidationInfo) -> EvaluationConfig | None:
        rollout = info.data.get("rollout")  # none where that is wrong itself
        return value if value is None or rollout is None else value.drawn_as(rollout.sampling)

    @property
    def held_out(self) -> EvaluationConfig:
        """``evaluation``, also where Python alone passes held-out prompts."""
        return self.evaluation or EvaluationConfig().drawn_as(self.rollout.sampling)

    def _misfits(self) -> Iterator[str]:
        if reasons := misfits(self):
            yield "; ".join(reasons)
