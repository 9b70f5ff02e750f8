"""What an RL run ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from quartet.models.loading import load_causal_lm, load_scalar_model, load_trained
from quartet.models.packed import PackedCausalLM, PackedModel

EXPORTED = {"actor": "model", "critic": "critic"}
"""Where in a run's directory the models that train are written to, by role."""


class RLResult:
    """Where the run is, and what ``summary.json`` holds.

    Args:
        trained: gives the trained models, by role.
    """

    def __init__(
        self, path: Path, summary: dict[str, Any], trained: Mapping[str, Callable[[], PreTrainedModel]]
    ) -> None:
        self.path = path
        self.summary = summary
        self._trained = trained

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained actor: the object trained in this process, or what a worker wrote, loaded when first asked for.

        Raises:
            UserError: what a worker wrote is not there any more, or only its adapters were saved.
        """
        return self._trained["actor"]()

    @cached_property
    def critic(self) -> PreTrainedModel | None:
        """The trained critic, where the method has one; as ``model``."""
        return self._trained["critic"]() if "critic" in self._trained else None


def trained_model(packed: PackedModel, path: Path) -> PreTrainedModel:
    """The model of ``packed``, or, where that has no contents, what was saved at ``path``; as ``load_trained``."""
    if packed.device.type != "meta":
        return packed.model
    return load_trained(path, load_causal_lm if isinstance(packed, PackedCausalLM) else load_scalar_model)
