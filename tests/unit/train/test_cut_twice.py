"""State of tensors that tensor parallelism and FSDP have cut both, into parts that are not alike, by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from quartet.train.checkpoint import Share, join_metadata, own_part, write_share
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.tensors import is_first_holder, local, local_slices, with_local, write_part
from quartet.train.state import make_optimizer_tensors, optimizer_tensors, shapes_of, snapshot
from quartet.weights.sink import NamedSource, gather
from rank_forks import run_ranks

Dims = dict[str, Any]
TENSORS: tuple[tuple[tuple[int, ...], Placement], ...] = (
    ((12, 2), Shard(0)),
    ((31, 3), Shard(0)),
    ((7,), Shard(0)),
    ((3, 2), Shard(0)),
    ((1, 4), Shard(0)),
    ((5, 6), Shard(1)),
    ((1, 6), Shard(1)),
    ((5,), Replicate()),
    ((1,), Replicate()),
    ((3, 2), Replicate()),
)
MESHES: tuple[tuple[int, tuple[Dims, ...]], ...] = (
    (6, ({"shard": 3, "tensor": 2},)),
    (4, ({"tensor": 2}, {"context": 2, "tensor": 2}, {"shard": 4})),
)


def values(number: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(TENSORS[number][0]).numel()).view(TENSORS[number][0])


def cut_module(mesh: Mesh) -> nn.Module:
    """As a sharded model has its parameters: on the mesh's tensor dimension first, and FSDP over the others."""
    module = nn.Module()
    for number, (_, kind) in enumerate(TENSORS):
        tensor = values(number)
        if mesh.tensor_mesh is not None:
            tensor = distribute_tensor(tensor, mesh.tensor_mesh, [kind], src_data_rank=None)
        module.register_parameter(f"p{number}", nn.Parameter(tensor))
    fully_shard(module, mesh=mesh.fsdp_mesh)
    return module


def parts_of(dims: Dims) -> list[str]:
    """What is wrong about single tensors."""
    mesh, wrong = Mesh.of(DataParallelGroup.of_world(), **dims), []
    rank = dist.get_rank()
    module = cut_module(mesh)
    for number, (name, parameter) in enumerate(module.named_parameters()):
        expected, here = values(number), local(parameter)
        if not torch.equal(expected[local_slices(parameter)], here):
            wrong.append(f"{name}: {here} is at {local_slices(parameter)}")
        first, on_all = gather(parameter), gather(parameter, everywhere=True)
        if (first is None) is not (rank > 0) or (first is not None and not torch.equal(first, expected)):
            wrong.append(f"{name} gathered on the first rank")
        if on_all is None or not torch.equal(on_all, expected):
            wrong.append(f"{name} gathered everywhere")
        other = with_local(parameter, torch.zeros_like(here))
        write_part(other, expected)
        copied = snapshot({"a": other})["a"]
        if not torch.equal(local(copied), here) or copied.shape != expected.shape:
            wrong.append(f"{name} written and copied")
        # Every number is written once, by the first that holds it.
        count = torch.zeros_like(expected)
        if is_first_holder(parameter):
            count[local_slices(parameter)] = 1
        dist.all_reduce(count)
        if not bool((count == 1).all()):
            wrong.append(f"{name} is held first {count}")
    sent = list(NamedSource(module.named_parameters).tensors())
    if len(sent) != (0 if rank else len(TENSORS)):
        wrong.append("sent")
    return wrong + [f"{n} sent" for n, tensor in enumerate(sent) if not torch.equal(tensor, values(n))]


def written(module: nn.Module, directory: Path, optimizer: torch.optim.Optimizer) -> None:
    rank, named = dist.get_rank(), dict(module.named_parameters())
    state: dict[str, Any] = (
        {n: p.detach() for n, p in named.items()} | optimizer_tensors(optimizer, named) | {"rest": {}}
    )
    directory.mkdir(exist_ok=True)
    dist.barrier()
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, write_share(directory, own_part(state, rank), rank))
    if rank == 0:
        join_metadata(directory, {name: digest for found in files for name, digest in found.items()})
    dist.barrier()


def checkpoints(dims: Dims, root: str, own: str, others: list[str]) -> list[str]:
    """Writes a share after a step of AdamW, and reads it and those of other meshes: what is wrong."""
    mesh, wrong = Mesh.of(DataParallelGroup.of_world(), **dims), []
    module = cut_module(mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, weight_decay=0.5)
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = with_local(parameter, torch.empty_like(local(parameter)))
        write_part(parameter.grad, values(number) % 3 - 1)
    optimizer.step()
    named = dict(module.named_parameters())
    expected = {n: local(t).clone() for n, t in [*named.items(), *optimizer_tensors(optimizer, named).items()]}
    written(module, Path(root, own), optimizer)
    for directory in (own, *others):
        share = Share(Path(root, directory))
        optimizer.state.clear()
        make_optimizer_tensors(optimizer, named, share.shapes)
        live = {n: p.detach() for n, p in named.items()} | optimizer_tensors(optimizer, named)
        for tensor in live.values():
            local(tensor).fill_(-7.0)
        share.read_into(live)
        wrong += [f"{n} of {directory} in {own}" for n, t in live.items() if not torch.equal(local(t), expected[n])]
        wrong += ["shapes"] if shapes_of(live) != share.shapes else []
    return wrong


def all_of(dims: tuple[Dims, ...], root: str, former: list[str]) -> list[list[str]]:
    found = []
    for one in dims:
        own = "-".join(f"{name}{size}" for name, size in one.items())
        found.append(parts_of(one) + checkpoints(one, root, own, former))
        former = [*former, own]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[list[str]]]]:
    root, former, found = tmp_path_factory.mktemp("shares"), list[str](), {}
    for world, dims in MESHES:
        found[world] = run_ranks(world, all_of, dims, str(root), list(former))
        former += sorted(path.name for path in root.iterdir() if path.name not in former)
    return found


@pytest.mark.parametrize("world", [world for world, _ in MESHES])
def test_parts_are_gathered_written_and_read_on_every_mesh(
    world: int, results: dict[int, list[list[list[str]]]]
) -> None:
    """Checkpoints of every mesh on all later ones, too, numbers of ranks included."""
    for rank, of_rank in enumerate(results[world]):
        assert not any(of_rank), f"rank {rank}"
