"""The roles of a run in one process: what each keeps resident, and the arbiter of a single pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quartet.models.packed import PackedModel
from quartet.schedule.leases import Arbiter, Mode, PoolSpec, RoleSpec
from quartet.schedule.placement import states_of

POOL = "local"


def model_bytes(model: PackedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.model.parameters())


def trained_bytes(model: PackedModel) -> int:
    """Of the parameters that learn: all of them, or adapters."""
    return sum(p.numel() * p.element_size() for p in model.model.parameters() if p.requires_grad)


def role_spec(name: str, models: Sequence[PackedModel], modes: Iterable[Mode]) -> RoleSpec:
    """What the role keeps resident: parameters; for training also gradients and two moments of those that learn."""
    size = sum(model_bytes(model) for model in models)
    states = 3 * sum(trained_bytes(model) for model in models)
    return RoleSpec(name, POOL, {mode: size + states if mode == "train" else size for mode in modes})


def local_arbiter(specs: Sequence[RoleSpec], *, version: int) -> Arbiter:
    """One pool with one slot and no byte limit; every trained role and the engine's copy is a state."""
    return Arbiter([PoolSpec(POOL, slots=1)], specs, versions=dict.fromkeys(states_of(specs), version))
