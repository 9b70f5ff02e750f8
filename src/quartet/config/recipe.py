"""Typed recipes: one per job. Every default of the project lives in this folder; nothing rewrites a recipe once it is
resolved.

Batch words: ``prompts_per_step`` prompts are answered ``responses_per_prompt`` times each; the step's groups are cut
into ``minibatches`` (one optimizer update each), and the whole is gone through ``epochs`` times.

Below them: settings of an RL recipe that contradict each other, and settings without effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from quartet.config.algorithms import (
    PPO,
    SEQUENCE_LOSSES,
    AlgorithmConfig,
    BestOfN,
    Distillation,
    GroupAlgorithm,
    OnlineDPO,
    OptimalTokenBaseline,
    PassAtK,
    PolicyGradient,
    ReMax,
    ScoredAlgorithm,
    SelectionAlgorithm,
    kl_term,
    reads_reference,
)
from quartet.config.choices import EngineConfig, RewardConfig, SpeculationConfig
from quartet.config.common import CheckpointConfig as CheckpointConfig
from quartet.config.common import (
    ClusterConfig,
    DataConfig,
    HubConfig,
    LocalCluster,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    SamplingConfig,
    ShardingConfig,
    StrictModel,
    TrainConfig,
    WeightSyncConfig,
    device_conflicts,
)
from quartet.config.engines import NativeEngineConfig, VLLMEngineConfig, sampling_conflicts
from quartet.config.evaluation import EvaluationConfig
from quartet.config.placement import (
    ROLES,
    AsynchronousPlacement,
    PlacementConfig,
    Role,
    has_memory_budget,
    num_processes_of,
)
from quartet.config.plugins import plugin_entries
from quartet.config.rewards import BaseModelReward
from quartet.config.run import LogConfig as LogConfig
from quartet.config.run import Recipe as Recipe
from quartet.config.run import SupervisedRecipe, TrainingRecipe
from quartet.config.strict import Batches, Groups, Nats, Pairs, Prompts, Rows


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


class RolloutConfig(StrictModel):
    """The engine that samples, and its sampling."""

    engine: EngineConfig = Field(NativeEngineConfig(), description="What generates, with its own keys.")
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig | None = Field(
        None, description="What drafts tokens that are verified several at a time, with the same answers; none."
    )


class ActorConfig(StrictModel):
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


class PTXConfig(StrictModel):
    """Demonstrations mixed into every update of the actor (Ouyang et al. 2022): ``loss = policy + coef · sft``."""

    data: DataConfig | None = Field(None, description="Rows to train on; left out where Python passes them.")
    coef: float = Field(gt=0, description="Weight of the demonstrations' loss, a mean over their loss tokens.")
    examples_per_minibatch: Rows = Field(ge=1, description="Demonstrations in each update of the actor.")
    prefetch: Batches = Field(2, ge=0, description="Tokenised batches prepared ahead, in a thread.")


class EnvironmentConfig(StrictModel):
    """A Python class that answers the policy's actions; ``rollout.sampling`` holds for each of its turns."""

    type: str | None = Field(None, description="An environment that a plug-in adds, in place of a target.")
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
    on_error: Literal["stop", "leave_out"] = Field(
        "stop", description="leave_out: nothing is learned from an episode in which a call fails."
    )
    weight: float = Field(1.0, description="Factor of the environment's own rewards in the score.")

    def _misfits(self) -> Iterator[str]:
        if self.type is not None and self.target is not None:
            yield f"environment.type {self.type} and environment.target {self.target} are both set: drop one"
        if self.type is not None and self.type not in (known := plugin_entries("environments")):
            yield f"environment.type {self.type} is none that a plug-in adds: {', '.join(known) or 'there is none'}"


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
        if reasons := recipe_conflicts(self):
            yield "; ".join(reasons)


# Checks across the sections of an RL recipe: a group yields every reason that it finds, and all are reported at once --


def recipe_conflicts(recipe: RLRecipe) -> list[str]:
    """Tells every reason why the recipe's parts do not fit together."""
    groups = (
        _sizes,
        _numerics,
        _engines,
        _speculation,
        _losses,
        _kl_and_reference,
        _environments,
        _rewards,
        _placements,
    )
    return list(chain.from_iterable(group(recipe) for group in groups))


