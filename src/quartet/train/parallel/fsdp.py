"""A packed model whose weights are shared out over a mesh, by torch's FSDP2.

Every decoder layer is gathered when it is called and given up again behind its pass; what is around the layers
(embeddings, the last norm, the head) belongs to a root that is called once per pack: hidden states and head within one
call, since FSDP's hooks are those of the module that is called. Gradients are sums over all ranks, as losses are
divided by the denominators of the whole batch.

**Precision.** Under bf16 autocast every linear layer would round its fp32 weight by itself and keep the rounded copy
for the backward: a whole model in bf16 on every rank. So FSDP gathers these weights rounded, which are the same bits,
and frees them after each layer. What autocast leaves in fp32 (norms, embeddings, a scalar head) is gathered in fp32
by groups of its own. Autocast stays on and finds nothing to round in weights. Gradients are summed in fp32.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.checkpoint import SAC_IGNORED_OPS

from quartet.cluster.errors import raising_rank_failed
from quartet.config import UserError
from quartet.models.directories import GatherFunctions
from quartet.models.packed_model import PackedModel, decoder_layers
from quartet.train.parallel.collectives import (
    CountedAllGather,
    CountedReduceScatter,
    DirectAllGather,
    OrderedReduceScatter,
)
from quartet.train.parallel.context import ALONE, ModelParallel
from quartet.train.parallel.gradients import sum_copies, sum_over_tensor_ranks
from quartet.train.parallel.layer_plan import check_cut
from quartet.train.parallel.mesh import CONTEXT, REPLICATE, TENSOR, Mesh
from quartet.train.parallel.pass_group import PassGroup
from quartet.train.parallel.tensor import parallelize_layers
from quartet.weights.sink import gather

T = TypeVar("T")

# Of a norm, whose result is a view. Nothing here writes into what a module returned.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# FSDP's hooks within a layer give the profiler other names when it is computed again; nothing is computed by that.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


class ShardedModel(nn.Module):
    """The root of a sharded model: what is called for every pack.

    Args:
        former_weights: a fingerprint of the whole weights, where this rank had them before they were shared out.

    Attributes:
        mesh: of the role.
        present: names of the parameters that had a gradient in the passes so far.
    """

    def __init__(self, packed: PackedModel, mesh: Mesh, former_weights: str | None = None) -> None:
        super().__init__()
        self.model = packed.model
        self.mesh = mesh
        self.former_weights = former_weights
        self.present: set[str] = set()
        peers: ModelParallel = packed.parallel or ALONE
        self._copies, self._tensor = None, peers.tensor
        if mesh.replicate > 1:
            self._copies = PassGroup(mesh.group(REPLICATE), packed.work)

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    @property
    def reduces_every_pass(self) -> bool:
        """Whether each backward is collective, so that all ranks need equally many.

        Where every rank holds the whole model, gradients are kept until ``sum_gradients``.
        """
        return self.mesh.num_parts > 1

    def make_passes(
        self,
        passes: Sequence[Callable[[], None] | None],
        idle: Callable[[], None],
        *,
        with_gradients: bool,
    ) -> None:
        """Calls ``passes``, equally many on all ranks, and ``idle`` in the place of those that are None.

        Raises:
            RankFailed: a rank that takes part in them failed.
        """
        self.present.clear()
        if with_gradients and not self.reduces_every_pass:
            # Nothing is collective in them, but gradients must be there to be summed.
            passes = list(filter(None, passes)) or [None]
        if with_gradients:
            self._fsdp.set_requires_gradient_sync(self.reduces_every_pass)
            self._fsdp.set_requires_all_reduce(self.reduces_every_pass and self.mesh.replicate == 1)
        with raising_rank_failed(self.mesh.copy.size):
            for one_pass in passes:
                (one_pass or idle)()
            self._fsdp.reshard()
            if with_gradients and not self.reduces_every_pass:
                self._reduce_now()

    def sum_gradients(self, present: Collection[str]) -> None:
        """Leaves the sums over all ranks in the parameters, where the passes have not done so. Collective.

        Args:
            present: parameters that had a gradient on any rank; the gradients of others are None.

        Raises:
            RankFailed: a rank that this one sums with failed.
        """
        with raising_rank_failed(self.mesh.data.size):
            self._sum_gradients(present)

    def _sum_gradients(self, present: Collection[str]) -> None:
        if not self.reduces_every_pass or self.mesh.replicate > 1:
            for group in _fsdp_groups(self):
                sum_copies(group, self._copies, in_order=self.mesh.fixed_order)
        for name, parameter in self.model.named_parameters():
            if name not in present:
                parameter.grad = None
        if self._tensor is not None:
            sum_over_tensor_ranks(self.model.parameters(), self._tensor, self.mesh.device_mesh.device_type)

    def _reduce_now(self) -> None:
        """Lays out kept gradients as sums of this copy. torch does it at the end of a backward alone; this is what it
        calls there."""
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_requires_all_reduce(False)
        self._fsdp._get_fsdp_state()._root_post_backward_final_callback()

    @property
    def _fsdp(self) -> Any:
        """Itself, which has torch's methods once it is sharded."""
        return self

    def watch(self) -> None:
        """Notes in ``present``, from now on, whose gradient a backward has made."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in _fsdp_groups(self):
            waiting = [
                (parameter, names[id(parameter.sharded_param)])
                for parameter in group.fsdp_params
                if parameter.sharded_param.requires_grad
            ]
            for module in group.modules if waiting else ():
                # Behind torch's own hook, which has made the gathered parameters by then.
                module.register_forward_pre_hook(partial(self._watch, waiting))

    def _watch(self, waiting: list[tuple[Any, str]], *_: Any) -> None:
        """Puts a hook on every gathered parameter of a module's group the first time that it exists."""
        if torch.is_grad_enabled():
            while waiting:
                parameter, name = waiting.pop()
                parameter.unsharded_param.register_post_accumulate_grad_hook(
                    lambda _, name=name: self.present.add(name)
                )


