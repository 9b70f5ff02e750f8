"""Drafts of tokens by what followed them elsewhere, and by Medusa heads."""

from quartet.config.plugins import DrafterType, Plugin

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
    }
)
