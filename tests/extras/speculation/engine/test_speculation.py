"""Speculation in the engine: the tokens of plain decoding, whatever is drafted; when it drafts; what it remembers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.extras.speculation.config import StepCosts
from quartet.extras.speculation.drafting import (
    HeadDrafter,
    HistoryDrafter,
    Speculator,
    branching,
    cost,
    drafted_cost,
)
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout import scheduler
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Draw, FinishReason, Request

Make = Callable[..., Request]
CHEAP = StepCosts(plain=(1.0, 1.0), drafted=(1.0, 1.0), drafting=(0.0,))
"""Drafted tokens cost nothing, so that as many are drafted as there are."""
CHAIN = [(0,), (0, 0), (0, 0, 0)]
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)]


def heads_of(packed: PackedCausalLM, depth: int, noise: float) -> Callable[[Tensor, int], Tensor]:
    """Heads whose distributions overlap with the trunk's next token: right for some tokens, wrong for others."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(depth, packed.vocab_size, generator=generator) * noise

    def heads(hidden: Tensor, depth: int) -> Tensor:
        return packed.logits(hidden).unsqueeze(1) + shift[:depth]

    return heads


def mixed_requests(make_request: Make, num: int) -> list[Request]:
    """Groups of four, short and long, of every way to sample, of which some stop early."""
    draw, asked = random.Random(3), []
    for i in range(num):
        group = i // 4
        asked.append(
            make_request(
                f"r{i}", group=f"g{group}", length=2 + group % 11, seed=i,
                max_new_tokens=draw.choice((3, 9, 20, 33)),
                temperature=draw.choice((0.0, 0.4, 0.7, 1.0, 1.6)), top_p=draw.choice((1.0, 1.0, 0.8)),
                top_k=draw.choice((0, 0, 12)), min_p=draw.choice((0.0, 0.0, 0.05)),
                draw=draw.choice(("inverse", "gumbel")),
                stop_token_ids=tuple(range(0, 97, 31)) if i % 3 == 0 else (),
                stop_strings=("7 7", "3 1") if i % 5 == 0 else (),
            )
        )  # fmt: skip
    return asked


def decode(token_ids: Sequence[int]) -> str:
    """Digits of the tokens; stop strings stand across two of them."""
    return "".join(f"{token % 10} " for token in token_ids)


def history(costs: StepCosts = CHEAP) -> HistoryDrafter:
    return HistoryDrafter(min_match=1, max_draft=4, costs=costs)


def run(
    engine: NativeEngine, asked: Sequence[Request], *, cancel: Sequence[str] = (), update_at: int | None = None
) -> dict[str, Completion]:
    """Submits in three parts; cancels some that run as they have a few tokens; new weights come under way."""
    done: dict[str, Completion] = {}
    parts, step = [list(asked[i::3]) for i in range(3)], 0
    while engine.has_work or parts:
        if parts and step % 5 == 0:
            engine.submit(parts.pop())
        if step == update_at:
            engine.update_weights(None, 7)
        done |= {c.request_id: c for c in engine.step()}
        ready = [i for i, made in engine.generated(cancel).items() if len(made.token_ids) >= 2]
        engine.cancel(ready)
        step += 1
    return done


def drafters(packed: PackedCausalLM) -> dict[str, Speculator]:
    heads = heads_of(packed, 3, 0.5)
    return {"history": history(), "chain": HeadDrafter(heads, CHAIN, CHEAP), "tree": HeadDrafter(heads, TREE, CHEAP)}


