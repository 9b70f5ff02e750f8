"""Drafts of tokens by what followed them elsewhere, and by Medusa heads; the job that makes heads."""

from quartet.config.plugins import DrafterType, Job, Plugin

_HERE = "quartet.extras.speculation."
PLUGIN = Plugin(
    drafters={
        "history": DrafterType(
            _HERE + "config:HistorySpeculation", _HERE + "drafting:history", vllm=_HERE + "heads:vllm_ngrams"
        ),
        "medusa": DrafterType(
            _HERE + "config:MedusaSpeculation",
            _HERE + "drafting:medusa",
            vllm=_HERE + "heads:vllm_medusa",
            model=_HERE + "drafting:load_heads",
            worker=_HERE + "head_trainer:companion_worker",
            folder="medusa",
        ),
    },
    jobs={
        "medusa": Job(
            _HERE + "config:MedusaRecipe",
            _HERE + "job:MedusaTrainer",
            "Medusa heads from a model's own answers.",
            reader=_HERE + "job:reader",
            starter=_HERE + "config:STARTER",
            folder="medusa",
            metrics=("loss/medusa", "eval/loss", "medusa/tokens_per_forward"),
        )
    },
)
