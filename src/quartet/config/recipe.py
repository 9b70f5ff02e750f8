"""Typed recipes: one per job. Every default of the project lives here; nothing rewrites a recipe once it is resolved.

Batch words: ``prompts_per_step`` prompts are answered ``responses_per_prompt`` times each; the step's groups are cut
into ``minibatches`` (one optimizer update each), and the whole is gone through ``epochs`` times.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# Models, optimisation ------------------------------------------------------------------------------------


class ModelConfig(Strict):
    """A transformers model directory or hub name."""

    path: str
    tokenizer: str | None = Field(None, description="Directory or hub name; the model's own when left out.")


class OptimConfig(Strict):
    """AdamW with linear warm-up."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Learning rate at the end, over its peak.")
    max_grad_norm: float = Field(1.0, gt=0)


class TrainConfig(Strict):
    """How one model is trained: optimizer, precision, micro-batch budgets in tokens."""

    optim: OptimConfig = OptimConfig()
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast over fp32 master weights.")
    token_budget: int = Field(
        8192, ge=1, description="Most tokens of one micro-batch with gradients; a shared prompt counts once."
    )
    forward_token_budget: int = Field(16384, ge=1, description="Most tokens of one forward-only micro-batch.")
    logprob_chunk: int = Field(1024, ge=1, description="Rows of logits that exist at a time.")
    share_prefixes: bool = Field(True, description="Compute a prompt once for all of its responses.")
    activation_checkpointing: bool = Field(
        False, description="Keep only each layer's input and compute the layer again in the backward pass."
    )


# Data ----------------------------------------------------------------------------------------------------


class DataConfig(Strict):
    """Rows from a JSONL, CSV or Parquet file, or a hub data set.

    ``columns`` maps our names to the file's, e.g. ``{prompt: question, completion: answer}``. Columns that are not
    mapped reach the rewards under their own names.
    """

    path: str
    split: str = Field("train", description="Split of a hub data set; files have none.")
    columns: dict[str, str] = Field(default_factory=dict)
    limit: int | None = Field(None, ge=1, description="Use only the first so many rows.")
    max_tokens: int | None = Field(None, ge=1, description="Longest prompt (RL) or sequence; the context if left out.")
    overlong: Literal["error", "skip"] = Field("error", description="skip: left out, counted and reported.")


class SamplingConfig(Strict):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: no limit.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Leaves out tokens below this share of the likeliest's probability."
    )
    max_new_tokens: int = Field(128, ge=1)
    stop_strings: tuple[str, ...] = ()


class EvaluationConfig(Strict):
    """Held-out evaluation during training."""

    data: DataConfig | None = Field(None, description="Left out only from Python, which passes evaluation prompts.")
    every_steps: int = Field(50, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)


# Rewards -------------------------------------------------------------------------------------------------


class ModelReward(Strict):
    """A sequence-classification model with one label, run in the trainer's own forward."""

    type: Literal["model"] = "model"
    path: str
    tokenizer: str | None = None
    name: str = "reward_model"
    weight: float = 1.0
    forward_token_budget: int = Field(16384, ge=1)


class FunctionReward(Strict):
    """A Python function ``f(prompts, completions, **columns) -> list[float | None]``, sync or async."""

    type: Literal["function"] = "function"
    target: str = Field(description="path/to/file.py:name or package.module:name")
    name: str | None = None
    weight: float = 1.0


RewardConfig = Annotated[ModelReward | FunctionReward, Field(discriminator="type")]


# Algorithms ----------------------------------------------------------------------------------------------

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


