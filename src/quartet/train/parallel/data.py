"""Data ranks: copies of a packed model, each held by the ranks of a mesh among which torch's FSDP2 shares weights out.

Where a rank holds all of a model, or of what its tensor ranks cut, it computes as one process does. Otherwise, every
decoder layer is gathered when it is called and given up again behind its pass; what is around the layers (embeddings,
the last norm, the head) belongs to a root that is called once per pack: hidden states and head within one call, since
FSDP's hooks are those of the module that is called. Each backward leaves sums over the ranks of a copy in the shards;
sums over copies are taken once, after all passes. Nothing is divided: losses are, by the denominators of the whole
batch.

**Precision.** Under bf16 autocast every linear layer would round its fp32 weight by itself and keep the rounded copy
for the backward: a whole model in bf16 on every rank. So FSDP gathers these weights rounded, which are the same bits,
and frees them after each layer. What autocast leaves in fp32 (norms, embeddings, a scalar head) is gathered in fp32
by groups of its own. Autocast stays on and finds nothing to round in weights. Gradients are summed in fp32. For the
same memory a rank that trains in bf16 gathers layers from itself alone, where it holds all of a model.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from quartet.cluster.errors import raising_rank_failed
from quartet.models.directories import GatherFunctions, Join, first_of
from quartet.models.packed_model import PackedModel, decoder_layers
from quartet.train.parallel.context import ModelParallel
from quartet.train.parallel.layer_plan import check_cut, layer_styles
from quartet.train.parallel.mesh import CONTEXT, PIPELINE, REPLICATE, SHARD, TENSOR, Mesh
from quartet.train.parallel.messages import AllGather, PassGroup, ReduceScatter
from quartet.train.parallel.pipeline import Elsewhere, MicroBatch, Pipeline, Stage, make_passes
from quartet.train.parallel.tensor import apply_tensor_parallel
from quartet.train.parallel.tensors import is_first_holder, is_whole_on_tensor_ranks, local, parameter_name
from quartet.weights.sink import gather

T = TypeVar("T")

# Of a norm, whose result is a view. Nothing here writes into what a module returned.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# FSDP's hooks within a layer give the profiler other names when it is computed again; nothing is computed by that.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)

_BUCKET_BYTES = 32 << 20


class ShardedModel(nn.Module):
    """The root of a model of several ranks: what is called for every pack.

    Args:
        groups: along the dimensions of the mesh in which there are several ranks.
        former_weights: a fingerprint of the whole weights, where this rank had them before they were shared out.
        stays_on_host: of its parameters, gradients and the optimizer.
        pipeline: with the other stages, where the model is cut into several.

    Attributes:
        mesh: of the role.
    """

    def __init__(
        self,
        packed: PackedModel,
        mesh: Mesh,
        groups: dict[str, PassGroup],
        *,
        former_weights: str | None,
        stays_on_host: bool,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.model = packed.model
        self.mesh = mesh
        self.former_weights = former_weights
        self.stays_on_host = stays_on_host
        self.stage: Stage | None = packed.stage
        self.pipeline = pipeline
        self._groups = groups

    @property
    def shares_weights(self) -> bool:
        """Whether FSDP gathers the weights."""
        return isinstance(self, FSDPModule)

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def make_passes(self, micro_batches: Sequence[Callable[[], MicroBatch]], *, gradients: bool) -> None:
        """Makes the passes of micro-batches, equally many on all ranks of a copy.

        Raises:
            RankFailed: a rank that takes part in them failed.
        """
        with raising_rank_failed(self.mesh.copy.size):
            if self.pipeline is not None:
                self.pipeline.make_passes(micro_batches, gradients=gradients)
            else:
                make_passes(micro_batches, gradients=gradients)
            self.free_gathered()

    def from_last_stage(self, value: T) -> T:
        """Returns what the last stage has. Collective over the stages; raises as ``make_passes``."""
        if self.pipeline is None:
            return value
        with raising_rank_failed(self.mesh.copy.size):
            return self.pipeline.from_last(value)

    def free_gathered(self) -> None:
        """Gives up what is still gathered. No collective."""
        for module in _fsdp_modules(self):
            module.reshard()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the gradients, which the same parameters have on all ranks, over copies and tensor ranks, and those of
        tied ones over the two stages that have them. Collective.

        Raises:
            RankFailed: a rank that this one sums with failed.
        """
        trained = [p for p in self.model.parameters() if p.grad is not None]
        device_type = self.mesh.device_mesh.device_type
        with raising_rank_failed(self.mesh.data.size):
            if copies := self._groups.get(REPLICATE):
                in_order = self.mesh.fixed_order or device_type == "cpu"
                _sum_up([local(p.grad) for p in trained], copies, device_type, in_order=in_order)
            if tensor := self._groups.get(TENSOR):
                # Each rank has those of its rows or heads of what is not cut.
                alike = [local(p.grad) for p in trained if is_whole_on_tensor_ranks(p)]
                _sum_up(alike, tensor, device_type, in_order=True)
            if self.pipeline is not None and self.stage is not None:
                tied = map(self.model.get_parameter, self.stage.tied)
                self.pipeline.sum_tied([local(p.grad) for p in tied if p.grad is not None])

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters whose gradients another stage has, too, and counts."""
        stage = self.stage
        return [p for n, p in self.model.named_parameters() if stage is not None and not stage.counts(n)]

    def written(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what this rank writes of a training state: of its tensors what it is the first to hold, and the first
        rank everything else.
        """
        mesh, found = self.mesh, {}
        for name, value in state.items():
            parameter = parameter_name(name)
            if parameter is None:
                own = mesh.data.rank == 0
            elif isinstance(value, DTensor):
                own = mesh.data.rank < mesh.copy.size and is_first_holder(value)
            else:
                own = mesh.is_first_of_stage
            if own and (self.stage is None or parameter is None or self.stage.counts(parameter)):
                found[name] = value
        return found


