"""Pipeline stages: ranks that have some of a model's layers each, and pass hidden states on.

Shapes: P packed tokens of one micro-batch on this rank, D hidden.

**Cut.** A stage has neighbouring layers; the first one the embedding too, the last one the last norm and the head. The
model's own forward runs on every stage. Stand-ins are where a module is on another stage: those before the own layers
give what was received, those behind them what they are given. So families need nothing of their own, position
embeddings are made where they are used, and parameters keep their names. Where embedding and head are one parameter,
the first and the last stage have it both, with equal values: gradients are summed between the two.

**Schedule.** 1F1B (Narayanan et al. 2021, "PipeDream-Flush"): after as many forwards as there are stages behind it, a
stage makes one forward and one backward in turn, and never keeps activations of more than ``stages - stage``
micro-batches. Between two computations a rank makes one exchange: it sends what the first made and receives what the
second needs. Every stage lays out the same micro-batches, so it knows all shapes, and nothing is padded or asked.

Hidden states travel as they are between layers, in fp32 under autocast to bf16: rounding them would give other results
than one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from quartet.config import UserError
from quartet.models.packed_model import PackedModel, decoder_layers

T = TypeVar("T")

# Which layers are where ----------------------------------------------------------------------------------


def split_layers(costs: Sequence[int], stages: int, *, first: int = 0, last: int = 0) -> list[range]:
    """Cuts layers into neighbouring ones for each stage, so that the dearest stage costs least. Of such cuts it takes
    the most even one, and then the one with fewer layers on early stages, which keep more micro-batches.

    Args:
        costs: of each layer.
        first, last: what the first and the last stage have besides.

    Raises:
        UserError: more stages than layers.
    """
    num = len(costs)
    if stages > num:
        raise UserError(
            "there are more pipeline stages than layers",
            found=f"sharding.pipeline: {stages}, {num} layers",
            remedy=f"choose {num} stages or fewer",
        )

    def cost(start: int, stop: int) -> int:
        return sum(costs[start:stop]) + (start == 0) * first + (stop == num) * last

    dearest, _ = _cheapest(num, stages, cost, max)
    _, ends = _cheapest(num, stages, lambda i, j: c * c if (c := cost(i, j)) <= dearest else float("inf"), add)
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _cheapest(
    num: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Finds the cheapest way to cut ``num`` layers: its cost and where each stage ends."""
    found: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0, end), (end,)) for end in range(1, num + 1)}
    for stage in range(1, stages):
        found = {
            end: min((join(before, cost(i, end)), (*ends, end)) for i, (before, ends) in found.items() if i < end)
            for end in range(stage + 1, num + 1)
        }
    return found[num]


@dataclass(frozen=True)
class ModelParts:
    """Names of a model's modules with weights, in the order of a pass.

    Attributes:
        before, behind: modules around the layers; the head is the last one.
        costs: numbers of weights of every layer.
        around: those of what is before, and behind.
        tied: ids of parameters that stand on both sides.
        dtype: of hidden states between layers.
    """

    before: tuple[str, ...]
    layers: tuple[str, ...]
    behind: tuple[str, ...]
    costs: tuple[int, ...]
    around: tuple[int, int]
    tied: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, packed: PackedModel) -> ModelParts:
        """Finds the parts, by a pass in which no module computes: on the meta device as well.

        Raises:
            UserError: the model cannot be cut.
        """
        model, layers = packed.model, decoder_layers(packed.body)
        paths = {module: path for path, module in model.named_modules()}
        names = tuple(paths[layer] for layer in layers)
        if len({name.rpartition(".")[0] for name in names}) != 1:
            raise _uncut(packed, f"{len(names)} decoder layers, which are not those of one list")
        calls = [name for name in _calls(packed, paths, layers) if _weights(model, name)]
        start = calls.index(names[0]) if names[0] in calls else 0
        before, called, behind = calls[:start], calls[start : start + len(names)], calls[start + len(names) :]
        behind.append(paths[packed.head])
        if called != list(names) or not before or len({*calls}) != len(calls):
            raise _uncut(packed, f"a pass calls its modules in this order: {', '.join(calls)}")
        sides = [{id(p): p for name in side for p in _weights(model, name)} for side in (before, behind)]
        of_layers = [{id(p): p for p in _weights(model, name)} for name in names]
        found = Counter(key for part in (sides[0] | sides[1], *of_layers) for key in part)
        for name, parameter in model.named_parameters():
            if found[id(parameter)] != 1:
                raise _uncut(packed, f"{name}, which {found[id(parameter)] or 'none'} of its parts use in a pass")
        sizes = [sum(p.numel() for p in part.values()) for part in (*sides, *of_layers)]
        dtype, tied = next(iter(sides[0].values())).dtype, frozenset(sides[0].keys() & sides[1].keys())
        return cls(tuple(before), names, tuple(behind), tuple(sizes[2:]), (sizes[0], sizes[1]), tied, dtype)

    def split(self, stages: int) -> list[range]:
        """Decides which layers each stage has, by numbers of weights; raises UserError as ``split_layers``."""
        return split_layers(self.costs, stages, first=self.around[0], last=self.around[1])


