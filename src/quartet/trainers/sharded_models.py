"""Models that processes hold between them: made without contents, shared out, filled by every process with its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.config.common import ShardingConfig
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import BaseModelReward
from quartet.schedule.model_worker import ScoreWorker, TrainWorker
from quartet.train.parallel.fsdp import shard_model
from quartet.train.parallel.layer_plan import check_cut
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.trainers.devices import META
from quartet.trainers.model_loader import ModelLoader, PTXData, UserObjects, passed_reward_models

TRAINED_ROLES = ("actor", "critic")


def role_shardings(recipe: RLRecipe, *, shares_reference: bool) -> dict[str, ShardingConfig]:
    """Returns role → how its processes hold its model; of roles that are not named each process has a whole copy.

    Args:
        shares_reference: the reference of a LoRA actor is that actor without its adapters.
    """
    is_actor = shares_reference and recipe.reference.path is None and recipe.actor.train.lora is not None
    return {
        "actor": recipe.actor.sharding,
        "critic": recipe.critic.sharding,
        "reference": recipe.actor.sharding if is_actor else recipe.reference.sharding,
        **{source.name: source.sharding for source in model_rewards(recipe)},
    }


def model_rewards(recipe: RLRecipe) -> list[BaseModelReward]:
    """Returns the model sources of reward that the recipe names, of training and of evaluation."""
    only = recipe.evaluation.rewards if recipe.evaluation is not None else ()
    return [source for source in (*recipe.rewards, *only) if isinstance(source, BaseModelReward)]


def check_cuts(loader: ModelLoader, of_role: Mapping[str, ShardingConfig]) -> None:
    """Checks that the model of every role can be cut.

    Args:
        loader: of models that need no contents.
        of_role: as of ``role_shardings``.

    Raises:
        UserError: a role's model cannot be cut as the recipe says.
    """
    for role in loader.roles():
        with _naming(role):
            check_cut(loader.model(role), **of_role.get(role, ShardingConfig()).peers)


@contextmanager
def _naming(role: str) -> Iterator[None]:
    """Makes user errors inside the block begin with the role."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{role}: {error.problem}", found=error.found, remedy=error.remedy) from error


class RoleMeshes:
    """The meshes of the roles in this process; all processes of a group ask for those of all roles in one order.

    Args:
        group: the processes that have these roles together; None where this one is alone.
        of_role: as of ``role_shardings``.
    """

    def __init__(self, group: DataParallelGroup | None, of_role: Mapping[str, ShardingConfig]) -> None:
        self._group = group
        self._of_role = of_role
        self._made: dict[ShardingConfig, Mesh] = {}

    def __call__(self, role: str) -> Mesh | None:
        """Returns the mesh of a role; None where every process works with a model of its own: one that is not trained,
        and not cut."""
        sharding = self.sharding_of(role)
        if self._group is None or (sharding.copy_size == 1 and role not in TRAINED_ROLES):
            return None
        if sharding not in self._made:
            self._made[sharding] = Mesh.cut(self._group, sharding)
        return self._made[sharding]

    def sharding_of(self, role: str) -> ShardingConfig:
        """Returns how the processes of a role hold its model."""
        return self._of_role.get(role, ShardingConfig())


class ShardedModels:
    """Workers of the roles whose models are cut.

    Args:
        device: where this process's parts go.
        shares_reference: as for ``ModelLoader``.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        objects: UserObjects,
        device: torch.device,
        meshes: RoleMeshes,
        *,
        shares_reference: bool,
    ) -> None:
        self._recipe, self._device, self._mesh_of = recipe, device, meshes
        self._objects = objects
        self._empty = ModelLoader(
            recipe, objects.on_meta(), device=META, computes=device, shares_reference=shares_reference, meshes=meshes
        )
        self._filled: set[int] = set()

    def worker(self, role: str, ptx: PTXData | None = None) -> ScoreWorker | TrainWorker:
        """Makes a worker as ``ModelLoader.worker`` does. Collective over the processes of the role.

        Raises:
            UserError: the model cannot be loaded on any of them, or not be cut so.
        """
        packed, mesh = self._empty.model(role), self._mesh_of(role)
        assert mesh is not None, "only models of several processes are cut"
        if id(packed.model) not in self._filled:
            self._filled.add(id(packed.model))
            with _naming(role):
                shard_model(packed, mesh, on_host=self._mesh_of.sharding_of(role).cpu_offload)
            load_shares(packed, self._contents(role), device=self._device, seed=self._recipe.seed)
        return self._empty.worker(role, ptx)

    def _contents(self, role: str) -> str | Mapping[str, Tensor]:
        """Returns where the weights of a role's model come from: a directory or hub name, or a model from Python,
        whole."""
        recipe, objects = self._recipe, self._objects
        given, path = self._named.get(role), None
        if role == "critic":
            given, path = objects.critic, recipe.critic.path
            if given is None and path is None:
                native = [source.name for source in self._empty.reward_models if source.codec is None]
                return self._contents(native[0] if native else "actor")
        elif role == "reference" and recipe.reference.path is not None:
            path = recipe.reference.path
        elif role in ("actor", "reference"):
            given, path = objects.model, recipe.actor.model.path if recipe.actor.model is not None else None
        if given is not None:
            return given.state_dict()
        return path if path is not None else {source.name: source.path for source in model_rewards(recipe)}[role]

    @cached_property
    def _named(self) -> dict[str, PreTrainedModel]:
        """Reward models from Python."""
        objects, recipe = self._objects, self._recipe
        only = recipe.evaluation.rewards if recipe.evaluation is not None else ()
        return passed_reward_models(recipe.rewards, objects.rewards) | passed_reward_models(
            only, objects.evaluation_rewards
        )