def _sum_up(gradients: Iterable[Tensor], ranks: PassGroup, device_type: str, *, in_order: bool) -> None:
    for bucket in _buckets(gradients):
        total = torch.cat([gradient.flatten().to(device_type) for gradient in bucket])
        ranks.sum_up(total, in_order=in_order)
        for gradient, values in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields neighbours that travel together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def sharded(packed: PackedModel) -> ShardedModel | None:
    """Returns the root of a model of several ranks; None where this process is the only one."""
    return packed.one_call if isinstance(packed.one_call, ShardedModel) else None


def shard_model(packed: PackedModel, mesh: Mesh, *, on_host: bool = False) -> ShardedModel:
    """Shares out the weights of ``packed`` over ``mesh``; all ranks call it, with equal weights or on the meta device.

    Call it once the model is probed and adapted, and ``freeze`` before it if it is never trained. Parameters that ranks
    have between them are DTensors of the same names from then on.

    Args:
        on_host: shards, their gradients and so the optimizer stay in host memory, where the optimizer computes; on the
            device is what a layer gathers.

    Raises:
        UserError: the model cannot be cut so.
    """
    found = sharded(packed)
    if found is not None:
        return found
    check_cut(packed, pipeline=mesh.pipeline, context=mesh.context, tensor=mesh.tensor)
    in_halves = packed.precision == "bf16" and any(p.requires_grad for p in packed.model.parameters())
    rounds = in_halves and packed.adapters is None
    if in_halves and not rounds:
        packed.round_frozen()
    whole_weights = list(packed.model.parameters())
    former = None if any(p.is_meta for p in whole_weights) else fingerprint(whole_weights)
    del whole_weights
    groups = {name: PassGroup(group, packed.work) for name, group in mesh.groups.items() if name != PIPELINE}
    tensor, context = groups.get(TENSOR), groups.get(CONTEXT)
    styles, pipeline = layer_styles(packed) if tensor is not None else {}, None
    if mesh.pipeline > 1:
        stage = Stage.cut(packed, mesh.stage, mesh.pipeline)
        pipeline = Pipeline(packed, stage, mesh.groups[PIPELINE])
    if tensor is not None or context is not None:
        packed.parallel = ModelParallel.of(packed, tensor=tensor, context=context)
    if tensor is not None:
        apply_tensor_parallel(packed, mesh.device_mesh[TENSOR], tensor, styles)
    root = ShardedModel(packed, mesh, groups, former_weights=former, stays_on_host=on_host, pipeline=pipeline)
    if mesh.num_parts > 1 or on_host or rounds:
        _share_out(packed, root, rounds=rounds)
    if packed.adapters is not None:
        packed.adapters.take_up_parameters()
    packed.one_call = root
    packed.gather = GatherFunctions(is_first=mesh.data.rank == 0, whole=partial(_whole, root))
    return root


def _whole(root: ShardedModel, *parts: Tensor, join: Join = first_of, everywhere: bool = False) -> Tensor | None:
    """Gathers as ``GatherFunctions`` says; the first copy's ranks alone do so, where not all get it."""
    mesh, found = root.mesh, None
    if not everywhere and mesh.data.rank >= mesh.copy.size:
        return None
    if not isinstance(parts[0], Elsewhere):
        gathered = [whole for part in parts if (whole := gather(part, everywhere=everywhere)) is not None]
        found = join(*gathered) if gathered else None
    if root.pipeline is None:
        return found
    return root.pipeline.bring(parts[0], found, is_first=mesh.is_first_of_stage, everywhere=everywhere)


def _share_out(packed: PackedModel, root: ShardedModel, *, rounds: bool) -> None:
    """Makes FSDP units of the layers and of the root; ``rounds``: what autocast rounds is gathered so."""
    mesh = root.mesh
    on_cpu = mesh.device_mesh.device_type == "cpu"
    rounded = {id(p) for p in packed.rounded_parameters()} if rounds else set()
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.device_mesh[SHARD]}
    if root.stays_on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not on_cpu)
        packed.computes_on = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    for layer in decoder_layers(packed.body):
        policy = whole
        if any(id(p) in rounded for p in layer.parameters()):
            policy = half
            kept = [m for m in layer.modules() if any(id(p) not in rounded for p in m.parameters(recurse=False))]
            if kept:
                fully_shard(kept if len(kept) > 1 else kept[0], mp_policy=whole, **options)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True, **options)
    fully_shard(root, mp_policy=whole, reshard_after_forward=False, **options)
    gather_by = AllGather(packed.work, direct=on_cpu)
    sum_by = ReduceScatter(packed.work, direct=on_cpu or mesh.fixed_order)
    module: Any  # torch's own collectives are of a class that has no public name
    for module in _fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(gather_by)
        module.set_custom_reduce_scatter(sum_by)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Tells models with different weights apart; not those whose weights are the same numbers in another order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        (int(t.detach().contiguous().view(integers[t.itemsize]).sum(dtype=torch.int64)), tuple(t.shape))
        for t in tensors
    ]
    return f"{zlib.crc32(repr(sums).encode()):08x}"