def _calls(packed: PackedModel, paths: dict[nn.Module, str], layers: list[nn.Module]) -> list[str]:
    """Returns which modules a pass calls, in their order; raises UserError where it fails."""
    units = [unit for unit in _units(packed.body, layers) if [*unit.parameters(), *unit.buffers()]]
    calls: list[str] = []
    states = torch.zeros(1, 2, packed.model.config.get_text_config().hidden_size, device=packed.device)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=packed.device)
    for unit in units:
        _put(packed.model, paths[unit], _Recorder(paths[unit], calls, states, follows=unit in layers[1:]))
    try:
        packed.body(input_ids=tokens, position_ids=tokens, attention_mask=None, use_cache=False)
    except Exception as error:
        raise _uncut(packed, f"a pass around its layers fails: {type(error).__name__}: {error}") from error
    finally:
        for unit in units:
            _put(packed.model, paths[unit], unit)
    return calls


def _units(module: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yields the layers in ``module``, and the largest modules that have none in them."""
    for child in module.children():
        if child in layers or not any(part in layers for part in child.modules()):
            yield child
        else:
            yield from _units(child, layers)


def _weights(model: nn.Module, path: str) -> list[nn.Parameter]:
    return list(model.get_submodule(path).parameters())


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent).add_module(name, module)


def _uncut(packed: PackedModel, found: str) -> UserError:
    return UserError(
        f"{type(packed.model).__name__} cannot be cut into pipeline stages",
        found=found,
        remedy="set sharding.pipeline to 1, and use sharding.shard, tensor or context",
    )


class _Recorder(nn.Module):
    """Notes that the module in whose place it stands is called."""

    def __init__(self, path: str, calls: list[str], states: Tensor, *, follows: bool) -> None:
        super().__init__()
        self._path, self._calls, self._states, self._follows = path, calls, states, follows

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self._follows and hidden_states is not self._states:
            raise ValueError(f"{self._path} is not given what the layer before it gives")
        self._calls.append(self._path)
        return self._states


# What a stage has ----------------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """Stands for a tensor that another stage has: on the meta device, of its shape and dtype."""

    stage: int

    @classmethod
    def of(cls, tensor: Tensor, stage: int) -> Elsewhere:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(cls)
        found.stage = stage
        return found

    def detach(self) -> Elsewhere:
        """Returns itself: torch's would not know the stage."""
        return self


Outline = dict[str, tuple[str, Elsewhere]]
"""Of every tensor of the whole model, by its name: the first name of the same tensor, and what stands for it."""


@dataclass(eq=False)
class Stage:
    """What this rank has of a model that is cut.

    Attributes:
        layers: which of the model's.
        width, dtype: of hidden states between stages.
        trained, state: of all stages, what trains, and the state without adapters.
        tied: names of the parameters that the first and the last stage have both; none on others.
        received: ``[1, P, D]`` in a pass.
    """

    index: int
    stages: int
    layers: range
    width: int
    dtype: torch.dtype
    trained: Outline
    state: Outline
    tied: tuple[str, ...] = ()
    received: Tensor | None = None

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.stages

    @classmethod
    def cut(cls, packed: PackedModel, index: int, stages: int) -> Stage:
        """Leaves in ``packed`` what stage ``index`` has of it, once it is probed, adapted and frozen.

        Raises:
            UserError: the model cannot be cut, or has too few layers.
        """
        model, parts = packed.model, ModelParts.of(packed)
        split = parts.split(stages)
        stage_of = dict.fromkeys(parts.before, 0) | dict.fromkeys(parts.behind, stages - 1)
        stage_of |= {parts.layers[i]: k for k, layers in enumerate(split) for i in layers}
        known: dict[int, Elsewhere] = {}
        trained = _outline(packed.complete_trained(), stage_of, known)
        with packed.without_adapters():
            state = _outline(model.state_dict(keep_vars=True), stage_of, known)
        width = model.config.get_text_config().hidden_size
        stage = cls(index, stages, split[index], width, parts.dtype, trained, state)
        gone = {name: model.get_submodule(name) for name, where in stage_of.items() if where != index}
        packed.forget({part for module in gone.values() for part in module.modules()})
        for path, module in gone.items():
            there = _Received(stage) if stage_of[path] < index else _Passed()
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in parts.tied and stage.is_last:
                    there.register_parameter(name, parameter)
                else:
                    setattr(there, name, Elsewhere.of(parameter, stage_of[path]))
            _put(model, path, there)
        stage.tied = tuple(name for name, p in model.named_parameters() if id(p) in parts.tied)
        packed.head, packed.stage = model.get_submodule(parts.behind[-1]), stage
        if packed.adapters is not None:
            packed.adapters.stage = stage
            packed.adapters.take_up_parameters()
        return stage

    def counts(self, name: str) -> bool:
        """Tells whether this stage counts a parameter's gradient in the norm, and gives it away: of what several have,
        the first one does.
        """
        known = self.trained.get(name) or self.state.get(name)
        return known is None or known[1].stage == self.index

    def complete(self, outline: Outline, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all that is in ``outline``, in the model's order: of this stage's from ``own``, tied ones once."""
        return {name: own[first] if there.stage == self.index else there for name, (first, there) in outline.items()}

    def elsewhere(self, own: Collection[str]) -> set[str]:
        """Returns names of what only other stages have; ``own`` are the names of what is here."""
        return (self.state.keys() | self.trained.keys()) - set(own)


def _outline(named: Mapping[str, Tensor], stage_of: Mapping[str, int], known: dict[int, Elsewhere]) -> Outline:
    first: dict[int, str] = {}
    found: Outline = {}
    for name, tensor in named.items():
        # Buffers beside all parts are everywhere.
        stage = next((k for path, k in stage_of.items() if name.startswith(f"{path}.")), 0)
        there = known.setdefault(id(tensor), Elsewhere.of(tensor, stage))
        found[name] = first.setdefault(id(tensor), name), there
    return found


class _Received(nn.Module):
    """Where a module was that is computed before the own layers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self._stage.received is not None, "a stage behind the first one computes what it has received"
        return self._stage.received


class _Passed(nn.Module):
    """Where a module was that is computed behind the own layers."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


# Passes --------------------------------------------------------------------------------------------------

Action = tuple[Literal["forward", "backward"], int]
"""What a stage computes, of which micro-batch."""


def order_of(stage: int, stages: int, num: int, *, gradients: bool = True) -> list[Action]:
    """Lists what a stage computes for ``num`` micro-batches, one after the other."""
    ahead = min(stages - 1 - stage, num) if gradients else num
    order: list[Action] = [("forward", i) for i in range(ahead)]
    for i in range(num - ahead):
        order += [("forward", ahead + i), ("backward", i)]
    return [*order, *(("backward", i) for i in range(num - ahead, num))] if gradients else order


class MicroBatch(Protocol):
    """A micro-batch that is laid out.

    Attributes:
        num_rows: P.
    """

    num_rows: int

    def forward(self, received: Tensor | None) -> Tensor:
        """Computes hidden states ``[P, D]`` for the next stage from those of the one before, of which the first stage
        has none; on the last stage the loss, which depends on them. Forward-only, nothing is read of what that gives.
        """


def make_passes(micro_batches: Sequence[Callable[[], MicroBatch]], *, gradients: bool) -> None:
    """Makes all passes of a model that has all of its layers here, one after the other."""
    for make in micro_batches:
        _make_pass(make, gradients=gradients)


def _make_pass(make: Callable[[], MicroBatch], *, gradients: bool) -> None:
    """Apart, so that nothing of one lives on in the next."""
    made = make().forward(None)
    if gradients and made.requires_grad:
        made.backward()


class Pipeline:
    """Makes passes together with the other stages; all of them call the same methods with the same micro-batches.

    Args:
        group: the ranks that have a stage each, in their order.
    """

    def __init__(self, packed: PackedModel, stage: Stage, group: dist.ProcessGroup) -> None:
        self._stage, self._group, self._work = stage, group, packed.work
        # nccl wants all ranks in a group's first call.
        dist.barrier(group)
        on_gpu = "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def make_passes(self, micro_batches: Sequence[Callable[[], MicroBatch]], *, gradients: bool) -> None:
        """Makes all passes. Each of ``micro_batches`` lays one out, as late as can be."""
        index, made, target = self._stage.index, None, -1
        alive: dict[int, _Alive] = {}
        for kind, i in order_of(index, self._stage.stages, len(micro_batches), gradients=gradients):
            one = _Alive(micro_batches[i]()) if kind == "forward" else alive.pop(i)
            source = index - 1 if kind == "forward" else index + 1
            place = torch.empty(one.num_rows, self._stage.width, dtype=self._stage.dtype, device=self._device)
            received, made = self._pass_on(made, target, place, source), None
            if kind == "forward":
                made, target = one.forward(received), index + 1
            else:
                made, target = one.backward(received), index - 1
            if kind == "forward" and gradients:
                alive[i] = one
        self._pass_on(made, target)

    def sum_tied(self, gradients: Sequence[Tensor]) -> None:
        """Adds up gradients of what the first and the last stage have both, each of which gives the same parts."""
        other = self._stage.stages - 1 - self._stage.index
        for gradient in gradients:
            here = gradient.to(self._device)  # it may be offloaded
            theirs = torch.empty_like(here)
            self._exchange(here, other, theirs, other)
            self._work.sent["pipeline"] += here.nbytes
            gradient.copy_(theirs.add_(here))

    def bring(self, tensor: Tensor, whole: Tensor | None, *, is_first: bool, everywhere: bool = False) -> Tensor | None:
        """Brings a whole tensor from the stage that has it to the first one, or to all. All stages call it.

        Args:
            tensor: one of ``Stage.complete``.
            whole: its contents, where this stage has it.
            is_first: this rank is the first of its stage, which alone sends or receives; ``everywhere`` all do.
        """
        index = self._stage.index
        holder = tensor.stage if isinstance(tensor, Elsewhere) else index
        if not everywhere and (holder == 0 or not is_first):
            return whole if index == 0 else None
        place = whole.to(self._device).contiguous() if whole is not None else None
        if place is None and (everywhere or index == 0):
            place = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if everywhere:
            assert place is not None
            dist.broadcast(place, group=self._group, group_src=holder)
            return place
        sent = place if index == holder else None
        return self._exchange(sent, 0, place if index == 0 else None, holder if index == 0 else -1)

    def from_last(self, value: T) -> T:
        """Returns on all stages what the last one has, in host memory."""
        found: list[Any] = [value if self._stage.is_last else None]
        dist.broadcast_object_list(found, group=self._group, group_src=self._stage.stages - 1, device=self._device)
        last: T = found[0]
        return last

    def _pass_on(
        self, made: Tensor | None, target: int, place: Tensor | None = None, source: int = -1
    ) -> Tensor | None:
        if made is not None and target in range(self._stage.stages):
            self._work.sent["pipeline"] += made.nbytes
        return self._exchange(made, target, place, source)

    def _exchange(
        self, made: Tensor | None, target: int, place: Tensor | None = None, source: int = -1
    ) -> Tensor | None:
        """Sends ``made`` to stage ``target`` and receives from ``source`` what comes to ``place``, at once: of two
        stages that both send first, neither would receive. Stages outside of the model are left out.
        """
        stages, under_way = range(self._stage.stages), []
        if made is not None and target in stages:
            sent = made.contiguous()
            under_way.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=target))
        if place is not None and source in stages:
            under_way.append(dist.P2POp(dist.irecv, place, group=self._group, group_peer=source))
        for work in dist.batch_isend_irecv(under_way) if under_way else ():
            work.wait()
        return place if source in stages else None


class _Alive:
    """A micro-batch from its forward to its backward."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self.num_rows = micro_batch.num_rows
        self._compute: Callable[[Tensor | None], Tensor] | None = micro_batch.forward

    def forward(self, received: Tensor | None) -> Tensor:
        assert self._compute is not None
        made = self._compute(received if received is None else received.requires_grad_())
        # What was made is only sent: its graph is enough for the backward.
        self._received, self._compute = received, None
        self._edge = get_gradient_edge(made) if made.requires_grad else None
        return made.detach()

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of what was received."""
        if self._edge is not None:
            torch.autograd.backward(self._edge, gradient)
        return None if self._received is None else self._received.grad
