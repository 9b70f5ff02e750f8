"""Iterative DPO: the reference moves up to the actor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quartet.config import UserError
from quartet.schedule.model_worker import ModelWorker
from quartet.trainers.cast import Cast


class ReferenceRefresh:
    """Iterative DPO: every ``every`` steps the reference takes over the actor's weights, with its adapters in them.

    Args:
        cast: with an actor and a reference.

    Raises:
        UserError: the reference is a model of another shape.
    """

    def __init__(self, every: int, cast: Cast) -> None:
        self._every = every
        self._cast = cast
        actor, reference = cast.actor.packed, cast.reference
        assert reference is not None, "made for a cast with a reference"
        with actor.without_adapters():
            own, other = (_shapes(packed.model.state_dict()) for packed in (actor, reference))
        if own != other:
            name = min(name for name, _ in own.items() ^ other.items())
            raise UserError(
                "the reference cannot take over the actor's weights",
                found=f"algorithm.refresh_steps={every}; the models differ, first in {name}",
                remedy="use a reference.path of the actor's architecture and size, or leave refresh_steps out",
            )

    async def after(self, steps: int) -> dict[str, float]:
        """Call after ``steps`` complete steps."""
        if steps % self._every == 0:
            groups = self._cast.groups
            await groups["actor"].send(ModelWorker.weights, groups["reference"], ModelWorker.load_weights)
        return {"reference/age": float(steps % self._every)}


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