def _fsdp_groups(root: nn.Module) -> list[Any]:
    """Returns torch's groups of parameters that travel together, each once."""
    modules = (module for module in root.modules() if isinstance(module, FSDPModule))
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return list({id(group): group for group in groups}.values())


def sharded(packed: PackedModel) -> ShardedModel | None:
    """Returns the root of a sharded model; None where this process holds the model alone."""
    return packed.one_call if isinstance(packed.one_call, ShardedModel) else None


def free_gathered(packed: PackedModel) -> None:
    """Gives up what is still gathered of a sharded model; does nothing where it is not sharded. No collective."""
    root = sharded(packed)
    for module in root.modules() if root is not None else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def stays_on_host(packed: PackedModel) -> bool:
    """Tells whether the model was sharded with ``on_host``."""
    root = sharded(packed)
    return root is not None and any(p.offload_to_cpu for group in _fsdp_groups(root) for p in group.fsdp_params)


def gathered_from(packed: PackedModel) -> list[Tensor]:
    """Returns the memory that torch gathers parameters from: flat views of this rank's shards and of what fills them up
    to equal sizes; none where the model is not sharded.
    """
    root = sharded(packed)
    groups = _fsdp_groups(root) if root is not None else ()
    return [parameter._sharded_param_data for group in groups for parameter in group.fsdp_params]


def shard_model(packed: PackedModel, mesh: Mesh, *, on_host: bool = False) -> ShardedModel:
    """Shares out the weights of ``packed`` over ``mesh``; all ranks call it, with equal weights or on the meta device.

    Call it once the model is probed and adapted, and ``freeze`` before it if it is never trained. Parameters are
    DTensors of the same names from then on.

    Args:
        on_host: shards, their gradients and so the optimizer stay in host memory, where the optimizer computes; on the
            device is what a layer gathers.

    Raises:
        UserError: this torch is too old, or the model cannot be cut so.
    """
    found = sharded(packed)
    if found is not None:
        return found
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise UserError(
            "models of several processes need torch 2.13 or newer",
            found=f"torch {torch.__version__}",
            remedy="install it, or use one process",
        )
    trains = any(p.requires_grad for p in packed.model.parameters())
    halved = packed.precision == "bf16" and trains
    if halved and packed.adapters is not None:
        packed.round_frozen()
        halved = False
    whole_weights = list(packed.model.parameters())
    former = None if any(p.is_meta for p in whole_weights) else fingerprint(whole_weights)
    del whole_weights
    _share_passes(packed, mesh)
    rounded = {id(p) for p in packed.rounded_parameters()} if halved else set()
    layers = decoder_layers(packed.body)
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.fsdp_mesh}
    if on_host:
        on_gpu = mesh.device_mesh.device_type == "cuda"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        packed.computes_on = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    root = ShardedModel(packed, mesh, former)
    for layer in layers:
        own = list(layer.parameters())
        policy = whole
        if any(id(p) in rounded for p in own):
            policy = half
            kept = [m for m in layer.modules() if any(id(p) not in rounded for p in m.parameters(recurse=False))]
            if kept:
                fully_shard(kept if len(kept) > 1 else kept[0], mp_policy=whole, **options)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True, **options)
    fully_shard(root, mp_policy=whole, reshard_after_forward=False, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
            on_cpu = mesh.device_mesh.device_type == "cpu"
            gather_by = DirectAllGather() if on_cpu else DefaultAllGather()
            reduce_by = OrderedReduceScatter() if on_cpu or mesh.fixed_order else DefaultReduceScatter()
            module.set_custom_all_gather(CountedAllGather(gather_by, packed.work))
            module.set_custom_reduce_scatter(CountedReduceScatter(reduce_by, packed.work))
    root.watch()
    if packed.adapters is not None:
        packed.adapters.take_up_parameters()
    packed.one_call = root
    packed.gather = GatherFunctions(is_first=mesh.data.rank == 0, whole=gather)
    return root


def _share_passes(packed: PackedModel, mesh: Mesh) -> None:
    """Cuts passes over the ranks along ``context``, and passes and weights over those along ``tensor``.

    Raises:
        UserError: as ``check_cut``.
    """
    check_cut(packed, context=mesh.context, tensor=mesh.tensor)
    of_ranks = {TENSOR: mesh.tensor_group, CONTEXT: mesh.context_group}
    groups = {name: PassGroup(group, packed.work) for name, group in of_ranks.items() if group is not None}
    if groups:
        packed.parallel = ModelParallel.of(packed, tensor=groups.get(TENSOR), context=groups.get(CONTEXT))
    if mesh.tensor_mesh is not None:
        parallelize_layers(packed, mesh.tensor_mesh, groups[TENSOR])


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Tells models with different weights apart; not those whose weights are the same numbers in another order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        (int(t.detach().contiguous().view(integers[t.itemsize]).sum(dtype=torch.int64)), tuple(t.shape))
        for t in tensors
    ]
    return f"{zlib.crc32(repr(sums).encode()):08x}"