class KLConfig(Strict):
    """Penalty for leaving the reference policy; coefficient 0 loads no reference model."""

    coef: float = Field(0.05, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k1"
    place: Literal["reward", "loss"] = "reward"
    target: float | None = Field(None, gt=0, description="Adaptive coefficient: KL per response to steer to.")
    horizon: int = Field(10_000, ge=1, description="Responses over which the adaptive coefficient moves.")


class OffPolicyConfig(Strict):
    """Importance weight ``old / rollout``."""

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = Field(2.0, gt=1)


class _PolicyGradient(Strict):
    clip_eps_low: float = Field(0.2, gt=0)
    clip_eps_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    aggregation: Aggregation = "token_mean"
    entropy_coef: float = Field(0.0, ge=0)
    missing_eos_penalty: float = Field(0.0, ge=0)
    off_policy: OffPolicyConfig | None = None


class PPO(_PolicyGradient):
    """Schulman et al. 2017 with a critic and generalised advantages."""

    name: Literal["ppo"] = "ppo"
    kl: KLConfig = KLConfig()
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)
    value_clip: float | None = Field(0.2, gt=0)
    whiten_advantages: bool = True


class GRPO(_PolicyGradient):
    """Shao et al. 2024: advantages relative to the group."""

    name: Literal["grpo"] = "grpo"
    kl: KLConfig = KLConfig(coef=0.0, estimator="k3", place="loss")
    normalise_std: bool = True


class RLOO(_PolicyGradient):
    """Ahmadian et al. 2024: leave-one-out baseline; ``level: sequence`` takes the completion as one action."""

    name: Literal["rloo"] = "rloo"
    kl: KLConfig = KLConfig()
    level: Literal["sequence", "token"] = "sequence"


AlgorithmConfig = Annotated[PPO | GRPO | RLOO, Field(discriminator="name")]


# Recipes -------------------------------------------------------------------------------------------------


class CheckpointConfig(Strict):
    every_steps: int = Field(50, ge=1)
    keep: int = Field(2, ge=1, description="Newest complete checkpoints kept.")


class LogConfig(Strict):
    tensorboard: bool = True
    rollouts_every: int = Field(1, ge=1, description="Steps between kept rollouts.")


class Recipe(Strict):
    """What every job has."""

    seed: int = Field(0, ge=0, lt=2**32)
    output_dir: str | None = Field(None, description="Default: runs/<job>-<date>-<time>.")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; all when left out.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class SFTRecipe(Recipe):
    """Supervised fine-tuning on demonstrations; only the demonstrator's tokens carry loss."""

    job: Literal["sft"] = "sft"
    model: ModelConfig | None = Field(None, description="Left out only from Python, which passes a model object.")
    data: DataConfig | None = Field(None, description="Left out only from Python, which passes rows.")
    evaluation_data: DataConfig | None = None
    evaluate_every_steps: int = Field(50, ge=1)
    train: TrainConfig = TrainConfig()
    steps: int | None = Field(None, ge=1, description="Optimizer steps; `epochs` over the data when left out.")
    epochs: int = Field(1, ge=1)
    examples_per_step: int = Field(32, ge=1)


class RewardModelRecipe(Recipe):
    """Pairwise (Bradley-Terry) reward model."""

    job: Literal["reward-model"] = "reward-model"
    model: ModelConfig | None = Field(None, description="Left out only from Python, which passes a model object.")
    data: DataConfig | None = Field(None, description="Left out only from Python, which passes rows.")
    evaluation_data: DataConfig | None = None
    evaluate_every_steps: int = Field(50, ge=1)
    train: TrainConfig = TrainConfig()
    steps: int | None = Field(None, ge=1)
    epochs: int = Field(1, ge=1)
    pairs_per_step: int = Field(32, ge=1)
    centring: float = Field(0.0, ge=0, description="Weight of (chosen + rejected)², keeps scores near 0.")


class RolloutConfig(Strict):
    """The native engine and its sampling."""

    engine: Literal["native"] = "native"
    sampling: SamplingConfig = SamplingConfig()
    max_running: int = Field(64, ge=1, description="Sequences that decode together.")
    max_prefill_tokens: int = Field(2048, ge=16, description="Prompt tokens computed per step, beside decoding.")
    cache_tokens: int | None = Field(
        None, ge=1, description="Tokens the key/value cache holds; grows with the requests when left out."
    )
    steps_per_lease: int = Field(8, ge=1, description="Decode steps between which scoring may interleave.")