def _sizes(recipe: RLRecipe) -> Iterator[str]:
    algorithm, responses, longest = (
        recipe.algorithm,
        recipe.responses_per_prompt,
        recipe.rollout.sampling.max_new_tokens,
    )
    if recipe.prompts_per_step % recipe.minibatches:
        yield (
            f"minibatches ({recipe.minibatches}) must divide prompts_per_step ({recipe.prompts_per_step}): "
            "every mini-batch holds whole groups"
        )
    if isinstance(algorithm, GroupAlgorithm | SelectionAlgorithm) and responses < 2:
        yield (
            f"{algorithm.name} compares the responses of a group; responses_per_prompt is {responses}, "
            "set it to 2 or more"
        )
    if isinstance(algorithm, BestOfN) and algorithm.keep >= responses:
        yield (
            f"algorithm.keep ({algorithm.keep}) must be less than responses_per_prompt ({responses}): "
            "nothing would be selected"
        )
    if isinstance(algorithm, PassAtK) and algorithm.k >= responses:
        yield (
            f"algorithm.k ({algorithm.k}) must be less than responses_per_prompt ({responses}): there would be one way "
            "to choose k responses, so nothing to compare"
        )
    overlong = algorithm.overlong if isinstance(algorithm, ScoredAlgorithm) else None
    if overlong is not None and overlong.buffer >= longest:
        yield (
            f"algorithm.overlong.buffer ({overlong.buffer}) must be less than rollout.sampling.max_new_tokens "
            f"({longest}): every response would be too long"
        )


def _numerics(recipe: RLRecipe) -> Iterator[str]:
    trained = (recipe.actor.train, recipe.critic.train)
    gpus = recipe.cluster.gpus_per_process if recipe.cluster.type == "ray" else 0
    if recipe.numerics == "exact":
        if any(train.precision == "bf16" for train in trained):
            yield "numerics: exact needs precision: fp32 for actor and critic; found bf16"
        if recipe.threads not in (None, 1):
            yield f"numerics: exact needs threads: 1; found {recipe.threads}"
        if recipe.device.startswith("cuda"):
            yield f"numerics: exact needs the CPU; found device: {recipe.device}"
        elif gpus:
            yield f"numerics: exact needs the CPU; found cluster.gpus_per_process: {gpus:g}"
        if any(train.compile for train in trained):
            yield "numerics: exact needs the model's own layers, whose sums were examined: leave out train.compile"
    if recipe.rollout.sampling.temperature == 0:
        yield "rollout.sampling.temperature is 0: greedy rollouts cannot be trained on; use e.g. 1.0"


def _engines(recipe: RLRecipe) -> Iterator[str]:
    engine, sampling = recipe.rollout.engine, recipe.rollout.sampling
    if not isinstance(engine, NativeEngineConfig):
        yield from engine.training_misfits()
        if recipe.numerics == "exact":
            yield f"numerics: exact is the native engine's; found rollout.engine {engine.type}"
    if sampling.truncated_logprobs and not isinstance(recipe.algorithm, PolicyGradient):
        yield (
            f"rollout.sampling.truncated_logprobs is for methods that compare with the sampler; "
            f"{recipe.algorithm.name} learns the whole distribution: leave it out"
        )
    if sampling.truncated_logprobs and not engine.has_our_sampler:
        yield (
            f"rollout.sampling.truncated_logprobs is for native and vllm: {engine.type}'s log-probabilities are those "
            "of all tokens; leave it out"
        )


def _speculation(recipe: RLRecipe) -> Iterator[str]:
    rollout, speculation = recipe.rollout, recipe.rollout.speculation
    asked = [("rollout.sampling", rollout.sampling)]
    if recipe.evaluation is not None and recipe.evaluation.sampling.draw != rollout.sampling.draw:
        asked.append(("evaluation.sampling", recipe.evaluation.sampling))
    for key, sampling in asked:
        yield from sampling_conflicts(key, sampling, rollout.engine)
    if speculation is None:
        return
    drafting = (
        NativeEngineConfig
        if plugin_entries("drafters")[speculation.type].vllm is None
        else NativeEngineConfig | VLLMEngineConfig
    )
    if not isinstance(rollout.engine, drafting):
        yield (
            f"rollout.speculation needs an engine that verifies drafts by this project's sampler, which native and "
            f"vllm do; found rollout.engine {rollout.engine.type}: leave it out, or use one of these"
        )
    yield from speculation.misfits_with(recipe)


