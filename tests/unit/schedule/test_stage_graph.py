"""Plans of stage graphs; how near they come to the optimum is measured in the benchmark's own test."""

from __future__ import annotations

import random

import pytest

from quartet.schedule.stage_graph import StageGraph, StageNode, plan

CHAINS = StageGraph(
    {
        "a": StageNode("p", 2.0),
        "b": StageNode("p", 3.0),
        "c": StageNode("q", 4.0, ("a",)),
        "d": StageNode("q", 1.0, ("a", "b")),
        "e": StageNode("p", 5.0, ("c", "d")),
    }
)


def test_upward_ranks_are_the_longest_chains() -> None:
    assert CHAINS.upward_ranks() == {"a": 11.0, "b": 9.0, "c": 9.0, "d": 6.0, "e": 5.0}
    assert CHAINS.lower_bound() == 11.0


def test_stages_are_placed_as_early_as_they_fit() -> None:
    first = CHAINS.times(["a", "b", "c", "d", "e"])
    assert first == {"a": (0.0, 2.0), "b": (2.0, 5.0), "c": (2.0, 6.0), "d": (6.0, 7.0), "e": (7.0, 12.0)}
    # `e` is named first, but what it comes after is placed before it.
    assert CHAINS.times(["e", "b", "a", "d", "c"])["e"] == (10.0, 15.0)
    gap = StageGraph({"x": StageNode("p", 2.0), "y": StageNode("q", 2.0, ("x",)), "z": StageNode("q", 2.0)})
    assert gap.times(["x", "y", "z"])["z"] == (0.0, 2.0)


def test_slots_and_loads_bound_what_can_be_reached() -> None:
    nodes = {f"s{i}": StageNode("p", 2.0) for i in range(4)}
    assert [plan(StageGraph(nodes, {"p": num})).seconds for num in (1, 2, 4)] == [8.0, 4.0, 2.0]
    assert [StageGraph(nodes, {"p": num}).lower_bound() for num in (1, 2, 4)] == [8.0, 4.0, 2.0]
    assert plan(StageGraph({})).seconds == StageGraph({}).lower_bound() == 0.0


def test_stages_stand_after_what_they_need() -> None:
    with pytest.raises(ValueError, match=r"'a' comes after \['b'\]"):
        StageGraph({"a": StageNode("p", 1.0, ("b",)), "b": StageNode("p", 1.0)})


def test_a_plan_sees_pools_that_upward_ranks_do_not() -> None:
    """`x` has the shorter chain, but all of pool q waits for it."""
    graph = StageGraph(
        {
            "x": StageNode("p", 2.0),
            "y": StageNode("p", 6.0),
            "y2": StageNode("r", 2.0, ("y",)),
            "q1": StageNode("q", 4.0, ("x",)),
            "q2": StageNode("q", 4.0, ("x",)),
        }
    )
    upward = graph.upward_ranks()
    assert max(end for _, end in graph.times(sorted(graph.nodes, key=lambda n: -upward[n])).values()) == 16.0
    found = plan(graph)
    assert found.seconds == 10.0 and found.ranks["x"] > found.ranks["y"]
    assert found.after["y"] == ("x",)


def test_a_plan_leaves_a_pool_free_for_what_is_about_to_come() -> None:
    graph = StageGraph(
        {
            "soon": StageNode("a", 1.0),
            "long": StageNode("b", 10.0),
            "urgent": StageNode("b", 1.0, ("soon",)),
            "tail": StageNode("c", 10.0, ("urgent",)),
        }
    )
    found = plan(graph)
    assert found.seconds == 12.0 and found.after == {"long": ("urgent",)}


def test_plans_are_never_worse_than_upward_ranks_and_never_too_good() -> None:
    better = 0
    for seed in range(200):
        draw = random.Random(seed)
        nodes: dict[str, StageNode] = {}
        for i in range(8):
            after = tuple(name for name in nodes if draw.random() < 0.3)
            nodes[f"s{i}"] = StageNode(draw.choice("pq"), float(draw.randint(1, 9)), after)
        graph = StageGraph(nodes)
        upward = graph.upward_ranks()
        first = max(end for _, end in graph.times(sorted(nodes, key=upward.__getitem__, reverse=True)).values())
        second = plan(graph).seconds
        assert graph.lower_bound() <= second <= first
        better += second < first
    assert better > 10
