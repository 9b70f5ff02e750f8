"""Quartet's public names, in one place: type checkers read them here, __init__.py loads each when it is asked for."""

from .config.algorithms import (
    BestOfN as BestOfN,
    CISPO as CISPO,
    CISPOLoss as CISPOLoss,
    ClipCovLoss as ClipCovLoss,
    ClippedLoss as ClippedLoss,
    DAPO as DAPO,
    Distillation as Distillation,
    DrGRPO as DrGRPO,
    DynamicSamplingConfig as DynamicSamplingConfig,
    GDPO as GDPO,
    GMPO as GMPO,
    GMPOLoss as GMPOLoss,
    GPG as GPG,
    GRPO as GRPO,
    GSPO as GSPO,
    GSPOLoss as GSPOLoss,
    KLConfig as KLConfig,
    KLCovLoss as KLCovLoss,
    OPO as OPO,
    OffPolicyConfig as OffPolicyConfig,
    OnlineDPO as OnlineDPO,
    OptimalTokenBaseline as OptimalTokenBaseline,
    OverlongConfig as OverlongConfig,
    PPO as PPO,
    PassAtK as PassAtK,
    RLOO as RLOO,
    ReMax as ReMax,
    ReinforceLoss as ReinforceLoss,
    ReinforcePlusPlus as ReinforcePlusPlus,
    ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline,
    RejectionConfig as RejectionConfig,
    SAPO as SAPO,
    SAPOLoss as SAPOLoss,
    SequenceClippedLoss as SequenceClippedLoss,
)
from .config.common import (
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
    TensorBoardConfig as TensorBoardConfig,
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
from .config.run import (
    CallbackConfig as CallbackConfig,
    LogConfig as LogConfig,
    PicturesConfig as PicturesConfig,
)
from .extras.trackers.config import (
    MLflowConfig as MLflowConfig,
    TrackioConfig as TrackioConfig,
    WandbConfig as WandbConfig,
)
from .extras.speculation.config import (
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
    CriticConfig as CriticConfig,
    EnvironmentConfig as EnvironmentConfig,
    PTXConfig as PTXConfig,
    RLRecipe as RLRecipe,
    ReferenceConfig as ReferenceConfig,
    RewardModelRecipe as RewardModelRecipe,
    RolloutConfig as RolloutConfig,
    SFTRecipe as SFTRecipe,
)
from .config.plugins import (
    DrafterType as DrafterType,
    EngineType as EngineType,
    Job as Job,
    Plugin as Plugin,
    RewardType as RewardType,
    TrackerType as TrackerType,
)
from .config.rewards import (
    RetryConfig as RetryConfig,
)
from .config.rewards import (
    ExactMatchReward as ExactMatchReward,
    FormatReward as FormatReward,
    FunctionReward as FunctionReward,
    HTTPReward as HTTPReward,
    JudgeReward as JudgeReward,
    LengthReward as LengthReward,
    MathReward as MathReward,
    ModelReward as ModelReward,
    NumericReward as NumericReward,
    PairwiseJudge as PairwiseJudge,
    PointwiseJudge as PointwiseJudge,
    RegexReward as RegexReward,
)
from .extras.iterated.config import CollectConfig as CollectConfig
from .extras.iterated.config import IteratedRecipe as IteratedRecipe
from .extras.iterated.trainer import IteratedTrainer as IteratedTrainer
from .extras.process_rewards.config import (
    DiscountedSteps as DiscountedSteps,
    MinSteps as MinSteps,
    ProcessModelReward as ProcessModelReward,
    ProcessRewardRecipe as ProcessRewardRecipe,
    SumSteps as SumSteps,
)
from .extras.process_rewards.trainer import ProcessRewardTrainer as ProcessRewardTrainer
from .extras.sandbox.config import CodeReward as CodeReward
from .extras.servers.config import (
    SGLangEngineConfig as SGLangEngineConfig,
    ServerEngineConfig as ServerEngineConfig,
)
from .envs.protocol import (
    Observation as Observation,
    StepResult as StepResult,
)
from .observe.callbacks import (
    Callback as Callback,
    RunControl as RunControl,
)
from .observe.progress import Progress as Progress
from .extras.report.build import build_report as build_report
from .extras.doctor.examine import examine as examine
from .extras.doctor.checks import Finding as Finding
from .trainers.evaluation import Evaluator as Evaluator
from .extras.speculation.job import MedusaTrainer as MedusaTrainer
from .trainers.preference import PreferenceTrainer as PreferenceTrainer
from .trainers.supervised import RewardModelTrainer as RewardModelTrainer
from .trainers.rl import RLTrainer as RLTrainer
from .trainers.supervised import SFTTrainer as SFTTrainer

__version__: str