def _losses(recipe: RLRecipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return
    loss, correction = algorithm.policy_loss, algorithm.off_policy
    is_of_responses = isinstance(algorithm, GroupAlgorithm) and not isinstance(algorithm, OptimalTokenBaseline)
    if isinstance(loss, SEQUENCE_LOSSES) and algorithm.top_entropy_quantile < 1:
        yield (
            f"algorithm.policy_loss {loss.name} has one ratio per response, algorithm.top_entropy_quantile leaves out "
            "tokens of it: use a loss of tokens, such as clipped, or leave top_entropy_quantile out"
        )
    if isinstance(loss, SEQUENCE_LOSSES) and not is_of_responses:
        yield (
            f"algorithm.policy_loss {loss.name} has one ratio per response, {algorithm.name} one "
            "advantage per token, which the ratio would average away; use clipped, cispo or reinforce"
        )
    if isinstance(loss, SEQUENCE_LOSSES) and correction is not None and correction.level != "sequence":
        yield f"algorithm.policy_loss {loss.name} has a ratio of the sequence: set algorithm.off_policy.level: sequence"
    if isinstance(algorithm, OptimalTokenBaseline) and recipe.rollout.sampling.truncated_logprobs:
        yield (
            "algorithm optimal_token_baseline reads probabilities of the whole vocabulary, and "
            "rollout.sampling.truncated_logprobs leaves some of it out: leave either"
        )


def _kl_and_reference(recipe: RLRecipe) -> Iterator[str]:
    algorithm, kl = recipe.algorithm, kl_term(recipe.algorithm)
    responses = recipe.prompts_per_step * recipe.responses_per_prompt
    if kl.target is not None and kl.horizon < responses:
        yield (
            f"algorithm.kl.horizon ({kl.horizon}) is less than the responses of one step ({responses}): the "
            "coefficient would jump, and could turn negative"
        )
    if isinstance(algorithm, Distillation) and recipe.reference.path is None:
        yield "distillation needs reference.path, the teacher: from itself the actor has nothing to learn"
    is_own = recipe.reference.path is None and recipe.actor.train.lora is not None
    if isinstance(algorithm, OnlineDPO) and algorithm.refresh_steps is not None and is_own:
        yield "with actor.train.lora the reference is the actor itself: set reference.path, or leave out refresh_steps"


def _environments(recipe: RLRecipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if recipe.environment is None:
        return
    if isinstance(algorithm, ReMax):
        yield (
            "remax has no greedy episodes for its baseline; with an environment use ppo, or rloo and several responses"
        )
    if isinstance(algorithm, ScoredAlgorithm) and algorithm.overlong is not None:
        yield (
            "algorithm.overlong is about one response of at most max_new_tokens, which holds for each turn of an "
            "episode; let the environment's rewards charge for length"
        )
    if isinstance(algorithm, OnlineDPO):
        yield (
            "online_dpo compares two answers to one prompt; episodes see different states: use best_of_n, grpo or rloo"
        )


def _rewards(recipe: RLRecipe) -> Iterator[str]:
    sources = (*recipe.rewards, *(recipe.evaluation.rewards if recipe.evaluation is not None else ()))
    models = {source.name for source in sources if isinstance(source, BaseModelReward)}
    names = [source.name for source in recipe.rewards if source.name]
    names += ["environment"] if recipe.environment is not None else []
    if clash := sorted(models & set(ROLES) - {"reward"}):
        yield f"a reward model is called {clash[0]!r}, as a role of every run is: give it another name"
    elif len(set(names)) != len(names):
        yield f"two rewards have the same name: {names}"
    steps = [source.name for source in recipe.rewards if isinstance(source, BaseModelReward) and source.pays_steps]
    if isinstance(recipe.algorithm, ReMax) and steps:
        yield (
            "algorithm remax takes the greedy response's whole score off every token, but the process reward "
            f"{steps[0]!r} pays steps one by one: after the first step the baseline would count what is paid already; "
            "use reinforce_pp, ppo or a group method"
        )


def _placements(recipe: RLRecipe) -> Iterator[str]:
    placement, algorithm, cluster = recipe.placement, recipe.algorithm, recipe.cluster
    staleness = placement.max_staleness if isinstance(placement, AsynchronousPlacement) else 0
    if staleness and isinstance(algorithm, PolicyGradient) and algorithm.off_policy is None:
        yield (
            f"an asynchronous placement trains on answers of weights up to {staleness} versions old: set "
            "algorithm.off_policy (importance weights), say {level: token, mode: truncate, cap: 2.0}"
        )
    yield from _shardings(recipe)
    if cluster.type == "ray" and placement is None:
        yield "cluster.type ray needs a placement: say which role works where, {type: full_offload, pool: {}} say"
    yield from device_conflicts(cluster, recipe.device)
    compiles = recipe.actor.train.compile or recipe.critic.train.compile
    if compiles and cluster.type == "ray" and cluster.max_restarts > 0:
        yield (
            "train.compile cannot go on from a checkpoint with equal bits, which is what a replaced worker does: set "
            "cluster.max_restarts: 0, or leave train.compile out"
        )


def _shardings(recipe: RLRecipe) -> Iterator[str]:
    """Tells which roles with a model cannot be cut over the processes of their pool."""
    asked: list[tuple[str, Role, ShardingConfig]] = [("actor.sharding", "actor", recipe.actor.sharding)]
    if recipe.algorithm.name == "ppo":
        asked.append(("critic.sharding", "critic", recipe.critic.sharding))
    if reads_reference(recipe.algorithm):
        asked.append(("reference.sharding", "reference", recipe.reference.sharding))
    only = recipe.evaluation.rewards if recipe.evaluation is not None else ()
    for place, sources in (("rewards", recipe.rewards), ("evaluation.rewards", only)):
        asked += [
            (f"{place}.{i}.sharding", "reward", source.sharding)
            for i, source in enumerate(sources)
            if isinstance(source, BaseModelReward)
        ]
    compiled = {"actor": recipe.actor.train.compile, "critic": recipe.critic.train.compile}
    for key, role, sharding in asked:
        processes, compiles = num_processes_of(recipe.placement, role), compiled.get(role, False)
        if (reason := sharding.misfit(key, processes, compiles=compiles)) is not None:
            yield reason
        elif recipe.numerics == "exact" and sharding.context * sharding.tensor > 1:
            yield (
                f"numerics: exact needs every sum in one process, in the order of the engine's: {key}.context and "
                f"{key}.tensor cut sums of a layer over processes; use {key}.shard or {key}.pipeline"
            )
        elif sharding.tensor > 1 and recipe.rollout.sampling.truncated_logprobs and role in ("actor", "reference"):
            yield (
                f"rollout.sampling.truncated_logprobs needs the likeliest tokens of the whole vocabulary, and of it "
                f"each process has a part under {key}.tensor: use {key}.context or {key}.shard, or leave top_p, top_k "
                "and min_p out"
            )
        elif sharding.cpu_offload and has_memory_budget(recipe.placement, role):
            yield (
                f"{key}.cpu_offload keeps the model in host memory, and the pool's budget_bytes would move it there "
                "and back: leave out either"
            )


def unused_settings(recipe: RLRecipe) -> list[str]:
    """Returns warnings about settings that the method does not read, or that cannot have the effect they are for.

    It is not refused: one line of a recipe picks another method, and the sections of the former one may stay.
    """
    algorithm, critic, kl = recipe.algorithm, recipe.critic, kl_term(recipe.algorithm)
    found = []
    if algorithm.name != "ppo" and critic != type(critic)():
        found.append(f"critic: not read, {algorithm.name} has none")
    if algorithm.name == "ppo" and critic.warmup_steps >= recipe.steps:
        found.append(f"critic: its {critic.warmup_steps} warm-up steps leave no step in which the actor learns")
    if recipe.reference.path is not None and not reads_reference(algorithm):
        found.append(f"reference: not loaded, {algorithm.name} reads none with these settings (see algorithm.kl.coef)")
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        found.append("kl: in the loss the gradient of k1 is 0 on average and holds nothing back; use k2 or k3")
    return found