def same(found: Completion, expected: Completion, exact: bool, tolerance: tuple[float, float]) -> None:
    if exact:
        assert found == expected
        return
    assert (found.token_ids, found.finish_reason, found.text_end) == (
        expected.token_ids, expected.finish_reason, expected.text_end,
    )  # fmt: skip
    atol, rtol = tolerance
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("kind", "numerics"),
    [
        ("history", "exact"),
        ("tree", "exact"),
        ("history", "fast"),
        ("chain", "fast, prompts read in place"),
    ],
)
def test_completions_are_those_of_plain_decoding(
    kind: str,
    numerics: str,
    tiny: Any,
    make_request: Make,
    tolerances: dict[torch.dtype, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Hundreds of mixed requests; bit for bit under exact numerics. Asked for once more, history knows the answers."""
    monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", 12 if "place" in numerics else 10**9)
    exact = numerics == "exact"
    if exact:
        request.getfixturevalue("exact_processor")
    packed = PackedCausalLM(tiny.packed.release(), numerics="exact") if exact else tiny.packed
    asked = mixed_requests(make_request, 90 if exact else 110)
    expected = run(NativeEngine(packed, max_running=24, decode=lambda _, ids: decode(ids)), asked)
    assert {c.finish_reason for c in expected.values()} == {*FinishReason} - {FinishReason.CANCELLED}
    drafter = drafters(packed)[kind]
    engine = NativeEngine(packed, max_running=24, decode=lambda _, ids: decode(ids), drafter=drafter)
    times = 2 if kind == "history" else 1
    for _ in range(times):
        found = run(engine, asked)
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            same(found[name], theirs, exact, tolerances[torch.float32])
    stats = engine.stats()
    assert sum(stats.kept_by_depth) > (0.2 if kind == "history" else 0.01) * stats.generated_tokens
    assert sum(stats.drafted_by_depth) > sum(stats.kept_by_depth)
    # Every request has one token from its prompt, and one from every step beside those that were kept.
    assert 0 <= stats.num_row_steps + sum(stats.kept_by_depth) + times * len(asked) - stats.generated_tokens < 60


def test_cancellations_and_new_weights_under_way(exact_processor: None, tiny: Any, make_request: Make) -> None:
    """What was cancelled has tokens of plain decoding; the others go on over an update to the same tokens."""
    packed = PackedCausalLM(tiny.packed.release(), numerics="exact")
    asked = mixed_requests(make_request, 60)
    cancelled = [request.request_id for request in asked[::7]]
    expected = run(NativeEngine(packed, max_running=24, decode=lambda _, ids: decode(ids)), asked)
    drafter = drafters(packed)["tree"]
    engine = NativeEngine(packed, max_running=24, decode=lambda _, ids: decode(ids), drafter=drafter)
    found = run(engine, asked, cancel=cancelled, update_at=4)
    assert found.keys() == expected.keys()
    gone = 0
    for name, theirs in expected.items():
        ours = found[name]
        assert theirs.token_ids[: len(ours.token_ids)] == ours.token_ids
        if ours.finish_reason is FinishReason.CANCELLED:
            gone += 1
        else:
            assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
    assert gone > 3
    assert {version for c in found.values() for version in c.versions} == {0, 7}


class Knowing:
    """A head that knows the trunk's next distribution, and gives one that overlaps with it.

    Attributes:
        engine: whose running requests are asked about.
        distances: total variation of each pair.
    """

    engine: NativeEngine

    def __init__(self, tiny: Any) -> None:
        self.tiny, self.distances = tiny, list[float]()
        self._shift = torch.randn(97, generator=torch.Generator().manual_seed(1)) * 0.8

    def __call__(self, hidden: Tensor, depth: int) -> Tensor:
        sequences = [[*r.request.prompt_ids, *r.token_ids] for r in self.engine.running]
        longest = max(map(len, sequences))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
        last = torch.tensor([len(ids) - 1 for ids in sequences])
        logits = self.tiny.twin(input_ids=padded, use_cache=False).logits[torch.arange(len(last)), last]
        guess = logits + self._shift
        self.distances += ((logits.softmax(-1) - guess.softmax(-1)).abs().sum(-1) / 2).tolist()
        return guess.unsqueeze(1)


def test_more_drafts_are_kept_by_the_requests_own_noise(tiny: Any, make_request: Make) -> None:
    """Gumbel noise keeps at least the mean of (1 - d) / (1 + d), d the total variation; the likeliest token, of which
    other requests have drafts, is kept less often.
    """
    kept = {}
    ways: tuple[Draw, ...] = ("inverse", "gumbel")
    for draw in ways:
        heads = Knowing(tiny)
        asked = [make_request(f"r{i}", length=5, seed=i, max_new_tokens=24, draw=draw) for i in range(40)]
        heads.engine = NativeEngine(tiny.packed, max_running=80, drafter=HeadDrafter(heads, CHAIN[:1], CHEAP))
        run(heads.engine, asked)
        stats = heads.engine.stats()
        kept[draw] = stats.kept_by_depth[0] / stats.drafted_by_depth[0]
    least = sum((1 - d) / (1 + d) for d in heads.distances) / len(heads.distances)
    most = 1 - sum(heads.distances) / len(heads.distances)
    error = 4 * (0.25 / stats.drafted_by_depth[0]) ** 0.5
    assert least - error < kept["gumbel"] < most + error
    assert kept["inverse"] < kept["gumbel"] - error


# When it drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [[(0,) * depth for depth in range(1, 5)], TREE], ids=["chain", "tree"])
def test_as_many_tokens_are_drafted_as_give_the_most_per_second(tiny: Any, paths: list[tuple[int, ...]]) -> None:
    """By trying every part of the tree that has all its nodes' parents, with the same formula."""
    draw = random.Random(0)
    tree = branching(paths)
    parts = [
        nodes
        for num in range(1 + len(tree))
        for nodes in itertools.combinations(range(len(tree)), num)
        if all(tree.parents[node] in (-1, *nodes) for node in nodes)
    ]
    chosen = set()
    for _ in range(200):
        # Of one slope, so that the best nodes of each number are the best of all.
        step = draw.uniform(0, 0.3)
        costs = StepCosts(
            plain=(draw.uniform(1, 3), 3.0 + step),
            drafted=(draw.uniform(1, 3), 3.0 + step),
            drafting=(draw.uniform(0, 0.3),),
        )
        speculator = HeadDrafter(heads_of(tiny.packed, 4, 0.1), paths, costs)
        left = [1.0] * (1 + len(tree))
        for node, parent in enumerate(tree.parents):
            rate = left[1 + parent] * draw.random() ** 0.5
            left[1 + parent] -= rate
            speculator.acceptance.recent[node] = [10_000, round(10_000 * rate)]
        rows, found = draw.randrange(1, 8), []
        for nodes in parts:
            gained = 0.0
            for node in nodes:
                chance, at = 1.0, node
                while at >= 0:
                    chance, at = chance * speculator.acceptance.rate(at), tree.parents[at]
                gained += chance
            seconds = drafted_cost(costs, rows, rows * (1 + len(nodes))) + cost(costs.drafting, 1)
            found.append((rows * (1 + gained) / seconds if nodes else rows * 1.02 / cost(costs.plain, rows), nodes))
        nodes = tuple(speculator.nodes([tree.depth] * rows))
        chosen.add(nodes)
        assert dict((nodes, rate) for rate, nodes in found)[nodes] == pytest.approx(max(found)[0])
    assert {len(nodes) for nodes in chosen} >= {0, 1, 2, min(len(tree), 7)}


def test_behind_a_kept_token_that_ends_a_response_nothing_was_tried(
    tiny: Any, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_request("r", seed=4, max_new_tokens=12)
    (plain,) = run(NativeEngine(tiny.packed), [asked]).values()
    stops = dataclasses.replace(
        asked, sampling=dataclasses.replace(asked.sampling, stop_token_ids=(plain.token_ids[3],))
    )
    assert plain.token_ids[3] not in plain.token_ids[:3]
    engine = NativeEngine(tiny.packed, drafter=history())
    assert engine.drafter is not None
    engine.submit([stops])
    engine.step()
    draft = [*plain.token_ids[1:4], 1, 1]
    monkeypatch.setattr(engine.drafter, "propose", lambda *_: engine.held["r"].propose(draft))
    done = engine.step()
    assert done[0].token_ids == plain.token_ids[:4]
    assert (engine.drafter.acceptance.drafted, engine.drafter.acceptance.kept) == ([1, 1, 1, 0], [1, 1, 1, 0])


# What it remembers ---------------------------------------------------------------------------------------


def test_an_engine_goes_on_from_the_state_of_another(tiny: Any, make_request: Make) -> None:
    """The same drafts, by history and acceptance: the answers are known when they are asked for once more."""
    asked = [make_request(f"r{i}", length=5, group=f"g{i % 4}", seed=i, max_new_tokens=30) for i in range(12)]
    costs = StepCosts(plain=(1.0, 1.1, 1.2), drafted=(1.0, 1.0, 1.05, 1.1, 1.15, 1.4))
    first = NativeEngine(tiny.packed, drafter=history(costs))
    assert first.drafter is not None
    run(first, asked)
    first.drafter.mark()
    state = first.drafter.state()
    other = NativeEngine(tiny.packed, drafter=history(costs))
    assert other.drafter is not None
    traces = []
    for engine in (first, other):
        before = engine.stats()
        if engine is other:
            other.drafter.load(state)
        run(engine, asked)
        after = engine.stats()
        columns = zip(
            before.drafted_by_depth + before.kept_by_depth, after.drafted_by_depth + after.kept_by_depth, strict=True
        )
        traces.append([b - a for a, b in columns] + [after.num_row_steps - before.num_row_steps])
    assert traces[0] == traces[1]
    assert traces[0][0] > 10
    assert first.drafter.state() is state, "the state of the mark, whatever came since"


def test_responses_end_without_a_trace_in_the_drafter(tiny: Any, make_request: Make) -> None:
    drafter = history()
    engine = NativeEngine(tiny.packed, drafter=drafter)
    run(engine, [make_request(f"r{i}", seed=i, max_new_tokens=9) for i in range(4)], cancel=["r1"])
    assert not drafter._drafts and not drafter._texts
    assert drafter.answers.num_tokens == 3 * (6 + 9)