class ActorConfig(Strict):
    model: ModelConfig | None = Field(None, description="Left out only from Python, which passes a model object.")
    train: TrainConfig = TrainConfig()


class CriticConfig(Strict):
    """``path`` left out: starts as a copy of the reward model, or of the actor's body where there is none."""

    path: str | None = None
    train: TrainConfig = TrainConfig(optim=OptimConfig(lr=2e-5))
    warmup_steps: int = Field(0, ge=0, description="First steps, in which only the critic learns.")


class ReferenceConfig(Strict):
    """``path`` left out: the actor as it starts."""

    path: str | None = None


class RLRecipe(Recipe):
    """Reinforcement learning of one actor against rewards."""

    job: Literal["rl"] = "rl"
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rewards: tuple[RewardConfig, ...] = ()
    algorithm: AlgorithmConfig = PPO()
    data: DataConfig | None = Field(None, description="Left out only from Python, which passes prompts.")
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig | None = None
    steps: int = Field(100, ge=1)
    prompts_per_step: int = Field(32, ge=1)
    responses_per_prompt: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1)
    epochs: int = Field(1, ge=1)
    chunk_size: int = Field(8, ge=1, description="Groups that are scored together.")
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="exact: sampler and trainer agree to the last bit (CPU, fp32, one thread; slower).",
    )
    canary_tolerance: float | None = Field(None, gt=0, description="Default by precision: 1e-3 fp32, 0.25 bf16.")

    @model_validator(mode="after")
    def _fits_together(self) -> RLRecipe:
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"minibatches ({self.minibatches}) must divide prompts_per_step ({self.prompts_per_step}): "
                "every mini-batch holds whole groups"
            )
        precisions = {self.actor.train.precision, self.critic.train.precision}
        if self.numerics == "exact" and precisions != {"fp32"}:
            raise ValueError("numerics: exact needs precision: fp32 for actor and critic; found bf16")
        if self.numerics == "exact" and self.threads not in (None, 1):
            raise ValueError(f"numerics: exact needs threads: 1; found {self.threads}")
        if self.algorithm.name in ("grpo", "rloo") and self.responses_per_prompt < 2:
            raise ValueError(
                f"{self.algorithm.name} compares the responses of a group; responses_per_prompt is "
                f"{self.responses_per_prompt}, set it to 2 or more"
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature is 0: greedy rollouts cannot be trained on; use e.g. 1.0")
        if isinstance(self.algorithm, RLOO) and self.algorithm.level == "sequence":
            correction = self.algorithm.off_policy
            if correction is not None and correction.level == "token":
                raise ValueError("a sequence ratio takes algorithm.off_policy.level: sequence")
            if self.algorithm.dual_clip is not None:
                raise ValueError("algorithm.dual_clip works on tokens; set algorithm.level to token, or leave it out")
        kl, responses = self.algorithm.kl, self.prompts_per_step * self.responses_per_prompt
        if kl.target is not None and kl.coef == 0:
            raise ValueError("algorithm.kl.coef is 0, so algorithm.kl.target has nothing to adapt; set a first coef")
        if kl.target is not None and kl.horizon < responses:
            raise ValueError(
                f"algorithm.kl.horizon ({kl.horizon}) is less than the responses of one step ({responses}): the "
                "coefficient would jump, and could turn negative"
            )
        names = [source.name for source in self.rewards if source.name]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards have the same name: {names}")
        return self


class EvalRecipe(Recipe):
    """Generates answers to held-out prompts and scores them with rewards."""

    job: Literal["eval"] = "eval"
    model: ModelConfig | None = Field(None, description="Left out only from Python, which passes a model object.")
    data: DataConfig | None = Field(None, description="Left out only from Python, which passes prompts.")
    rewards: tuple[RewardConfig, ...] = ()
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    max_running: int = Field(64, ge=1)


RECIPES: dict[str, type[Recipe]] = {
    "sft": SFTRecipe,
    "reward-model": RewardModelRecipe,
    "rl": RLRecipe,
    "eval": EvalRecipe,
}
