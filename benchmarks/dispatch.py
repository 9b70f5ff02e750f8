"""What a call on a worker group costs beside raw Ray calls of the same payload, and how many bytes a batch moves.

    python benchmarks/dispatch.py [--workers 2] [--megabytes 100] [--calls 200]

Both sides have actors of the same class in one Ray cluster on this machine and take turns; figures are medians. *Raw*
is ``ray.get([actor.method.remote(payload) for actor in actors])`` with Ray's own serialisation; of a split batch, parts
are cut with ``select`` by a plan made beforehand and put together with ``concat``, in no order, or (last row) they are
nothing but moved. Bytes moved are those that Ray serialises: every argument and result once, however many read it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from common import arguments, markdown, write_results

from quartet.batch import ColumnSet, RaggedBatch
from quartet.cluster import BROADCAST, RANK_ZERO, SPLIT, ResourcePool, Worker, WorkerGroup, connect, dispatch
from quartet.cluster.dispatch import plan_parts, segment_table

MIB = 2**20


class Echo(Worker):
    @dispatch(BROADCAST)
    def size(self, value: Any) -> int:
        return int(getattr(value, "nbytes", 8))

    @dispatch(RANK_ZERO)
    def one(self, value: Any) -> Any:
        return value

    @dispatch(SPLIT)
    def same(self, batch: RaggedBatch) -> ColumnSet:
        return ColumnSet(batch.ids, dict(batch.token))

    @dispatch(SPLIT)
    def logprobs(self, batch: RaggedBatch) -> ColumnSet:
        return ColumnSet(batch.ids, {"logprobs": batch.token["rollout_logprobs"]})

    @dispatch(SPLIT)
    def count(self, batch: RaggedBatch) -> int:
        return batch.num_tokens


def ragged(num_bytes: int, responses: int = 8, prompt: int = 256, longest: int = 1024) -> RaggedBatch:
    """Groups with responses of an eighth of ``longest`` to ``longest`` tokens, ids, two masks and log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    per_token = 8 + 4 + 1 + 1
    mean = prompt + responses * longest * 9 // 16
    num_groups = max(num_bytes // per_token // mean, 2)
    lengths = torch.randint(longest // 8, longest + 1, (num_groups, responses), generator=generator)
    table = [part for group in lengths.tolist() for part in [prompt, *group]]
    width = responses + 1
    total = sum(table)
    leaves = [k for k in range(len(table)) if k % width]
    return RaggedBatch(
        torch.randint(0, 32000, (total,), generator=generator),
        tuple(table),
        tuple(k // width * width if k % width else -1 for k in range(len(table))),
        tuple(leaves),
        tuple(f"{k // width}.{k % width - 1}" for k in leaves),
        token={
            "rollout_logprobs": torch.rand(total, generator=generator),
            "action_mask": torch.ones(total, dtype=torch.bool),
            "loss_mask": torch.ones(total, dtype=torch.bool),
        },
    )


def batch_bytes(batch: RaggedBatch) -> int:
    return batch.input_ids.nbytes + sum(values.nbytes for values in batch.token.values())


def take_turns(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each side; one turn of each first that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(of) for name, of in seconds.items()}


@contextmanager
def serialised(backend: Any) -> Iterator[list[int]]:
    """Bytes of every argument that goes out meanwhile."""
    import ray

    context = ray._private.worker.global_worker.get_serialization_context()
    found: list[int] = []
    call, put = backend.call, backend.put

    def counted(value: Any) -> None:
        if not isinstance(value, ray.ObjectRef):
            found.append(context.serialize(value).total_bytes)

    def counting_call(handle: Any, method: str, args: tuple[Any, ...], returns: int = 1) -> Any:
        for value in args:
            counted(value)
        return call(handle, method, args, returns)

    def counting_put(value: Any) -> Any:
        counted(value)
        return put(value)

    backend.call, backend.put = counting_call, counting_put
    try:
        yield found
    finally:
        del backend.call, backend.put


def calls(group: WorkerGroup, raw: Sequence[Any], args: Any) -> list[dict[str, Any]]:
    """Seconds per call, ours and raw, for several payloads."""
    import ray

    from quartet.cluster.ray_backend import deregister_tensor_serializer, register_tensor_serializer

    def raw_call(method: str, actors: Sequence[Any], payloads: Sequence[Any]) -> Callable[[], Any]:
        def run() -> None:
            ray.get([getattr(actor, method).remote(value) for actor, value in zip(actors, payloads, strict=True)])

        return run

    array, tensor = np.ones(MIB, np.uint8), torch.ones(MIB, dtype=torch.uint8)
    batch = ragged(10 * MIB)
    plan = plan_parts(segment_table(batch), len(raw))
    parts = [batch.select(part) for part in plan]
    everyone, first = list(raw), list(raw[:1])

    def by_hand(method: str) -> Callable[[], Any]:
        def run() -> None:
            found = ray.get([getattr(a, method).remote(batch.select(p)) for a, p in zip(raw, plan, strict=True)])
            if isinstance(found[0], ColumnSet):
                ColumnSet.concat(found)

        return run

    cases: list[tuple[str, Callable[[], Any], Callable[[], Any], int]] = [
        ("a number to all", lambda: group.size(1), raw_call("size", everyone, [1] * len(raw)), args.calls),
        ("a number there and back", lambda: group.one(1), raw_call("one", first, [1]), args.calls),
        ("1 MiB array to all", lambda: group.size(array), raw_call("size", everyone, [array] * len(raw)), args.calls),
        ("1 MiB array there and back", lambda: group.one(array), raw_call("one", first, [array]), args.calls),
        ("1 MiB tensor there and back", lambda: group.one(tensor), raw_call("one", first, [tensor]), args.calls),
        ("10 MiB batch split", lambda: group.count(batch), by_hand("count"), args.calls // 10),
        ("10 MiB batch split and back", lambda: group.same(batch), by_hand("same"), args.calls // 10),
        (
            "the same, cut beforehand",
            lambda: group.same(batch),
            raw_call("same", everyone, parts),
            args.calls // 10,
        ),
    ]
    found = []
    for name, ours, theirs, number in cases:

        def raw_turn(run: Callable[[], Any] = theirs) -> None:
            deregister_tensor_serializer()
            try:
                run()
            finally:
                register_tensor_serializer()

        seconds = take_turns({"ours": ours, "raw": raw_turn}, max(number, 2))
        found.append({"payload": name, **seconds, "ratio": seconds["ours"] / seconds["raw"]})
    return found


def awaited(group: WorkerGroup, raw: Sequence[Any], number: int) -> dict[str, Any]:
    """Seconds of a small call that a coroutine awaits, as the driver of a run does, ours and raw."""

    async def both() -> dict[str, float]:
        seconds: dict[str, list[float]] = {"ours": [], "raw": []}
        for turn in range(number + 1):
            for name in seconds:
                begun = time.perf_counter()
                await (group.ask("one", 1, mode=RANK_ZERO) if name == "ours" else raw[0].one.remote(1))
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
        return {name: statistics.median(of) for name, of in seconds.items()}

    found = asyncio.run(both())
    return {"payload": "a number there and back, awaited", **found, "ratio": found["ours"] / found["raw"]}


def moved(backend: Any, group: WorkerGroup, batch: RaggedBatch) -> dict[str, Any]:
    """Bytes that go out and come back when a batch is split and collected, over its own."""
    import ray

    size = batch_bytes(batch)
    context = ray._private.worker.global_worker.get_serialization_context()
    with serialised(backend) as sent:
        begun = time.perf_counter()
        back = group.same(batch)
        seconds = time.perf_counter() - begun
    assert back.ids == batch.ids and all(torch.equal(back.token[name], batch.token[name]) for name in batch.token)
    future = group.call("same", batch, mode=SPLIT, blocking=False)
    future.wait()
    returned = sum(context.serialize(ray.get(ref)).total_bytes for ref in future._parts)
    return {
        "batch_bytes": size,
        "sent_bytes": sum(sent),
        "returned_bytes": returned,
        "sent_ratio": sum(sent) / size,
        "returned_ratio": returned / size,
        "seconds": seconds,
    }


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    if args.smoke:
        args.megabytes, args.calls, args.repeats = 1, 4, 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with connect(num_cpus=2 * args.workers + 1, log_to_driver=False) as backend:
        import ray

        group = WorkerGroup(ResourcePool([args.workers], cpus=0.1), Echo, name="group")
        raw = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(args.workers)]
        ray.get([actor.size.remote(1) for actor in raw])
        batch = ragged(args.megabytes * MIB)
        small = awaited(group, raw, args.calls)
        results = {"calls": [*calls(group, raw, args), small], "moved": moved(backend, group, batch)}
    write_results(args, results)
    rows = [
        [c["payload"], *(f"{1e3 * c[side]:.2f}" for side in ("ours", "raw")), f"{c['ratio']:.2f}"]
        for c in results["calls"]
    ]
    print(markdown(["payload", "group, ms", "raw Ray, ms", "ratio"], rows))
    m = results["moved"]
    print(
        f"\nsplit and collected: {m['batch_bytes'] / MIB:.0f} MiB in {m['seconds']:.2f} s; "
        f"sent {m['sent_ratio']:.3f} x, returned {m['returned_ratio']:.3f} x its bytes"
    )


if __name__ == "__main__":
    main()
