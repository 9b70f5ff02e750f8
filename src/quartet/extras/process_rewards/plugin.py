"""Process rewards: a model that judges the steps of an answer, its training, and its rewards in RL."""

from quartet.config.plugins import Job, Plugin, RewardType

_HERE = "quartet.extras.process_rewards"

PLUGIN = Plugin(
    jobs={
        "process-reward": Job(
            f"{_HERE}.config:ProcessRewardRecipe",
            f"{_HERE}.trainer:ProcessRewardTrainer",
            "Process reward model from step-labelled answers.",
            is_supervised=True,
            reader=f"{_HERE}.data:reader",
            starter=f"{_HERE}.config:STARTER",
            beside=f"{_HERE}.data:write_separator",
        )
    },
    rewards={
        "process_model": RewardType(
            f"{_HERE}.config:ProcessModelReward",
            model=f"{_HERE}.roles:process_model",
            metrics=f"{_HERE}.roles:process_metrics",
        )
    },
)
