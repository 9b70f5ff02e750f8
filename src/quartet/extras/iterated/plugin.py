"""The iterated reward model: rounds of fresh pairs, reward model and RL."""

from quartet.config.plugins import Job, Plugin

PLUGIN = Plugin(
    jobs={
        "iterated-reward-model": Job(
            "quartet.extras.iterated.config:IteratedRecipe",
            "quartet.extras.iterated.trainer:IteratedTrainer",
            "Rounds of fresh pairs, reward model and RL.",
            sections="quartet.extras.iterated.trainer:sections",
            starter="quartet.extras.iterated.config:STARTER",
            methods="rl.algorithm",
            metrics=("iterated/pairs", "iterated/label_mean"),
        )
    }
)
