"""Drafts of tokens by what followed them elsewhere, and by Medusa heads; the job that makes heads."""

from quartet.config.plugins import DrafterType, Job, Plugin

_HERE = "quartet.extras.speculation."
PLUGIN = Plugin(
    drafters={
        "history": DrafterType(
            _HERE + "config:HistorySpeculation", _HERE + "drafting:history", vllm=_HERE + "vllm:ngrams"
        ),
        "medusa": DrafterType(
            _HERE + "config:MedusaSpeculation",
            _HERE + "drafting:medusa",
            vllm=_HERE + "vllm:medusa",
            model=_HERE + "drafting:load_heads",
            worker=_HERE + "companion:companion_worker",
            folder="medusa",
        ),
    },
    jobs={
        "medusa": Job(
            _HERE + "recipe:MedusaRecipe",
            _HERE + "job:MedusaTrainer",
            "Medusa heads from a model's own answers.",
            reader=_HERE + "job:reader",
            starter=_HERE + "recipe:STARTER",
            words=("medusa",),
            folder="medusa",
            metrics=("loss/medusa", "eval/loss", "medusa/tokens_per_forward"),
        )
    },
)
