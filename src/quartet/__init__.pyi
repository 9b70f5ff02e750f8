"""Quartet's public names, in one place: type checkers read them here, __init__.py loads each when it is asked for."""

from .config.algorithms import (
    BestOfN as BestOfN,
    CISPO as CISPO,
    DAPO as DAPO,
    Distillation as Distillation,
    DrGRPO as DrGRPO,
    DynamicSamplingConfig as DynamicSamplingConfig,
    GDPO as GDPO,
    GMPO as GMPO,
    GPG as GPG,
    GRPO as GRPO,
    GSPO as GSPO,
    KLConfig as KLConfig,
    OPO as OPO,
    OffPolicyConfig as OffPolicyConfig,
    OnlineDPO as OnlineDPO,
    OptimalTokenBaseline as OptimalTokenBaseline,
    OverlongConfig as OverlongConfig,
    PPO as PPO,
    PassAtK as PassAtK,
    RLOO as RLOO,
    ReMax as ReMax,
    ReinforcePlusPlus as ReinforcePlusPlus,
    ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline,
    RejectionConfig as RejectionConfig,
    SAPO as SAPO,
)
from .config.policy_losses import (
    CISPOLoss as CISPOLoss,
    ClipCovLoss as ClipCovLoss,
    ClippedLoss as ClippedLoss,
    GMPOLoss as GMPOLoss,
    GSPOLoss as GSPOLoss,
    KLCovLoss as KLCovLoss,
    ReinforceLoss as ReinforceLoss,
    SAPOLoss as SAPOLoss,
    SequenceClippedLoss as SequenceClippedLoss,
)
from .config.cluster import (
    LocalCluster as LocalCluster,
    OffloadConfig as OffloadConfig,
    RayCluster as RayCluster,
    TorchrunCluster as TorchrunCluster,
    WeightSyncConfig as WeightSyncConfig,
)
from .config.common import (
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    LoRAConfig as LoRAConfig,
    ModelConfig as ModelConfig,
    OptimConfig as OptimConfig,
    SamplingConfig as SamplingConfig,
    ShardingConfig as ShardingConfig,
    SourceConfig as SourceConfig,
    TrainConfig as TrainConfig,
)
from .extras.speculation.config import (
    HeadTraining as HeadTraining,
    HistorySpeculation as HistorySpeculation,
    MedusaSpeculation as MedusaSpeculation,
    StepCosts as StepCosts,
)
from .config.engines import (
    NativeEngineConfig as NativeEngineConfig,
    SGLangEngineConfig as SGLangEngineConfig,
    ServerEngineConfig as ServerEngineConfig,
    VLLMEngineConfig as VLLMEngineConfig,
)
from .config.errors import (
    Interrupted as Interrupted,
    UserError as UserError,
)
from .config.evaluation import (
    AlarmConfig as AlarmConfig,
    ComparisonConfig as ComparisonConfig,
    EvalRecipe as EvalRecipe,
    EvaluationConfig as EvaluationConfig,
    GradingConfig as GradingConfig,
    NumberAnswer as NumberAnswer,
    RegexAnswer as RegexAnswer,
    TextAnswer as TextAnswer,
)
from .config.load import (
    dump_recipe as dump_recipe,
    load_recipe as load_recipe,
)
from .config.logs import (
    CallbackConfig as CallbackConfig,
    LogConfig as LogConfig,
    MLflowConfig as MLflowConfig,
    NotifyConfig as NotifyConfig,
    TensorBoardConfig as TensorBoardConfig,
    TrackioConfig as TrackioConfig,
    WandbConfig as WandbConfig,
)
from .extras.speculation.recipe import (
    HeadsConfig as HeadsConfig,
    MedusaRecipe as MedusaRecipe,
)
from .config.placement import (
    AsynchronousPlacement as AsynchronousPlacement,
    DevicesConfig as DevicesConfig,
    ForwardOffloadPlacement as ForwardOffloadPlacement,
    FullOffloadPlacement as FullOffloadPlacement,
    HomogeneousPlacement as HomogeneousPlacement,
    PipelinedPlacement as PipelinedPlacement,
    PoolConfig as PoolConfig,
    SeparatedPlacement as SeparatedPlacement,
)
from .config.preference import (
    CachedReferenceConfig as CachedReferenceConfig,
    AOTLoss as AOTLoss,
    BCOPairLoss as BCOPairLoss,
    DPOLoss as DPOLoss,
    DiscoPOPLoss as DiscoPOPLoss,
    EXOPairLoss as EXOPairLoss,
    HingeLoss as HingeLoss,
    IPOLoss as IPOLoss,
    KTOLoss as KTOLoss,
    ORPOLoss as ORPOLoss,
    PointwisePairLoss as PointwisePairLoss,
    PreferenceRecipe as PreferenceRecipe,
    RobustDPOLoss as RobustDPOLoss,
    SimPOLoss as SimPOLoss,
)
from .config.recipe import (
    ActorConfig as ActorConfig,
    CollectConfig as CollectConfig,
    CriticConfig as CriticConfig,
    EnvironmentConfig as EnvironmentConfig,
    IteratedRecipe as IteratedRecipe,
    PTXConfig as PTXConfig,
    ProcessRewardRecipe as ProcessRewardRecipe,
    RLRecipe as RLRecipe,
    ReferenceConfig as ReferenceConfig,
    RewardModelRecipe as RewardModelRecipe,
    RolloutConfig as RolloutConfig,
    SFTRecipe as SFTRecipe,
)
from .config.plugins import DrafterType as DrafterType, Job as Job, Plugin as Plugin, RewardType as RewardType
from .config.remote import (
    BreakerConfig as BreakerConfig,
    RetryConfig as RetryConfig,
)
from .config.rewards import (
    DiscountedSteps as DiscountedSteps,
    ExactMatchReward as ExactMatchReward,
    FormatReward as FormatReward,
    FunctionReward as FunctionReward,
    GateConfig as GateConfig,
    HTTPReward as HTTPReward,
    JudgeReward as JudgeReward,
    LengthReward as LengthReward,
    MathReward as MathReward,
    MinSteps as MinSteps,
    ModelReward as ModelReward,
    NumericReward as NumericReward,
    PairwiseJudge as PairwiseJudge,
    PointwiseJudge as PointwiseJudge,
    ProcessModelReward as ProcessModelReward,
    RegexReward as RegexReward,
    SumSteps as SumSteps,
)
from .extras.sandbox.config import CodeReward as CodeReward
from .envs.protocol import (
    Observation as Observation,
    StepResult as StepResult,
)
from .observe.callbacks import (
    Callback as Callback,
    Control as Control,
)
from .observe.progress import Progress as Progress
from .extras.report.build import build_report as build_report
from .extras.doctor.examine import examine as examine
from .extras.doctor.checks import Finding as Finding
from .trainers.evaluation_job import Evaluator as Evaluator
from .trainers.iterated import IteratedTrainer as IteratedTrainer
from .extras.speculation.job import MedusaTrainer as MedusaTrainer
from .trainers.preference import PreferenceTrainer as PreferenceTrainer
from .trainers.process_reward import ProcessRewardTrainer as ProcessRewardTrainer
from .trainers.reward_model import RewardModelTrainer as RewardModelTrainer
from .trainers.rl import RLTrainer as RLTrainer
from .trainers.sft import SFTTrainer as SFTTrainer

__version__: str
